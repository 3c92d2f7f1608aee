"""How fast an engine generates, measured by the pool; used to weigh what is outstanding on it."""

from __future__ import annotations

_FIRST_TOKENS = 64  # before that many, an engine has no speed
_WINDOW_TOKENS = 4096  # at least so many, and so many of each open request; then what was measured counts half
_WINDOW_OF_REQUEST = 1024


class SpeedMeter:
    """Tokens per second of an open request, the time that it waits included.

    Not tokens per second of the engine: those grow with the number of requests that decode together, so an engine with
    few requests would look slow, get fewer still, and never recover. The window is long enough for many requests to
    hold the time in which the engine rebuilds their KV after new weights: an engine that has just done so would look
    many times as fast as one that is about to, and get all new requests.
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
        if self._tokens >= max(_WINDOW_TOKENS, _WINDOW_OF_REQUEST * self._requests):
            self._tokens, self._request_s = self._tokens / 2, self._request_s / 2

    def tokens_per_s(self) -> float | None:
        """None before there is enough to tell."""
        return self._tokens / self._request_s if self._tokens >= _FIRST_TOKENS and self._request_s > 0 else None

    def _advance(self, now_s: float) -> None:
        self._request_s += self._requests * (now_s - self._changed_s)
        self._changed_s = now_s
