"""One policy of interruption.py on this machine: SmolLM2, or a small model, under the real clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_jax.control.clocks.real import RealClock
from areal_jax.control.events import EventLog
from benchmarks.interrupted_engine import InterruptedEngine, Load
from benchmarks.side_engine import LANES, STALL_S, load_model, make_backend
from benchmarks.sides import Call, Start, Stopwatch, serve


def prepare(arguments: dict[str, Any]) -> Start:
    decoder, weights = load_model(arguments['model'])

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        programs = backend.warm_up(backend.prepare(weights))

        def call() -> Mapping[str, float]:
            log, watch, marks = EventLog(keeps=False), Stopwatch(), iter((True, False))
            mark = lambda: watch.start() if next(marks) else watch.stop()
            run = InterruptedEngine(
                RealClock(LANES, log, STALL_S), log, backend, weights, Load(**arguments['load']), arguments['policy'],
                decode_steps=arguments['engine']['decode_steps'], interval_s=arguments['interval_s'], on_mark=mark,
            )  # fmt: skip
            return run.measure() | watch.parts()

        return call, lambda: {'clock': 'real', 'programs': programs}

    return start


if __name__ == '__main__':
    serve(prepare)
