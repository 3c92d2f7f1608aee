"""Describes the environment of a run: commit, package versions, hardware, and other causes of different bits."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from areal_jax.installation import find_clone, strip_python_path

PACKAGES = ('areal_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'ml_collections')
_VERSIONS_S = 60.0  # for an interpreter on a slow file system


def git_commit() -> str | None:
    """Returns the commit of the clone, with '-dirty' if it has changes; None if the package is installed."""
    if (root := find_clone()) is None:  # a repository around an installation has unrelated commits
        return None
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide what a run computes, and of Python."""
    versions = {'python': platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages by name, as another interpreter has them; {} if it does not run."""
    code = (
        'import importlib.metadata as m, json, sys\n'
        'found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}\n'
        'print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))'
    )
    command = [python, '-c', code, *packages]
    environment = {**os.environ, 'PYTHONPATH': strip_python_path()}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_VERSIONS_S, check=True)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


class Hardware(TypedDict):
    """The cores, instruction set and devices of a run."""

    cores: int  # that this process may use
    machine: str  # instruction set
    devices: list[str]
    xla_flags: NotRequired[str]  # with which the learner's programs were compiled; absent on CPUs and without flags


def hardware(devices: Sequence[str] | None = None, xla_flags: str = '') -> Hardware:
    """Returns the cores this process may use, the instruction set, and accelerators, also of other processes.

    Starts jax to find its devices and their flags if `devices` is None.
    """
    if devices is None:
        import jax

        local = jax.local_devices()
        devices, xla_flags = [str(device) for device in local], read_xla_flags(local[0].platform)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    found: Hardware = {'cores': cores, 'machine': platform.machine(), 'devices': list(devices)}
    return {**found, 'xla_flags': xla_flags} if xla_flags else found


def read_xla_flags(of: str) -> str:
    """The flags of XLA in the environment of this process for a platform of jax; '' for the CPU."""
    return os.environ.get(_VARIABLES.get(of, ''), '')


# The environment, as far as the numbers of a run depend on it: written at every start, compared before a replay.


_CPU_INFO = pathlib.Path('/proc/cpuinfo')  # of Linux
_FLAGS = ('flags', 'Features')  # x86, Arm
_VARIABLES = {'gpu': 'XLA_FLAGS', 'tpu': 'LIBTPU_INIT_ARGS'}  # that compilers read, by the platform's name in jax
_SETTINGS = (
    *_VARIABLES.values(),
    *('JAX_DEFAULT_MATMUL_PRECISION', 'JAX_ENABLE_X64', 'JAX_PLATFORMS', 'OMP_NUM_THREADS'),
)
_MOST_FLAGS = 8  # named in a sentence


class Environment(TypedDict):
    """The causes of different bits in a result, apart from config, seed and data."""

    commit: str | None  # of this program
    versions: Mapping[str, str]  # of Python and packages
    machine: str  # 'x86_64'
    instructions: list[str]  # flags of the CPU, sorted; [] if the system does not list them
    devices: list[str]
    cores: int  # cores that the process may use: the number of threads of XLA
    settings: Mapping[str, str]  # variables of the environment that change what XLA computes


def read_environment(devices: Sequence[str] | None = None) -> Environment:
    """Reads the environment of this process; starts jax to find its devices if they are not given."""
    if devices is None:
        import jax

        devices = [f'{device} ({device.device_kind})' for device in jax.local_devices()]
    found = hardware(devices)
    return {
        'commit': git_commit(),
        'versions': package_versions(),
        'machine': found['machine'],
        'instructions': _read_instructions(),
        'devices': found['devices'],
        'cores': found['cores'],
        'settings': {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def describe_differences(recorded: Environment, here: Environment) -> list[str]:
    """Lists the differences between the recorded environment and this one: 'jaxlib 0.10.2 -> 0.10.3', ..."""
    found = [
        f'{name} {_change(recorded["versions"].get(name), here["versions"].get(name))}'
        for name in sorted({*recorded['versions'], *here['versions']})
        if recorded['versions'].get(name) != here['versions'].get(name)
    ]
    if recorded['commit'] != here['commit']:
        found.append(f'commit {_change(recorded["commit"], here["commit"])}')
    if recorded['machine'] != here['machine']:
        found.append(f'instruction set {_change(recorded["machine"], here["machine"])}')
    elif flags := _describe_flags(set(recorded['instructions']), set(here['instructions'])):
        found.append(flags)
    if recorded['devices'] != here['devices']:
        found.append(f'devices {_change(", ".join(recorded["devices"]), ", ".join(here["devices"]))}')
    if recorded['cores'] != here['cores']:
        found.append(f'cores {_change(recorded["cores"], here["cores"])}')
    names = sorted({*recorded['settings'], *here['settings']})
    changes = ((name, recorded['settings'].get(name), here['settings'].get(name)) for name in names)
    return found + [f'{name} {_change(before, now)}' for name, before, now in changes if before != now]


def _describe_flags(recorded: set[str], here: set[str]) -> str:
    parts = []
    for word, names in (('lacks', recorded - here), ('has also', here - recorded)):
        if names:
            more = ' ...' if len(names) > _MOST_FLAGS else ''
            parts.append(f'{word} {" ".join(sorted(names)[:_MOST_FLAGS])}{more}')
    return f'this CPU {", and ".join(parts)}' if parts else ''


def _change(before: object, now: object) -> str:
    return f'{"none" if before is None else before} -> {"none" if now is None else now}'


def _read_instructions() -> list[str]:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return []
    values = (line.partition(':') for line in lines)
    return next((sorted(set(value.split())) for name, _, value in values if name.strip() in _FLAGS), [])
