"""The writer of the event log: one JSON line per event, handed to the system at once, so it survives a killed process.

The schema is areal_jax/events/schema.py.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import cast

from areal_jax import files
from areal_jax.errors import UserError, cut_text
from areal_jax.events import schema
from areal_jax.events.schema import Event

_FIX = 'restore the file as the run wrote it, or start anew in another --workdir'
TEXT_CHARACTERS = 2000  # of a text: a reason, an address, a name
# completions, whose fields have a checksum already; replies are bounded on arrival
_WHOLE = frozenset(('run_done', 'deadline', 'signal'))
_LINE = json.JSONEncoder(separators=(',', ':'))  # json.dumps makes one for every call
_SORTED = json.JSONEncoder(sort_keys=True)


class EventLog:
    """Appends events with a sequence number and the clock's time; keeps them in memory if it has no file.

    Args:
      path: the file; None = in memory.
      keeps: without a file, whether events are kept in memory; a server that runs for months keeps none.
      next_seq, next_run: the numbers of the next event and of the next run on a lane, from the checkpoint of a resumed
        run.
    """

    def __init__(self, path: pathlib.Path | None = None, next_seq: int = 0, next_run: int = 0, *, keeps: bool = True):
        self.events: list[schema.Event] = []  # only without a file
        self._keeps = keeps
        self.next_seq, self.next_run = next_seq, next_run
        self.listeners: list[Callable[[schema.Event], None]] = []
        self._now: Callable[[], float] = lambda: 0.0
        self._file: files.LineWriter | None = files.LineWriter(path) if path else None

    def start(self, now: Callable[[], float]) -> None:
        """Takes the time of events from `now`, and logs the start of the program; called by the clock."""
        self._now = now
        self.write('log', version=schema.VERSION)

    def take_run_number(self) -> int:
        """Takes the number for a new run on a lane."""
        number, self.next_run = self.next_run, self.next_run + 1
        return number

    def write(self, kind: str, lane: str | None = None, **fields: object) -> None:
        """Appends one event; raises ValueError for a kind or a field that the schema lacks, or a missing field.

        A field of None is left out. Every text is cut to TEXT_CHARACTERS, in a replay too.
        Types are not checked here, because this runs several times per request; tests check them with `check_types`.
        """
        event: dict[str, object] = {'seq': self.next_seq, 'time': self._now(), 'lane': lane, 'kind': kind}
        for name, value in fields.items():
            if isinstance(value, str) and len(value) > TEXT_CHARACTERS and kind not in _WHOLE:
                event[name] = cut_text(value, TEXT_CHARACTERS)
            elif value is not None:
                event[name] = value
        record = schema.KINDS.get(kind)
        if record is None or not record.required <= event.keys() <= record.allowed:
            raise ValueError(_describe_misuse(kind, event.keys()))
        self.next_seq += 1
        if self._file:
            self._file.write(_LINE.encode(event))
        elif self._keeps:
            self.events.append(cast(schema.Event, event))
        for listener in self.listeners:
            listener(cast(schema.Event, event))

    def sync(self) -> None:
        """Returns when all events so far are on the disk; callable from any thread."""
        if self._file:
            self._file.sync()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def check_of(event: Mapping[str, object]) -> int:
    """The checksum of an event over all its fields except `check`."""
    fields = {name: value for name, value in event.items() if name != 'check'}
    return zlib.crc32(_SORTED.encode(fields).encode())


def check_types(event: Mapping[str, object]) -> None:
    """A listener for tests: raises TypeError for an event whose fields do not have the schema's types in the log."""
    if fault := schema.find_fault(json.loads(_LINE.encode(event))):
        raise TypeError(f'event {event.get("kind")!r} {fault}')


def _describe_misuse(kind: str, names: Set[str]) -> str:
    where = 'the schema (areal_jax/events/schema.py)'
    if kind not in schema.KINDS:
        return f'event kind {kind!r} is not in {where}; known: {sorted(schema.KINDS)}'
    record = schema.KINDS[kind]
    missing, unknown = sorted(record.required - names), sorted(names - record.allowed)
    return f'event {kind!r}: fields left out: {missing}, not in {where}: {unknown}'


def truncate_events(path: pathlib.Path, next_seq: int) -> None:
    """Cuts off the events that a resumed run will write again (`seq` >= next_seq), and a torn last line.

    Raises FileError, naming the line, if an earlier event is missing or malformed, or if a later program wrote the
    log.
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


# The event log of a run as the script of its replay: gives the next completion and finds the first difference.
#
# A log holds one start of the program after another; each is replayed separately.


FIRST_VERSION = 6  # of the log; since then it has all data for a replay
COMPLETIONS = ('run_done', 'deadline', 'signal')  # kinds that the clock writes when it releases a completion
_ADDED = {  # fields that were added to a kind, with the first version of the log that has them
    'buffer': {'rewards': 8},
    'prefill': {'prompt_tokens': 8},
    'evaluation_prefill': {'prompt_tokens': 8},
}
_WITHOUT = 'nothing'
_MOST_SHOWN = 120  # characters of a value in a sentence


class ReplayError(UserError):
    """The first field of the first event in which a replay differs from its log; the message names the line."""


class Recording:
    """The events of one start; each event of its replay is checked against them when it is written.

    Args:
      events: the whole log.
      first, end: numbers of the first event of the start and of the event after its last.
      name: the log's name, for errors.
    """

    def __init__(self, events: Sequence[Event], first: int, end: int, name: str):
        self.first, self.end, self._events, self._name = first, end, events, name
        start = events[first] if first < end else None
        self._version = start['version'] if start is not None and start['kind'] == 'log' else FIRST_VERSION
        self.fault: ReplayError | None = None
        self.checked = first  # number of the next event to check
        self.beyond: Event | None = None  # the first event that the replay wrote after the end

    def next_completion(self, seq: int) -> Event | None:
        """Event `seq`, for a program that waits for a completion; None if the start has no further event.

        Raises ReplayError if the log has an event there that the program should have written by itself.
        """
        if seq >= self.end:
            return None
        event = self._events[seq]
        if event['kind'] not in COMPLETIONS:
            raise self.refuse(seq, f'{event["kind"]!r}', 'writes nothing there: it waits for a completion')
        return event

    def check(self, event: Event) -> None:
        """Raises ReplayError for the first event that differs from the log. Does not check events after the end."""
        seq = event['seq']
        if seq >= self.end and self.beyond is None and event['kind'] != 'error':
            self.beyond = event
        if self.fault is not None or seq >= self.end:
            return
        self.checked = seq + 1
        ours, theirs = _plain(event), _plain(self._events[seq])
        if ours['kind'] == theirs['kind'] == 'log':
            ours['version'] = theirs['version']  # a later program adds kinds and fields, and changes none
        for field, version in _ADDED.get(event['kind'], {}).items():
            if version > self._version:
                ours.pop(field, None)
        if ours == theirs:
            return
        if ours['kind'] != theirs['kind']:
            raise self.refuse(seq, f'{theirs["kind"]!r}', f'writes {ours["kind"]!r}')
        field = next(name for name in (*theirs, *ours) if ours.get(name, _WITHOUT) != theirs.get(name, _WITHOUT))
        raise self.refuse(
            seq,
            f'{field}={_show(theirs.get(field, _WITHOUT))} of {theirs["kind"]!r}',
            f'has {field}={_show(ours.get(field, _WITHOUT))}',
        )

    def refuse(self, seq: int, recorded: str, replayed: str) -> ReplayError:
        """Returns the error for event `seq`, or the recording's earlier error; it is kept as `fault`."""
        error = ReplayError(f'{self._name}: line {seq + 1} has {recorded}, where the replay {replayed}')
        self.fault = self.fault or error
        return self.fault


def find_starts(events: Sequence[Event]) -> list[int]:
    """The number of the first event of every start of the program."""
    return [event['seq'] for event in events if event['kind'] == 'log']


def require_whole(events: Sequence[Event], name: str) -> None:
    """Raises ReplayError, naming the first wrong line, for a log that was edited or not written by the real clock."""
    before: Event | None = None
    for line, event in enumerate(events, start=1):
        where = f'{name}: line {line}'
        if event['kind'] == 'log' and event['version'] < FIRST_VERSION:
            raise ReplayError(
                f'{where} says that the event log has version {event["version"]}, which lacks what a replay needs; '
                f'it is there from version {FIRST_VERSION} on: replay a run that this program made'
            )
        fault = find_edit(event, before)
        if before is None and event['kind'] != 'log':
            fault = f"has {event['kind']!r}, where 'log' begins a start of the program"
        if event['kind'] in COMPLETIONS and 'check' not in event:
            fault = f'has {event["kind"]!r} without a check sum'
        if fault:
            raise ReplayError(f'{where} {fault}: replay the log as the run wrote it')
        before = event


def find_edit(event: Event, before: Event | None) -> str:
    """The sign that a line was lost, added, moved or changed, as the end of a sentence; '' if nothing shows it.

    Args:
      before: the event of the previous line; None = this is the first line.
    """
    due = before['seq'] + 1 if before else 0
    fields = cast(Mapping[str, object], event)
    if event['seq'] != due:
        return f'has seq={event["seq"]}, where {due} is due'
    if before is not None and event['time'] < before['time']:
        return f'has time={event["time"]}, before {before["time"]} of the line above'
    if 'check' in fields and fields['check'] != check_of(fields):
        return f'has check={fields["check"]}, and its other fields give {check_of(event)}'
    return ''


def _plain(event: Mapping[str, object]) -> dict[str, object]:
    """The event as read from the log: tuples are lists, and NaN (as text) is equal to itself."""
    return json.loads(json.dumps(event), parse_constant=str)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'
