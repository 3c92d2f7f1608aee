"""Tells the pool which servers there are, from what the registry says at each look.

app/ gives it the function that reads the registry, or the list of rollout.urls, and the one that makes a client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from areal_jax import lanes
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.registry.entries import Order
from areal_jax.rollout.servers.member import RemoteEngine
from areal_jax.rollout.servers.server_entries import ServerEntry
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import Work


@dataclasses.dataclass
class _Seen:
    """A server at the last look."""

    engine: str  # its name in the pool
    order: Order
    heartbeat: int | None
    beaten_s: float  # clock seconds of the look that saw the heartbeat change
    is_silent: bool = False  # and the pool knows
    is_gone: bool = False  # it said that it is leaving, or its entry is gone


class RegistryWatch:
    """One coroutine: looks every `every_s`, on the lane `registry`.

    Args:
      read: gives the entries; runs on the lane.
      make_engine: the client of a server; later servers of the same name get a client of the same name. Raises
        UserError for a server that the run cannot use.
      patience_s: a server whose heartbeat does not change for so long gets no requests until it answers.
    """

    def __init__(
        self,
        clock: Clock,
        pool: ServerPool,
        read: Callable[[], Sequence[ServerEntry]],
        make_engine: Callable[[ServerEntry], RemoteEngine],
        *,
        every_s: float = 1.0,
        patience_s: float = 10.0,
    ):
        self._clock, self._pool, self._read, self._make_engine = clock, pool, read, make_engine
        self._every_s, self._patience_s = every_s, patience_s
        self._seen: dict[str, _Seen] = {}
        self._refused: tuple[UserError, float] | None = None  # the first server that was, and when
        self._never = clock.event('next look at the registry')

    async def run(self) -> None:
        """Looks for ever.

        A server that the run cannot use is refused: the pool is told, and it gets no work. Where no other one has come
        after the patience, the UserError that names the first of them is raised.
        """
        while True:
            entries = await self._clock.run(lanes.REGISTRY, self._read, Work('registry'))
            for entry in entries:
                self._note(entry)
            names = {entry.name for entry in entries}
            for name, seen in self._seen.items():
                if name not in names and not seen.is_gone:
                    seen.is_gone = True
                    self._pool.leave(seen.engine, 'its entry in the registry is gone')
            self._require_usable()
            await self._clock.wait(self._never, self._every_s)

    def _note(self, entry: ServerEntry) -> None:
        now_s, seen = self._clock.now(), self._seen.get(entry.name)
        if seen is None or entry.order > seen.order:
            self._note_new(entry, now_s)
            return
        if entry.order < seen.order or seen.is_gone:
            return
        if entry.is_leaving:
            seen.is_gone = True
            self._pool.leave(seen.engine, 'it says that it is leaving')
        elif entry.heartbeat != seen.heartbeat:
            seen.heartbeat, seen.beaten_s, seen.is_silent = entry.heartbeat, now_s, False
        elif entry.heartbeat is not None and not seen.is_silent and now_s - seen.beaten_s > self._patience_s:
            seen.is_silent = True  # told once: from now on it is asked
            self._pool.suspect(seen.engine, f'no heartbeat for {now_s - seen.beaten_s:.1f} s')

    def _note_new(self, entry: ServerEntry, now_s: float) -> None:
        """An entry may be the rest of a dead server: it joins, and gets work when it has answered."""
        before = self._seen.get(entry.name)
        if before is not None and before.engine and entry.incarnation == before.order[0]:
            self._pool.remove(before.engine, 'another process that started at the same time has its name')
        seen = self._seen[entry.name] = _Seen('', entry.order, entry.heartbeat, now_s, is_gone=True)
        if entry.is_leaving:
            return
        try:
            engine = self._make_engine(entry)
            self._pool.join(engine, entry.incarnation, entry.url)
        except UserError as error:
            self._pool.note_refused(entry.name, str(error))
            self._refused = self._refused or (error, now_s)
        else:
            seen.engine, seen.is_gone = engine.name, False

    def _require_usable(self) -> None:
        """Raises the error of a refused server where there was never one that the run can use."""
        if self._refused is None or any(seen.engine for seen in self._seen.values()):
            return
        error, since_s = self._refused
        if self._clock.now() - since_s >= self._patience_s:
            raise error
