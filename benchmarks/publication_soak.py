"""Versions of all kinds through every channel while an engine decodes: bits, log-probs, memory, damage.

A version changes few elements, many, all of some leaves, or none. For each channel the tree that is staged must be the
version bit for bit, its digest the one that was published, and the log-probs of the engine those of an engine that
loaded the version whole. Versions with NaN payloads, infinities and -0.0, which no engine decodes with, go through the
same records to a reader beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.parts.engines import bind_fetch
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.delta import ChangeFinder, encode_changes
from areal_jax.publication.manifest import LeafDigest, host_manifest, leaves_by_path, manifest_hash
from areal_jax.publication.record import Held, Record, RecordHeader, leaf_bytes
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import ChainFull, PublicationError, add_sums
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import Tree
from benchmarks.carriers import CARRIERS, open_channel
from benchmarks.soak_decoding import Decoding

MODEL = ModelConfig(
    vocab_size=512, d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=384, rope_theta=1e4,
)  # fmt: skip
SHARES = (0.01, 0.0, 0.05, 0.9, 0.001)  # of the elements of a leaf that a version changes, in turn
ODD = np.array([0x7FC1, 0xFFC2, 0x7F80, 0xFF80, 0x8000, 0x0001], np.uint16)  # NaN payloads, infinities, -0.0, tiny
WHOLE_EVERY = 50  # versions from a whole one of the odd ones to the next


@dataclasses.dataclass
class Covered:
    """What a soak of one channel did."""

    versions: int = 0
    odd_versions: int = 0
    dispatches: int = 0
    compared_logprobs: int = 0
    wrong_bits: int = 0
    wrong_logprobs: int = 0
    digest_misses: int = 0
    rss_bytes: list[int] = dataclasses.field(default_factory=list)


def change(params: Tree, rng: np.random.Generator, share: float) -> Tree:
    """A version in which about this share of the elements moved by one step of the format."""

    def moved(leaf: np.ndarray) -> np.ndarray:
        words = leaf.reshape(-1).view(np.uint16).copy()
        words[rng.random(words.size) < share] ^= 1
        return words.view(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(moved, params)


def soak(name: str, minutes: float, most: int, seed: int) -> Covered:
    """Until the minutes are over or `most` versions were decoded with."""
    rng, covered, end_s = np.random.default_rng(seed), Covered(), time.monotonic() + 60 * minutes
    backend = JaxDecodeBackend(
        Decoder(MODEL), slots=4, context_tokens=64, block_tokens=32, prefill_buckets=(32,), decode_steps=4,
        filtered=False, dtype='bfloat16', batch_buckets=(4,),
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16)), Decoder(MODEL).init(seed))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        channel = open_channel(name, pathlib.Path(one), MODEL, delta=True)
        odd = _odd_versions(name, pathlib.Path(other), params, rng)
        fetch, decoding = bind_fetch(channel, jax.devices()[0], backend), Decoding(backend, seed)
        shares = itertools.cycle(SHARES)
        while covered.versions < most and time.monotonic() < end_s:
            params = change(params, rng, next(shares))
            published = channel.transfer(covered.versions, params)
            found, while_fetched = decoding.beside(lambda published=published: fetch(published))
            covered.dispatches += while_fetched
            expected = backend.prepare(jax.device_put(params, jax.devices()[0]))
            covered.wrong_bits += not _same_bits(found.params, expected.params)
            covered.digest_misses += published.manifest_hash != manifest_hash(host_manifest(params))
            decoding.swap(found)
            compared, wrong = decoding.compare(expected)
            covered.compared_logprobs += compared
            covered.wrong_logprobs += wrong
            covered.wrong_bits += not next(odd)
            covered.odd_versions += 1
            channel.release(covered.versions)
            covered.versions += 1
            covered.rss_bytes.append(_rss_bytes())
    return covered


def measure_soak(options: Any) -> Iterator[dict[str, Any]]:
    """A row for each channel; `met`: nothing is wrong, and memory grows by less than a tenth after a third."""
    for name in CARRIERS:
        covered = soak(name, options.minutes, options.versions, options.seed)
        rss = covered.rss_bytes
        grown = rss[-1] / rss[len(rss) // 3] if rss else 1.0
        wrong = covered.wrong_bits + covered.wrong_logprobs + covered.digest_misses
        counts = {**dataclasses.asdict(covered), 'rss_bytes': rss[:: max(1, len(rss) // 20)]}
        yield {'row': 'soak', 'channel': name, 'rss_growth': grown, 'met': wrong == 0 and grown < 1.1, **counts}


def _odd_versions(name: str, directory: pathlib.Path, params: Tree, rng: np.random.Generator) -> Iterator[bool]:
    """Whether each of the versions without end, of bits of all kinds, was read as it was sent."""
    sender, open_receiver = CARRIERS[name](directory, MODEL)
    leaves = {path: np.array(leaf) for path, leaf in leaves_by_path(params).items()}
    reader, base, manifest = None, None, host_manifest(leaves)
    for version in itertools.count():
        before = {path: leaf.copy() for path, leaf in leaves.items()}
        for leaf in leaves.values():
            words = leaf.reshape(-1).view(np.uint16)
            places = rng.random(words.size) < 0.01
            words[places] = rng.choice(ODD, places.sum())
        if version % WHOLE_EVERY == 0:
            record, manifest = _make_whole(version, leaves)
        else:
            assert base is not None
            record, manifest = _make_delta(version, before, leaves, base, manifest)
        try:
            address = sender.send(record)
        except ChainFull:  # as the channel does
            record, manifest = _make_whole(version, leaves)
            address = sender.send(record)
        base = Held(version, manifest_hash(manifest))
        reader = reader or WeightsReader(open_receiver(address), jax.devices()[0])
        try:
            found = leaves_by_path(reader.receive(version, base.manifest_hash)[0])
        except PublicationError as error:
            print(f'{name}: {error}')
            yield False
            continue
        yield all(_bits(found[path]) == _bits(leaf) for path, leaf in leaves.items())
        sender.release(version)


def _make_whole(version: int, leaves: Mapping[str, np.ndarray]) -> tuple[Record, dict[str, LeafDigest]]:
    manifest, parts = host_manifest(leaves), [leaf_bytes(leaf) for leaf in leaves.values()]
    return Record(RecordHeader(version, manifest, [len(part) for part in parts]), parts), manifest


def _make_delta(
    version: int,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    base: Held,
    manifest: Mapping[str, LeafDigest],
) -> tuple[Record, dict[str, LeafDigest]]:
    """As VersionEncoder makes it, which refuses what is no number."""
    finder, parts, digests = ChangeFinder(max(leaf.size for leaf in after.values())), [], {}
    for path, leaf in after.items():
        words = leaf.reshape(-1).view(np.uint16)
        found = finder.find(before[path].reshape(-1).view(np.uint16), words, 'bfloat16')
        parts.append(encode_changes(found.changes, leaf.size))
        digests[path] = dataclasses.replace(manifest[path], content=add_sums(manifest[path].content, found.sums))
    return Record(RecordHeader(version, digests, [len(part) for part in parts], base), parts), digests


def _same_bits(one: Tree, other: Tree) -> bool:
    return all(_bits(a) == _bits(b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _bits(leaf: Any) -> bytes:
    return np.asarray(leaf).tobytes()


def _rss_bytes() -> int:
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize()
