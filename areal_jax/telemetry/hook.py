"""Hands every row of metrics to a function of the user's own, in a thread of its own.

    def function(row: Mapping[str, float], step: int, workdir: pathlib.Path) -> None

`row` has the metrics of one update that are finite numbers, by name; WORKDIR/config.json holds the config.
"""

from __future__ import annotations

import pathlib

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.plugins import Function, raising_user_error
from areal_jax.telemetry.hook import RowThread, finite, read_progress
from areal_jax.telemetry.metrics import Line

FIELD = 'telemetry.hook'
FILE = 'hook.json'  # in the workdir: the last step that the function was given
_FIX = 'remove it: the hook then gets all rows again'


class MetricsHook(RowThread):
    """Calls the function with one row after another.

    A call that raises is warned of once and counted, and the rows after it are handed over all the same: a tracker may
    be out of reach for a while. A step is handed over at most once in a workdir: a resumed run that makes an update
    again does not repeat its row. What an earlier attempt wrote and did not hand over comes first, so that a hook set
    at a resume gets all rows; another function begins at step 1.
    """

    def __init__(self, function: Function, spec: str, workdir: pathlib.Path):
        """`spec` is the text that names the function, for errors."""
        super().__init__(f'{FIELD}={spec}', workdir)
        self._function, self._spec = function, spec
        self._last_step = int(read_progress(workdir / FILE, {'hook': spec}, _FIX).get('last_step', 0))

    def _hand_over(self, step: int, metrics: Line) -> None:
        if step <= self._last_step:
            return
        try:
            with raising_user_error(self._spec, FIELD):
                self._function(finite(metrics), step, self._workdir)
        except UserError as error:
            self._note_failure(str(error))
        self._calls, self._last_step = self._calls + 1, step
        try:
            files.write_json(self._workdir / FILE, {'hook': self._spec, 'last_step': step})
        except OSError as error:  # the run itself says that its disk is full
            self._note_failure(str(error))
