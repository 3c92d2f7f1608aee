"""The writer of the event log: one JSON line per event, handed to the system at once, so that it survives any death.

The schema is areal_jax/events/schema.py.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from areal_jax import files
from areal_jax.errors import cut_text
from areal_jax.events import schema

_FIX = 'restore the file as the run wrote it, or start anew in another --workdir'
_WRITTEN_HERE = schema.HEADER.allowed | {'kind'}
_REQUIRED = {kind: record.required - _WRITTEN_HERE for kind, record in schema.KINDS.items()}
TEXT_CHARACTERS = 2000  # of a text: a reason, an address, a name
# fields of the completions, under a check sum already; what a reply holds is bounded where it comes in
_WHOLE = {'run_done', 'deadline', 'signal'}
_TEXTS = {
    kind: [field.name for field in record.fields if field.type_name == 'str' and field.name not in _WRITTEN_HERE]
    for kind, record in schema.KINDS.items() if kind not in _WHOLE
}  # fmt: skip
_ALLOWED = {kind: record.allowed - _WRITTEN_HERE for kind, record in schema.KINDS.items()}


class EventLog:
    """Appends events with a sequence number and the clock's time; keeps them in memory when it has no file.

    Args:
      path: of the file; None = in memory.
      keeps: without a file, whether events are kept in memory; a server that runs for months keeps none.
      next_seq, next_run: the numbers of the next event and of the next run on a lane, as the checkpoint of a resumed
        run has them.
    """

    def __init__(self, path: pathlib.Path | None = None, next_seq: int = 0, next_run: int = 0, *, keeps: bool = True):
        self.events: list[schema.Event] = []  # only without a file
        self._keeps = keeps
        self.next_seq, self.next_run = next_seq, next_run
        self.listeners: list[Callable[[schema.Event], None]] = []
        self._now: Callable[[], float] = lambda: 0.0
        self._file: files.LineWriter | None = files.LineWriter(path) if path else None

    def start(self, now: Callable[[], float]) -> None:
        """Take the time of the events from `now`, and log that the program started; called by the clock."""
        self._now = now
        self.write('log', version=schema.VERSION)

    def take_run_number(self) -> int:
        """The number of a run on a lane that is requested now."""
        number, self.next_run = self.next_run, self.next_run + 1
        return number

    def write(self, kind: str, lane: str | None = None, **fields: object) -> None:
        """Append one event; raises ValueError for a kind or a field that the schema lacks, or a field left out.

        A text is cut to TEXT_CHARACTERS, whoever it comes from; what a replay writes is cut alike.
        Types are not checked here, because this runs several times per request; tests check them with `check_types`.
        """
        names = fields.keys()
        if names != _REQUIRED.get(kind) and not (kind in _REQUIRED and _REQUIRED[kind] <= names <= _ALLOWED[kind]):
            raise ValueError(_describe_misuse(kind, names))
        for name in _TEXTS.get(kind, ()):
            text = fields.get(name)
            if isinstance(text, str) and len(text) > TEXT_CHARACTERS:
                fields[name] = cut_text(text, TEXT_CHARACTERS)
        event = {'seq': self.next_seq, 'time': self._now(), 'lane': lane, 'kind': kind, **fields}
        self.next_seq += 1
        if self._file:
            self._file.write(json.dumps(event, separators=(',', ':')))
        elif self._keeps:
            self.events.append(cast(schema.Event, event))
        for listener in self.listeners:
            listener(cast(schema.Event, event))

    def sync(self) -> None:
        """All events until now are on the disk when this returns; from any thread."""
        if self._file:
            self._file.sync()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def check_of(event: Mapping[str, object]) -> int:
    """The check sum of an event, over all its fields but `check`."""
    fields = {name: value for name, value in event.items() if name != 'check'}
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def check_types(event: Mapping[str, object]) -> None:
    """A listener for tests: raises TypeError for an event whose fields are not of the types of the schema."""
    if fault := schema.find_fault(event):
        raise TypeError(f'event {event.get("kind")!r} {fault}')


def _describe_misuse(kind: str, names: Iterable[str]) -> str:
    if kind not in _REQUIRED:
        return f'event kind {kind!r} is not in the schema (areal_jax/events/schema.py); known: {sorted(_REQUIRED)}'
    missing, unknown = sorted(_REQUIRED[kind] - set(names)), sorted(set(names) - _ALLOWED[kind])
    return f'event {kind!r}: fields left out: {missing}, not in the schema (areal_jax/events/schema.py): {unknown}'


def truncate_events(path: pathlib.Path, next_seq: int) -> None:
    """Cut off the events that a resumed run will write again: those with `seq` >= next_seq, and a torn last line.

    Raises FileError, naming the line, where one of the events before them is missing or is no event, or where a later
    program wrote the log.
    """
    kept: list[bytes] = []
    lines = path.read_bytes().split(b'\n') if path.exists() else []
    for number, line in enumerate(lines, start=1):
        where = f'{path}: line {number}'
        if len(kept) == next_seq:
            break
        try:
            event = files.parse_object(line, where, _FIX)
        except files.FileError:
            if number == len(lines):  # torn, or the empty rest after the last line break
                break
            raise
        if event.get('seq') != len(kept):
            raise files.FileError(f'{where} has seq={event.get("seq")!r}, where event {len(kept)} is expected; {_FIX}')
        schema.require_known_version(event, where)
        kept.append(line + b'\n')
    if len(kept) < next_seq:
        raise files.FileError(f'{path} has {len(kept)} events, the checkpoint was saved after {next_seq}; {_FIX}')
    if lines:
        files.write_bytes(path, b''.join(kept))
