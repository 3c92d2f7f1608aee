"""An agent with two tools learns: what configs/agents/shop.py gains on held-out problems, over seeds.

    python -m benchmarks.agent_learning --json=benchmarks/results/agent_learning.json

A warm-up, configs/agents/sft_shop.py, then one run of configs/agents/shop.py from its result for each seed. The
gain of a problem is the mean of its sampled rewards after training less the mean before, that is after the warm-up.
The interval over all seeds is Student's, over the pairs of seed and problem; the one over the means of the seeds is
given next to it. CPU seconds are of all processes of a run; wall seconds are longer if others use the machine. The
minutes of a seed include the warm-up. A run that is finished in --workdir is read and not repeated.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.report.statistics import cluster_interval
from areal_jax.telemetry.facts import EVALUATIONS, read_scores
from benchmarks.report import write_report

WARM_UP, TRAINING = 'configs/agents/sft_shop.py', 'configs/agents/shop.py'
GAIN, PROBLEMS, WARM_UP_MINUTES = 0.1, 64, 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the seeds; 0 if every check held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seed', type=int, default=0, help='the first seed')
    parser.add_argument('--seeds', type=int, default=3, help='how many')
    parser.add_argument('--minutes', type=float, default=25.0, help='of wall time that a seed may take')
    parser.add_argument('--workdir', type=pathlib.Path, default=pathlib.Path('runs/agent_learning'), help='of the runs')
    parser.add_argument('--json', type=pathlib.Path, help='file for the numbers')
    parser.add_argument('--plot', type=pathlib.Path, help='picture of the curves')
    options = parser.parse_args(arguments)
    start = options.workdir / 'warm_up'
    warm_up = _train(WARM_UP, start)
    numbered = range(options.seed, options.seed + options.seeds)
    seeds = [run_seed(seed, start, options.workdir / f'seed{seed}') for seed in numbered]
    numbers = summarize(seeds, warm_up, options.minutes)
    write_report(numbers, options.json)
    if options.plot:
        draw(numbers, options.plot)
    return 0 if all(numbers['checks'].values()) else 1


def run_seed(seed: int, start: pathlib.Path, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains one seed from the warm-up in `start`, and returns its scores, its curve, its tools and its cost."""
    training = _train(TRAINING, workdir, f'--config.run.seed={seed}', f'--config.model.path={start}')
    scores = read_scores(workdir / EVALUATIONS)
    report = json.loads((workdir / 'report.json').read_text())
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return {
        'seed': seed,
        'before': [list(one) for one in scores['before'].sampled],
        'after': [list(one) for one in scores['after'].sampled],
        'greedy': {name: statistics.fmean(found.greedy) for name, found in scores.items()},
        'reward': [line['reward/mean'] for line in lines],
        'tools': report['agents']['tools'],
        'counts': report['agents']['counts'],
        'cost': training,
    }


def summarize(seeds: Sequence[Mapping[str, Any]], warm_up: Mapping[str, float], minutes: float) -> dict[str, Any]:
    """The gains with their intervals, and the checks: gain, problems, minutes."""
    gains = [gains_of(seed) for seed in seeds]
    means = [statistics.fmean(gain) for gain in gains]
    pooled = cluster_interval([[gain] for of_seed in gains for gain in of_seed])
    walls = [(warm_up['wall_s'] + seed['cost']['wall_s']) / 60 for seed in seeds]
    return {
        'gains': means,
        'pooled': vars(pooled),
        'over_seeds': vars(cluster_interval([[mean] for mean in means])),
        'minutes': walls,
        'checks': {
            f'every seed gains more than {GAIN}': min(means) > GAIN,
            f'the pooled interval is above {GAIN}': pooled.low is not None and pooled.low > GAIN,
            f'{PROBLEMS} held-out problems': all(len(gain) == PROBLEMS for gain in gains),
            f'the warm-up takes at most {WARM_UP_MINUTES:g} minutes': warm_up['wall_s'] <= 60 * WARM_UP_MINUTES,
            f'a seed takes at most {minutes:g} minutes': max(walls) <= minutes,
        },
        'warm_up': dict(warm_up),
        'seeds': list(seeds),
    }


def gains_of(seed: Mapping[str, Any]) -> list[float]:
    """The gain of each problem."""
    pairs = zip(seed['before'], seed['after'], strict=True)
    return [statistics.fmean(after) - statistics.fmean(before) for before, after in pairs]


def draw(numbers: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the reward of every update, and the held-out mean before and after, by seed."""
    import matplotlib

    matplotlib.use('agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for index, seed in enumerate(numbers['seeds']):
        rewards = seed['reward']
        ends = [statistics.fmean(map(statistics.fmean, seed[phase])) for phase in ('before', 'after')]
        axes.plot(range(1, len(rewards) + 1), rewards, color=f'C{index}', label=f'seed {seed["seed"]}')
        axes.plot([0, len(rewards)], ends, 'D', color=f'C{index}', markeredgecolor='black')
    axes.set(
        xlabel='update', ylabel='reward', ylim=(0, 1), title='Lines: training; diamonds: held out, before and after'
    )
    axes.legend(loc='lower right')
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _train(config: str, workdir: pathlib.Path, *fields: str) -> dict[str, float]:
    """Runs a training to its end, or reads what an earlier call of the benchmark has measured."""
    cost = workdir / 'cost.json'
    if cost.exists():
        return json.loads(cost.read_text())
    command = [sys.executable, '-m', 'areal_jax.main_train', f'--config={config}', f'--workdir={workdir}']
    began, used = time.monotonic(), _cpu_seconds()
    subprocess.run([*command, *fields], check=True, stdout=sys.stderr)
    measured = {'wall_s': time.monotonic() - began, 'cpu_s': _cpu_seconds() - used}
    cost.write_text(json.dumps(measured))
    return measured


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == '__main__':
    sys.exit(main())
