"""Shared-prompt rows against ordinary rows: one update of the same groups, interleaved, same model, same loss.

    python benchmarks/prompt_sharing.py --out=benchmarks/results/prompt_sharing.json

The groups have the quickstart's shape: 8 groups of 8 answers, prompts of 44 tokens, answers of 4 to 16.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

import jax
import numpy as np

from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.optimizer import make_optimizer
from areal_jax.models.decoder import Decoder, ModelConfig
from areal_jax.sharding.mesh import make_mesh
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup

SMOLLM2_135M = ModelConfig(
    vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536, rope_theta=1e5
)
ROW_TOKENS, ROW_LOSS_TOKENS = 336, 256


def make_groups(seed: int) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(seed)
    return [make_group(draw, rng) for draw in range(8)]


def make_group(draw: int, rng: np.random.Generator) -> TrajectoryGroup:
    prompt = Prompt(draw, rng.integers(3, 49000, 44).astype(np.int32), 'benchmark', {})
    trajectories = []
    for sample in range(8):
        length = int(rng.integers(4, 17))
        tokens = rng.integers(3, 49000, length).astype(np.int32)
        segment = Segment(tokens, np.full(length, -8.0, np.float32), 0)
        trajectories.append(Trajectory(prompt, sample, (segment,), float(sample % 2), 'stop', '', 0.0, 0.0))
    return TrajectoryGroup(draw, tuple(trajectories))


def make_learner(decoder: Decoder, params: object, packing: str) -> SpmdLearner:
    learner = SpmdLearner(
        decoder, params, make_mesh(), optimizer=make_optimizer('sgd'), learning_rate=0.0, row_tokens=ROW_TOKENS,
        row_loss_tokens=ROW_LOSS_TOKENS, packing=packing,
    )  # fmt: skip
    learner.warm_up()
    return learner


def measure(learner: SpmdLearner, groups: list[TrajectoryGroup]) -> dict[str, float]:
    wall, cpu = time.monotonic(), time.process_time()
    metrics = learner.update(groups, 0)
    jax.block_until_ready(learner.publish(1))
    return {
        'wall_s': time.monotonic() - wall,
        'cpu_s': time.process_time() - cpu,
        'row_tokens': metrics['train/row_tokens'],
        'microbatches': metrics['train/microbatches'],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--repetitions', type=int, default=3)
    options = parser.parse_args()
    decoder = Decoder(SMOLLM2_135M)
    params = decoder.init(0)
    learners = {packing: make_learner(decoder, params, packing) for packing in ('shared_prompt', 'ordinary')}
    del params
    runs: dict[str, list[dict[str, float]]] = {packing: [] for packing in learners}
    for repetition in range(options.repetitions + 1):  # the first is thrown away
        for packing, learner in learners.items():
            result = measure(learner, make_groups(repetition))
            if repetition:
                runs[packing].append(result)
    medians = {p: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for p, rs in runs.items()}
    shared, ordinary = medians['shared_prompt'], medians['ordinary']
    report = {
        'ordinary_over_shared': {key: ordinary[key] / shared[key] for key in ('wall_s', 'cpu_s', 'row_tokens')},
        'medians': medians,
        'runs': runs,
        'hardware': hardware(),
        'versions': package_versions(),
        'commit': git_commit(),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + '\n')


if __name__ == '__main__':
    main()
