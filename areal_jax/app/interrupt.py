"""Ctrl-C and SIGTERM as a request: a run without a clock of its own ends between two updates."""

from __future__ import annotations

import signal
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """`requested` after the first signal; a second acts as it did before. A context manager, for the main thread."""

    requested = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True
        self.__exit__()
        name = signal.Signals(number).name
        print(f'{name}: finishing the update under way, then saving; once more to quit at once', flush=True)
