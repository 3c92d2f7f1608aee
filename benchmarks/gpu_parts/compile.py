"""Compiling the programs of an engine: side by side, as runs do, or one after the other.

    python -m benchmarks.gpu_parts.compile {beside,one} [--tiny] OUT

The engine is that of the part `run`. Each order is a process of its own without a compilation cache, because XLA keeps
what it tried for a product as long as its process lives.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import jax
import jax.monitoring

from areal_jax.app.parts.compilations import EVENT
from areal_jax.learning import weights as trees
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, compile_side_by_side
from benchmarks.gpu_parts.cells import Cells, run_part
from benchmarks.gpu_parts.kernels import covered
from benchmarks.gpu_parts.shapes import SHAPES, TINY

SEED = 0


class Compilations:
    """The compilations of XLA inside of its context, of all threads."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            now = time.perf_counter()
            with self._lock:
                self._spans.append((now - duration_secs, now))

    def numbers(self) -> dict[str, Any]:
        """How many, their seconds summed, the longest, and the seconds in which at least one was under way."""
        with self._lock:
            spans = list(self._spans)
        seconds = [last - first for first, last in spans]
        return {
            'programs': len(spans),
            'summed_s': sum(seconds),
            'longest_s': max(seconds, default=0.0),
            'covered_s': covered(spans),
        }


def measure(cells: Cells, order: str, *, tiny: bool) -> None:
    jax.config.update('jax_enable_compilation_cache', False)
    backend = make_backend(tiny)
    params = backend.prepare(trees.cast(Decoder(TINY if tiny else SHAPES['0.5b']).init(SEED), 'bfloat16'))
    jax.block_until_ready(params)
    lowered = backend.lower_all(params)
    with Compilations() as compilations:
        began = time.perf_counter()

        def note() -> None:
            numbers = {'seconds': time.perf_counter() - began, 'cores': os.cpu_count(), **compilations.numbers()}
            cells.add('compile', numbers)

        if order == 'beside':
            compile_side_by_side(lowered)
        else:
            for program in lowered:
                program.compile()
                note()  # a part that is ended leaves what it had
        note()


def make_backend(tiny: bool) -> JaxDecodeBackend:
    """The engine of the part `run`."""
    return JaxDecodeBackend(
        Decoder(TINY if tiny else SHAPES['0.5b']),
        slots=4 if tiny else 64,
        context_tokens=32 if tiny else 544,
        block_tokens=16 if tiny else 64,
        prefill_buckets=(32,) if tiny else (256, 4096),
        decode_steps=2 if tiny else 16,
        filtered=False,
        dtype='bfloat16',
    )


if __name__ == '__main__':
    run_part(measure)
