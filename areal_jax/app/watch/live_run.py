"""The present state of a run, from the files of its workdir alone: event log, metrics, answers, lock.

Each call of `LiveRun.read` reads what was appended since the last one. A run under way, a finished one and a killed one
are read alike.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from areal_jax import files
from areal_jax.app.workdir.run_list import NEVER_BEGAN, RUNNING, list_runs
from areal_jax.config import CONFIG
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.run_record import read_fields
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import Line
from areal_jax.telemetry.rollout_views import name_of
from areal_jax.telemetry.rollout_writer import DIRECTORY, list_files
from areal_jax.types import NOT_GENERATED

WINDOW_S = 60.0  # clock seconds over which occupancy and rates are measured
_CHUNK = 1 << 22  # bytes
_RECENT = 1 << 22  # bytes at the end of a log in which dispatches are read at the start; earlier ones are over
_MARK = 64  # bytes before the place of reading that are compared, to see that a file was cut and written on
_ANSWERS = 64  # of the newest ones that are kept
_TEXT = 400  # characters of each
_KIND = re.compile(rb'"kind": ?"(\w+)"')
_DISPATCHES = frozenset((b'decode', b'receive'))

Event = dict[str, Any]


class LineTail:
    """Reads the lines that were appended to a file since the last call.

    A last line without its line break stays unread until it is whole. A file that was replaced, or cut and written on,
    as `--resume` does, is read again from its start.

    Args:
      chunk_bytes: that are in memory at once, in addition to a line.
    """

    def __init__(self, path: pathlib.Path, chunk_bytes: int = _CHUNK):
        self._path, self._chunk_bytes = path, chunk_bytes
        self._offset, self._inode, self._mark = 0, 0, b''
        self.size = 0  # of the file when it was last read

    def read(self, restart: Callable[[], None] = lambda: None) -> Iterator[tuple[int, bytes]]:
        """Yields (offset of its end, line); calls `restart` first if the file is read again from its start."""
        try:
            file = self._path.open('rb')
        except FileNotFoundError:
            self._begin_again(0, restart)
            return
        with file:
            stat = os.fstat(file.fileno())
            self.size = stat.st_size
            if stat.st_ino != self._inode or not self._continues(file):
                self._begin_again(stat.st_ino, restart)
            file.seek(self._offset)
            yield from self._read_lines(file)

    def _continues(self, file: BinaryIO) -> bool:
        """Whether the bytes before the place of reading are the ones that were read."""
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _begin_again(self, inode: int, restart: Callable[[], None]) -> None:
        if self._offset:
            restart()
        self._offset, self._inode, self._mark = 0, inode, b''

    def _read_lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        rest = b''
        while content := file.read(self._chunk_bytes):
            *lines, rest = (rest + content).split(b'\n')
            for line in lines:
                self._offset += len(line) + 1
                yield self._offset, line
            if lines:
                self._mark = (lines[-1] + b'\n')[-_MARK:]


class Lane:
    """When a lane was occupied lately, and by which work it is now."""

    def __init__(self) -> None:
        self.open: dict[int, Event] = {}  # run_start by run
        self._spans: collections.deque[tuple[float, float]] = collections.deque()  # disjoint, ascending

    def add(self, start: float, end: float) -> None:
        """Notes an occupation; each ends no earlier than the one before, up to the width of the lane."""
        while self._spans and start <= self._spans[-1][1]:
            before = self._spans.pop()
            start, end = min(start, before[0]), max(end, before[1])
        self._spans.append((start, end))

    def share(self, low: float, high: float) -> float:
        """The share of the clock seconds from `low` to `high` with one piece of work or several; forgets older ones."""
        while self._spans and self._spans[0][1] < low:
            self._spans.popleft()
        spans = list(self._spans)
        if self.open:  # occupied until now
            start = min(event['time'] for event in self.open.values())
            spans = [(a, min(b, start)) for a, b in spans if a < start] + [(start, high)]
        occupied = sum(max(0.0, min(end, high) - max(start, low)) for start, end in spans)
        return min(1.0, occupied / (high - low)) if high > low else 0.0


@dataclasses.dataclass
class Slots:
    """The decoding slots of an engine at its last dispatch."""

    time: float
    used: int
    slots: int
    version: int


class Loop:
    """The loop's state, from its events."""

    def __init__(self) -> None:
        self.first: float | None = None  # clock seconds of the first event
        self.now = 0.0  # of the last one
        self.version = 0  # published
        self.lanes: dict[str, Lane] = {}
        self.slots: dict[str, Slots] = {}
        self.running: dict[int, None] = {}  # draws admitted and not finished
        self.buffered: dict[int, tuple[float, ...]] = {}  # draw -> rewards
        self.batch: tuple[int, tuple[int, ...]] | None = None  # update and draws, until its version is published
        self.doing = ''  # outside of training
        self.unread = 0  # lines that are no events
        self._tokens: collections.deque[tuple[float, int]] = collections.deque()  # time and tokens of a dispatch

    def apply(self, line: bytes, is_recent: bool) -> None:
        """Takes in one line of the log; dispatches only if they are recent."""
        found = _KIND.search(line)
        if found is None:
            self.unread += 1
            return
        handler = _HANDLERS.get(found[1])
        if handler is None or (found[1] in _DISPATCHES and not is_recent):
            return
        try:
            event = msgspec.json.decode(line)
            handler(self, event)
            self.now = event['time']
            self.first = self.now if self.first is None else self.first
        except (msgspec.DecodeError, KeyError, TypeError, IndexError):
            self.unread += 1

    def lane(self, name: str) -> Lane:
        return self.lanes.setdefault(name, Lane())

    def generated(self, low: float) -> int:
        """Tokens generated since `low`; forgets older ones."""
        while self._tokens and self._tokens[0][0] < low:
            self._tokens.popleft()
        return sum(tokens for _, tokens in self._tokens)

    def note_tokens(self, event: Event) -> None:
        self._tokens.append((event['time'], event['tokens']))


def _begin_attempt(loop: Loop, event: Event) -> None:
    for lane in loop.lanes.values():
        lane.open.clear()  # of a process that is gone
    loop.doing = ''


def _admit(loop: Loop, event: Event) -> None:
    loop.running[event['draw']] = None


def _buffer(loop: Loop, event: Event) -> None:
    loop.running.pop(event['draw'], None)
    loop.buffered[event['draw']] = tuple(event.get('rewards', ()))


def _drop(loop: Loop, event: Event) -> None:
    loop.running.pop(event['draw'], None)
    loop.buffered.pop(event['draw'], None)


def _consume(loop: Loop, event: Event) -> None:
    for draw in event['draws']:
        loop.buffered.pop(draw, None)
    loop.batch = event['update'], tuple(event['draws'])


def _publish(loop: Loop, event: Event) -> None:
    loop.version = event['version']
    if loop.batch and loop.batch[0] <= loop.version:
        loop.batch = None


def _decode(loop: Loop, event: Event) -> None:
    loop.note_tokens(event)
    used = sum(request is not None for request in event['slots'])
    loop.slots[event['engine']] = Slots(event['time'], used, len(event['slots']), event['version'])


def _start_work(loop: Loop, event: Event) -> None:
    loop.lane(event['lane'] or '').open[event['run']] = event


def _end_work(loop: Loop, event: Event) -> None:
    lane = loop.lane(event['lane'] or '')
    lane.open.pop(event['run'], None)
    lane.add(event['started'], event['started'] + event['seconds'])


def _leave(loop: Loop, event: Event) -> None:
    loop.slots.pop(event['engine'], None)


def _evaluate(loop: Loop, event: Event) -> None:
    loop.doing = f'evaluating {event["phase"]} training' if event['mode'] == 'start' else ''


def _stop(loop: Loop, event: Event) -> None:
    loop.doing = f'stopping ({event["name"]})'


_HANDLERS: Mapping[bytes, Callable[[Loop, Event], None]] = {
    b'log': _begin_attempt,
    b'admit': _admit,
    b'buffer': _buffer,
    b'drop': _drop,
    b'consume': _consume,
    b'publish': _publish,
    b'decode': _decode,
    b'receive': Loop.note_tokens,
    b'run_start': _start_work,
    b'run_done': _end_work,
    b'leave': _leave,
    b'evaluate': _evaluate,
    b'signal': _stop,
}


@dataclasses.dataclass(frozen=True)
class ShortAnswer:
    """An answer as a line shows it."""

    update: int
    draw: int
    name: str
    reward: float | None
    versions: tuple[int, ...]  # the first and the last one; () if it was not generated
    text: str


class LiveRun:
    """A run that is read again and again.

    Args:
      workdir: need not exist yet.
      wall: the time of the system in seconds since 1970.
    """

    def __init__(self, workdir: pathlib.Path, wall: Callable[[], float] = time.time):
        self.workdir, self._wall = workdir, wall
        self.loop = Loop()
        self.rows: list[Line] = []  # metrics of each update
        self.answers: collections.deque[ShortAnswer] = collections.deque(maxlen=_ANSWERS)
        self.fields: dict[str, str] = {}  # of the config
        self.state, self.reason, self.holder = NEVER_BEGAN, '', ''
        self.silent_s = 0.0  # wall seconds since the last event of a run under way
        self._events, self._metrics = LineTail(workdir / EVENTS), LineTail(workdir / METRICS)
        self._rollouts: tuple[pathlib.Path, LineTail] | None = None
        self._config: tuple[int, int] = (0, 0)
        self._judged: tuple[object, ...] | None = None  # what the state was found from

    @property
    def exists(self) -> bool:
        return self.workdir.is_dir()

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def is_real(self) -> bool:
        """Whether a second of its clock is a second of the wall."""
        return self.fields.get('run.clock', 'real') == 'real'

    @property
    def now(self) -> float:
        """Clock seconds: of the last event, and for a run under way on the real clock the time since then."""
        return self.loop.now + (self.silent_s if self.is_real else 0.0)

    @property
    def window(self) -> tuple[float, float]:
        """The last minute of the clock, or the time since the start."""
        return max(self.loop.first or 0.0, self.now - WINDOW_S), self.now

    def read(self) -> None:
        """Reads what is new. Raises FileError for a config that is no JSON object."""
        self._read_config()
        for end, line in self._events.read(self._restart_loop):
            self.loop.apply(line, end > self._events.size - _RECENT)
        for _, line in self._metrics.read(self.rows.clear):
            self._add_row(line)
        self._read_answers()
        self._find_state()

    def _restart_loop(self) -> None:
        self.loop = Loop()

    def _read_config(self) -> None:
        try:
            stat = (self.workdir / CONFIG).stat()
        except FileNotFoundError:
            return
        if (stat.st_mtime_ns, stat.st_ino) != self._config:
            self._config = (stat.st_mtime_ns, stat.st_ino)
            self.fields = read_fields(self.workdir)

    def _add_row(self, line: bytes) -> None:
        try:
            row = msgspec.json.decode(line)
            if isinstance(row[names.STEP], int):
                self.rows.append(row)
        except (msgspec.DecodeError, KeyError, TypeError):
            self.loop.unread += 1

    def _read_answers(self) -> None:
        newest = max(list_files(self.workdir / DIRECTORY), default=None)
        if self._rollouts and self._rollouts[0] != newest:  # the rest of the file before
            self._add_answers(self._rollouts[1])
        if newest is None:
            self._rollouts = None
            return
        if self._rollouts is None or self._rollouts[0] != newest:
            self._rollouts = newest, LineTail(newest)
        self._add_answers(self._rollouts[1])

    def _add_answers(self, tail: LineTail) -> None:
        for _, line in tail.read(self.answers.clear):
            try:
                group = msgspec.json.decode(line)
                self.answers.extend(_shorten(group, answer) for answer in group['answers'])
            except (msgspec.DecodeError, KeyError, TypeError):
                self.loop.unread += 1

    def _find_state(self) -> None:
        """Under way, or how it ended: that is found again only if a file has changed."""
        holder = files.find_holder(self.workdir)
        self.holder, self.silent_s = holder or '', 0.0
        if holder is not None:
            self.state, self.reason, self._judged = RUNNING, '', None
            written = [stamp for name in (EVENTS, METRICS) if (stamp := _modified(self.workdir / name))]
            self.silent_s = max(0.0, self._wall() - max(written)) if written else 0.0
            return
        seen = tuple(_modified(self.workdir / name) for name in ('.', EVENTS, METRICS, CONFIG))
        if self.exists and seen != self._judged:
            self._judged = seen
            self.state, self.reason = _judge(self.workdir)


def _shorten(group: Event, answer: Event) -> ShortAnswer:
    versions = [version for _, version in answer.get('versions', ()) if version != NOT_GENERATED]
    span = (min(versions), max(versions)) if versions else ()
    return ShortAnswer(group['update'], group['draw'], name_of(answer), answer['reward'], span, answer['text'][:_TEXT])


def _modified(path: pathlib.Path) -> float:
    """Seconds since 1970; 0 without the file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _judge(workdir: pathlib.Path) -> tuple[str, str]:
    """Returns (state, reason) of a run that no process uses."""
    try:
        entry = list_runs(workdir)[0]
    except UserError:
        return NEVER_BEGAN, ''
    return (entry.state, entry.reason) if entry.path == workdir else (NEVER_BEGAN, '')
