"""The servers of a run as its registry has them: which serve where, and what each says of itself.

A server registers with `describe_server` and a Heartbeat (areal_jax/registry/), server_entries.py reads.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.config.kinds import ClientKind
from areal_jax.errors import UserError
from areal_jax.registry.entries import Entry, Order, read_entries
from areal_jax.rollout.servers.keeper import SAYS_NOTHING, ServerFacts

_RECEIVER = 'receiver'  # among the details
ENGINE = 'engine'  # the role of servers, also of those that somebody has started by hand


@dataclasses.dataclass(frozen=True)
class ServerEntry:
    """What a server says of itself."""

    name: str
    incarnation: int  # counts the servers of this name, from 1
    url: str  # 'http://host:port'
    kind: str  # the name of a config.kinds.ClientKind, which speaks to it
    process: int
    is_leaving: bool = False  # it takes no further requests
    heartbeat: int | None = None  # changes while the server lives; None: it has none (rollout.urls)
    facts: ServerFacts = SAYS_NOTHING
    receiver: str = ''  # 'http://host:port' of the program that makes its directories of weights; '' = none
    token: str = ''  # with the incarnation it names this one process
    index: int | None = None  # of the engine, in a run in roles

    @property
    def order(self) -> Order:
        return self.incarnation, self.token

    @property
    def holder(self) -> str:
        """See Entry.holder; '' for a server that is in no registry."""
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
    """The entry of a server, for Registration; with url='' of one that is still being built."""
    details = describe_facts(facts) | ({_RECEIVER: receiver} if receiver else {})
    return Entry(name, 0, '', url, kind, ENGINE, index, code=code, details=details)


def describe_facts(facts: ServerFacts) -> dict[str, object]:
    """The details of the entry of a server."""
    return {'facts': dataclasses.asdict(facts)}


def read_registry(workdir: pathlib.Path) -> list[ServerEntry]:
    """The servers by name; those that are still being built have no address and are left out."""
    return [_read(entry) for entry in read_entries(workdir) if entry.role == ENGINE and entry.address]


def read_address(address: str, clients: Sequence[ClientKind]) -> ServerEntry:
    """The server of an element of rollout.urls, 'vllm+http://host:port'; raises UserError for what is no address."""
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
    """Facts that this version does not know are left out."""
    known = {field.name for field in dataclasses.fields(ServerFacts)}
    return ServerFacts(**{name: v for name, v in given.items() if name in known} if isinstance(given, Mapping) else {})
