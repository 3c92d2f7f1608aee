"""Counts what XLA compiles, so that a compilation inside the loop is seen."""

from __future__ import annotations

import jax.monitoring

EVENT = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
    """Programs compiled since the counter was made; use as a context manager, it listens while inside."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def reset(self) -> None:
        self.count, self.seconds = 0, 0.0

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            self.count += 1
            self.seconds += duration_secs
