"""Which packages the parts need, and their wheels from a folder. Standard library only: it runs before all imports."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import zipfile
from collections.abc import Sequence

_SETUP = pathlib.Path(__file__).parents[2] / 'setup.py'
# What a run with random weights imports, besides what jax itself needs; launch/gpu_wheels.sh has what these import.
NEEDED = (
    *('jax', 'flax', 'optax', 'chex', 'orbax-checkpoint', 'tensorstore', 'ml-collections', 'absl-py', 'psutil'),
    'pytest',
)


def find_missing(names: Sequence[str] = NEEDED) -> list[str]:
    """'flax' for what is not installed, 'flax>=0.12.8 (0.10.2 is there)' for what is too old."""
    missing = []
    for name in names:
        least = least_versions().get(name, '0')
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if _numbers(version) < _numbers(least):
            missing.append(f'{name}>={least} ({version} is there)')
    return missing


def unpack_wheels(folder: pathlib.Path, into: pathlib.Path) -> None:
    """Unpacks every wheel of `folder`, so that `into` on PYTHONPATH makes them importable; installs nothing."""
    for wheel in sorted(folder.glob('*.whl')):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    for library in [*into.glob('*.data/purelib'), *into.glob('*.data/platlib')]:
        for item in library.iterdir():
            item.rename(into / item.name)


def least_versions() -> dict[str, str]:
    """{'flax': '0.12.8'} of 'flax>=0.12.8' in install_requires and the extra dev."""
    return dict(re.findall(r"'([a-z][\w.-]*)>=([\d.]+)", _SETUP.read_text()))


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 12, 8) of '0.12.8' or '0.12.8rc1'."""
    match = re.match(r'\d+(\.\d+)*', version)
    return tuple(int(number) for number in match[0].split('.')) if match else ()
