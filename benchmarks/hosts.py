"""What it costs to bring a version from a learner of four processes to two engines, and that it arrives bit for bit.

    python -m benchmarks.hosts --out=benchmarks/results/hosts.json

- equal: a random model of Qwen3's shape with 135 M weights in bfloat16, whole and as deltas: whether each engine holds
  the bits that the learner gathers itself; the most bytes that one process sends (bar: at most 0.3 of all).
- speed: 2 GB of weights, whole, from the end of an update until the engines have them. Wall seconds over as many pairs
  of processes that copy the same bytes through sockets (bar: at most 3).
- files: CPU seconds of all processes over the same version as files (bar: at most 0.6).

The sides need up to 19 GB of memory, so a turn starts them one after the other: each makes two versions, and the third
is measured. All processes are on this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from areal_jax.errors import UserError
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import Bar, Run, ratio
from benchmarks.sides import Side

MOST_SHARE, WALL, CPU = 0.3, Bar(3.0, at_least=False), Bar(0.6, at_least=False)
_WARM = 2


def start_side(way: str, model: str, options: argparse.Namespace, *, delta: bool = False) -> Side:
    arguments = {'way': way, 'model': model, 'delta': delta, 'seed': options.seed}
    return Side(sys.executable, 'benchmarks.side_hosts', arguments)


def measure_equality(options: argparse.Namespace) -> Row:
    """A whole version and deltas: whether the engines hold the learner's bits, and how the bytes are divided."""
    model, found = 'tiny' if options.small else '135M', {}
    for name, delta in (('whole', False), ('deltas', True)):
        with start_side('shards', model, options, delta=delta) as side:
            for _ in range(4):
                side.call()
            found[name] = side.facts()
    records = [version['record'] for version in found['deltas']['versions']]
    equal = all(all(facts['bit_equal']) and len(facts['bit_equal']) == 2 for facts in found.values())
    share = max(version['most_share'] for facts in found.values() for version in facts['versions'])
    return {
        'row': 'equal', 'model': model, 'bar': MOST_SHARE, 'bit_equal': equal, 'most_share': share,
        'records': records, 'bytes': {name: facts['versions'][-1]['bytes'] for name, facts in found.items()},
        'met': equal and share <= MOST_SHARE and records == ['whole', 'delta', 'delta', 'delta'],
    }  # fmt: skip


def measure_speed(options: argparse.Namespace) -> Row:
    """Wall seconds over bare sockets, in turns."""
    calls = _call_in_turns('shards', 'sockets', options)
    wall = ratio(calls['shards'], calls['sockets'], 'wall_s', WALL)
    beside = ratio(calls['shards'], calls['sockets'], 'cpu_s', WALL)
    return {
        'row': 'speed', 'turns': options.turns, 'bar': WALL.value, 'wall_over_sockets': wall.median,
        'quartile': wall.quartile, 'cpu_over_sockets': beside.median, 'met': WALL.holds(wall), 'calls': calls,
    }  # fmt: skip


def measure_files(options: argparse.Namespace) -> Row:
    """CPU seconds over the same version as files, in turns."""
    calls = _call_in_turns('shards', 'files', options)
    cpu = ratio(calls['shards'], calls['files'], 'cpu_s', CPU)
    beside = ratio(calls['shards'], calls['files'], 'wall_s', CPU)
    return {
        'row': 'files', 'turns': options.turns, 'bar': CPU.value, 'cpu_over_files': cpu.median,
        'quartile': cpu.quartile, 'wall_over_files': beside.median, 'met': CPU.holds(cpu), 'calls': calls,
    }  # fmt: skip


def _call_in_turns(one: str, other: str, options: argparse.Namespace) -> dict[str, list[Run]]:
    calls: dict[str, list[Run]] = {one: [], other: []}
    for _ in range(options.turns):
        for way, found in calls.items():
            with start_side(way, 'tiny' if options.small else '2GB', options) as side:
                side.facts()
                for _ in range(_WARM):
                    side.call()
                found.append(side.call())
            print(way, found[-1], file=sys.stderr, flush=True)
    return calls


ROWS = {'equal': measure_equality, 'speed': measure_speed, 'files': measure_files}


def measure(options: argparse.Namespace) -> list[Row]:
    found = []
    for name in split_choices('rows', options.rows, ROWS):
        found.append(ROWS[name](options))
        show(found[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--rows', default=','.join(ROWS), help='what is measured')
    options = parser.parse_args(arguments)
    if options.small:
        options.turns = 1
    if options.turns < 1:
        raise UserError(f'--turns={options.turns} must be at least 1')
    rows = report('hosts', arguments, options, lambda: measure(options))['rows']
    return 0 if all(row['met'] for row in rows) else 2


if __name__ == '__main__':
    run('hosts', lambda: sys.exit(main()))
