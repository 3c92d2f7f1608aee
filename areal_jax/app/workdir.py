"""The directory of one run: what may be written there, and what a resumed run must have in common with it."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax import files
from areal_jax.config import flatten
from areal_jax.ranges import ConfigError
from areal_jax.telemetry import metrics

CONFIG = 'config.json'
WEIGHTS = 'weights.json'
CHECKPOINTS = 'checkpoints'
# where and in which form it is computed may change on the way: checkpoints are read by regions, one leaf per layer
_MAY_CHANGE = (
    *('mesh.', 'distributed.', 'learner.layers', 'learner.remat', 'learner.attention'),
    'learner.rows_per_microbatch',  # a multiple of the mesh
)
_BLOCKS, _BLOCK_BYTES = 256, 4096
_RESTORE = 'restore the file as the run wrote it, or start anew in another --workdir'


def prepare_workdir(workdir: pathlib.Path, values: Mapping[str, Any], *, resume: bool) -> None:
    """Writes config.json; raises ConfigError for a run there that would be overwritten or continued differently.

    Args:
      values: the config as a plain nested dict.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--workdir={workdir} cannot be made ({error.strerror}); choose another one') from error
    path = workdir / CONFIG
    if resume and path.exists():
        saved, current = dict(flatten(files.read_json(path, _RESTORE))), dict(flatten(values))
        fixed = [field for field in current if not field.startswith(_MAY_CHANGE)]
        if different := sorted(field for field in fixed if saved.get(field) != current[field]):
            changes = ', '.join(f'{f}: {saved.get(f)!r} -> {current[f]!r}' for f in different)
            raise ConfigError(f'--resume with another config than {path}: {changes}; use the same, or a new workdir')
    elif not resume and _holds_updates(workdir):
        raise ConfigError(
            f'{workdir} holds a run already: go on with --resume, or give another --workdir (or remove it)'
        )
    files.write_json(path, values, allow_nan=True)  # eta may be infinite


def note_weights(workdir: pathlib.Path, source: pathlib.Path | None, *, resume: bool) -> None:
    """Writes down which weights a run starts from; None = drawn by config and seed.

    Raises ConfigError where a resumed run finds other files there: the reference model is not in a checkpoint, and
    shapes would not show it.
    """
    if source is None:
        return
    path, digest = workdir / WEIGHTS, sample_digest(source)
    if resume and path.exists() and files.read_json(path, _RESTORE).get('samples_sha256') != digest:
        raise ConfigError(
            f'--resume with other weights: the files of model.path={str(source)!r} are not those that the run in '
            f'{workdir} started from; bring them back, or start anew in another --workdir'
        )
    files.write_json(path, {'path': str(source), 'samples_sha256': digest})


def sample_digest(source: pathlib.Path) -> str:
    """SHA-256 over name, size and 256 evenly spaced blocks of 4 KiB of a file, or of each safetensors in a directory.

    Weights of another training differ in nearly every block; to read 60 GB at every start would show no more.
    """
    digest = hashlib.sha256()
    for file in sorted(source.glob('*.safetensors')) if source.is_dir() else [source]:
        size = file.stat().st_size
        digest.update(f'{file.name} {size} '.encode())
        with file.open('rb') as data:
            for block in range(_BLOCKS):
                data.seek(block * max(size - _BLOCK_BYTES, 0) // (_BLOCKS - 1))
                digest.update(data.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _holds_updates(workdir: pathlib.Path) -> bool:
    """Whether something would be lost; an attempt that ended before its first update is simply replaced."""
    written = workdir / metrics.FILE
    return any((workdir / CHECKPOINTS).glob('step_*')) or (written.exists() and written.stat().st_size > 0)
