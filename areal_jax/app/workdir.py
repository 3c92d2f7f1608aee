"""The directory of one run: what may be written there, and what a resumed run must have in common with it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.config import flatten
from areal_jax.ranges import ConfigError
from areal_jax.telemetry import metrics

CONFIG = 'config.json'
CHECKPOINTS = 'checkpoints'
# where and in which form it is computed may change on the way: checkpoints are whole arrays, one leaf per layer
_MAY_CHANGE = (
    *('mesh.', 'distributed.', 'learner.layers', 'learner.remat', 'learner.attention'),
    'learner.rows_per_microbatch',  # a multiple of the mesh
)


def prepare_workdir(workdir: pathlib.Path, values: Mapping[str, Any], *, resume: bool) -> None:
    """Writes config.json; raises ConfigError for a run there that would be overwritten or continued differently.

    Args:
      values: the config as a plain nested dict.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / CONFIG
    if resume and path.exists():
        saved, current = dict(flatten(json.loads(path.read_text()))), dict(flatten(values))
        fixed = [field for field in current if not field.startswith(_MAY_CHANGE)]
        if different := sorted(field for field in fixed if saved.get(field) != current[field]):
            changes = ', '.join(f'{f}: {saved.get(f)!r} -> {current[f]!r}' for f in different)
            raise ConfigError(f'--resume with another config than {path}: {changes}; use the same, or a new workdir')
    elif not resume and _holds_updates(workdir):
        raise ConfigError(
            f'{workdir} holds a run already: go on with --resume, or give another --workdir (or remove it)'
        )
    path.write_text(json.dumps(values, indent=1) + '\n')


def _holds_updates(workdir: pathlib.Path) -> bool:
    """Whether something would be lost; an attempt that ended before its first update is simply replaced."""
    written = workdir / metrics.FILE
    return any((workdir / CHECKPOINTS).glob('step_*')) or (written.exists() and written.stat().st_size > 0)
