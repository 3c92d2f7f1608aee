"""Which processes of a registry are alive, and waits for those that shall come.

A heartbeat is a change of its entry, seen twice by one reader on its own clock: no clocks of two
machines are compared, and the rest of a dead process is never taken for a living one.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Collection, Mapping

from areal_jax.errors import LostPeerError
from areal_jax.registry.entries import Entry, Order, read_entries

PATIENCE_S = 10.0  # without a heartbeat a process is no longer taken for alive
LOOK_S = 0.25  # between two looks of a process that waits
REPORT_S = 10.0  # between two sentences of one


class Presence:
    """A reader of one registry. `now` gives seconds of this process's clock."""

    def __init__(self, workdir: pathlib.Path, *, now: Callable[[], float] = time.monotonic):
        self._workdir, self._now = workdir, now
        self._beats: dict[str, tuple[Order, int | None]] = {}  # by name: at the last look
        self._alive: dict[str, tuple[Order, float]] = {}  # by name: whose heartbeat was seen to change, and when

    def look(self) -> dict[str, Entry]:
        """The living by name: not leaving, and with a heartbeat that has changed within the patience."""
        now = self._now()
        entries = {entry.name: entry for entry in read_entries(self._workdir)}
        for name, entry in entries.items():
            before = self._beats.get(name)
            if before is not None and before[0] == entry.order and before[1] != entry.heartbeat:
                self._alive[name] = entry.order, now
            self._beats[name] = entry.order, entry.heartbeat
        return {name: entry for name, entry in entries.items() if not entry.is_leaving and self._is_alive(entry, now)}

    def _is_alive(self, entry: Entry, now: float) -> bool:
        order, since_s = self._alive.get(entry.name, (None, 0.0))
        return order == entry.order and now - since_s <= PATIENCE_S


def await_living(
    workdir: pathlib.Path,
    names: Collection[str],
    deadline_s: float,
    *,
    what: str,
    fix: str,
    accept: Callable[[Mapping[str, Entry]], bool] = lambda found: True,
    say: Callable[[str], None] = lambda sentence: print(sentence, flush=True),
) -> dict[str, Entry]:
    """The entries of these names when all are alive and `accept` takes them.

    Args:
      what: of whom a process that waits says that it does: 'learner 0 of attempt 2'.
      fix: what to do where they do not come.

    Raises LostPeerError that names the processes that have not come within the deadline.
    """
    presence, began = Presence(workdir), time.monotonic()
    reported = began
    while True:
        living = presence.look()
        found = {name: living[name] for name in names if name in living}
        if len(found) == len(names) and accept(found):
            return found
        now = time.monotonic()
        missing = ', '.join(sorted(set(names) - set(found))) or 'one of an earlier attempt'
        if now - began >= deadline_s:
            raise LostPeerError(
                f'waited {now - began:.0f} s for {what} in {workdir}, and {missing} has not come: {fix}'
            )
        if now - reported >= REPORT_S:
            reported = now
            say(f'waiting for {what} ({missing}), {now - began:.0f} s')
        time.sleep(LOOK_S)
