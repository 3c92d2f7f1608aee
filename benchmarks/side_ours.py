"""Our side of the comparisons: an update of the learner, or answers of the decode engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from areal_jax.formats.hf_directory import load_hf
from areal_jax.learning.learner import SpmdLearner
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks import case  # of an earlier version, which has no routes
from benchmarks.case import default_optimizer, learner_settings, make_groups
from benchmarks.sides import Call, Compilations, Start, serve
from benchmarks.workload import load_work

DECODE_STEPS = 8  # of a dispatch
BLOCK_TOKENS, PREFILL_TOKENS = 64, 1024


def prepare(arguments: dict[str, Any]) -> Start:
    """`core`: the one that it runs on, where all threads share one."""
    if 'core' in arguments:
        os.sched_setaffinity(0, {arguments['core']})  # before jax makes its pools of threads
    return {'train': prepare_training, 'generate': prepare_generation}[arguments['task']](arguments)


def prepare_training(arguments: Mapping[str, Any]) -> Start:
    """An update with learning rate 0, so that every call computes the same."""
    config, params = load_hf(arguments['model'])
    decoder = Decoder(config, **arguments['decoder'])
    groups = make_groups(load_work(arguments['work']))
    settings = learner_settings(**arguments['settings'])
    if arguments['settings'].get('records_routes'):
        groups = case.give_routes(groups, Decoder(config), params)

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
    per_row = -(-context // BLOCK_TOKENS)
    blocks = [range(row * per_row, (row + 1) * per_row) for row in range(len(prompts))]

    def start() -> tuple[Call, Any]:
        backend = JaxDecodeBackend(
            Decoder(config),
            slots=len(prompts),
            context_tokens=context,
            block_tokens=BLOCK_TOKENS,
            prefill_buckets=(PREFILL_TOKENS,),
            decode_steps=DECODE_STEPS,
            filtered=False,
            dtype='float32',
            batch_buckets=(len(prompts),),
        )
        weights = backend.prepare(params)
        backend.warm_up(weights)

        def call() -> Mapping[str, float]:
            state = backend.initial_state()
            together = max(1, PREFILL_TOKENS // prompt_tokens)
            pieces = [PrefillPiece(row[:-1], 0, own) for row, own in zip(prompts, blocks, strict=True)]
            for first in range(0, len(pieces), together):
                state = backend.prefill(weights, state, pieces[first : first + together])
            requests = [GenerationRequest(row, 0, 0, prompt, sampling) for row, prompt in enumerate(prompts)]
            tokens, valid = prompts[:, -1], 0
            for position in range(prompt_tokens - 1, context - 1, DECODE_STEPS):
                rows = [
                    DecodeRow(request, int(token), position, context, own)
                    for request, token, own in zip(requests, tokens, blocks, strict=True)
                ]
                state, output = backend.generate(weights, state, rows, DECODE_STEPS)
                tokens, valid = output.tokens[-1], valid + int(output.valid.sum())
            jax.block_until_ready(state)
            return {'tokens': float(valid)}

        return call, dict

    return start


if __name__ == '__main__':
    serve(prepare)
