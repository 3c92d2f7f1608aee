"""Versions of the weights from the learner to a decoding engine, whole or as deltas, over every channel.

    python -m benchmarks.publication --before=CHECKOUT --out=benchmarks/results/publication.json [--rows=bytes,staged]
    python -m benchmarks.publication --soak --minutes=30 [--out=benchmarks/results/publication_soak.json]

Weights are SmolLM2-135M in bfloat16. carriers.py lists the channels. Rows:

  bytes   configs/quickstart.py with publication.delta: bytes of a delta divided by those of a whole version, and the
          share of the elements that changed; medians of updates 8 to 16, for each of --rates
  staged  Wall seconds from an update to weights that are staged, the cast and the digests of both sides included, and
          CPU seconds of the learner's part, medians: whole directories as commit 1ad9c82 wrote and verified them
          (--before names its checkout), and each channel whole and with deltas. `met`: a delta takes the learner no
          more CPU seconds than a whole directory of now
  pause   An engine of 8 slots that swaps --swaps deltas, one after the other: the gap between two dispatches at a swap
          less the median gap, its 99 % quantile, in seconds and in decode dispatches; KV kept, and computed again (a
          prefill is a dispatch, and in no gap)
  rate    The same engine with a new version every --interval_s: tokens a second divided by those without new versions,
          KV kept, and computed again; versions were sent before, so that the learner's work is not in it
  soak    With --soak alone: publication_soak.py

Without a checkout at --before the row of 1ad9c82 is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.errors import UserError
from benchmarks.carriers import CARRIERS
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.publication_soak import measure_soak
from benchmarks.sides import QUICKSTART, ROOT

FIRST, LAST = 8, 16  # updates of the row `bytes`
WHOLE = 'directory'  # the channel of whole versions that has no records
PARAMETER_BYTES = 2


def ask(module: str, arguments: Mapping[str, object], code: pathlib.Path = ROOT) -> dict[str, Any]:
    """What a side prints as its last line; `code` is the checkout whose areal_jax it runs."""
    environment = os.environ | {'PYTHONPATH': f'{code}{os.pathsep}{ROOT}', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    script = ROOT / 'benchmarks' / f'{module}.py'
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)], cwd=code, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f'{module} of {code} ended:\n{done.stderr[-4000:]}')
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_bytes(options: argparse.Namespace) -> Iterator[Row]:
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            workdir = pathlib.Path(folder) / 'run'
            fields = {
                'publication.channel': 'files', 'publication.dtype': 'bfloat16', 'publication.delta': True,
                'publication.base_every': 1000, 'optimizer.learning_rate': rate, 'evaluation.problems': 0,
                'run.seed': options.seed, 'run.export': False, 'telemetry.plots': False, 'checkpoint.every': 0,
                'run.steps': 2 if options.small else LAST,
            }  # fmt: skip
            words = [f'--config.{path}={value}' for path, value in fields.items()]
            command = [sys.executable, '-m', 'areal_jax.main_train', f'--config={QUICKSTART}', f'--workdir={workdir}']
            subprocess.run([*command, *words], cwd=ROOT, check=True, stdout=sys.stderr)
            rows = json.loads((workdir / 'report.json').read_text())['publications']
        yield {'row': 'bytes', 'learning_rate': rate, **summarize_bytes(rows, 1 if options.small else FIRST)}


def summarize_bytes(rows: Sequence[Mapping[str, Any]], first: int) -> Row:
    """Of the versions from `first` on: shares are of a whole version's bytes, which `changed` does not say of one."""
    judged = [row for row in rows if row['version'] >= first and row['record'] == 'delta']
    whole = PARAMETER_BYTES * 134_515_008
    return {
        'updates': [row['version'] for row in judged],
        'bytes': statistics.median(row['bytes'] for row in judged),
        'share_of_whole': statistics.median(row['bytes'] / whole for row in judged),
        'changed': statistics.median(row['changed'] for row in judged),
        'all': [[row['version'], row['record'], row['bytes'], row['changed']] for row in rows],
    }


def staged_sides(before: pathlib.Path | None) -> dict[str, tuple[str, bool, pathlib.Path]]:
    """(channel, whether deltas, checkout) of each side, by name."""
    sides = {f'{WHOLE} now': (WHOLE, False, ROOT)}
    if before is not None:
        sides[f'{WHOLE} before'] = (WHOLE, False, before.absolute())
    for name in CARRIERS:
        sides |= {f'{name} whole': (name, False, ROOT), f'{name} delta': (name, True, ROOT)}
    return sides


def measure_staged(options: argparse.Namespace) -> Iterator[Row]:
    calls: dict[str, list[dict[str, Any]]] = {}
    sides = staged_sides(options.before)
    for _ in range(options.turns):
        for name, (channel, delta, code) in sides.items():
            arguments = {
                'channel': channel, 'delta': delta, 'versions': 2 if options.small else options.versions,
                'lr': options.rates[0], 'seed': options.seed,
            }  # fmt: skip
            calls.setdefault(name, []).append(ask('side_staged', arguments, code))
    for name, found in calls.items():
        middle = lambda key, found=found: statistics.median(value for one in found for value in one[key])
        whole_cpu_s = statistics.median(value for one in calls[f'{WHOLE} now'] for value in one['send_cpu_s'])
        sent = {key: middle(key) for key in ('bytes', 'changed') if found[0][key][0] is not None}
        row = {
            'row': 'staged',
            'side': name,
            **{key: middle(key) for key in ('staged_s', 'send_s', 'send_cpu_s')},
            **sent,
        }
        judged = {'bar_cpu_s': whole_cpu_s, 'met': row['send_cpu_s'] <= whole_cpu_s} if sides[name][1] else {}
        yield row | judged | {'calls': found}


def measure_pause(options: argparse.Namespace) -> Iterator[Row]:
    """`met`: the pause is at most a decode dispatch, in all but one of a hundred swaps."""
    for name in CARRIERS:
        swaps = 4 if options.small else options.swaps
        arguments = {'what': 'swaps', 'channel': name, 'swaps': swaps, 'lr': options.rates[0], 'seed': options.seed}
        for policy, found in ask('side_published', arguments).items():
            pauses = [gap - found['median_gap_s'] for gap in found['swap_gaps_s']]
            pause_s = float(np.quantile(pauses, 0.99))
            share = pause_s / found['dispatch_s']
            told = {'pause_s': pause_s, 'median_s': statistics.median(pauses), 'dispatches': share, 'met': share <= 1}
            yield {'row': 'pause', 'channel': name, 'policy': policy, **told, **found}


def measure_rate(options: argparse.Namespace) -> Iterator[Row]:
    for name in CARRIERS:
        arguments = {
            'what': 'rates', 'channel': name, 'delta': True, 'interval_s': options.interval_s,
            'updates': 2 if options.small else options.updates, 'lr': options.rates[0], 'seed': options.seed,
            'turns': 1 if options.small else options.turns,
        }  # fmt: skip
        found = ask('side_published', arguments)
        without = found['rates'].pop('none')
        for policy, rates in found['rates'].items():
            turns = [new / old for old, new in zip(without, rates, strict=True)]
            yield {
                'row': 'rate', 'channel': name, 'policy': policy, 'interval_s': options.interval_s,
                'rate': statistics.median(turns), 'quartile': float(np.quantile(turns, 0.25)), 'turns': turns,
                'tokens_s': {'none': without, policy: rates}, 'bytes': found['bytes'],
            }  # fmt: skip


ROWS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    'bytes': measure_bytes,
    'staged': measure_staged,
    'pause': measure_pause,
    'rate': measure_rate,
}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises UserError for rows that are not there and a checkout that is none."""
    parser = make_parser(__doc__, turns=3)
    parser.add_argument('--json', dest='out', type=pathlib.Path, help='the same as --out')
    parser.add_argument('--rows', default=','.join(ROWS))
    parser.add_argument('--before', type=pathlib.Path, help='checkout of commit 1ad9c82')
    parser.add_argument('--rates', default='2e-5,1e-6', help='learning rates; the first one in staged, pause and rate')
    parser.add_argument('--versions', type=int, default=0, help='staged: of a call (6); soak: at most (no bound)')
    parser.add_argument('--swaps', type=int, default=200, help='pause: of each channel and policy')
    parser.add_argument('--interval_s', type=float, default=5.0, help='rate: between two versions')
    parser.add_argument('--updates', type=int, default=6, help='rate: versions of a run')
    parser.add_argument('--soak', action='store_true', help='the row soak alone')
    parser.add_argument('--minutes', type=float, default=30.0, help='soak: of each channel')
    options = parser.parse_args(arguments)
    options.rows = split_choices('rows', options.rows, ROWS)
    options.rates = [float(rate) for rate in options.rates.split(',')]
    options.versions = options.versions or (sys.maxsize if options.soak else 6)
    if options.small and options.soak:
        options.versions = min(options.versions, 12)
    if options.before is not None and not (options.before / 'areal_jax').is_dir():
        raise UserError(f'--before={options.before} is no checkout of this repository: it has no areal_jax/')
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for made in [measure_soak] if options.soak else [ROWS[name] for name in options.rows]:
        for row in made(options):
            rows.append(row)
            show(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('publication', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('publication', main)
