"""One version of the weights as bytes, a header and one part a leaf, and the protocols of the carriers that move it.

A whole record holds the bits of every leaf, a delta the changes since a base version (delta.py). Carriers (files,
shared memory, sockets) move records and do not look into their parts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import jax.numpy as jnp
import numpy as np

from areal_jax.publication.manifest import (
    LeafDigest,
    Manifest,
    decode_manifest,
    encode_manifest,
    manifest_hash,
    merge_shards,
)
from areal_jax.publication.shard_plan import parse_shard
from areal_jax.publication.versions import PublicationError
from areal_jax.types import Tree

Part: TypeAlias = bytes | bytearray | memoryview  # C-contiguous bytes
RecordKind = Literal['whole', 'delta']
FORMAT = 1  # of the header and of the parts
_DELTA_BYTES, _DELTA_ELEMENT_BYTES = 64, 7  # bounds on a part of a delta: in all, plus per element (delta.py)


@dataclasses.dataclass(frozen=True)
class Held:
    """A version that a reader holds bit for bit."""

    version: int
    manifest_hash: str


@dataclasses.dataclass(frozen=True)
class RecordHeader:
    """The description of a record, without its parts."""

    version: int
    leaves: Mapping[str, LeafDigest]  # the manifest of `version`, by path, or by the names of shards (shard_plan.py)
    sizes: Sequence[int]  # bytes of each part, in the order of the sorted names
    base: Held | None = None  # what a delta is applied to; None: a whole record

    @property
    def kind(self) -> RecordKind:
        return 'whole' if self.base is None else 'delta'

    @property
    def manifest(self) -> Manifest:
        """The digests by path; sums over the shards of a leaf are the sums of the leaf."""
        return merge_shards(self.leaves)

    @property
    def manifest_hash(self) -> str:
        return manifest_hash(self.manifest)

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes)

    def encode(self) -> bytes:
        base = None if self.base is None else dataclasses.asdict(self.base)
        return json.dumps({
            'format': FORMAT, 'version': self.version, 'base': base, 'manifest_hash': self.manifest_hash,
            'sizes': list(self.sizes), 'leaves': encode_manifest(self.leaves),
        }).encode()  # fmt: skip


def decode_header(content: Part) -> RecordHeader:
    """The inverse of `RecordHeader.encode`; raises PublicationError for anything else."""
    try:
        found = json.loads(bytes(content))
        if type(found['version']) is not int or abs(found['version']) >> 63:
            raise ValueError('the version is no integer of 64 bits')
        if found['format'] != FORMAT:
            raise ValueError(f'format {found["format"]}, and this program reads {FORMAT}')
        base = (
            None if found['base'] is None else Held(int(found['base']['version']), str(found['base']['manifest_hash']))
        )
        leaves = decode_manifest(found['leaves'])
        header = RecordHeader(found['version'], leaves, tuple(found['sizes']), base)
        _require_sizes(header)
        if header.manifest_hash != found['manifest_hash']:
            raise ValueError('the manifest is not the one that its hash names')
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise PublicationError(
            f'the header of a record of weights is damaged ({type(error).__name__}: {error})'
        ) from error
    return header


def _require_sizes(header: RecordHeader) -> None:
    """Raises ValueError for sizes that parts of these leaves cannot have: readers allocate memory by them."""
    if len(header.sizes) != len(header.leaves):
        raise ValueError(f'{len(header.sizes)} sizes for {len(header.leaves)} leaves')
    for (path, leaf), size in zip(sorted(header.leaves.items()), header.sizes, strict=True):
        elements = math.prod(leaf.shape)
        parse_shard(path, leaf.shape)
        whole = elements * jnp.dtype(leaf.dtype).itemsize
        fits = size == whole if header.base is None else 0 <= size <= _DELTA_BYTES + _DELTA_ELEMENT_BYTES * elements
        if type(size) is not int or not fits:
            raise ValueError(f'a part of {reprlib.repr(size)} bytes for the leaf {path[:80]!r} of {whole}')


@dataclasses.dataclass(frozen=True)
class Record:
    """One version in the form that carriers move."""

    header: RecordHeader
    parts: Sequence[Part]  # in the order of the sorted names; whole: the bits of the leaf or shard, row-major


def leaf_bytes(leaf: np.ndarray) -> Part:
    """The bits of a leaf, row-major, as a part of a whole record; a view if the leaf is row-major already."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


def tree_of_record(record: Record) -> dict[str, Tree]:
    """The weights of a whole record as a nested dict of numpy arrays, views of its parts."""
    tree: dict[str, Tree] = {}
    for (path, digest), part in zip(sorted(record.header.leaves.items()), record.parts, strict=True):
        put_leaf(tree, path, np.frombuffer(part, jnp.dtype(digest.dtype)).reshape(digest.shape))
    return tree


def put_leaf(tree: dict[str, Tree], path: str, leaf: Tree) -> None:
    """Puts a leaf at its path, 'layers/0/mlp_norm', into a nested dict."""
    *outer, name = path.split('/')
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[name] = leaf


class RecordSender(Protocol):
    """The learner's end of a carrier. Calls come from one thread."""

    def send(self, record: Record) -> str:
        """Makes a record available to every reader, and returns the address to tell readers.

        A whole record begins a new chain; a delta continues it. The chain of the newest version stays readable, from
        its whole record on, for readers that join. Parts may be reused after `send` returns. No reader delays it.

        Raises PublicationError for lack of space, with both sizes, and for a failed write.
        """
        ...

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Permits the removal of chains whose versions are all below `version` and not `pinned`."""
        ...

    def held(self) -> Mapping[str, Held]:
        """The version that each reader acknowledged last, by name."""
        ...

    def close(self) -> None:
        """Frees the resources that the carrier holds outside the process; readers get an error from then on."""
        ...


class RecordReceiver(Protocol):
    """A reader's end of a carrier."""

    def fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        """Brings the reader from `held` to `version`: calls `consume` with the missing records, in order.

        These are deltas alone if a chain leads from `held`, else the newest whole record and the deltas after it.
        Parts are valid only during the call of `consume`, whose exceptions are passed on.

        Raises PublicationError for a version that is not there, a damaged record, a dead sender, or a missed deadline.
        """
        ...

    def acknowledge(self, held: Held) -> None:
        """Tells the sender which version the reader now holds, checked against its manifest."""
        ...

    def close(self) -> None: ...
