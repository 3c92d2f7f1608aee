"""The open requests of a pool with their indices: by id, by group and by engine.

Every operation takes constant time in the number of open requests, and O(log engines) to keep the engines ranked.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable

from areal_jax.types import GenerationRequest


@dataclasses.dataclass(eq=False)
class Entry:
    """One open request."""

    request_id: str
    group: tuple[int, int]  # (seed, draw)
    engine: str
    outstanding: int  # tokens that it may still generate
    version: int | None  # GenerationRequest.version


@dataclasses.dataclass(eq=False)
class _Group:
    engine: str  # of the request that came last
    requests: int = 0  # open ones


@dataclasses.dataclass(eq=False)
class _Load:
    """Of one engine."""

    number: int  # in the order of joining: of equally loaded engines the first is chosen
    outstanding: int = 0  # tokens
    is_routed: bool = True  # whether new requests may go there

    @property
    def rank(self) -> tuple[int, int]:
        return self.outstanding, self.number


class Ledger:
    """Which request is open on which engine, and how many tokens each engine may still have to generate."""

    def __init__(self, engines: Iterable[str] = ()):
        self.on_room: Callable[[], None] = lambda: None  # called when a request ends, an engine comes or goes
        # called with the engine, the change of its open requests, and tokens that one of them got
        self.on_change: Callable[[str, int, int], None] = lambda engine, requests, tokens: None
        self._numbers = itertools.count()
        self._loads: dict[str, _Load] = {}
        self._ranking: list[tuple[int, int, str]] = []  # (outstanding tokens, number, engine), ascending
        self._entries: dict[str, Entry] = {}  # by request id, in the order of arrival
        self._groups: dict[tuple[int, int], _Group] = {}
        for name in engines:
            self.add_engine(name)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: str) -> Entry | None:
        """None where no such request is open."""
        return self._entries.get(request_id)

    def add_engine(self, name: str) -> None:
        """From now on new requests may go there; an engine that was withdrawn keeps its entries."""
        load = self._loads.setdefault(name, _Load(next(self._numbers)))
        self._unrank(name, load)
        load.is_routed = True
        self._rank(name, load)
        self.on_room()

    def withdraw_engine(self, name: str) -> None:
        """No new request goes there; what is open there stays."""
        load = self._loads[name]
        self._unrank(name, load)
        load.is_routed = False
        self.on_room()

    def remove_engine(self, name: str) -> None:
        """Forgets the engine; raises RuntimeError where it has outstanding tokens."""
        self.withdraw_engine(name)
        if self._loads[name].outstanding:
            raise RuntimeError(f'{name} is removed with {self._loads[name].outstanding} outstanding tokens')
        del self._loads[name]

    def entries(self) -> list[Entry]:
        """The open requests, first come first."""
        return list(self._entries.values())

    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return {name: load.outstanding for name, load in self._loads.items()}

    def routed_engines(self) -> int:
        """How many engines take new requests."""
        return len(self._ranking)

    def is_routed(self, name: str) -> bool:
        return name in self._loads and self._loads[name].is_routed

    def engine_of_group(self, request: GenerationRequest) -> str | None:
        """Where an open request of the same group is."""
        group = self._groups.get((request.seed, request.draw))
        return None if group is None else group.engine

    def least_outstanding(self, avoid: str = '') -> str | None:
        """The engine with the fewest outstanding tokens, not `avoid`; None where there is no other."""
        return next((name for _, _, name in self._ranking if name != avoid), None)

    def open(self, request: GenerationRequest, engine: str) -> Entry:
        """Notes that the engine has the request. Raises RuntimeError for a request that is open already."""
        request_id = request.request_id
        if request_id in self._entries:
            raise RuntimeError(f'request {request_id} is open already, on {self._entries[request_id].engine}')
        generated = sum(len(segment.tokens) for segment in request.prefix)
        tokens = request.sampling.max_new_tokens - generated
        entry = self._entries[request_id] = Entry(
            request_id, (request.seed, request.draw), engine, tokens, request.version
        )
        group = self._groups.setdefault(entry.group, _Group(engine))
        group.engine = engine
        group.requests += 1
        self._add(engine, tokens)
        self.on_change(engine, 1, 0)
        return entry

    def note_generated(self, entry: Entry, tokens: int) -> None:
        """Notes that so many of its tokens were delivered; a closed entry stays as it is."""
        if self._entries.get(entry.request_id) is entry:
            entry.outstanding -= tokens
            self._add(entry.engine, -tokens)
            self.on_change(entry.engine, 0, tokens)

    def close(self, entry: Entry) -> None:
        """Notes that the request has ended; nothing the second time."""
        if self._entries.get(entry.request_id) is not entry:
            return
        del self._entries[entry.request_id]
        group = self._groups[entry.group]
        group.requests -= 1
        if not group.requests:
            del self._groups[entry.group]
        self._add(entry.engine, -entry.outstanding)
        self.on_change(entry.engine, -1, 0)
        self.on_room()

    def _add(self, engine: str, tokens: int) -> None:
        """Changes the outstanding tokens of an engine and its place in the ranking."""
        load = self._loads[engine]
        self._unrank(engine, load)
        load.outstanding += tokens
        self._rank(engine, load)

    def _unrank(self, name: str, load: _Load) -> None:
        place = bisect.bisect_left(self._ranking, (*load.rank, name))
        if place < len(self._ranking) and self._ranking[place][2] == name:
            del self._ranking[place]

    def _rank(self, name: str, load: _Load) -> None:
        if load.is_routed:
            bisect.insort(self._ranking, (*load.rank, name))
