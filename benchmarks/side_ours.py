"""Our side of the comparisons: an update of the learner, or answers of the decode engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.formats.hf_directory import load_hf
from areal_jax.learning.learner import SpmdLearner
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.backend import SlotInit
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.sharding.mesh import make_mesh
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.case import default_optimizer, learner_settings, make_groups
from benchmarks.sides import Call, Compilations, Start, serve
from benchmarks.workload import load_work

DECODE_STEPS = 8  # of a dispatch


def prepare(arguments: dict[str, Any]) -> Start:
    return {'train': prepare_training, 'generate': prepare_generation}[arguments['task']](arguments)


def prepare_training(arguments: Mapping[str, Any]) -> Start:
    """An update with learning rate 0, so that every call computes the same."""
    config, params = load_hf(arguments['model'])
    decoder = Decoder(config, **arguments['decoder'])
    groups = make_groups(load_work(arguments['work']))
    settings = learner_settings(**arguments['settings'])

    def start() -> tuple[Call, Any]:
        compilations = Compilations()
        learner = SpmdLearner(
            decoder, params, make_mesh(), optimizer=default_optimizer(), learning_rate=0.0, settings=settings
        )
        shown = ('loss/value', 'update/grad_norm', 'train/packing_utilization')

        def call() -> Mapping[str, float]:
            metrics = learner.update(groups, 0)  # reads its metrics from the devices, so it has ended
            return {name: metrics[name] for name in shown}

        def facts() -> Mapping[str, Any]:
            return {
                'attention': learner.attention,
                'compilations': compilations.report(),
                'program_bytes': program_bytes(learner),
            }

        return call, facts

    return start


def program_bytes(learner: SpmdLearner) -> dict[str, dict[str, int]]:
    """What the compiler says that the learner's programs hold."""
    analyses = {name: program.memory_analysis() for (name, _), program in learner.programs.compiled.items()}
    return {
        name: {
            'arguments': analysis.argument_size_in_bytes,
            'outputs': analysis.output_size_in_bytes,
            'temporary': analysis.temp_size_in_bytes,
        }
        for name, analysis in analyses.items()
        if analysis is not None
    }


def prepare_generation(arguments: Mapping[str, Any]) -> Start:
    """Answers of `new_tokens` to all prompts of the work, one slot each."""
    config, params = load_hf(arguments['model'])
    prompts, new_tokens = load_work(arguments['work']).prompts, arguments['new_tokens']
    prompt_tokens = prompts.shape[1]
    context = prompt_tokens + new_tokens
    sampling = SamplingParams(new_tokens, 1.0, 0, 1.0, ())

    def start() -> tuple[Call, Any]:
        backend = JaxDecodeBackend(
            Decoder(config),
            slots=len(prompts),
            context_tokens=context,
            prefill_buckets=(prompt_tokens, context),
            decode_steps=DECODE_STEPS,
            filtered=False,
            dtype='float32',
        )
        backend.warm_up(params)

        def call() -> Mapping[str, float]:
            state = backend.initial_state()
            prefixes = backend.prefill(params, [row[:-1] for row in prompts])
            for slot, (row, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
                request = GenerationRequest(slot, 0, 0, row, sampling)
                state = backend.insert(prefix, state, [SlotInit(slot, request, row, context)])
            valid = 0
            for done in range(0, new_tokens, DECODE_STEPS):
                width = backend.width_for(prompt_tokens + done + DECODE_STEPS)
                state, output = backend.generate(params, state, DECODE_STEPS, width)
                valid += int(np.asarray(output.valid).sum())
            jax.block_until_ready(state)
            return {'tokens': float(valid)}

        return call, dict

    return start


if __name__ == '__main__':
    serve(prepare)
