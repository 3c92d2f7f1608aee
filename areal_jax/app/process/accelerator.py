"""The accelerators of this machine, found without jax, and the flags of XLA that a process sets before jax starts."""

from __future__ import annotations

import importlib.util
import mmap
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.fields import ConfigError
from areal_jax.config.xla_flags import (
    AUTO,
    FIELD,
    GPU,
    choose_flags,
    describe_flags,
    name_variable,
    read_variable,
    write_flags,
)

VISIBLE = 'CUDA_VISIBLE_DEVICES'
_PLATFORMS = {'cuda', 'gpu'}
_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')  # the packages without which jax computes on the CPU
_DEVICES, _BUS = pathlib.Path('/dev'), pathlib.Path('/sys/bus/pci/devices')
_GOOGLE = '0x1ae0'  # a vendor of PCI
# generations by PCI device
_TPUS = {'0x005e': 'v4', '0x0062': 'v5p', '0x0063': 'v5e', '0x006f': 'v6e', '0x0076': 'v7x'}
_COMPILERS = {GPU: ('jaxlib', 'libjax_common.so')}  # packages and files in which flags are named; else that of TPUs
_TPU_COMPILER = ('libtpu', 'libtpu.so')


def find_gpus(environment: Mapping[str, str], devices: pathlib.Path = _DEVICES) -> tuple[str, ...]:
    """The GPUs that jax would find, as CUDA_VISIBLE_DEVICES names them; () where it computes on the CPU.

    Args:
      environment: of this process; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES count.
      devices: the directory with the device files nvidia0, nvidia1 and so on.
    """
    if not _may_use(environment, _PLATFORMS) or not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return ()
    found = sum(re.fullmatch(r'nvidia\d+', path.name) is not None for path in devices.glob('nvidia*'))
    if VISIBLE not in environment:
        return tuple(str(number) for number in range(found))
    names = [name.strip() for name in environment[VISIBLE].split(',')]
    end = next((place for place, name in enumerate(names) if name in ('', '-1')), len(names))
    return tuple(names[:end]) if found else ()  # CUDA reads no further than the first invalid name


def _may_use(environment: Mapping[str, str], platforms: Collection[str]) -> bool:
    asked = environment.get('JAX_PLATFORMS', '')
    return not asked or not set(platforms).isdisjoint(asked.split(','))


def find_hardware(environment: Mapping[str, str], devices: pathlib.Path = _DEVICES, bus: pathlib.Path = _BUS) -> str:
    """What jax will compile for on this machine: a generation of TPU, 'v5p', GPU, or '' for the CPU."""
    if _may_use(environment, ['tpu']) and importlib.util.find_spec('libtpu') is not None:
        for kind in _list_tpus(bus):
            return kind
    return GPU if find_gpus(environment, devices) else ''


def _list_tpus(bus: pathlib.Path) -> Iterator[str]:
    for path in sorted(bus.glob('*')):
        try:
            if (path / 'vendor').read_text().strip() == _GOOGLE:
                kind = _TPUS.get((path / 'device').read_text().strip())
                yield from [kind] if kind else []
        except OSError:
            continue


def use_xla_flags(config: config_dict.ConfigDict) -> None:
    """Sets the flags of cluster.xla_flags in the environment of this process, and prints which flags it uses.

    Call it before jax is used; on a machine that computes on the CPU it does nothing. Flags that the environment has
    stay. Of a preset, flags that this XLA does not have are left out.

    Raises ConfigError for flags of the user's own that this XLA does not have: it would end the process without a word.
    """
    if not (hardware := find_hardware(os.environ)):
        return
    chosen, given = choose_flags(config, hardware, os.environ), read_variable(hardware, os.environ)
    unknown = find_unknown(chosen, hardware)
    if unknown and config.cluster.xla_flags != AUTO:
        raise ConfigError(
            f'{FIELD}={config.cluster.xla_flags!r}: the compiler for {hardware} that is installed has no flag '
            f'{", ".join(unknown)}; correct it, or leave it out'
        )
    added = {name: value for name, value in chosen.items() if name not in unknown}
    variable = name_variable(hardware)
    if added:
        os.environ[variable] = f'{os.environ.get(variable, "")} {write_flags(added)}'.strip()
    print(f'XLA flags for {hardware}: {describe_flags(config, added, given)}', flush=True)


def find_unknown(names: Collection[str], hardware: str) -> list[str]:
    """The names that the library of the compiler does not contain; [] where there is no such library."""
    package, file = _COMPILERS.get(hardware, _TPU_COMPILER)
    spec = importlib.util.find_spec(package)
    library = pathlib.Path(next(iter(spec.submodule_search_locations or ()), '')) / file if spec else pathlib.Path(file)
    if not names or not library.is_file():
        return []
    with library.open('rb') as content, mmap.mmap(content.fileno(), 0, prot=mmap.PROT_READ) as text:
        return [name for name in names if text.find(name.encode()) < 0]
