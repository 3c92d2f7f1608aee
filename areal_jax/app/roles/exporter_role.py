"""The exporter of a run in roles: writes checkpoints as Hugging Face directories during training.

It runs if run.export_every is set. It computes on the CPU, and no process waits for it: the controller writes the
final weights itself (finished_export.py).
"""

from __future__ import annotations

import pathlib
import threading

from ml_collections import config_dict

from areal_jax.app.export.finished_export import RECORD
from areal_jax.app.export.run_export import export_checkpoint
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.roles.roles import RoleProcess, await_controller, keep_name
from areal_jax.app.workdir.run_directory import CHECKPOINTS, read_report
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.errors import UserError

EXPORTS = 'exports'  # in the workdir: a directory for each version, 'exports/16'
_LOOK_S = 1.0


def serve_exports(config: config_dict.ConfigDict, process: RoleProcess, interrupts: StopRequests) -> bool:
    """Exports until the run has finished (returns True), or until a signal comes before that (returns False).

    Raises LostPeerError if the controller does not appear, UserError for errors that the user can fix.
    """
    told = threading.Event()
    with keep_name(process, config):
        await_controller(process, config, config.distributed.command_deadline_s)
        exporter = Exporter(process.workdir, config.run.export_every, config.run.steps, config.run.export_dtype)
        with interrupts.deferred(lambda number: told.set(), 'ending after this export'):
            return _export_until_told(exporter, told)


def _export_until_told(exporter: Exporter, told: threading.Event) -> bool:
    """Exports until the run has finished (returns True) or `told` is set before that (returns False)."""
    while True:
        has_finished = exporter.has_finished()  # asked before the search: no checkpoint is saved after it
        for path in exporter.find_due():
            if told.is_set() and not has_finished:
                return False
            exporter.export(path)
        if has_finished:
            return True
        if told.wait(_LOOK_S) and not exporter.has_finished():
            return False


class Exporter:
    """Writes WORKDIR/exports/VERSION for checkpoints of versions that are multiples of `every`, except the last.

    Args:
      steps: updates of the run; the weights of the last one are in WORKDIR/export.
      dtype: of the weights.
    """

    def __init__(self, workdir: pathlib.Path, every: int, steps: int, dtype: str):
        self._workdir, self._every, self._steps, self._dtype = workdir, every, steps, dtype
        self._store = CheckpointStore(workdir / CHECKPOINTS)
        self._given_up: set[str] = set()  # names of checkpoints

    def has_finished(self) -> bool:
        """Whether the run has finished, after which it saves no further checkpoint."""
        return read_report(self._workdir, self._steps) is not None

    def find_due(self) -> list[pathlib.Path]:
        """Returns the checkpoints whose weights are not exported yet, oldest version first.

        A version that a run saves again, after it returned to an earlier checkpoint, is exported again.
        """
        newest = {step: path for step, path in self._store.saves() if step % self._every == 0 and step < self._steps}
        due = [path for step, path in newest.items() if not self._is_exported(step, path)]
        return [path for path in due if path.name not in self._given_up]

    def export(self, path: pathlib.Path) -> None:
        """Exports a checkpoint. Prints a warning on failure (the run removed the checkpoint, the disk is full)."""
        step = int(path.name.split('_')[1])
        out = self._out(step)
        out.parent.mkdir(exist_ok=True)
        try:
            export_checkpoint(path, out, self._dtype)
        except UserError as error:
            self._given_up.add(path.name)
            fix = '; raise checkpoint.keep' if isinstance(error, CheckpointError) else ''
            print(f'warning: version {step} is not exported: {error}{fix}', flush=True)
        else:
            print(f'version {step} is in {out}', flush=True)

    def _is_exported(self, step: int, path: pathlib.Path) -> bool:
        """Whether the export is no older than the checkpoint: both are on one file system, and so share one clock."""
        try:
            return (self._out(step) / RECORD).stat().st_mtime >= path.stat().st_mtime
        except FileNotFoundError:  # not exported yet; or the checkpoint was just removed, and the next search shows it
            return False

    def _out(self, step: int) -> pathlib.Path:
        return self._workdir / EXPORTS / str(step)
