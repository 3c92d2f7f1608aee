"""How fast an engine generates, measured by the pool; used to weigh what is outstanding on it."""

from __future__ import annotations

from collections.abc import Callable

from areal_jax.rollout.load_ledger import Ledger

_FIRST_TOKENS = 64  # before that many, an engine has no speed
_WINDOW_TOKENS = 4096  # then what was measured counts half


class SpeedMeter:
    """Tokens per second of an open request, the time that it waits included.

    Not tokens per second of the engine: those grow with the number of requests that decode together, so an engine with
    few requests would look slow, get fewer still, and never recover.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._changed_s = 0.0
        self._tokens, self._request_s = 0.0, 0.0

    def note_requests(self, change: int, now_s: float) -> None:
        """`change` requests were opened; negative: were closed."""
        self._advance(now_s)
        self._requests += change

    def note_generated(self, tokens: int, now_s: float) -> None:
        self._advance(now_s)
        self._tokens += tokens
        if self._tokens >= _WINDOW_TOKENS:
            self._tokens, self._request_s = self._tokens / 2, self._request_s / 2

    def tokens_per_s(self) -> float | None:
        """None before there is enough to tell."""
        return self._tokens / self._request_s if self._tokens >= _FIRST_TOKENS and self._request_s > 0 else None

    def _advance(self, now_s: float) -> None:
        self._request_s += self._requests * (now_s - self._changed_s)
        self._changed_s = now_s


class MeasuredSpeeds:
    """Weighs what is outstanding on each engine of a ledger by the speed measured there."""

    def __init__(self, ledger: Ledger, now: Callable[[], float]):
        self._ledger, self._now = ledger, now
        self._meters: dict[str, SpeedMeter] = {}

    def add(self, engine: str) -> None:
        """Until an engine is measured, it is as fast as the fastest."""
        measured = [speed for meter in self._meters.values() if (speed := meter.tokens_per_s()) is not None]
        self._meters[engine] = SpeedMeter()
        self._ledger.set_speed(engine, max(measured, default=1.0))

    def remove(self, engine: str) -> None:
        del self._meters[engine]

    def note_requests(self, engine: str, change: int) -> None:
        """`change` requests were opened on the engine; negative: were closed."""
        self._meters[engine].note_requests(change, self._now())

    def note_generated(self, engine: str, tokens: int) -> None:
        meter = self._meters[engine]
        meter.note_generated(tokens, self._now())
        if (speed := meter.tokens_per_s()) is not None:
            self._ledger.set_speed(engine, speed)
