"""What a run in roles has written so far, and when this process saw it: the files are read again and again."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from areal_jax.events.schema import FILE
from areal_jax.registry import REGISTRY, Order, file_of, list_orders, read_entry
from checks import logs

Event = Mapping[str, Any]
_LOG = re.compile(r'(\w+-\d+)\.(\d+)\.log')  # of launch/roles.py: WORKDIR/logs/learner-0.2.log


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that was seen of a run."""

    at_s: float  # of time.monotonic()
    # a process was started, is in the registry, is built (it has an address there), was struck, is gone; an event was
    # written; the run has ended
    what: Literal['start', 'registered', 'built', 'struck', 'gone', 'event', 'end']
    process: str = ''
    number: int = 0  # of a start: how many of this process there were, this one included
    update: int | None = None  # of a start: of the newest checkpoint
    event: Event = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class State:
    """What a run has written."""

    starts: dict[str, int] = dataclasses.field(default_factory=dict)  # of each process
    registered: dict[str, bool] = dataclasses.field(default_factory=dict)  # by its newest start: whether it is built
    events: list[Event] = dataclasses.field(default_factory=list)
    is_writing_version: bool = False
    is_writing_checkpoint: bool = False


class EventTail:
    """The events of a log that grows, and that a resumed run cuts off and goes on with, or begins anew."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._inode, self._offset = 0, 0
        self.lines: list[bytes] = []

    def read(self) -> list[Event]:
        """Those of the lines that were added since the last call; `lines` are all that are there now."""
        try:
            with self._path.open('rb') as file:
                status = os.fstat(file.fileno())
                is_same = status.st_ino == self._inode and status.st_size >= self._offset
                self._inode, self._offset = status.st_ino, self._offset if is_same else 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        *whole, rest = content.split(b'\n')
        self._offset += len(content) - len(rest)
        known = 0
        if not is_same:
            known = next((n for n, pair in enumerate(zip(self.lines, whole, strict=False)) if pair[0] != pair[1]),
                         min(len(self.lines), len(whole)))  # fmt: skip
            self.lines = self.lines[:known]
        added = whole[known:]
        self.lines += added
        return [json.loads(line) for line in added]


class View:
    """Looks at the workdir of a run; `marks` has all that was ever seen, in that order."""

    def __init__(self, workdir: pathlib.Path, now: Callable[[], float] = time.monotonic):
        self._workdir, self._now = workdir, now
        self._tail = EventTail(workdir / FILE)
        self._entries: dict[str, tuple[Order, int]] = {}  # by name: the holder and the inode of its file
        self._before: dict[str, Order] = {}  # by name: the holder when the process was started
        self.state, self.marks = State(), list[Mark]()

    def look(self) -> None:
        now = self._now()
        self._look_at_starts(now)
        self._look_at_registry(now)
        self.look_at_loop()

    def look_at_loop(self) -> None:
        """At the log and at what is being written: a part of `look` that takes little time."""
        now = self._now()
        for event in self._tail.read():
            self.marks.append(Mark(now, 'event', event=event))
            self.state.events.append(event)
        if len(self.state.events) != len(self._tail.lines):  # the log was cut off
            self.state.events = [json.loads(line) for line in self._tail.lines]
        self.state.is_writing_version = any((self._workdir / 'publication').glob('.v*.partial'))
        self.state.is_writing_checkpoint = any((self._workdir / logs.CHECKPOINTS).glob('.step_*.partial'))

    def mark(self, what: Literal['struck', 'gone', 'end'], process: str = '') -> None:
        self.marks.append(Mark(self._now(), what, process))

    def _look_at_starts(self, now: float) -> None:
        found: dict[str, int] = {}
        try:
            names = os.listdir(self._workdir / 'logs')
        except FileNotFoundError:
            return
        for name in names:
            if match := _LOG.fullmatch(name):
                found[match[1]] = max(found.get(match[1], 0), int(match[2]))
        for process, number in sorted(found.items()):
            if number == self.state.starts.get(process):
                continue
            self.state.starts[process] = number
            self.state.registered.pop(process, None)
            if process in self._entries:
                self._before[process] = self._entries[process][0]
            self.marks.append(Mark(now, 'start', process, number, logs.newest_update(self._workdir)))

    def _look_at_registry(self, now: float) -> None:
        directory = self._workdir / REGISTRY
        for name, orders in list_orders(directory).items():
            order = max(orders)
            path = file_of(directory, name, order)
            try:
                holder = order, path.stat().st_ino  # each entry is a new file, heartbeats are not
            except FileNotFoundError:
                continue
            if self._entries.get(name) == holder or (entry := read_entry(path)) is None:
                continue
            self._entries[name] = holder
            if order == self._before.get(name):
                continue  # of the start before
            if name not in self.state.registered:
                self.marks.append(Mark(now, 'registered', name))
            if entry.address and not self.state.registered.get(name):
                self.marks.append(Mark(now, 'built', name))
            self.state.registered[name] = bool(entry.address)
