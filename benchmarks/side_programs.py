"""Our side of generation.py where one program of the backend is measured: a step, or the prefill of long prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams, Weights
from benchmarks.side_engine import load_model, make_backend
from benchmarks.sides import Call, Start, serve
from benchmarks.workload import FIRST_TOKEN


def prepare(arguments: dict[str, Any]) -> Start:
    decoder, loaded = load_model(arguments['model'])

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        weights = backend.prepare(loaded)
        backend.warm_up(weights)
        tokens = np.random.default_rng(0).integers(
            FIRST_TOKEN, arguments['model']['vocab_size'], (backend.slots, arguments['prompt_tokens'])
        )
        task = {'step': measure_steps, 'prefill': measure_prefill}[arguments['task']]
        return task(backend, weights, tokens.astype(np.int32), arguments)

    return start


def measure_steps(
    backend: JaxDecodeBackend, weights: Weights, tokens: np.ndarray, arguments: Mapping[str, Any]
) -> tuple[Call, Any]:
    """Dispatches that all begin after the prompt: the host sets the position of a row, so they are equal."""
    context, steps = backend.context_tokens, arguments['engine']['decode_steps']
    state = prefill_all(backend, weights, backend.initial_state(), tokens[:, :-1])
    rows = [
        DecodeRow(
            request=GenerationRequest(i, 0, 0, row, SamplingParams(steps, 1.0, 0, 1.0, ())),
            token=int(row[-1]),
            position=len(row) - 1,
            limit=context,
            blocks=blocks_of(backend, i),
        )
        for i, row in enumerate(tokens)
    ]

    def call() -> Mapping[str, float]:
        nonlocal state
        for _ in range(arguments['dispatches']):
            state, output = backend.generate(weights, state, rows, steps)
            assert output.valid.all()
        return {'tokens': float(arguments['dispatches'] * steps * len(rows)), 'read': float(output.positions_read)}

    call()  # pages of the cache that were never touched
    return call, dict


def measure_prefill(
    backend: JaxDecodeBackend, weights: Weights, tokens: np.ndarray, arguments: Mapping[str, Any]
) -> tuple[Call, Any]:
    """Prompts of all slots, packed as a run packs them: as many consecutive pieces as a bucket holds."""
    state = prefill_all(backend, weights, backend.initial_state(), tokens)

    def call() -> Mapping[str, float]:
        nonlocal state
        for _ in range(arguments['repeats']):
            state = prefill_all(backend, weights, state, tokens)
        return {'tokens': float(arguments['repeats'] * tokens.size)}

    return call, lambda: {'temporary_bytes': temporary_bytes(backend, weights)}


def blocks_of(backend: JaxDecodeBackend, row: int) -> range:
    """Of the sequence in one row, when each has a whole context of its own."""
    blocks = -(-backend.context_tokens // backend.block_tokens)
    return range(row * blocks, (row + 1) * blocks)


def prefill_all(backend: JaxDecodeBackend, weights: Weights, state: Any, tokens: np.ndarray) -> Any:
    for pieces in plan(backend, tokens):
        state = backend.prefill(weights, state, pieces)
    return state


def plan(backend: JaxDecodeBackend, tokens: np.ndarray) -> Iterator[Sequence[PrefillPiece]]:
    """Pieces of each row, and as many of different rows together as fit a bucket."""
    largest, length = backend.largest_piece, tokens.shape[1]
    for start in range(0, length, largest):
        stop = min(start + largest, length)
        waiting: list[PrefillPiece] = []
        for i, row in enumerate(tokens):
            piece = PrefillPiece(row[start:stop], start, blocks_of(backend, i))
            if backend.prefill_bucket([p.span for p in (*waiting, piece)]) is None:
                yield waiting
                waiting = []
            waiting.append(piece)
        yield waiting


def temporary_bytes(backend: JaxDecodeBackend, weights: Weights) -> int:
    """Temporary memory of the largest program that prefills, as the compiler says."""
    programs = (backend.lower_prefill(weights, bucket).compile() for bucket in backend.declared_prefills)
    return max(program.memory_analysis().temp_size_in_bytes for program in programs)


if __name__ == '__main__':
    serve(prepare)
