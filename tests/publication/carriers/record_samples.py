"""Records of weights for tests of carriers: parts of given sizes, filled with bytes of their own."""

import numpy as np

from areal_jax.publication.manifest import LeafDigest
from areal_jax.publication.record import Held, Record, RecordHeader

SIZES = (0, 1, 255, 256, 70_000, 3_000_000, 0)  # none, and around every boundary that a carrier has


def make_record(version, sizes=SIZES, base=None):
    """Part k of a version is random bytes of a generator with the seed (version, k)."""
    parts = [np.random.default_rng((version, k)).bytes(size) for k, size in enumerate(sizes)]
    leaves = {f'leaf/{k:02d}': LeafDigest((len(part),), 'uint8', (sum(part), version)) for k, part in enumerate(parts)}
    return Record(RecordHeader(version, leaves, tuple(sizes), base), parts)


def held(record):
    return Held(record.header.version, record.header.manifest_hash)


def make_chain(first, sizes=SIZES, n_deltas=2, delta_sizes=(9, 0, 1, 300, 2, 5000, 0)):
    """A whole record and deltas, each based on the one before."""
    chain = [make_record(first, sizes)]
    for version in range(first + 1, first + 1 + n_deltas):
        chain.append(make_record(version, delta_sizes, held(chain[-1])))
    return chain


class Reader:
    """What `consume` got: a copy of every record."""

    def __init__(self):
        self.records = []

    def __call__(self, record):
        self.records.append((record.header, [bytes(part) for part in record.parts]))

    @property
    def versions(self):
        return [header.version for header, _ in self.records]


def assert_got(reader, records):
    assert reader.versions == [record.header.version for record in records]
    for (header, parts), record in zip(reader.records, records, strict=True):
        assert header.encode() == record.header.encode()
        assert parts == list(record.parts)
