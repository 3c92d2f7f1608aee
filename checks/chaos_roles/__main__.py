"""Chaos of roles: python -m checks.chaos_roles --minutes=90 --seed=0 --json=FILE.

Runs under launch.local with a controller, two learner processes of four virtual devices and two engines. In each, one
or two processes are killed or stopped at start-up, while a version is staged or swapped, while a checkpoint is saved,
or at the end; every run must end with its report all the same. 20 runs meet each role, signal and phase together once,
which takes some 35 minutes on two cores with nothing else to do; fewer minutes take a sample. Exit code 0 only if every
check held and at least one of each role, of each signal and of each phase was met.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from areal_jax import files
from checks.chaos_roles.judge import Calm, Judgement, judge_run, run_calm
from checks.chaos_roles.plan import CELLS, Cell, Deck, count_cells, find_missing
from checks.chaos_roles.recovery import Baseline
from checks.chaos_roles.runs import STEPS, Record, WatchedRun, command_of
from checks.command import describe_command, leave_directory, make_directory, make_parser, restore_signals

WEIGHTS = 'the weights of one process'  # a kind beside those of plan.KINDS


@dataclasses.dataclass
class Found:
    """What all runs have shown."""

    calm: Calm | None = None
    runs: list[Judgement] = dataclasses.field(default_factory=list)
    met: list[Cell] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)  # strikes whose phase was over too soon

    @property
    def violations(self) -> list[str]:
        calm = [f'undisturbed runs: {text}' for text in self.calm.violations] if self.calm else []
        return calm + [text for run in self.runs for text in run.violations]

    @property
    def missing(self) -> list[str]:
        """Kinds of which nothing is known."""
        return find_missing(self.met) + ([] if self.calm and self.calm.compared else [WEIGHTS])

    @property
    def passed(self) -> bool:
        return not self.violations and not self.missing

    def note(self, record: Record, judgement: Judgement) -> None:
        self.runs.append(judgement)
        self.met += [strike.cell for strike in record.strikes]
        self.missed += [str(strike) for strike in record.missed]

    def record(self) -> dict[str, Any]:
        """What --json writes, beside the facts of the command."""
        calm = dataclasses.asdict(self.calm) if self.calm else None
        return {
            'passed': self.passed, 'complete': set(self.met) == set(CELLS), 'missing': self.missing,
            'violations': self.violations, 'cells': count_cells(self.met), 'missed': self.missed,
            'undisturbed': calm, 'runs': [run.record() for run in self.runs],
        }  # fmt: skip


def disturb(found: Found, directory: pathlib.Path, seed: int, until_s: float) -> None:
    """Fills `found` until all cells were met or the time is over; keeps the directories of what failed."""
    cache = directory / 'compilation_cache'
    if time.monotonic() >= until_s:
        return
    found.calm = calm = run_calm(directory / 'undisturbed', cache, until_s)
    if calm.baseline is None:
        return
    deck, slowest = Deck(seed), calm.baseline
    while deck and until_s - time.monotonic() > calm.seconds:
        number = len(found.runs) + 1
        slowest = _run_once(found, deck, directory / f'run_{number:02d}', cache, slowest, until_s)


def _run_once(
    found: Found, deck: Deck, directory: pathlib.Path, cache: pathlib.Path, baseline: Baseline, until_s: float
) -> Baseline:
    """The baseline with what this run took before it was struck."""
    strikes = deck.draw()
    with WatchedRun(functools.partial(command_of, cache=cache), directory, until_s) as run:
        record = run.carry_out(strikes, STEPS, baseline)
    if record.is_cut:
        print(f'cut off: {_listed(strikes)}', flush=True)
        return baseline
    judgement = _judge(record, baseline)
    for strike in record.missed:
        deck.give_back(strike.cell)
    found.note(record, judgement)
    verdict = 'failed' if judgement.violations else 'held'
    said = '; '.join(map(str, judgement.recoveries)) or 'nothing was struck'
    missed = f'; too late for {_listed(record.missed)}' if record.missed else ''
    print(f'{verdict:6}  run {len(found.runs)}: {said}{missed}  ({judgement.seconds:.0f} s)', flush=True)
    for violation in judgement.violations:
        print(f'        {violation}', flush=True)
    if judgement.violations:
        print(f'        {record.workdir}', flush=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return baseline.widen(record.marks)


def _judge(record: Record, baseline: Baseline) -> Judgement:
    """An exception of a check is a violation, and ends nothing else."""
    try:
        return judge_run(record, baseline)
    except Exception as error:
        wrong = f'{type(error).__name__} in the check itself: {error}'
        return Judgement(record.ending.seconds, record.ending.exit_code, (), (wrong,))


def main(arguments: Sequence[str]) -> int:
    parser = make_parser('chaos_roles', __doc__, seed_of='of the order of the strikes, and of whom they meet when')
    parser.add_argument('--minutes', type=float, default=90.0, help='after which it stops by itself')
    flags = parser.parse_args(arguments)
    restore_signals()
    directory, began_s, found = make_directory('chaos_roles'), time.monotonic(), Found()
    try:
        disturb(found, directory, flags.seed, began_s + 60 * flags.minutes)
    except KeyboardInterrupt:
        print('interrupted: what follows is what ran until now', flush=True)
    minutes = {'minutes_asked': flags.minutes, 'minutes_taken': round((time.monotonic() - began_s) / 60, 2)}
    facts = {**describe_command(parser, arguments), 'seed': flags.seed, **minutes}
    if flags.json:
        files.write_json(flags.json, facts | found.record())
    _print_summary(found, facts)
    leave_directory(directory, failed=bool(found.violations))
    return 0 if found.passed else 1


def _print_summary(found: Found, facts: dict[str, Any]) -> None:
    print('\n| role, signal, phase | met |\n|---|---|')
    for name, count in count_cells(found.met).items():
        print(f'| {name} | {count} |')
    if found.calm and found.calm.baseline:
        print(f'undisturbed: {found.calm.baseline}')
    print(f'{len(found.runs)} runs, {len(found.met)} strikes, {len(found.violations)} violations; '
          f'{facts["minutes_taken"]} minutes, seed {facts["seed"]}, commit {facts["commit"]}')  # fmt: skip
    if found.missing:
        print(f'not covered: {", ".join(found.missing)}')


def _listed(strikes: Sequence[object]) -> str:
    return ', '.join(map(str, strikes))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
