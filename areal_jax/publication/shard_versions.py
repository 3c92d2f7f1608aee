"""Versions that every process of a learner sends: one process leads them, with no weights of its own. jax-free.

    every process   ShardSender (shard_channel.py) sends, when the leader says so, the shards that the plan gives it
    leader          ShardVersions(everywhere, name='stream', delta=True).transfer(version, copy)
    engine          carriers/shard_receiver.py joins the records of all processes

A version counts as published after all processes have it: only then engines are told its name. All records of a version
are of one kind, which the leader chooses; shard_plan.py says which process sends what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NoReturn, Protocol, TypedDict

from areal_jax.publication.versions import (
    EncodedDigest,
    PublicationError,
    add_sums,
    hash_digests,
    join_addresses,
    name_version,
)
from areal_jax.types import PublicationSize, PublishedWeights, Tree


class SentShards(TypedDict):
    """What a process tells the leader about the record of its shards."""

    address: str  # '' = the chain has no room for the delta: all processes must send the version whole
    leaves: Mapping[str, EncodedDigest]  # by path: the shape of the whole leaf, the sums of the shards of this process
    n_bytes: int
    changed: float  # elements


class Everywhere(Protocol):
    """Calls a method of the ShardSender of every process at the same time."""

    def __call__(self, name: str, *args: object, copy: Tree = None) -> list[SentShards]:
        """Returns the results, in the order of the processes.

        `copy`: the version, where this process has a part of it. Raises PublicationError if a process failed.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Chain:
    begun: int  # the whole version
    whole_bytes: int
    nbytes: int = 0  # of the deltas


class ShardVersions:
    """`protocols.Channel` of a process without weights: makes all processes of the learner send each version.

    A version is whole if it is the first, `base_every` versions after a whole one, if the deltas since then would take
    as many bytes, or if the last transfer failed.

    Args:
      name: publication.channel, for the log.
    """

    def __init__(self, everywhere: Everywhere, *, name: str, delta: bool, base_every: int = 20):
        self._everywhere, self._name, self._delta, self._base_every = everywhere, name, delta, base_every
        self._chain: _Chain | None = None  # None: the next version is sent whole
        self._released: tuple[int, list[int]] = 0, []  # told to the processes with the next version, which needs room

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """Returns when every process has its shards ready for readers; the handle is the name of the version.

        Raises PublicationError for weights with NaN or infinity, and if a process or its carrier fails.
        """
        chain, self._chain = self._chain, None  # if a process fails, readers may or may not have this version
        if chain is not None and not (self._delta and chain.begun < version < chain.begun + self._base_every):
            chain = None
        sent = self._everywhere('send_shards', version, chain is None, *self._released, copy=copy)
        if chain is not None:
            chain = dataclasses.replace(chain, nbytes=chain.nbytes + _count_bytes(sent))
            if chain.nbytes >= chain.whole_bytes or not all(each['address'] for each in sent):
                chain, sent = None, self._everywhere('repeat_shards', version)
        self._chain = _Chain(version, _count_bytes(sent)) if chain is None else chain
        leaves = add_digests(each['leaves'] for each in sent)
        manifest_hash = hash_digests(leaves)
        handle = name_version(join_addresses([each['address'] for each in sent]), version, manifest_hash)
        size = PublicationSize(
            self._name,
            'whole' if chain is None else 'delta',
            _count_bytes(sent),
            None if chain is None else _share(sent, leaves),
        )
        return PublishedWeights(version, manifest_hash, handle=handle, size=size)

    def receive(self, published: PublishedWeights) -> NoReturn:
        """Raises PublicationError: this process holds no weights."""
        raise PublicationError(
            f'weights of version {published.version} are at {published.handle}: a controller without a learner holds '
            'none, its engines load them from there'
        )

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """See protocols.Channel."""
        self._released = version, sorted(pinned)


def add_digests(parts: Iterable[Mapping[str, EncodedDigest]]) -> dict[str, EncodedDigest]:
    """Adds the sums of leaves of which each process has sent some shards."""
    total: dict[str, EncodedDigest] = {}
    for part in parts:
        for path, digest in part.items():
            known = total[path]['content'] if path in total else (0, 0)
            content = list(add_sums(known, digest['content']))
            total[path] = EncodedDigest(shape=digest['shape'], dtype=digest['dtype'], content=content)
    return total


def _count_bytes(sent: Iterable[SentShards]) -> int:
    return sum(each['n_bytes'] for each in sent)


def _share(sent: Iterable[SentShards], leaves: Mapping[str, EncodedDigest]) -> float:
    """The share of the elements that changed."""
    elements = sum(math.prod(leaf['shape']) for leaf in leaves.values())
    return sum(each['changed'] for each in sent) / max(1, elements)
