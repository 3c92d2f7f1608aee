"""The learner's last version as bits, and records of the next one against it. record_channel.py says which is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from areal_jax.publication.delta import ChangeFinder, add_sums, encode_changes
from areal_jax.publication.manifest import LeafDigest, finite_host_manifest, unfinite_error
from areal_jax.publication.record import Held, Part, Record, RecordHeader, leaf_bytes
from areal_jax.publication.versions import PublicationError

Leaves = Mapping[str, np.ndarray]  # by path, in the order of the paths


class VersionEncoder:
    """Keeps the bits of the last version that it encoded, in memory that is used again. For 16-bit elements."""

    def __init__(self) -> None:
        self._bits: dict[str, np.ndarray] = {}  # uint16 [n]
        self._finder = ChangeFinder(0)

    def encode_whole(self, version: int, leaves: Leaves) -> Record:
        """A record whose parts are valid until the next call; all digests are computed.

        Raises PublicationError for NaN and infinity, and for leaves whose elements have other than 16 bits.
        """
        for path, leaf in leaves.items():
            if leaf.dtype.itemsize != 2:
                raise PublicationError(
                    f'publication.delta=True with the leaf {path!r} in {leaf.dtype}: 99.8 % of the elements of float32 '
                    "weights change in each update, so that no delta is smaller; use publication.dtype='bfloat16', or "
                    'publication.delta=False'
                )
        if {path: bits.size for path, bits in self._bits.items()} != {path: leaf.size for path, leaf in leaves.items()}:
            self._bits = {path: np.empty(leaf.size, np.uint16) for path, leaf in leaves.items()}
            self._finder = ChangeFinder(max((leaf.size for leaf in leaves.values()), default=0))
        manifest = finite_host_manifest(dict(leaves), version)
        for path, leaf in leaves.items():
            np.copyto(self._bits[path], _bits_of(leaf))
        parts: list[Part] = [bits.data.cast('B') for bits in self._bits.values()]
        return Record(RecordHeader(version, manifest, [len(part) for part in parts]), parts)

    def encode_delta(
        self, version: int, leaves: Leaves, base: Held, manifest: Mapping[str, LeafDigest]
    ) -> tuple[Record, float]:
        """(the record, share of the elements that changed) against the last version, which is `base` with `manifest`.

        Raises PublicationError for NaN and infinity; the bits are a part of the new version then, as they are when it
        is not sent: encode a whole version next.
        """
        changed, parts, digests = 0, [], {}
        for path, leaf in leaves.items():
            digest = manifest[path]
            found = self._finder.find(self._bits[path], _bits_of(leaf), digest.dtype)
            if found.unfinite:
                raise unfinite_error(version, path, digest, found.unfinite)
            changed += found.changes.count
            parts.append(encode_changes(found.changes, leaf.size))
            digests[path] = dataclasses.replace(digest, content=add_sums(digest.content, found.sums))
        header = RecordHeader(version, digests, [len(part) for part in parts], base)
        return Record(header, parts), changed / max(1, sum(leaf.size for leaf in leaves.values()))


def wrap_whole(version: int, leaves: Leaves) -> Record:
    """A whole record of any dtype over the leaves themselves; raises PublicationError for NaN and infinity."""
    manifest = finite_host_manifest(dict(leaves), version)
    parts = [leaf_bytes(leaf) for leaf in leaves.values()]
    return Record(RecordHeader(version, manifest, [len(part) for part in parts]), parts)


def _bits_of(leaf: np.ndarray) -> np.ndarray:
    """uint16 [n], a view where the leaf lies row by row."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint16)
