"""Devices of a TPU slice or of GPU nodes, described for the compiler on a machine that has none of them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import cast
from unittest import mock

import jax
from jax.experimental import topologies

from areal_jax.config.fields import ConfigError
from areal_jax.config.xla_flags import GPU
from areal_jax.simulation.prices import Chip, find_chip

NODE = 8  # GPUs of a host
_SLICE = re.compile(r'(?:tpu *)?(v\w+|tpu7x):(\d+(?:x\d+)*)', re.IGNORECASE)
_COUNT = re.compile(r'([1-9]\d{0,5}) *x *(\w[\w -]*)')
_NAME = re.compile(r'[a-z][\w -]*', re.IGNORECASE)
_FORMS = "write a TPU slice as 'v5p:2x4x4' or GPUs as '8 x H100'"
_CHIP_NAMES = {'v7x': 'tpu7x', 'tpu v7x': 'tpu7x'}  # names of the compiler that are not those of the clouds
_GENERATIONS = {'TPU7x': 'v7x'}  # where they are not the end of the chip's name
_DEVICES_OF_CHIP = {'TPU7x': 2}  # else 1: both cores of a chip are one device


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that this machine does not have."""

    name: str  # as it was asked for
    chip: Chip  # of which a device may be a part
    devices: tuple[jax.Device, ...]

    @property
    def share(self) -> int:
        """The devices of one chip."""
        return _DEVICES_OF_CHIP.get(self.chip.name, 1)

    @property
    def hardware(self) -> str:
        """What presets of XLA's flags are for, see config/xla_flags.py; '' for devices of a CPU."""
        if self.devices[0].platform == 'cpu':
            return ''
        name = self.chip.name
        return _GENERATIONS.get(name, name.removeprefix('TPU ')) if self.devices[0].platform == 'tpu' else GPU

    @property
    def memory_bytes(self) -> float:
        return self.chip.memory_bytes / self.share

    @property
    def flops(self) -> float:
        return self.chip.flops / self.share


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a text asks for."""

    text: str
    chip: Chip
    chips: int | None  # None = not said
    shape: str = ''  # of a slice: '2x4x4'


def _parse(text: str, flag: str, forms: str = _FORMS) -> _Asked:
    """Parses 'v5p:2x4x4' or '8 x H100'; raises ConfigError in one sentence for an unknown form or chip."""
    text = text.strip()
    if match := _SLICE.fullmatch(text):
        if chips := math.prod(int(size) for size in match[2].split('x')):
            return _Asked(text, _find_chip(match[1], text, flag), chips, match[2])
    elif match := _COUNT.fullmatch(text):
        return _Asked(text, _find_chip(match[2], text, flag), int(match[1]))
    raise ConfigError(f'{flag}={text!r} is not understood: {forms}')


def _find_chip(name: str, text: str, flag: str) -> Chip:
    try:
        return find_chip(_CHIP_NAMES.get(name.strip().lower(), name))
    except ConfigError as error:
        raise ConfigError(f'{flag}={text!r}: {error}') from error


# Devices of which the data sheet is all that is known: for sizes, not for a compiler.


@dataclasses.dataclass(frozen=True)
class _Described:
    """What layouts read of a device."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


def describe_accelerator(text: str, count: int) -> Topology:
    """Describes the devices of 'H100', '8 x H100' or 'v5p:2x4x4' without a compiler.

    Args:
      count: the devices where the text says no number.

    Raises ConfigError in one sentence for an unknown form or chip.
    """
    flag = '--accelerator'
    alone = _NAME.fullmatch(text.strip())
    asked = _Asked(text, _find_chip(text, text, flag), None) if alone else _parse(text, flag, f"{_FORMS}, or 'H100'")
    chip = asked.chip
    number = count if asked.chips is None else asked.chips * _DEVICES_OF_CHIP.get(chip.name, 1)
    # of no platform and kind that jax knows, so that it asks for no places in a slice and lays meshes out in order
    described = (_Described(index, chip.name, f'{chip.name}, described') for index in range(number))
    return Topology(asked.text, chip, tuple(cast(jax.Device, device) for device in described))


# Devices that a compiler knows.


# GPUs that XLA's compiler is told about, by chip, with the names that their drivers give. All are of one generation, so
# they differ in memory alone; the numbers in write_target are from its data sheet.
GPU_NAMES = {'H100 SXM': 'NVIDIA H100 80GB HBM3', 'H800 SXM': 'NVIDIA H800', 'H200 SXM': 'NVIDIA H200'}


def describe_topology(text: str) -> Topology:
    """Describes the devices of 'v5p:2x4x4' or '8 x H100' for a compiler; nothing runs on them.

    Raises ConfigError in one sentence for an unknown form, chip or shape, and for a compiler that is not installed.
    """
    asked = _parse(text, '--topology')
    if asked.shape:
        return _describe_slice(asked)
    return _describe_gpus(asked)


def _describe_slice(asked: _Asked) -> Topology:
    if importlib.util.find_spec('libtpu') is None:
        raise ConfigError(
            f'--topology={asked.text!r} needs the TPU compiler, libtpu, which is not installed: '
            "pip install 'areal_jax[aot-tpu]'"
        )
    kind = asked.chip.name.lower().removeprefix('tpu ')
    try:
        described = topologies.get_topology_desc(f'{kind}:{asked.shape}', platform='tpu')
    except jax.errors.JaxRuntimeError as error:
        reason = f'is no slice that the TPU compiler knows: {_reason(error)}'
        raise ConfigError(f'--topology={asked.text!r} {reason}') from error
    return Topology(asked.text, asked.chip, tuple(described.devices))


def _reason(error: Exception) -> str:
    return str(error).partition(':')[2].strip().partition('\n')[0].rstrip('.')


def _describe_gpus(asked: _Asked) -> Topology:
    text, chip, count = asked.text, asked.chip, asked.chips or 0
    if chip.name not in GPU_NAMES:
        known = ', '.join(GPU_NAMES)
        raise ConfigError(f'--topology={text!r}: GPUs can be compiled for as one of {known}; {_FORMS}')
    if count > NODE and count % NODE:
        raise ConfigError(f'--topology={text!r}: more than {NODE} GPUs are whole nodes of {NODE}; use a multiple')
    if importlib.util.find_spec('jax_cuda13_plugin') is None:
        raise ConfigError(
            f"--topology={text!r} needs jax's plugin for CUDA, which is not installed: pip install 'areal_jax[aot-gpu]'"
        )
    each = min(count, NODE)
    with accept_cuda():
        described = topologies.get_topology_desc(
            platform='cuda', target_config=write_target(chip), topology=f'1x{count // each}x{each}'
        )
    return Topology(text, chip, tuple(described.devices))


@contextlib.contextmanager
def accept_cuda() -> Iterator[None]:
    """Inside, jax takes 'cuda' as a platform although no device of it is there (jax issue 28376).

    It replaces a private function of jax, the only one. Raises ConfigError with a jax that has it no more.
    """
    from jax._src import xla_bridge

    known: Callable[[str], str] | None = getattr(xla_bridge, 'canonicalize_platform', None)
    if known is None:
        raise ConfigError(f'AOT for GPUs needs jax 0.10.2, and this is jax {jax.__version__}')
    canonical = lambda platform: platform if platform == 'cuda' else known(platform)
    with mock.patch.object(xla_bridge, 'canonicalize_platform', canonical):
        yield


def write_target(chip: Chip) -> str:
    """Writes a GPU as the text of XLA's GpuTargetConfigProto."""
    numbers = {
        'threads_per_block_limit': 1024, 'threads_per_warp': 32, 'shared_memory_per_block': 49152,
        'shared_memory_per_core': 233472, 'threads_per_core_limit': 2048, 'core_count': 132,
        'fpus_per_core': 128, 'block_dim_limit_x': 2**31 - 1, 'block_dim_limit_y': 65535, 'block_dim_limit_z': 65535,
        'memory_bandwidth': int(chip.bytes_s), 'l2_cache_size': 50 * 2**20, 'clock_rate_ghz': 1.98,
        'device_memory_size': int(chip.memory_bytes), 'shared_memory_per_block_optin': 232448,
        'registers_per_core_limit': 65536, 'registers_per_block_limit': 65536,
    }  # fmt: skip
    lines = [f'  {name}: {value}' for name, value in numbers.items()]
    lines.append('  cuda_compute_capability { major: 9 minor: 0 }')
    versions = 'dnn_version_info { major: 9 minor: 10 }\nruntime_version { major: 13 }'
    device = '\n'.join(('gpu_device_info {', *lines, '}'))
    return f'{device}\nplatform_name: "CUDA"\n{versions}\ndevice_description_str: "{GPU_NAMES[chip.name]}"\n'


@contextlib.contextmanager
def take_turn(announce: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, this is the only process of the machine that compiles ahead: compilations take all cores and much memory.

    `announce` is called once if another process is inside.
    """
    path = pathlib.Path(tempfile.gettempdir()) / 'areal_jax_aot.lock'
    with path.open('a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            announce()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
