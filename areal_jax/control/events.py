"""The event log: one JSON line per event, flushed at once, so that the file tells the run after any death."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import IO, Any

from areal_jax import files

KINDS = frozenset(
    (
        *('draw', 'admit', 'route', 'arrive', 'prefill', 'decode', 'interrupt', 'finish', 'reward', 'buffer'),
        *('consume', 'drop', 'publish', 'load', 'run_start', 'run_done', 'deadline', 'signal', 'save', 'restore'),
        *('evaluate', 'join', 'leave', 'error', 'state'),
    )
)


class EventLog:
    """Appends events with a sequence number and the clock's time; keeps them in memory when it has no file."""

    def __init__(self, path: pathlib.Path | None = None, next_seq: int = 0):
        self.events: list[dict[str, Any]] = []  # only without a file
        self.next_seq = next_seq
        self.now: Callable[[], float] = lambda: 0.0  # the clock sets this
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._file: IO[str] | None = path.open('a', buffering=1) if path else None

    def write(self, kind: str, lane: str | None = None, **fields: Any) -> None:
        """One event; `kind` is one of KINDS."""
        if kind not in KINDS:
            raise ValueError(f'event kind {kind!r} is not in the schema; known: {sorted(KINDS)}')
        event = {'seq': self.next_seq, 'time': self.now(), 'lane': lane, 'kind': kind, **fields}
        self.next_seq += 1
        if self._file:
            self._file.write(json.dumps(event, separators=(',', ':')) + '\n')
        else:
            self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def truncate_events(path: pathlib.Path, next_seq: int) -> None:
    """Cut off the events that a resumed run will write again: those with `seq` >= next_seq, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)['seq'] >= next_seq:
                break
        except ValueError:
            break
        kept.append(line + '\n')
    files.write_text(path, ''.join(kept))
