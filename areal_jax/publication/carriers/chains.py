"""A chain: one whole record and the deltas after it. Which records of it a reader needs, and which chains may go.

The carriers in shared memory and over sockets keep their chains by these rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from areal_jax.publication.record import Held, Record, RecordHeader
from areal_jax.publication.versions import PublicationError


def find_missing(chain: Sequence[Held], version: int, held: Held | None) -> range | None:
    """Indices of the records that bring a reader from `held` to `version`; None where the chain has no such version.

    Deltas alone if the chain has `held` at or before that version, else everything from the whole record on.
    """
    versions = [record.version for record in chain]
    if version not in versions:
        return None
    end = versions.index(version) + 1
    known = chain[:end]
    return range(known.index(held) + 1 if held in known else 0, end)


def require_next(chain: Sequence[Held], header: RecordHeader) -> None:
    """Raises PublicationError for a delta whose base is not the last record of the chain."""
    last = chain[-1] if chain else None
    if header.base is not None and header.base != last:
        told = 'no record' if last is None else f'version {last.version} (manifest {last.manifest_hash[:12]})'
        raise PublicationError(
            f'the delta of version {header.version} is based on version {header.base.version} (manifest '
            f'{header.base.manifest_hash[:12]}), and the chain ends with {told}: send version {header.version} whole'
        )


def require_parts(record: Record) -> None:
    """Raises ValueError for parts of other sizes than the header says."""
    found = [memoryview(part).nbytes for part in record.parts]
    if found != list(record.header.sizes):
        raise ValueError(f'version {record.header.version} has parts of {found} bytes, not {list(record.header.sizes)}')


def is_needed(chain: Sequence[Held], lowest: int, pinned: Collection[int]) -> bool:
    """Whether a reader may still ask for a version of the chain."""
    return any(record.version >= lowest or record.version in pinned for record in chain)


def describe(chains: Sequence[Sequence[Held]]) -> str:
    """'versions 4, 5 and 7', 'no version': for errors."""
    versions = sorted({record.version for chain in chains for record in chain})
    if not versions:
        return 'no version'
    first = ', '.join(map(str, versions[:-1]))
    return f'versions {first} and {versions[-1]}' if first else f'version {versions[-1]}'
