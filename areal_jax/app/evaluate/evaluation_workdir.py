"""The directory of one evaluation: what may be there before, and what a resumed one must have in common with it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax import files
from areal_jax.app.workdir.run_directory import WEIGHTS
from areal_jax.config import CONFIG, flatten
from areal_jax.config.ranges import ConfigError
from areal_jax.config.structure import read_saved
from areal_jax.evaluation import results
from areal_jax.events.schema import FILE as EVENTS

RESULTS = 'results.json'
_OWN = {files.LOCK, CONFIG, WEIGHTS, EVENTS, results.FILE, RESULTS}
_MAY_CHANGE = ('telemetry.', 'task.verifier', 'run.compilation_', 'run.stall_timeout_s')  # no answer depends on them
_FIX = 'restore the file as the evaluation wrote it, or start anew in another --workdir'


class EvaluationWorkdir:
    """Files of an evaluation. Nothing is written until `begin`; `discard` removes what a start that failed has left.

    Args:
      values: the config as a plain nested dict.
    """

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any], *, resume: bool):
        self.path, self.answers, self.results = path, path / results.FILE, path / RESULTS
        self._values, self._resume = values, resume
        self._existed = path.exists()

    @property
    def has_answers(self) -> bool:
        return self.answers.exists() and self.answers.stat().st_size > 0

    def require_usable(self) -> None:
        """Raises ConfigError for a directory with something else, answers without `resume`, or another config."""
        if not self.path.exists():
            return
        self._require_own()
        if not self.has_answers:
            return
        if not self._resume:
            raise ConfigError(
                f'{self.path} holds answers already: go on with --resume, or give another --workdir (or remove it)'
            )
        self._require_same_config()

    def begin(self) -> None:
        """Writes config.json; the directory is locked."""
        files.write_json(self.path / CONFIG, self._values)

    def discard(self) -> None:
        """Removes what this start has written, unless there are answers."""
        if self.has_answers or not self.path.exists():
            return
        for name in _OWN:
            (self.path / name).unlink(missing_ok=True)
        if not self._existed and not any(self.path.iterdir()):
            self.path.rmdir()

    def _require_own(self) -> None:
        if not self.path.is_dir():
            raise ConfigError(f'--workdir={self.path} is a file, not a directory; choose another one')
        names = {path.name for path in self.path.iterdir() if not path.name.endswith('.partial')}
        if others := sorted(names - _OWN):
            raise ConfigError(
                f'--workdir={self.path} holds something else than an evaluation ({others[0]!r}): give an evaluation a '
                'directory of its own'
            )

    def _require_same_config(self) -> None:
        saved = dict(flatten(read_saved(self.path / CONFIG, _FIX)))
        current = dict(flatten(self._values))
        fields = [field for field in current if not field.startswith(_MAY_CHANGE)]
        if different := sorted(field for field in fields if saved.get(field) != current[field]):
            changes = ', '.join(f'{field}: {saved.get(field)!r} -> {current[field]!r}' for field in different)
            raise ConfigError(
                f'--resume with another config than {self.path / CONFIG}: {changes}; use the same, or a new --workdir'
            )
