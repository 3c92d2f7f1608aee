"""The replay clock: work runs inline, and completions are released in the order that a log of the real clock has.

What it shares with the other clocks is in loop.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import NoReturn

from areal_jax.control.clocks.loop import Block, Deadline, DeadlockError, Interval, LoopClock, Ready
from areal_jax.control.event_writer import EventLog, Recording
from areal_jax.events.schema import DeadlineEvent, RunDoneEvent, SignalEvent
from areal_jax.protocols import Event

_TAKEN = ('reply', 'failure', 'check')  # fields that the log alone has
Failure = Callable[[str], Exception]  # from a message


class EndOfLogError(DeadlockError):
    """Coroutines wait, and the start that is replayed has no further completion: it was stopped or killed there."""


class ReplayClock(LoopClock):
    """Releases the completions of one start of a run, at the times that its log has, and checks every event.

    Work is done at the beginning of its interval. A call is not made: its outcome is the one in the log. The program
    ends with ReplayError at the first event that differs, and with EndOfLogError where it waits at the end of the log.

    Args:
      recording: of the start; every event that the program writes is checked against it.
      failures: exceptions that calls raised, by the name of their type.
    """

    def __init__(
        self,
        lanes: Mapping[str, int],
        log: EventLog,
        recording: Recording,
        *,
        start_s: float = 0.0,
        failures: Mapping[str, Failure],
    ):
        self._recording, self._failures = recording, failures
        self._now = start_s
        self._by_number: dict[int, Interval] = {}  # intervals under way
        self._released: RunDoneEvent | DeadlineEvent | SignalEvent | None = None  # the completion released last
        self.stop_requested: Event | None = None  # what a signal in the log sets
        log.listeners.insert(0, recording.check)
        super().__init__(lanes, log)

    def now(self) -> float:
        return self._now

    def _begin(self, interval: Interval) -> None:
        self._by_number[interval.number] = interval
        if interval.is_call:
            return
        try:
            interval.result = interval.fn()
        except Exception as error:  # raised in the coroutine that asked for the work, when the log says so
            interval.error = error

    def _take_outcome(self, interval: Interval) -> None:
        event = self._released
        assert event is not None
        assert event['kind'] == 'run_done'
        if 'reply' in event:
            interval.result = json.loads(event['reply'])
        elif 'failure' in event:
            interval.error = self._failure(interval, event['failure'])
        else:
            raise self._recording.refuse(event['seq'], "no reply of 'run_done'", f'needs one: {interval.describe()}')

    def _failure(self, interval: Interval, name: str) -> Exception:
        if name == 'TimeoutError':
            return interval.describe_lateness()
        return self._failures.get(name, RuntimeError)(f'{interval.describe()} failed with {name} in the run')

    def _write_completion(
        self, kind: str, lane: str | None = None, interval: Interval | None = None, **fields: object
    ) -> None:
        released = self._released
        assert released is not None
        taken = {name: value for name, value in released.items() if name in _TAKEN}
        self.log.write(kind, lane, **fields, **taken)

    def _note_end_of_call(self, interval: Interval) -> None:
        """Never: no call is made."""

    def _deadline_key(self, timeout_s: float) -> float:
        return self._now + timeout_s

    def _post_signal(self, number: signal.Signals, event: Event) -> None:
        raise RuntimeError('a replay takes the signals of its log and no other')

    def _post_arrival(self, receive: Callable[[], None]) -> None:
        raise RuntimeError('a replay takes nothing from other threads')

    def _release_next(self, block: Block) -> Ready:
        seq = self.log.next_seq
        event = None if self._recording.fault else self._recording.next_completion(seq)
        if event is None:
            raise EndOfLogError(f'the log has no further completion: {self.describe_waits()}')
        self._now = event['time']
        if event['kind'] == 'run_done':
            interval = self._by_number.pop(event['run'], None)
            if interval is None:
                self._refuse_unknown(seq, f'run={event["run"]} of {event["kind"]!r}', 'has no such run under way')
            self._released = event
            interval.started_s, interval.seconds = event['started'], event['seconds']
            self._finish(interval)
        elif event['kind'] == 'deadline':
            deadline = self._take_deadline(event['wait'])
            if deadline is None:
                self._refuse_unknown(seq, f'wait={event["wait"]!r} of {event["kind"]!r}', 'has no such wait')
            self._released = event
            self._expire(deadline)
        elif event['kind'] == 'signal':
            if self.stop_requested is None:
                self._refuse_unknown(seq, f'{event["kind"]!r}', 'takes no signals')
            self._released = event
            self._write_completion('signal', name=event['name'])
            self.stop_requested.set()
        return []

    def _take_deadline(self, name: str) -> Deadline | None:
        """The first deadline of a wait of this name that is not over."""
        for _, _, deadline in sorted(self._deadlines, key=lambda entry: entry[:2]):
            if not deadline.future.done() and deadline.event.name == name:
                return deadline
        return None

    def _refuse_unknown(self, seq: int, recorded: str, replayed: str) -> NoReturn:
        raise self._recording.refuse(seq, recorded, replayed)

    def _close(self) -> None:
        """Nothing to free: work runs inline."""
