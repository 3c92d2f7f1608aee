"""The event log of a run as the script of its replay: what comes next, and the first event that differs.

A log has one start of the program after another; each is replayed by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from areal_jax.control.event_writer import check_of
from areal_jax.errors import UserError
from areal_jax.events.schema import Event

FIRST_VERSION = 6  # of the log that has what a replay needs
COMPLETIONS = ('run_done', 'deadline', 'signal')  # kinds that the clock writes when it releases one
_ADDED = {  # fields of every event of a kind, with the version of the log that has them first
    'buffer': {'rewards': 8},
    'prefill': {'prompt_tokens': 8},
    'evaluation_prefill': {'prompt_tokens': 8},
}
_WITHOUT = 'nothing'
_MOST_SHOWN = 120  # characters of a value in a sentence


class ReplayError(UserError):
    """The first field of the first event in which a replay differs from its log; the message names the line."""


class Recording:
    """The events of one start, against which each event of its replay is checked when it is written.

    Args:
      events: of the whole log.
      first, end: numbers of the first event of the start and of the one after its last.
      name: of the log, for errors.
    """

    def __init__(self, events: Sequence[Event], first: int, end: int, name: str):
        self.first, self.end, self._events, self._name = first, end, events, name
        start = events[first] if first < end else None
        self._version = start['version'] if start is not None and start['kind'] == 'log' else FIRST_VERSION
        self.fault: ReplayError | None = None
        self.checked = first  # number of the next event to check
        self.beyond: Event | None = None  # the first that the replay wrote after the end

    def next_completion(self, seq: int) -> Event | None:
        """Event `seq`, when the program waits for a completion; None where the start has no further event.

        Raises ReplayError where the log has an event there that the program should have written by itself.
        """
        if seq >= self.end:
            return None
        event = self._events[seq]
        if event['kind'] not in COMPLETIONS:
            raise self.refuse(seq, f'{event["kind"]!r}', 'writes nothing there: it waits for a completion')
        return event

    def check(self, event: Event) -> None:
        """Raises ReplayError for an event that differs from the log; nothing after the first, and after the end."""
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
        """The error for event `seq`; it stays the fault of this recording."""
        error = ReplayError(f'{self._name}: line {seq + 1} has {recorded}, where the replay {replayed}')
        self.fault = self.fault or error
        return self.fault


def find_starts(events: Sequence[Event]) -> list[int]:
    """The number of the first event of every start of the program."""
    return [event['seq'] for event in events if event['kind'] == 'log']


def require_whole(events: Sequence[Event], name: str) -> None:
    """Raises ReplayError, naming the first line at fault, for a log that the real clock did not write as it is."""
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
    """What shows that a line was lost, added, moved or changed, as the end of a sentence; '' for nothing.

    Args:
      before: the event of the line above; None = this is the first line.
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
    """As the log has it: tuples are lists, and NaN is equal to itself."""
    return json.loads(json.dumps(event), parse_constant=str)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'
