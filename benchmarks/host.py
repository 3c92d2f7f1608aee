"""What the host's side of a run costs as it grows: the loop, its servers' words, the registry, and a publication.

    python -m benchmarks.host --out=benchmarks/results/host.json [--rows=loop,answers,wire,registry,publication,stream]

  loop         64, 512 and 4,096 engines that cost nothing, with 25 open requests each, event log on (side_host.py): CPU
               microseconds of the whole loop for each trajectory, from admission to publication, for engines in this
               process and for servers. `growth` is the cost with the most engines over the cost with the fewest, turn
               by turn: at most 1.5. `lag_ms_max` is the longest time without a look at new completions, `lag_ms_p99`
               what a completion that comes while the loop is busy waits for it at most in 99 of 100 cases;
               `spell_ms_p99` the time without a look that 99 of 100 stay below.
  answers      Updates of 1,048,576 tokens in answers of 1,024 through the in-process engine, 64 slots, 16 steps a
               dispatch: the longest time without a look, and bytes of the log for each generated token.
  wire         Servers behind HTTP that answer at a fixed pace (side_wire.py), 9,000 tokens in pieces of 16 or of 64:
               CPU microseconds of the controller for an answer, for each of its pieces, for each of its tokens, and for
               a question what a server holds, as a health check asks.
  registry     Engines whose entries change once a second (side_registry.py): operations a second on the files, CPU
               microseconds of a heartbeat, of an engine's start, and for each entry in a look of the controller.
  publication  A version of SmolLM2-135M through the files channel: bytes written, bytes read by so many engines, CPU
               seconds of both sides.
  stream       A whole record through a socket of this host, in parts of 8 MB and of 64 bytes: CPU seconds of the sender
               (to keep it, to send it) and of a reader (to receive, copy and digest it).

Each call is a process of its own; sizes take turns. Numbers are medians over the turns, `all` has every call's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from areal_jax.app.workdir.environment import git_commit
from areal_jax.errors import UserError
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import Bar, ratio
from benchmarks.sides import Run, Side

OPEN_EACH = 25
POOLS = ('in_process', 'servers')
GROWTH = Bar(1.5, at_least=False)
# of an answer: pieces, tokens of a piece, seconds before each
SHAPES = {'short': (1, 16, 0.25), 'many': (562, 16, 0.02), 'large': (141, 64, 0.08)}
WIRE_ENGINES, WIRE_OPEN_EACH = 4, 16
LOOKS = 5
DTYPES = ('float32', 'bfloat16')
Name = TypeVar('Name', bound=Hashable)


def in_turns(sides: Mapping[Name, Mapping[str, Any]], module: str, turns: int) -> dict[Name, list[Run]]:
    """A call of each side in each turn, A B A B, each in a new process; `sides` has their arguments."""
    calls: dict[Name, list[Run]] = {name: [] for name in sides}
    for turn in range(turns):
        for name, arguments in sides.items():
            with Side(sys.executable, f'benchmarks.{module}', arguments) as side:
                calls[name].append(side.call())
            print(turn, module, name, calls[name][-1]['checks'], file=sys.stderr, flush=True)
    return calls


def middle(calls: Sequence[Run], name: str, factor: float = 1.0) -> float:
    """The median of a check, with four digits."""
    return shorten(factor * statistics.median(call['checks'][name] for call in calls))


def shorten(value: float) -> float:
    return float(f'{value:.4g}')


def us_trajectory(call: Run) -> float:
    return 1e6 * call['checks']['part_cpu_s'] / call['checks']['tokens']


def measure_loop(options: argparse.Namespace) -> Iterator[Row]:
    sides = {
        (pool, engines): {'pool': pool, 'engines': engines, 'open_each': OPEN_EACH, 'seconds': options.seconds}
        for engines in options.engines
        for pool in POOLS
    }
    calls = in_turns(sides, 'side_host', options.turns)
    for (pool, engines), found in calls.items():
        costs = [us_trajectory(call) for call in found]
        yield {
            'row': 'loop', 'pool': pool, 'engines': engines, 'open': OPEN_EACH * engines,
            'us_trajectory': shorten(statistics.median(costs)), 'all': [shorten(cost) for cost in costs],
            **{name: middle(found, name) for name in (
                'lag_ms_p99', 'lag_ms_max', 'spell_ms_p99', 'log_bytes', 'start_cpu_s',
            )}, 'calls': found,
        }  # fmt: skip
    fewest, most = min(options.engines), max(options.engines)
    for pool in POOLS:
        grown = ratio(calls[pool, most], calls[pool, fewest], 'cpu_s', GROWTH)
        yield {
            'row': 'growth', 'pool': pool, 'engines': [fewest, most], 'ratio_cpu': shorten(grown.median),
            'quartile_cpu': shorten(grown.quartile), 'bar': GROWTH.value, 'met': GROWTH.holds(grown),
        }  # fmt: skip


def measure_answers(options: argparse.Namespace) -> Iterator[Row]:
    [found] = in_turns({'answers': {}}, 'side_host', options.turns).values()
    numbers = {name: middle(found, name) for name in ('lag_ms_max', 'log_bytes_token')}
    yield {'row': 'answers', 'tokens_an_update': 1 << 20, **numbers, 'calls': found}


def measure_wire(options: argparse.Namespace) -> Iterator[Row]:
    sides = {
        name: {
            'engines': WIRE_ENGINES, 'open_each': WIRE_OPEN_EACH, 'seconds': options.seconds,
            'pieces': min(pieces, 20) if options.small else pieces, 'tokens': tokens, 'pause_s': pause_s,
        }
        for name, (pieces, tokens, pause_s) in SHAPES.items()
    }  # fmt: skip
    calls = in_turns(sides, 'side_wire', options.turns)
    shapes = [(arguments['pieces'], arguments['tokens']) for arguments in sides.values()]
    costs = split_costs(shapes, [statistics.median(map(us_trajectory, found)) for found in calls.values()])
    many = calls['many']
    yield {
        'row': 'wire', 'engines': WIRE_ENGINES, 'open': WIRE_ENGINES * WIRE_OPEN_EACH, 'shapes': shapes,
        **{name: shorten(value) for name, value in costs.items()},
        'us_question': middle(many, 'question_s', 1e6), 'lag_ms_max': middle(many, 'lag_ms_max'),
        'log_bytes': middle(many, 'log_bytes'), 'question_log_bytes': middle(many, 'question_log_bytes'),
        'all': {name: [shorten(us_trajectory(call)) for call in found] for name, found in calls.items()},
        'calls': [call for found in calls.values() for call in found],
    }  # fmt: skip


def split_costs(shapes: Sequence[tuple[int, int]], costs: Sequence[float]) -> dict[str, float]:
    """What an answer, a piece and a token cost, from the costs of answers of three shapes (pieces, tokens of a piece).

    An answer of p pieces of t tokens costs answer + p (piece + t token).
    """
    sizes = np.array([(1, pieces, pieces * tokens) for pieces, tokens in shapes], float)
    return dict(zip(('us_answer', 'us_piece', 'us_token'), np.linalg.solve(sizes, costs).tolist(), strict=True))


def measure_registry(options: argparse.Namespace) -> Iterator[Row]:
    sides = {engines: {'engines': engines, 'looks': 2 if options.small else LOOKS} for engines in options.engines}
    for engines, found in in_turns(sides, 'side_registry', options.turns).items():
        looks_a_s = middle(found, 'looks_a_s')
        yield {
            'row': 'registry', 'engines': engines, 'looks_a_s': looks_a_s,
            'operations_a_s': shorten(registry_operations(engines, looks_a_s)),
            'controller_cpu_share': shorten(middle(found, 'look_cpu_s') * looks_a_s),
            'us_entry_read': middle(found, 'look_cpu_s', 1e6 / engines), 'us_beat': middle(found, 'beat_cpu_s', 1e6),
            'ms_start': middle(found, 'start_cpu_s', 1e3), 'calls': found,
        }  # fmt: skip


def registry_operations(engines: int, looks_a_s: float) -> float:
    """A second: a heartbeat of each engine; in a look a listing, and of each entry its time and its content."""
    return engines + looks_a_s * (1 + 2 * engines)


def measure_publication(options: argparse.Namespace) -> Iterator[Row]:
    sides = {dtype: {'dtype': dtype, 'versions': 1 if options.small else 3} for dtype in DTYPES}
    for dtype, found in in_turns(sides, 'side_publication', options.turns).items():
        nbytes, parameters = (found[0]['checks'][name] for name in ('bytes', 'parameters'))
        yield {
            'row': 'publication', 'model': 'SmolLM2-135M', 'dtype': dtype, 'parameters': parameters,
            'bytes_written': nbytes, 'bytes_a_parameter': shorten(nbytes / parameters),
            'bytes_read': {str(engines): engines * nbytes for engines in options.engines},
            **{name: middle(found, name) for name in ('write_cpu_s', 'read_cpu_s')}, 'calls': found,
        }  # fmt: skip


def measure_stream(options: argparse.Namespace) -> Iterator[Row]:
    sizes = {'bytes': (1 << 23, 4 if options.small else 32), 'frames': (64, 1000 if options.small else 20_000)}
    sides = {name: {'part_bytes': size, 'parts': parts, 'versions': 5} for name, (size, parts) in sizes.items()}
    for name, found in in_turns(sides, 'side_stream', options.turns).items():
        names = ('store_cpu_s', 'send_cpu_s', 'receive_cpu_s', 'copy_cpu_s', 'digest_cpu_s')
        count = found[0]['checks'][name]
        yield {
            'row': 'stream',
            'of': name,
            name: count,
            **{each: middle(found, each) for each in names},
            'calls': found,
        }


ROWS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    'loop': measure_loop,
    'answers': measure_answers,
    'wire': measure_wire,
    'registry': measure_registry,
    'publication': measure_publication,
    'stream': measure_stream,
}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises UserError for rows and sizes that cannot be."""
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--rows', default=','.join(ROWS))
    parser.add_argument('--engines', default='64,512,4096', help='rows loop, registry and publication')
    parser.add_argument('--keep', action='store_true', help='rows of other names that are in --out stay')
    parser.add_argument(
        '--seconds', type=float, default=2.0, help='CPU seconds of a call, at least: rows loop and wire'
    )
    options = parser.parse_args(arguments)
    options.rows = split_choices('rows', options.rows, ROWS)
    if options.small:
        options.engines, options.seconds = '32,64', 0.2
    sizes = options.engines.split(',')
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) >= 32 for size in sizes):
        raise UserError(f'--engines={options.engines} must be two numbers or more, each at least 32')
    options.engines = [int(size) for size in sizes]
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for name in options.rows:
        for row in ROWS[name](options):
            rows.append(row)
            show(row)
    return rows


def kept_rows(options: argparse.Namespace) -> list[Row]:
    """With --keep, what the report has besides the rows measured now; raises UserError for another commit's."""
    if not (options.keep and options.out and options.out.exists()):
        return []
    earlier = json.loads(options.out.read_text())
    if earlier['commit'] != git_commit():
        raise UserError(f'--keep: {options.out} is of commit {earlier["commit"]}, not of {git_commit()}; leave it out')
    names = {*options.rows, *(('growth',) if 'loop' in options.rows else ())}
    return [row for row in earlier['rows'] if row['row'] not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    options = read_options(arguments)
    kept = kept_rows(options)
    rows = report('host', arguments, options, lambda: kept + measure(options))['rows']
    return 0 if all(row.get('met', True) for row in rows) else 2


if __name__ == '__main__':
    run('host', lambda: sys.exit(main()))
