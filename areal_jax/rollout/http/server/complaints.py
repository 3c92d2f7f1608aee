"""What the HTTP thread complains of: a line for each kind and minute, however often clients provoke it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

NAME = 'areal_jax.rollout.http.server'
_PERIOD_S = 60.0


class OncePerMinute(logging.Filter):
    """Lets the first record of a kind pass, then one a minute that says how many it counts for."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        super().__init__()
        self._now = now
        self._kinds: dict[object, tuple[float, int]] = {}  # (when the last one passed, how many since)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.levelno, record.msg, error)
        last_s, held_back = self._kinds.get(kind, (-float('inf'), 0))
        if self._now() - last_s < _PERIOD_S:
            self._kinds[kind] = last_s, held_back + 1
            return False
        self._kinds[kind] = self._now(), 0
        if held_back:
            record.msg = f'{record.msg} (and {held_back} times since the last such line)'
        return True


@contextlib.contextmanager
def bounded_log() -> Iterator[logging.Logger]:
    """The logger of the HTTP side, inside with a bound."""
    logger, bound = logging.getLogger(NAME), OncePerMinute()
    logger.addFilter(bound)
    try:
        yield logger
    finally:
        logger.removeFilter(bound)
