"""Which processes of a run say that they live, and which have stopped: a program that hangs has no exit code."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Collection

from areal_jax.registry import read_entries

PATIENCE_S = 60.0  # a process compiles without its heartbeat stopping for so long
REGISTER_S = 120.0  # a process imports little before it registers
LOOK_S = 5.0  # between two looks at the registry


@dataclasses.dataclass(frozen=True)
class Signs:
    """What one look at the registry has shown, by the numbers of processes."""

    registered: Collection[int]
    silent: Collection[int]  # their heartbeat has not changed for PATIENCE_S; includes earlier incarnations


class Heartbeats:
    """The heartbeats in the registry of a run, timed by the clock of this process alone."""

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir
        self._changed: dict[str, tuple[object, float]] = {}  # by name: (holder and heartbeat, since when)
        self._due_s = 0.0

    def look(self) -> Signs | None:
        """None where no look is due, or the registry cannot be read."""
        now = time.monotonic()
        if now < self._due_s:
            return None
        self._due_s = now + LOOK_S
        try:
            entries = read_entries(self._workdir)
        except OSError:  # a file system that is away for a while
            return None
        silent = set()
        for entry in entries:
            beat, since_s = (entry.order, entry.heartbeat), self._changed.get(entry.name)
            if since_s is None or since_s[0] != beat:
                self._changed[entry.name] = beat, now
            elif now - since_s[1] >= PATIENCE_S and not entry.is_leaving:
                silent.add(entry.process)
        return Signs({entry.process for entry in entries}, silent)
