"""The policies of interruption.py on this machine, one call after the other: SmolLM2, or a small model, in real time.

One process for all policies: they have the same programs, and the memory of one.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from typing import Any

from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from benchmarks.interrupted_engine import POLICIES, InterruptedEngine, Load, Policy
from benchmarks.side_engine import LANES, STALL_S, load_model, make_backend
from benchmarks.sides import Call, Start, Stopwatch, serve

MEAN_LENGTHS = 2  # between two updates


def prepare(arguments: dict[str, Any]) -> Start:
    """Call number i runs policy i % 4, in the order of POLICIES."""
    decoder, weights = load_model(arguments['model'])
    load, decode_steps = Load(**arguments['load']), arguments['engine']['decode_steps']

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        programs = backend.warm_up(backend.prepare(weights))

        def measure(policy: Policy, interval_s: float) -> Mapping[str, float]:
            gc.collect()  # the engine of the call before is a circle of references with a cache
            log, watch, marks = EventLog(keeps=False), Stopwatch(), iter((True, False))
            mark = lambda: watch.start() if next(marks) else watch.stop()
            run = InterruptedEngine(
                RealClock(LANES, log, STALL_S), log, backend, weights, load, policy,
                decode_steps=decode_steps, interval_s=interval_s, on_mark=mark,
            )  # fmt: skip
            return run.measure() | watch.parts()

        alone = measure('none', arguments['first_interval_s'])
        interval_s = two_mean_lengths_s(load, backend.slots, alone['tokens'] / alone['part_wall_s'])
        order = itertools.cycle(POLICIES)
        facts = {'clock': 'real', 'programs': programs, 'interval_s': interval_s, 'alone': alone}
        return lambda: measure(next(order), interval_s), lambda: facts

    return start


def two_mean_lengths_s(load: Load, slots: int, tokens_s: float) -> float:
    """In which an engine of this speed generates two mean answers in every slot."""
    return MEAN_LENGTHS * load.mean_tokens * slots / tokens_s


if __name__ == '__main__':
    serve(prepare)
