"""Reading golds and answers, against an earlier commit of this project in a work tree of its own.

    git worktree add --detach BEFORE 8e4eddcf
    python -m benchmarks.reading --before=BEFORE --out=benchmarks/results/reading.json

  load      seconds of one core to load a file of 7,473 worked solutions as integers, and one of 12,000 golds of
            contests as mathematics, child processes included: bar 1.3x
  verdicts  CPU seconds of a verdict by each kind of answer, over solutions that mark their answer in a box, after
            '####', by a phrase and not at all; for mathematics, over the golds of the file: bar 1.1x

The golds are those of tests/tasks/answers/drawn_golds.py, in the forms that both sides load. Each side is a process a
turn, in turns; ratios are ours over theirs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.errors import UserError
from benchmarks.options import Row, make_parser, report, run, show
from benchmarks.ratios import Bar

SOLUTIONS, GOLDS = 7473, 12_000
BARS = {'load': Bar(1.3, False), 'verdict': Bar(1.1, False)}
MARKS = (r'The result is \boxed{%s}.', '#### %s', 'The answer is $%s$.', 'So it is %s')
TEXT_KINDS = ('integer', 'number', 'exact', 'normalised')
_LINES = 5  # of a worked solution
_SCORED = 300  # golds of mathematics
_REPEATED = 20  # verdicts by text, which take microseconds


def draw_solutions(n: int, rng: random.Random) -> list[str]:
    """Worked solutions as long as those of GSM8K."""
    line = lambda: f'She has {rng.randrange(99)} + {rng.randrange(99)} = <<1+1={rng.randrange(99)}>> apples a day.'
    return ['\n'.join(line() for _ in range(_LINES)) + f'\n#### {int(10 ** rng.uniform(0, 4))}' for _ in range(n)]


def write_lines(path: pathlib.Path, golds: Sequence[str]) -> None:
    rows = ({'question': f'question {k}', 'answer': gold} for k, gold in enumerate(golds))
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def ask_side(tree: pathlib.Path, task: Mapping[str, Any]) -> Any:
    """What `answer` returns in a process that imports areal_jax from the tree."""
    code = pathlib.Path(__file__).read_text()
    with tempfile.TemporaryDirectory() as directory:
        program = pathlib.Path(directory) / 'side.py'
        program.write_text(
            code.partition('# SIDE\n')[2].partition('# END\n')[0] + f'\nanswer({json.dumps(dict(task))!r})\n'
        )
        environment = os.environ | {'PYTHONPATH': str(tree), 'PYTHONHASHSEED': '0'}
        done = subprocess.run([sys.executable, program], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'--before={tree}: its readers ended with code {done.returncode}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


# SIDE
def answer(asked):
    import json
    import pathlib
    import resource
    import time

    from areal_jax.tasks import jsonl
    from areal_jax.tasks.scoring.score_call import ScoringError, score_answer
    from areal_jax.tasks.task import TaskError

    task = json.loads(asked)

    def used():
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    def verdict(kind, gold, text):
        try:
            return float(score_answer(jsonl.KINDS[kind].score, {'answer': gold}, text, 'stop'))
        except ScoringError:
            return -1.0

    if task['do'] == 'probe':
        found, path = [], pathlib.Path(task['path'])
        for name, golds in task['golds'].items():
            path.write_text(
                ''.join(json.dumps({'question': str(k), 'answer': gold}) + '\n' for k, gold in enumerate(golds))
            )
            try:
                jsonl.read_problems(path, 'math')
                found.append(name)
            except TaskError:
                pass
    elif task['do'] == 'load':
        start_s = used()
        problems = jsonl.read_problems(pathlib.Path(task['path']), task['kind'])
        found = {'cpu_s': used() - start_s, 'golds': len(problems)}
    else:
        pairs = [(gold, text) for gold, text in task['pairs']]
        verdicts = [verdict(task['kind'], *pair) for pair in pairs[:50]]  # imports, and caches of patterns
        start_s = time.process_time()
        for _ in range(task['repeated']):
            verdicts = [verdict(task['kind'], *pair) for pair in pairs]
        found = {'cpu_s': (time.process_time() - start_s) / task['repeated'] / len(pairs), 'right': sum(verdicts)}
    print(json.dumps(found))


# END


def choose_golds(
    n: int, before: pathlib.Path, here: pathlib.Path, directory: pathlib.Path, rng: random.Random
) -> tuple[list[str], list[str]]:
    """n golds, each of the next form of which both sides load every gold that is drawn here; then these forms."""
    from tests.tasks.answers.drawn_golds import FORMS

    each = -(-n // (len(FORMS) * 4 // 5))  # enough where a fifth of the forms is refused
    golds = {name: [FORMS[name](rng)[0] for _ in range(each)] for name in FORMS}
    tasks = {
        tree: {'do': 'probe', 'golds': golds, 'path': str(directory / f'forms_{side}.jsonl')}
        for side, tree in enumerate((here, before))
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loaded = [set(found) for found in pool.map(ask_side, tasks, tasks.values())]
    names = [name for name in FORMS if all(name in side for side in loaded)]
    return [golds[names[k % len(names)]][k // len(names)] for k in range(n)], names


def compare(what: str, bar: str, sides: Mapping[str, Callable[[], Any]], turns: int) -> Row:
    """One row: seconds of both sides in turns, and the ratio of ours over theirs."""
    runs: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, ask in sides.items():
            runs[name].append(ask())
    ratios = [ours['cpu_s'] / theirs['cpu_s'] for ours, theirs in zip(runs['ours'], runs['before'], strict=True)]
    median, quartile = float(np.median(ratios)), float(np.percentile(ratios, 75))
    row = {
        'what': what, 'bar': BARS[bar].value, 'ratio': median, 'quartile': quartile, 'met': median <= BARS[bar].value,
        'runs': runs, **{f'{name}_cpu_s': float(np.median([run['cpu_s'] for run in runs[name]])) for name in runs},
    }  # fmt: skip
    show(row)
    return row


def measure(options: argparse.Namespace) -> list[Row]:
    here, rng = pathlib.Path(__file__).parents[1], random.Random(options.seed)
    trees = {'ours': here, 'before': options.before.resolve()}
    share = 0.02 if options.small else 1.0
    rows: list[Row] = []

    def add(what: str, bar: str, task: Mapping[str, Any], turns: int) -> None:
        sides = {name: (lambda tree=tree: ask_side(tree, task)) for name, tree in trees.items()}
        rows.append(compare(what, bar, sides, turns))

    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        solutions = draw_solutions(round(SOLUTIONS * share), rng)
        write_lines(directory / 'solutions.jsonl', solutions)
        golds, names = choose_golds(round(GOLDS * share), trees['before'], here, directory, rng)
        write_lines(directory / 'golds.jsonl', golds)
        for kind in TEXT_KINDS:
            task = {'do': 'load', 'path': str(directory / 'solutions.jsonl'), 'kind': kind}
            add(f'load {len(solutions)} worked solutions as {kind}', 'load', task, options.turns)
        task = {'do': 'load', 'path': str(directory / 'golds.jsonl'), 'kind': 'math'}
        add(f'load {len(golds)} golds in {len(names)} forms as math', 'load', task, min(options.turns, options.loads))
        marked = [(text.rpartition('#### ')[2], text.replace('#### ', mark.split('%s')[0]) + mark.split('%s')[1])
                  for text in solutions[:400] for mark in MARKS]  # fmt: skip
        for kind in TEXT_KINDS:
            task = {'do': 'verdicts', 'kind': kind, 'pairs': marked, 'repeated': _REPEATED}
            add(f'a verdict by {kind}', 'verdict', task, options.turns)
        chosen = golds[: round(_SCORED * share) + 5]
        pairs = [
            (gold, MARKS[k % 3] % other)
            for k, gold in enumerate(chosen)
            for other in (gold, chosen[(k + len(names)) % len(chosen)])
        ]
        add(
            'a verdict by math',
            'verdict',
            {'do': 'verdicts', 'kind': 'math', 'pairs': pairs, 'repeated': 1},
            options.turns,
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--before', type=pathlib.Path, required=True, help='work tree of the other side')
    parser.add_argument('--loads', type=int, default=2, help='turns of the load of mathematics, which takes minutes')
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    return report('reading', arguments, options, lambda: measure(options)) | {'wall_s': time.monotonic() - began_s}


if __name__ == '__main__':
    run('reading', main)
