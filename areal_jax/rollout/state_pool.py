"""The states of recurrent layers: which place of an engine's memory holds the state behind which tokens.

A recurrent layer keeps one state of fixed size per sequence, where attention keeps keys and values per position. A
program reads the state at the place of a sequence and writes the state behind the last token that it processed to the
same place. So a state is of exactly one length, and cannot be cut to a shorter one.

A prefix or a sequence in a slot (blocks.py) holds one place. A snapshot is a state that nothing holds any more: a
prompt can begin with kept blocks as far as the last position behind which there is a snapshot.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

_TOKEN_BYTES = 4  # int32


class StateSizes(NamedTuple):
    """The places of the states of an engine."""

    places: int  # 0 to places - 1; the state of padding is written to the place `places`

    @property
    def padding(self) -> int:
        return self.places


def size_states(slots: int, snapshots: int | None) -> StateSizes:
    """Returns the places that are always enough; `snapshots` None: half as many as slots, at least 1.

    A request in a slot needs one for itself, and one for its prefix until it has read that.
    """
    return StateSizes(2 * slots + (max(1, slots // 2) if snapshots is None else snapshots))


class Holder(Protocol):
    """A prefix or a sequence."""

    state: int | None  # the place of its state; None = it has none


class NoStates:
    """Does the work of StatePool for a model without recurrent layers: nothing."""

    def allocate(self, holder: Holder) -> None:
        pass

    def branch(self, holder: Holder, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> None:
        pass

    def release(self, holder: Holder) -> None:
        pass

    def keep(self, holder: Holder, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> None:
        pass

    def covers(self, holder: Holder) -> bool:
        return True

    def longest(self, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> int:
        return len(tokens)

    def need(self, holder: Holder) -> None:
        pass

    def spare(self, holder: Holder) -> None:
        pass

    def take_copies(self) -> Sequence[tuple[int, int]]:
        return ()

    def forget(self) -> None:
        pass

    def check(self, needed: Iterable[Holder], spared: Iterable[Holder]) -> None:
        pass


class _Name(NamedTuple):
    """What a snapshot is found by."""

    before: tuple[int, bytes]  # policy version, and digest of the whole blocks
    rest: bytes  # the tokens behind them, fewer than a block


class StatePool:
    """The places of states, and the snapshots among them.

    If no place is free, the snapshot that was not used for longest is evicted, and after the last snapshot the state
    of the prefix that has been spared for longest.
    """

    def __init__(self, sizes: StateSizes, block_tokens: int):
        self._sizes, self._block_tokens = sizes, block_tokens
        self._free = list(range(sizes.places))  # a heap: the lowest is taken first, whatever the order of releases
        self._snapshots: collections.OrderedDict[int, _Name] = collections.OrderedDict()  # by place; last used last
        self._places: dict[tuple[int, bytes], dict[bytes, int]] = collections.defaultdict(dict)  # by name
        self._spared: collections.OrderedDict[int, Holder] = collections.OrderedDict()  # by place; the oldest first
        self._copies: dict[int, int] = {}  # source by target, in the order of the requests

    @property
    def free(self) -> int:
        """The number of places that hold nothing."""
        return len(self._free)

    @property
    def empty(self) -> frozenset[int]:
        """The places that hold nothing."""
        return frozenset(self._free)

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def allocate(self, holder: Holder) -> None:
        """Gives the holder a place, of unknown content; raises RuntimeError if all are needed."""
        holder.state = self._take()

    def branch(self, holder: Holder, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> None:
        """Gives the holder a place that begins as the snapshot behind `tokens`; if there is none, of unknown content.

        If it gets the place of the snapshot itself, no copy is needed. Nothing is written before the copies, so the
        snapshot may be evicted before they run.
        """
        source = self._find(self._name(version, digests, tokens))
        holder.state = place = self._take()
        if source is not None and source != place:
            self._copies[place] = source

    def release(self, holder: Holder) -> None:
        """Frees the holder's place, if it has one."""
        if (place := self._leave(holder)) is not None:
            self._copies.pop(place, None)
            heapq.heappush(self._free, place)

    def keep(self, holder: Holder, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> None:
        """Turns the holder's state, which is behind exactly `tokens`, int32 [T], into a snapshot.

        Frees it instead if there is such a snapshot already, or if the copy that it begins with has not run.
        """
        if holder.state is None:
            return
        name = self._name(version, digests, tokens)
        if holder.state in self._copies or self._find(name) is not None:
            self.release(holder)
        elif (place := self._leave(holder)) is not None:
            self._snapshots[place] = name
            self._places[name.before][name.rest] = place

    def covers(self, holder: Holder) -> bool:
        """Tells whether the holder has its state still."""
        return holder.state is not None

    def longest(self, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> int:
        """Returns the length of the longest beginning of `tokens`, int32 [T], that has a snapshot; 0 = none has.

        `digests` are those of the tokens, or of more tokens that begin with them.
        """
        size = self._block_tokens
        for whole in range(len(tokens) // size, -1, -1):
            rest = tokens[whole * size : (whole + 1) * size].tobytes()
            ends = [end for end in self._places.get((version, digests[whole]), ()) if rest.startswith(end)]
            if ends:
                return whole * size + len(max(ends, key=len)) // _TOKEN_BYTES
        return 0

    def need(self, holder: Holder) -> None:
        """Keeps the state of a prefix from being evicted."""
        if holder.state is not None:
            self._spared.pop(holder.state, None)

    def spare(self, holder: Holder) -> None:
        """Allows that the state of a prefix is evicted."""
        if holder.state is not None:
            self._spared[holder.state] = holder

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """Returns (source, target) places to be copied before anything else is written, in this order."""
        copies, self._copies = [(source, target) for target, source in self._copies.items()], {}
        return copies

    def forget(self) -> None:
        """Frees all snapshots."""
        for place in self._snapshots:
            heapq.heappush(self._free, place)
        self._snapshots.clear()
        self._places.clear()

    def check(self, needed: Iterable[Holder], spared: Iterable[Holder]) -> None:
        """Asserts that these are the holders, and that every place is free, a snapshot or has one holder.

        Of the spared ones some may have lost their state.
        """
        needed = list(needed)
        held = [holder.state for holder in needed if holder.state is not None]
        assert len(held) == len(needed)
        kept = {holder.state: holder for holder in spared if holder.state is not None}
        assert kept == self._spared
        places = [*self._free, *self._snapshots, *held, *kept]
        assert sorted(places) == list(range(self._sizes.places))
        assert {*self._copies} <= {*held, *kept}
        names = {place: _Name(before, rest) for before, named in self._places.items() for rest, place in named.items()}
        assert names == self._snapshots

    def _name(self, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> _Name:
        whole = len(tokens) // self._block_tokens
        return _Name((version, digests[whole]), tokens[whole * self._block_tokens :].tobytes())

    def _find(self, name: _Name) -> int | None:
        """Returns the place of a snapshot, which is now the last used."""
        place = self._places.get(name.before, {}).get(name.rest)
        if place is not None:
            self._snapshots.move_to_end(place)
        return place

    def _leave(self, holder: Holder) -> int | None:
        """Takes the place from the holder and returns it."""
        place, holder.state = holder.state, None
        if place is not None:
            self._spared.pop(place, None)
        return place

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        if self._snapshots:
            place, name = self._snapshots.popitem(last=False)
            del self._places[name.before][name.rest]
            if not self._places[name.before]:
                del self._places[name.before]
            return place
        if not self._spared:
            raise RuntimeError(f'all {self._sizes.places} states of recurrent layers are needed')
        place, holder = self._spared.popitem(last=False)
        self._copies.pop(place, None)
        holder.state = None
        return place


States = NoStates | StatePool


def build_states(sizes: StateSizes | None, block_tokens: int) -> States:
    """Returns the pool of these sizes; None = the model has no recurrent layers."""
    return NoStates() if sizes is None else StatePool(sizes, block_tokens)
