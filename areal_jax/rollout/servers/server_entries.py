"""The servers of a run in its registry, with their addresses and the facts that they state.

A server registers with `describe_server` and a Heartbeat (areal_jax/registry.py), and the reader here finds it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax import lanes
from areal_jax.config.kinds import ClientKind
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.registry import Entry, Order, read_entries
from areal_jax.rollout.servers.keeper import SAYS_NOTHING, ServerFacts
from areal_jax.rollout.servers.member import RemoteEngine
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import Work

_RECEIVER = 'receiver'  # among the details
ENGINE = 'engine'  # the role of servers, also of servers started by hand


@dataclasses.dataclass(frozen=True)
class ServerEntry:
    """A server's entry: its address, kind, liveness and facts."""

    name: str
    incarnation: int  # counts the servers of this name, from 1
    url: str  # 'http://host:port'
    kind: str  # the name of a config.kinds.ClientKind, which speaks to it
    process: int
    is_leaving: bool = False  # it takes no further requests
    heartbeat: int | None = None  # changes while the server lives; None: it has none (rollout.urls)
    facts: ServerFacts = SAYS_NOTHING
    receiver: str = ''  # 'http://host:port' of the program that writes its weight directories; '' = none
    token: str = ''  # identifies the process, together with the incarnation
    index: int | None = None  # of the engine, in a run in roles

    @property
    def order(self) -> Order:
        return self.incarnation, self.token

    @property
    def holder(self) -> str:
        """The holder as in Entry.holder; '' for a server that is in no registry."""
        return f'{self.incarnation}-{self.token}' if self.token else ''


def describe_server(
    name: str,
    url: str,
    kind: str,
    facts: ServerFacts = SAYS_NOTHING,
    *,
    index: int | None = None,
    code: str = '',
    receiver: str = '',
) -> Entry:
    """Returns the entry of a server, for Registration; url='' if the server is still being built."""
    details = describe_facts(facts) | ({_RECEIVER: receiver} if receiver else {})
    return Entry(name, 0, '', url, kind, ENGINE, index, code=code, details=details)


def describe_facts(facts: ServerFacts) -> dict[str, object]:
    """Returns the facts as details of a server's entry."""
    return {'facts': dataclasses.asdict(facts)}


def read_registry(workdir: pathlib.Path) -> list[ServerEntry]:
    """Reads the servers by name; leaves out servers that are still being built, which have no address."""
    return [_read(entry) for entry in read_entries(workdir) if entry.role == ENGINE and entry.address]


def read_address(address: str, clients: Sequence[ClientKind]) -> ServerEntry:
    """Parses an element of rollout.urls, 'vllm+http://host:port'; raises UserError if it is no address."""
    known = [client.name for client in clients if client.has_address]
    found = re.fullmatch(r'(\w+)\+(https?://[^/?#\s]+)/?', address)
    if found is None or found[1] not in known:
        kinds = ' or '.join(f'{name}+http://host:port' for name in known)
        raise UserError(f'{address!r} is no address of a server (rollout.urls): write {kinds}')
    return ServerEntry(address, 1, found[2], found[1], 0)


def _read(entry: Entry) -> ServerEntry:
    return ServerEntry(
        entry.name, entry.incarnation, entry.address, entry.kind, entry.process, entry.is_leaving, entry.heartbeat,
        _read_facts(entry.details.get('facts')), str(entry.details.get(_RECEIVER, '')), entry.token, entry.index,
    )  # fmt: skip


def _read_facts(given: Any) -> ServerFacts:
    known = {field.name for field in dataclasses.fields(ServerFacts)}
    return ServerFacts(**{name: v for name, v in given.items() if name in known} if isinstance(given, Mapping) else {})


# Tells the pool which servers there are, by polling the registry.
#
# app/ gives it the function that reads the registry, or the list of rollout.urls, and the function that makes a client.


@dataclasses.dataclass
class _Seen:
    engine: str  # its name in the pool
    order: Order
    heartbeat: int | None
    beaten_s: float  # clock seconds of the poll that saw the heartbeat change
    is_silent: bool = False  # and the pool was told
    is_gone: bool = False  # it said that it is leaving, its entry is gone, or the run cannot use it


class RegistryWatch:
    """Polls the registry every `every_s` in one coroutine, on the lane `registry`.

    Args:
      read: returns the entries; runs on the lane.
      make_engine: makes the client of a server; later servers of the same name get a client of the same name. Raises
        UserError for a server that the run cannot use.
      patience_s: a server whose heartbeat does not change for this long gets no requests until it answers.
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
        self._refused: tuple[UserError, float] | None = None  # the error of the first refused server, and when
        self._never = clock.event('next look at the registry')

    async def run(self) -> None:
        """Polls forever.

        A server that the run cannot use is refused: the pool is told, and the server gets no work. If no usable server
        has come within `patience_s`, raises the UserError that names the first refused server.
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
            seen.is_silent = True  # told once: from now on the keeper asks it
            self._pool.suspect(seen.engine, f'no heartbeat for {now_s - seen.beaten_s:.1f} s')

    def _note_new(self, entry: ServerEntry, now_s: float) -> None:
        """Joins a new server. The entry may be left over from a dead one: it gets work only once it has answered."""
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
        if self._refused is None or any(seen.engine for seen in self._seen.values()):
            return
        error, since_s = self._refused
        if self._clock.now() - since_s >= self._patience_s:
            raise error
