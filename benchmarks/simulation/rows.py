"""Published runs, simulated with the constants of constants.py at an eighth of their size, misses first.

    python -m benchmarks.simulation --json=benchmarks/results/simulation [--minutes=60] [--parts=figure_5c,...]

Every part writes JSON/PART.json when it is done, first with one seed, then again with one more as long as there is
time. Errors are shares of the published number. docs/simulation_accuracy.md has what came out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.generation import processor
from benchmarks.options import split_choices
from benchmarks.report import write_report
from benchmarks.simulation import constants
from benchmarks.simulation.comparison import Result
from benchmarks.simulation.device_rows import compare_devices
from benchmarks.simulation.eta_rows import compare_figure_5c, compare_table_7
from benchmarks.simulation.interruption_rows import compare_interruption
from benchmarks.simulation.other_rows import compare_others
from benchmarks.simulation.simulated import Simulations
from benchmarks.simulation.snowball_rows import compare_snowball
from benchmarks.simulation.table_1_rows import compare_table_1

PARTS: Mapping[str, Callable[[Simulations, int], Result]] = {
    'figure_5c': compare_figure_5c, 'table_1': compare_table_1, 'table_7': compare_table_7,
    'interruption': compare_interruption, 'devices': compare_devices, 'snowball': compare_snowball,
    'others': compare_others,
}  # fmt: skip


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=pathlib.Path, help='directory in which every part writes PART.json')
    parser.add_argument('--minutes', type=float, default=float('inf'), help='begin no simulation later than that')
    parser.add_argument('--seed', type=int, default=0, help='the first one, of lengths and rewards')
    parser.add_argument('--seeds', type=int, default=constants.SEEDS.value, help='runs of a row')
    parser.add_argument('--updates', type=int, default=constants.UPDATES.value, help='measured, after the warm-up')
    parser.add_argument('--kept', type=pathlib.Path, help='a file of runs: those in it are not made again')
    parser.add_argument('--parts', default=','.join(PARTS))
    options = parser.parse_args(arguments)
    options.parts = split_choices('parts', options.parts, tuple(PARTS))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    until = time.monotonic() + 60 * options.minutes
    simulations = Simulations((), until, options.kept)
    found: dict[str, Result] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        if found and time.monotonic() >= until:
            break
        simulations.add_seed(seed)
        for part in options.parts:
            found[part] = PARTS[part](simulations, options.updates)
            if options.json:
                _write(options, arguments, part, found[part], simulations)
    for result in found.values():
        print(result.describe())


def _write(
    options: argparse.Namespace, arguments: Sequence[str] | None, part: str, result: Result, simulations: Simulations
) -> None:
    numbers = {
        'part': result.part, 'bar': result.bar, 'value': result.value, 'met': result.met,
        'rows': [row.as_row() for row in result.misses_first()], 'simulations': simulations.take(),
        'seeds': list(simulations.seeds), 'updates': options.updates, 'constants': constants.digest(),
        'command': f'python -m benchmarks.simulation {" ".join(sys.argv[1:] if arguments is None else arguments)}',
        'processor': processor(),
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # what write_report prints: rows are printed at the end
        write_report(numbers, options.json / f'{part}.json')


if __name__ == '__main__':
    main()
