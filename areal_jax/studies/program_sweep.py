"""A sweep whose arms are trained as programs of many arms: its config file has get_programs(), not get_sweep()."""

from __future__ import annotations

import pathlib
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

from areal_jax import files
from areal_jax.app.command_line import CommandLine, CommandLineError, call_in_file
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.sweep.arms import Arm, make_arms, note_sweep, read_state, require_same_sweep
from areal_jax.app.sweep.runner import Runner
from areal_jax.errors import ExitCode, UserError
from areal_jax.report.report import FILE as REPORT
from areal_jax.studies.arm_programs import make_programs

SCORES = 'scores.md'  # in the directory of the sweep
_PARTS = 4  # of a name: row, column, table, seed
_PURPOSE = "which returns {'full': arms, 'quick': arms}, arms as {'ROW.COLUMN.TABLE.SEED': {'section.field': value}}"


class ProgramSweep:
    """A sweep in its directory.

    Args:
      form: 'full' or 'quick'.
      jobs: programs at a time.

    Raises UserError for an arm that cannot run, or that no program can train, and for a directory that holds anything
    else.
    """

    def __init__(self, command: CommandLine, form: str, workdir: pathlib.Path, jobs: int):
        self._source, self._workdir, self._jobs = command.source, workdir, jobs
        self.arms = _read_arms(command, form, workdir)
        self._programs = make_programs('sweep', self.arms, workdir)
        require_same_sweep(workdir, self._source, self.arms)

    def print_commands(self) -> None:
        """One a line, of the programs that have not finished."""
        for program in self._programs:
            if not program.read_state().is_finished:
                print(shlex.join(program.command(False)))

    def run(self, interrupts: Interrupts) -> int:
        """Trains what has not finished and writes the scores; returns the exit code.

        Raises UserError for arms that failed, after all others had their turn.
        """
        note_sweep(self._workdir, self._source, self.arms)
        pending = [program for program in self._programs if not program.read_state().is_finished]
        for program in pending:
            program.write_list()
        runner = Runner(pending, self._jobs, lambda program: program.read_state())
        runner.run(interrupts)
        files.write_text(self._workdir / SCORES, render_scores(_read_scores(self.arms)))
        print(self._workdir / SCORES, flush=True)
        if runner.is_stopping:
            print('stopped; the same command goes on')
            return ExitCode.STOPPED
        if failed := [program for program in self._programs if not program.read_state().is_finished]:
            reason = failed[0].read_state().reason
            raise UserError(f'{len(failed)} programs have not finished, the first {failed[0].name} ({reason})')
        return ExitCode.FINISHED


def render_scores(scores: Mapping[str, float]) -> str:
    """Markdown: the median over the seeds of the final weights' score, and their range, by the names of the arms."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for name, score in scores.items():
        row, column, table, _ = name.split('.')
        found.setdefault(table, {}).setdefault((row, column), []).append(score)
    return '\n\n'.join('\n'.join(_render_table(table, cells)) for table, cells in found.items()) + '\n'


def _render_table(table: str, cells: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[str]:
    rows, columns = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    yield f'| {table} | {" | ".join(columns)} |'
    yield f'| --- |{" --- |" * len(columns)}'
    for row in rows:
        yield f'| {row} | {" | ".join(_render(cells.get((row, column), ())) for column in columns)} |'


def _render(scores: Sequence[float]) -> str:
    """'0.95 (0.91 to 0.97)'; '' without any."""
    if len(scores) < 2:
        return ''.join(f'{score:.2f}' for score in scores)
    return f'{statistics.median(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})'


def _read_scores(arms: Sequence[Arm]) -> dict[str, float]:
    """Of the arms that have finished."""
    finished = [arm for arm in arms if read_state(arm).is_finished]
    return {arm.name: files.read_json(arm.workdir / REPORT)['score'] for arm in finished}


def _read_arms(command: CommandLine, form: str, workdir: pathlib.Path) -> list[Arm]:
    forms = call_in_file(command.source, 'get_programs', _PURPOSE)
    found = forms.get(form) if isinstance(forms, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        raise CommandLineError(f'--config={command.source}: get_programs() must be a function {_PURPOSE}')
    if wrong := [name for name in found if not isinstance(name, str) or name.count('.') != _PARTS - 1]:
        raise CommandLineError(
            f'--config={command.source}: the arm {wrong[0]!r} has no name of the form ROW.COLUMN.TABLE.SEED'
        )
    return make_arms(command, found, workdir)
