"""Versions of the tiny decoder in 16 bits, and channels that carry them as records."""

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.manifest import host_manifest, manifest_hash
from areal_jax.publication.record import Held, Record
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.publication.versions import ChainFull, PublicationError
from tests.publication.tiny import CONFIG, host_params


def first_version(dtype='bfloat16', config=CONFIG):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), host_params(config=config))


def next_version(params, seed, share=0.02):
    """About this share of the elements of each leaf moves by one step; at least one of all."""
    rng = np.random.default_rng(seed)
    after = jax.tree.map(np.copy, params)
    after['final_norm'].view(np.uint16)[0] ^= 1
    for leaf in jax.tree.leaves(after):
        leaf.reshape(-1).view(np.uint16)[rng.random(leaf.size) < share] ^= 1
    return after


def make_versions(count, share=0.02, config=CONFIG):
    made = [first_version(config=config)]
    for seed in range(1, count):
        made.append(next_version(made[-1], seed, share))
    return made


def held_of(params, version):
    return Held(version, manifest_hash(host_manifest(params)))


def open_channel(directory, *, delta=True, base_every=20, verify=False, config=CONFIG):
    sender, receiver = FilesSender(directory, config), FilesReceiver(directory, config, 'reader')
    return RecordChannel(
        sender, lambda address: receiver, name='files', delta=delta, base_every=base_every, verify=verify
    )


class Carrier:
    """A sender that keeps records in memory, and a receiver of the same; `damage` may change what is fetched."""

    def __init__(self):
        self.records, self.fetched, self.told = {}, [], []
        self.fails = self.is_full = False
        self.damage = lambda record: record

    def send(self, record):
        if self.fails:
            raise PublicationError('the carrier has no room')
        if self.is_full and record.header.base is not None:
            raise ChainFull('the chain has no room')
        if record.header.base is None:
            self.records = {v: r for v, r in self.records.items() if v < record.header.version}
        self.records[record.header.version] = Record(record.header, [bytes(part) for part in record.parts])
        return 'memory'

    def fetch(self, version, held, consume):
        chain, at = [], version
        while True:
            record = self.records[at]
            chain.insert(0, record)
            if record.header.base is None or record.header.base == held:
                break
            at = record.header.base.version
        for record in chain:
            self.fetched.append((record.header.kind, record.header.version))
            consume(self.damage(record))

    def acknowledge(self, held):
        self.told.append(held)

    def release(self, version, pinned=()):
        pass

    def withdraw(self, version):
        if version in self.records and self.records[version].header.base is not None:
            del self.records[version]

    def held(self):
        return {'one': self.told[-1]} if self.told else {}

    def close(self):
        pass


def over(carrier, **options):
    return RecordChannel(carrier, lambda address: carrier, **{'name': 'memory', 'delta': True, **options})
