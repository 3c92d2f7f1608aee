"""The open requests of a pool with their indices: by id, by group and by engine; used by pool.py.

Every operation takes constant time in the number of open requests, and O(log engines) to keep the engines ranked.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

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


class Ledger:
    """Which request is open on which engine, and how many tokens each engine may still have to generate."""

    def __init__(self, engines: Iterable[str]):
        self._names = list(engines)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._outstanding = [0] * len(self._names)
        self._ranking = [(0, index) for index in range(len(self._names))]  # (outstanding tokens, engine), ascending
        self._entries: dict[str, Entry] = {}  # by request id, in the order of arrival
        self._groups: dict[tuple[int, int], _Group] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """The open requests, first come first."""
        return list(self._entries.values())

    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return dict(zip(self._names, self._outstanding, strict=True))

    def engine_of_group(self, request: GenerationRequest) -> str | None:
        """Where an open request of the same group is."""
        group = self._groups.get((request.seed, request.draw))
        return None if group is None else group.engine

    def least_outstanding(self) -> str:
        """The engine with the fewest outstanding tokens; of equal ones the first."""
        return self._names[self._ranking[0][1]]

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
        return entry

    def note_generated(self, entry: Entry, tokens: int) -> None:
        """Notes that so many of its tokens were delivered; a closed entry stays as it is."""
        if self._entries.get(entry.request_id) is entry:
            entry.outstanding -= tokens
            self._add(entry.engine, -tokens)

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

    def _add(self, engine: str, tokens: int) -> None:
        """Changes the outstanding tokens of an engine and its place in the ranking."""
        index = self._index[engine]
        del self._ranking[bisect.bisect_left(self._ranking, (self._outstanding[index], index))]
        self._outstanding[index] += tokens
        bisect.insort(self._ranking, (self._outstanding[index], index))
