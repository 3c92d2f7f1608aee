"""In place of train_program and score_runs: arms whose score is a function of their factors, and no jax.

python -m tests.studies.toy_process LIST. An arm with a learning rate above 0.5 is an error. TOY_KILL names a job that
kills itself, once, before it writes anything.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys

from areal_jax.studies.stages import SCORE, read_list

RATE = 0.003  # the best one


def main() -> int:
    path = pathlib.Path(sys.argv[1])
    note(path.parent)
    if path.parent.name == os.environ.get('TOY_KILL') and len(starts(path.parent)) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    listed = read_list(path)
    for name, (_, config) in listed.items():
        if config.optimizer.learning_rate > 0.5:
            print(f'error: arm {name!r} is refused by the toy', file=sys.stderr)
            return 2
    for workdir, config in listed.values():
        score = score_of(config)
        if config.staleness.schedule == 'natural':
            (workdir / SCORE).write_text(json.dumps({'score': score}))
            continue
        lag = int(re.sub(r'\D', '', config.staleness.schedule))
        workdir.mkdir(parents=True, exist_ok=True)
        reward = score * config.task.length / (config.task.length + 1)
        lines = [{'step': step, 'reward/mean': reward, 'tokens/trained': 8} for step in range(1, config.run.steps + 1)]
        (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
        rate = config.optimizer.learning_rate
        report = {
            'steps': config.run.steps, 'finished': True, 'optimizer_steps': {'applied': 1, 'skipped': 0},
            'token_age': {'mean': lag, 'max': lag}, 'score': score, 'initial_weights_sha256': 'start',
            'weights_sha256': f'{rate}/{config.run.seed}/{lag}' if rate else 'start',
        }  # fmt: skip
        (workdir / 'report.json').write_text(json.dumps(report))
    return 0


def score_of(config) -> float:
    """0.9 less what a lag costs plain PPO, and 0.01 for each seed; 0.3 at any rate but the best."""
    if abs(config.optimizer.learning_rate - RATE) > 1e-9:
        return 0.3
    lag = int(re.sub(r'\D', '', config.staleness.schedule) or 0)
    cost = 0.02 * lag if config.loss.proximal == 'behavior' else 0.0
    return 0.9 - cost + 0.001 * (config.run.seed % 7)


def note(workdir: pathlib.Path) -> None:
    with (workdir / 'toy.txt').open('a') as file:
        file.write(f'{os.getpid()}\n')


def starts(workdir: pathlib.Path) -> list[str]:
    path = workdir / 'toy.txt'
    return path.read_text().splitlines() if path.exists() else []


if __name__ == '__main__':
    sys.exit(main())
