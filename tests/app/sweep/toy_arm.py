"""In place of main_train: an arm whose reward is learning_rate + seed / 100 + eta * update / 1000, and no jax.

Its tokens are eta / 2 versions old in the mean, and it trains 5 + eta tokens a second.

It leaves the files that a run leaves, refuses what a run refuses, and saves when it is told to stop. An update takes
PAUSE_S seconds, an environment variable. A learning rate of 0.5 is an error, one of 0.25 makes no optimizer step, one
of 0.125 has the arm kill itself once, after two updates. Two more variables order what the arms of a sweep do without a
clock: an arm waits at its start until MEET arms have started, and the arm named by HOLD stays in its fifth update.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

from absl import flags

from areal_jax.app.command_line import parse_train_command
from areal_jax.config import TrackedConfig

STEPS = 4
HELD_AFTER, HELD_S = 4, 100.0  # updates; seconds, in which a test ends the arm


def main() -> int:
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, '', flag_values=values)
    flags.DEFINE_bool('resume', False, '', flag_values=values)
    config = parse_train_command(sys.argv, values).config
    workdir = pathlib.Path(values.workdir)
    note(workdir, f'start {os.getpid()} {time.time()} resume={values.resume}')
    note(workdir, f'compiled {os.environ["JAX_COMPILATION_CACHE_DIR"]}')
    meet(workdir.parent, int(os.environ.get('MEET', '0')))
    metrics = workdir / 'metrics.jsonl'
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    if done and not values.resume:
        return fail(f'{workdir} holds a run already')
    rate, seed, eta = config.optimizer.learning_rate, config.run.seed, config.staleness.eta
    if rate == 0.5:
        return fail('optimizer.learning_rate=0.5 is refused by the toy')
    (workdir / 'config.json').write_text(json.dumps(TrackedConfig(config).as_dict()))
    stops: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stops.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    for step in range(done + 1, config.run.steps + 1):
        is_held = workdir.name == os.environ.get('HOLD') and step > HELD_AFTER
        time.sleep(HELD_S if is_held else float(os.environ.get('PAUSE_S', '0')))
        with metrics.open('a') as file:
            reward = rate + seed / 100 + eta * step / 1000
            line = {'step': step, 'time': step * 2.0, 'reward/mean': reward, 'tokens/trained': 10}
            file.write(json.dumps(line | {'staleness/token_age_mean': eta / 2}) + '\n')
        if rate == 0.125 and step == 2 and not done:
            os.kill(os.getpid(), signal.SIGKILL)
        if stops:
            (workdir / 'checkpoints' / f'step_{step:08}').mkdir(parents=True)
            note(workdir, f'saved {time.time()}')
            return 75
    report = {
        'steps': config.run.steps,
        'finished': True,
        'optimizer_steps': {'applied': 0 if rate == 0.25 else config.run.steps, 'skipped': 0},
        'accuracy': {'greedy': {'before': None, 'after': {'mean': rate, 'low': None, 'high': None, 'n': 1}}}
        | {'sampled': {'before': None, 'after': None, 'gain': None}},
        'evaluation_curve': [],
        'evaluation_curve_ends': None,
        'token_age': {'mean': eta / 2, 'max': eta},
        'throughput': {'train_tokens_per_second': 5 + eta},
        'ratio_split': {'share': 0.125, 'parts': {'mismatch': {'rms': 1e-6}, 'drift': {'rms': 0.25}}},
        'weights_sha256': f'{rate}/{seed}/{eta}',
    }
    (workdir / 'report.json').write_text(json.dumps(report))
    note(workdir, f'end {time.time()}')
    return 3 if rate == 0.25 else 0


def meet(sweep: pathlib.Path, arms: int) -> None:
    end_s = time.monotonic() + 60
    while len(list(sweep.glob('*/toy.txt'))) < arms:
        if time.monotonic() > end_s:
            raise TimeoutError(f'fewer than {arms} arms have started')
        time.sleep(0.01)


def note(workdir: pathlib.Path, line: str) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / 'toy.txt').open('a') as file:
        file.write(f'{line}\n')


def fail(sentence: str) -> int:
    print(f'error: {sentence}', file=sys.stderr)
    return 2


if __name__ == '__main__':
    sys.exit(main())
