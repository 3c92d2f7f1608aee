"""Where a run came from: commit, package versions, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from typing import TypedDict

from areal_jax.installation import find_clone

PACKAGES = ('areal_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'ml_collections')


def git_commit() -> str | None:
    """The commit of the clone, '-dirty' when it has changes; None where the package is installed."""
    if (root := find_clone()) is None:  # a repository around an installation has other commits
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


class Hardware(TypedDict):
    """Where a run computes."""

    cores: int  # that this process may use
    machine: str  # instruction set
    devices: list[str]


def hardware() -> Hardware:
    """Cores this process may use, instruction set and accelerator."""
    import jax

    return describe_hardware([str(device) for device in jax.local_devices()])


def describe_hardware(devices: Sequence[str]) -> Hardware:
    """The same with these accelerators, which may belong to other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return {'cores': cores, 'machine': platform.machine(), 'devices': list(devices)}
