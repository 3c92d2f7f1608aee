"""The event log: one JSON line per event, flushed at once, so that the file tells the run after any death."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from areal_jax import files

KINDS = frozenset(
    (
        *('draw', 'admit', 'route', 'arrive', 'prefill', 'decode', 'interrupt', 'finish', 'reward', 'buffer'),
        *('consume', 'drop', 'publish', 'load', 'run_start', 'run_done', 'deadline', 'signal', 'save', 'restore'),
        *('evaluate', 'join', 'leave', 'error', 'state'),
    )
)
_FIX = 'restore the file as the run wrote it, or start anew in another --workdir'


class EventLog:
    """Appends events with a sequence number and the clock's time; keeps them in memory when it has no file."""

    def __init__(self, path: pathlib.Path | None = None, next_seq: int = 0):
        self.events: list[dict[str, Any]] = []  # only without a file
        self.next_seq = next_seq
        self.now: Callable[[], float] = lambda: 0.0  # the clock sets this
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._file: files.LineWriter | None = files.LineWriter(path) if path else None

    def write(self, kind: str, lane: str | None = None, **fields: Any) -> None:
        """One event; `kind` is one of KINDS."""
        if kind not in KINDS:
            raise ValueError(f'event kind {kind!r} is not in the schema; known: {sorted(KINDS)}')
        event = {'seq': self.next_seq, 'time': self.now(), 'lane': lane, 'kind': kind, **fields}
        self.next_seq += 1
        if self._file:
            self._file.write(json.dumps(event, separators=(',', ':')))
        else:
            self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def sync(self) -> None:
        """All events until now are on the disk when this returns; from any thread."""
        if self._file:
            self._file.sync()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def truncate_events(path: pathlib.Path, next_seq: int) -> None:
    """Cut off the events that a resumed run will write again: those with `seq` >= next_seq, and a torn last line.

    Raises FileError, naming the line, where one of the events before them is missing or is no event.
    """
    kept: list[bytes] = []
    lines = path.read_bytes().split(b'\n') if path.exists() else []
    for number, line in enumerate(lines, start=1):
        where = f'{path}: line {number}'
        if len(kept) == next_seq:
            break
        try:
            seq = files.parse_object(line, where, _FIX).get('seq')
        except files.FileError:
            if number == len(lines):  # torn, or what follows the last line break: nothing
                break
            raise
        if seq != len(kept):
            raise files.FileError(f'{where} has seq={seq!r}, where event {len(kept)} is expected; {_FIX}')
        kept.append(line + b'\n')
    if len(kept) < next_seq:
        raise files.FileError(f'{path} has {len(kept)} events, the checkpoint was saved after {next_seq}; {_FIX}')
    if lines:
        files.write_bytes(path, b''.join(kept))
