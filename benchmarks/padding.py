"""Our own train step without padding against padded micro-batches, over the spread of the lengths.

    python -m benchmarks.padding --out=benchmarks/results/padding.json

Also draws the curve beside the JSON, as PNG. Every sigma of the lognormal lengths has the same number of tokens; the
longest answer is at most LIMIT times the mean, as max_new_tokens would have it. Micro-batches have the same number of
places, of tokens and of loss tokens, in each of three ways:

  packed   trajectories side by side, first fit, one row per micro-batch;
  padded   one trajectory per row, rows as long as the longest trajectory of the update;
  trimmed  the same, but every micro-batch cut to a half of that where its longest allows.

Prompts are repeated in all of them. One update is one optimizer step (learning rate 0); the ways take turns in one
process, medians are of the calls after the first, and losses and gradient norms must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax

from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.sharding.rules import make_mesh
from benchmarks.case import default_optimizer, learner_settings, make_groups, make_work
from benchmarks.report import write_report
from benchmarks.workload import SIGMA, Workload

SIGMAS = (0.0, 0.25, 0.5, 0.75, 1.0)
MODEL = ModelConfig(
    vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=3, head_dim=32, d_ff=576, rope_theta=1e6,
    family='qwen2', qkv_bias=True,
)  # fmt: skip
MULTIPLE = 64  # row shapes are multiples of it, as are the tiles of attention


def make_settings(work: Workload, longest: int, microbatch_tokens: int) -> dict[str, LearnerSettings]:
    """Of each way. `longest` is the longest answer there is."""
    up = lambda x: -(-x // MULTIPLE) * MULTIPLE
    row, loss_row = up(work.prompt_tokens + longest), up(longest)
    rows = max(microbatch_tokens // row, 1)
    common: dict[str, Any] = {'packing': 'ordinary', 'accumulate': 'dispatch'}
    padded = common | {'row_tokens': row, 'row_loss_tokens': loss_row, 'rows_per_microbatch': rows, 'fill': 'padded'}
    return {
        'packed': learner_settings(row_tokens=rows * row, row_loss_tokens=rows * loss_row, **common),
        'padded': learner_settings(**padded),
        'trimmed': learner_settings(**padded, tail_buckets=1),
    }


def measure(decoder: Decoder, params: Any, work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    made = make_work(decoder, params, work)
    groups = make_groups(made)
    longest = max(len(answer) for answer in made.answers)
    learners = {}
    for way, settings in make_settings(work, longest, options.microbatch_tokens).items():
        learners[way] = SpmdLearner(
            decoder, params, make_mesh(), optimizer=default_optimizer(), learning_rate=0.0, settings=settings
        )
    metrics = {way: learner.update(groups, 0) for way, learner in learners.items()}
    require_same_work(metrics)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in learners}
    for _ in range(options.repetitions):
        for way, learner in learners.items():
            wall, cpu = time.monotonic(), time.process_time()
            learner.update(groups, 0)
            runs[way].append({'wall_s': time.monotonic() - wall, 'cpu_s': time.process_time() - cpu})
    ways = {way: summarize(runs[way], metrics[way], work.answer_tokens) for way in learners}
    speed_up = {
        f'packed over {way}': {k: ways['packed'][k] / ways[way][k] for k in ('tokens_per_cpu_s', 'tokens_per_wall_s')}
        for way in ('padded', 'trimmed')
    }
    return {'speed_up': speed_up, 'ways': ways, 'longest_answer': longest, 'trained_tokens': work.answer_tokens}


def summarize(runs: list[dict[str, float]], metrics: Any, tokens: int) -> dict[str, Any]:
    middle = {key: statistics.median(run[key] for run in runs) for key in ('wall_s', 'cpu_s')}
    shown = ('loss/value', 'update/grad_norm', 'train/microbatches', 'train/packing_utilization')
    return {
        **middle,
        **{f'tokens_per_{key}': tokens / seconds for key, seconds in middle.items()},
        **{name: metrics[name] for name in shown},
        'runs': runs,
    }


def require_same_work(metrics: dict[str, Any]) -> None:
    for name in ('loss/value', 'update/grad_norm'):
        values = [m[name] for m in metrics.values()]
        # advantages add up to 0 over a group, and at equal lengths so does the loss: hence the absolute part
        if max(values) - min(values) > 1e-6 + 1e-4 * max(abs(v) for v in values):
            raise RuntimeError(f'{name} differs, so the ways did different work: {values}')


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    sigmas = [float(sigma) for sigma in results['sigmas']]
    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout='constrained')
    for way, marker in (('padded', 'o'), ('trimmed', 's')):
        speed_ups = [cell['speed_up'][f'packed over {way}']['tokens_per_cpu_s'] for cell in results['sigmas'].values()]
        axes.plot(sigmas, speed_ups, marker=marker, label=f'packed over {way}')
    axes.axhline(1.0, color='grey', linewidth=0.8)
    axes.set(xlabel='sigma of the lognormal lengths', ylabel='trained tokens per CPU second, ratio', ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--sigmas', default=','.join(map(str, SIGMAS)))
    parser.add_argument('--groups', type=int, default=8)
    parser.add_argument('--group_size', type=int, default=8)
    parser.add_argument('--mean_tokens', type=int, default=224, help='of an answer; a prompt has 32')
    parser.add_argument('--microbatch_tokens', type=int, default=2048)
    parser.add_argument('--repetitions', type=int, default=5)
    options = parser.parse_args()
    jax.config.update('jax_enable_compilation_cache', False)
    decoder = Decoder(MODEL)
    params = decoder.init(seed=0)
    cells = {}
    for sigma in map(float, options.sigmas.split(',')):
        work = Workload(options.groups, options.group_size, 32, options.mean_tokens, sigma, MODEL.vocab_size)
        cells[str(sigma)] = measure(decoder, params, work, options)
        print(sigma, json.dumps(cells[str(sigma)]['speed_up']), file=sys.stderr, flush=True)
    numbers = {
        'packed_over': {sigma: cell['speed_up'] for sigma, cell in cells.items()},
        'paper_like_sigma': SIGMA,
        'sigmas': cells,
        'model': dataclasses.asdict(MODEL),
        'options': {k: v for k, v in vars(options).items() if k != 'out'},
    }  # fmt: skip
    whole = write_report(numbers, options.out)
    if options.out:
        draw(whole, options.out.with_suffix('.png'))


if __name__ == '__main__':
    main()
