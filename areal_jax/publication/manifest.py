"""The manifest of a version of the weights: a digest of every leaf, which both ends of a channel compute."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, SupportsInt, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from areal_jax.native.arrays import host_view, sum_words
from areal_jax.publication.shard_plan import Runs, find_runs, is_shard, parse_shard
from areal_jax.publication.versions import EncodedDigest, PublicationError, add_sums, hash_digests
from areal_jax.sharding.placement import Place, move_to
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

Leaf = np.ndarray | jax.Array
Made = TypeVar('Made')


class UnchangedLeaves(Generic[Made]):
    """Remembers, by path, the result computed from each leaf of the last version."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[weakref.ref[Leaf], Made]] = {}

    def find(self, leaves: Mapping[str, Leaf]) -> dict[str, Made]:
        """Returns the results of the leaves that are the same arrays as in the last call of `note`."""
        known = {path: self._made[path] for path in leaves if path in self._made}
        return {path: made for path, (source, made) in known.items() if source() is leaves[path]}

    def note(self, leaves: Mapping[str, Leaf], made: Mapping[str, Made]) -> None:
        """Remembers the results of the leaves of a version, and forgets the version before."""
        self._made = {path: (weakref.ref(leaf), made[path]) for path, leaf in leaves.items()}


class Mover:
    """Moves versions to one place; of each version, only the leaves that the last one did not have.

    A leaf is moved again if nothing else refers to its moved copy any more.
    """

    def __init__(self, place: Place):
        self._place = place
        self._moved: UnchangedLeaves[weakref.ref[jax.Array]] = UnchangedLeaves()

    def move(self, params: Tree) -> Tree:
        """Returns the tree at the place; leaves that are already there are returned as they are."""
        leaves, structure = jax.tree.flatten(params)
        paths = list(by_path(params))
        found = self._moved.find(dict(zip(paths, leaves, strict=True)))
        known = {path: leaf for path, reference in found.items() if (leaf := reference()) is not None}
        new = [index for index, path in enumerate(paths) if path not in known]
        over = self._place if isinstance(self._place, jax.Device) else jax.tree.leaves(self._place)
        cut = over if isinstance(over, jax.Device) else [over[index] for index in new]
        arrived = move_to([leaves[index] for index in new], cut)
        known |= {paths[index]: leaf for index, leaf in zip(new, arrived, strict=True)}
        moved = [known[path] for path in paths]
        references = [weakref.ref(leaf) for leaf in moved]
        self._moved.note(dict(zip(paths, leaves, strict=True)), dict(zip(paths, references, strict=True)))
        return jax.tree.unflatten(structure, moved)


def by_path(params: Tree) -> dict[str, Leaf]:
    """Leaves by path, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads positions over the 32-bit words
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # itemsize -> the unsigned view of an element
_FIRST_FACTOR, _SECOND_FACTOR = 0x85EBCA6B, 0xC2B2AE35  # of MurmurHash3's 32-bit finalizer
_BLOCK = 1 << 16  # elements per step of the numpy digest: the data of a step stays in a core's cache


@dataclasses.dataclass(frozen=True)
class LeafDigest:
    """Shape, dtype and checksums of a leaf."""

    shape: tuple[int, ...]
    dtype: str
    content: tuple[int, int]  # uint32: sum of the words; sum of the words mixed with their positions


Manifest = Mapping[str, LeafDigest]  # by path, 'layers/0/attention/query'


def device_manifest(params: Tree) -> dict[str, LeafDigest]:
    """The manifest of a tree of jax arrays, computed on the devices that hold them, without collectives.

    The content of a leaf of words w_i (its bits, widened to 32; i is the position in row-major order) is
        (sum_i w_i,  sum_i mix(w_i + G i))  mod 2^32,  mix = the finalizer of MurmurHash3 (Appleby), a bijection.
    Changing one element always changes the second sum. Moving elements changes it with probability 1 - 2^-32.

    Raises PublicationError for an element wider than 32 bits.
    """
    return {path: digest for path, (digest, _) in _measure(params).items()}


def finite_manifest(params: Tree, version: int) -> dict[str, LeafDigest]:
    """`device_manifest` of a version; checks in the same program that all its values are finite.

    Raises PublicationError that names the version, the first leaf with NaN or infinity, and the number of such values.
    """
    return _require_finite(_measure(params), version)


def finite_host_manifest(params: Tree, version: int) -> dict[str, LeafDigest]:
    """`finite_manifest` for numpy arrays, without jax programs, which would wait for the update that is under way.

    Leaves with the names of shards (shard_plan.py) have the sums of their positions in the whole leaf.
    Raises PublicationError as `finite_manifest` does.
    """
    found = {path: (leaf, _host_sums(np.asarray(leaf), path)) for path, leaf in leaves_by_path(params).items()}
    measured = {path: (_leaf_digest(leaf, sums[:2]), sums[2]) for path, (leaf, sums) in found.items()}
    return _require_finite(measured, version)


def finite_shard_manifest(shards: Mapping[str, np.ndarray | jax.Array], version: int) -> dict[str, LeafDigest]:
    """`finite_host_manifest` of shards by name, computed on the devices that hold them.

    Raises PublicationError as `finite_manifest` does.
    """
    launched = {}
    for name, values in shards.items():
        shard = parse_shard(name, values.shape)
        launched[name] = shard_sums(values, tuple(start for start, _ in shard.box), shard.shape)
    for sums in launched.values():
        sums.copy_to_host_async()
    found = {name: [int(each) for each in np.asarray(sums)] for name, sums in launched.items()}
    return _require_finite(
        {name: (_leaf_digest(shards[name], sums[:2]), sums[2]) for name, sums in found.items()}, version
    )


def _require_finite(measured: Mapping[str, tuple[LeafDigest, int]], version: int) -> dict[str, LeafDigest]:
    for path, (digest, wrong) in measured.items():
        if wrong:
            raise unfinite_error(version, path, digest, wrong)
    return {path: digest for path, (digest, _) in measured.items()}


def unfinite_error(version: int, path: str, digest: LeafDigest, wrong: int) -> PublicationError:
    """The error for a version in which `wrong` values of a leaf are NaN or infinite."""
    narrow = f", or use publication.dtype='float32' if {digest.dtype} cannot hold them"
    return PublicationError(
        f'weights of version {version}: {wrong} of the {math.prod(digest.shape)} values of {path!r} are NaN or '
        f'infinite: lower optimizer.learning_rate{"" if digest.dtype == "float32" else narrow}'
    )


def _measure(params: Tree) -> dict[str, tuple[LeafDigest, int]]:
    leaves = leaves_by_path(params)
    sums = _sum_shards(list(leaves.values()))
    return {
        path: (_leaf_digest(leaf, row[:2]), int(row[2])) for (path, leaf), row in zip(leaves.items(), sums, strict=True)
    }


def _sum_shards(leaves: Sequence[np.ndarray | jax.Array]) -> np.ndarray:
    """uint32 [leaves, 3], see `shard_sums`: each shard's device runs one program, and the host adds the results.

    One program over all devices would be a collective, which the lane of publication may not run during the learner's.
    Arrays in host memory are summed without a program, which would wait for the learner's.
    """
    sums, rows, launched = np.zeros((len(leaves), 3), np.uint32), [], []
    for row, leaf in enumerate(leaves):
        if (view := host_view(leaf)) is not None and (found := sum_words(view)) is not None:
            sums[row] = found
            continue
        for shard, start in _held_shards(leaf):
            rows.append(row)
            launched.append(shard_sums(shard, start, leaf.shape))
    for found in launched:
        found.copy_to_host_async()
    if launched:
        np.add.at(sums, rows, [np.asarray(found) for found in launched])
    return sums


def _held_shards(leaf: np.ndarray | jax.Array) -> Iterator[tuple[np.ndarray | jax.Array, tuple[int, ...]]]:
    """Yields the shards of a leaf that this process counts, each with its start position in the leaf."""
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        yield leaf, (0,) * leaf.ndim
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield shard.data, tuple(s.start or 0 for s in shard.index)


def host_manifest(params: Tree) -> dict[str, LeafDigest]:
    """The manifest of `device_manifest`, computed from numpy arrays without jax programs."""
    return {path: digest_leaf(np.asarray(leaf)) for path, leaf in leaves_by_path(params).items()}


def digest_leaf(leaf: np.ndarray, name: str = '', whole: np.ndarray | None = None) -> LeafDigest:
    """The digest of a leaf, or of the shard of this name; also copies the values to their places in `whole`, [n]."""
    return _leaf_digest(leaf, _host_sums(leaf, name, whole)[:2])


def merge_shards(manifest: Manifest) -> Manifest:
    """The manifest of whole leaves from one of shards: sums over a leaf are sums over its shards, mod 2^32."""
    if not any(is_shard(name) for name in manifest):
        return manifest
    merged: dict[str, LeafDigest] = {}
    for name, digest in manifest.items():
        shard = parse_shard(name, digest.shape)
        known = merged[shard.path].content if shard.path in merged else (0, 0)
        merged[shard.path] = LeafDigest(shard.shape, digest.dtype, add_sums(known, digest.content))
    return dict(sorted(merged.items()))


def manifest_hash(manifest: Manifest) -> str:
    """sha256, in hex, of the manifest's sorted JSON."""
    return hash_digests(encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> dict[str, EncodedDigest]:
    """Returns the manifest as a JSON-able dict."""
    return {
        path: EncodedDigest(shape=list(leaf.shape), dtype=leaf.dtype, content=list(leaf.content))
        for path, leaf in manifest.items()
    }


def decode_manifest(record: Mapping[str, Mapping[str, Any]]) -> dict[str, LeafDigest]:
    """The inverse of `encode_manifest`; raises KeyError, TypeError or ValueError for anything else."""
    return {path: _decode_leaf(path, leaf) for path, leaf in record.items()}


def _decode_leaf(path: str, leaf: Mapping[str, Any]) -> LeafDigest:
    shape, dtype, content = leaf['shape'], leaf['dtype'], leaf['content']
    if not isinstance(shape, list) or not all(type(axis) is int and 0 <= axis < 1 << 48 for axis in shape):
        raise ValueError(f'the shape of the leaf {path[:80]!r} is no list of sizes')
    if not isinstance(dtype, str) or [type(word) for word in content] != [int, int] or max(content) >> 32:
        raise ValueError(f'the dtype or the sums of the leaf {path[:80]!r} are none')
    return LeafDigest(tuple(shape), dtype, (content[0], content[1]))


def require_equal(sent: Manifest, received: Manifest, version: int) -> None:
    """Raises PublicationError that names the version, the first leaf that differs, and how."""
    for path in sorted({*sent, *received}):
        if sent.get(path) != received.get(path):
            raise PublicationError(
                f'weights of version {version}: leaf {path!r} is not what was published '
                f'(sent {sent.get(path, "nothing")}, received {received.get(path, "nothing")}). Publish the version '
                'again; if it happens again, check the memory or the disk that carries the weights'
            )


def weights_sha256(params: Tree) -> str:
    """sha256, in hex, over the bytes of all leaves in the order of their paths; for reports."""
    digest = hashlib.sha256()
    for leaf in leaves_by_path(params).values():
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data if np.size(leaf) else b'')
    return digest.hexdigest()


def change_of_sums(positions: np.ndarray, before: np.ndarray | None, after: np.ndarray) -> tuple[int, int]:
    """The increments, mod 2^32, of the two sums of a content when the elements at row-major `positions` change.

    `before` and `after` are the bits of these elements, uint [n]; before=None: they were not counted before.
    """
    spread = positions.astype(np.uint32) * np.uint32(_GOLDEN)
    scratch = np.empty_like(spread)
    plain = mixed = 0
    for sign, words in ((1, after), (-1, before)):
        if words is None:
            continue
        plain += sign * int(words.sum(dtype=np.uint64))
        found = spread + words
        _mix_in_place(found, scratch)
        mixed += sign * int(found.sum(dtype=np.uint64))
    return plain % 2**32, mixed % 2**32


def unfinite_bits(dtype: str) -> int:
    """The bits that are all set in NaN and infinity of 16-bit floats, and in no other value; 0 for other dtypes."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return 0
    return int(np.array(np.inf, jnp.dtype(dtype)).view(np.uint16))


def leaves_by_path(params: Tree) -> dict[str, jax.Array | np.ndarray]:
    """Leaves by path, sorted by path; raises PublicationError for elements above 32 bits."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for path, leaf in leaves.items():
        if np.dtype(leaf.dtype).itemsize not in _WORDS:
            raise PublicationError(
                f'leaf {path!r} has dtype {leaf.dtype}: elements above 32 bits are not published; cast it to float32'
            )
    return dict(sorted(leaves.items()))


def _leaf_digest(leaf: jax.Array | np.ndarray, pair: Iterable[SupportsInt]) -> LeafDigest:
    words, mixed = pair
    return LeafDigest(tuple(leaf.shape), str(leaf.dtype), (int(words), int(mixed)))


@functools.partial(jax.jit, static_argnums=(1, 2))  # compiled once for all leaves of a shape
def shard_sums(leaf: jax.Array, start: tuple[int, ...], whole: tuple[int, ...]) -> jax.Array:
    """uint32 [3]: the two sums of the content, and the number of values that are not finite.

    `leaf` is the shard that begins at `start` of a leaf of the shape `whole`.
    """
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    wrong = ~jnp.isfinite(leaf) if floating else jnp.zeros(leaf.shape, bool)
    if leaf.dtype == bool:
        leaf = leaf.astype(jnp.uint8)
    words = lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros(leaf.shape, jnp.uint32)  # in the whole leaf
    for axis, (first, size) in enumerate(zip(start, whole, strict=True)):
        within = lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        position = position * np.uint32(size) + (within + np.uint32(first) if first else within)
    mixed = _mix(words + position * np.uint32(_GOLDEN))
    values = words, mixed, wrong.astype(jnp.uint32)
    # one pass over the leaf: for three separate sums XLA:CPU would write the summands to memory, 40 times as slow
    add = lambda totals, more: tuple(total + one for total, one in zip(totals, more, strict=True))
    return jnp.stack(lax.reduce(values, (np.uint32(0),) * 3, add, tuple(range(leaf.ndim))))


def _host_sums(leaf: np.ndarray, name: str = '', whole: np.ndarray | None = None) -> tuple[int, int, int]:
    """Computes the numbers of `shard_sums` for a whole leaf on the host, or for the shard of this name."""
    leaf = np.ascontiguousarray(leaf)
    if is_shard(name):
        return _sum_runs(leaf, find_runs(*parse_shard(name, leaf.shape).bounds), whole)
    if (found := sum_words(leaf, target=whole)) is not None:
        return found
    words = leaf.reshape(-1).view(_WORDS[leaf.dtype.itemsize])
    if whole is not None:
        np.copyto(whole, words)
    return *_sum_blocks(words), _count_unfinite(leaf)


def sum_content(words: np.ndarray) -> tuple[int, int]:
    """Returns the two sums of a content whose words these are, uint32 [n], at any address."""
    words = np.require(words, requirements=['ALIGNED', 'C'])
    found = sum_words(words)
    return _sum_blocks(words) if found is None else found[:2]


def _sum_runs(leaf: np.ndarray, runs: Runs, whole: np.ndarray | None) -> tuple[int, int, int]:
    """Computes the numbers of `shard_sums` for values whose positions are the runs."""
    totals, flat = np.zeros(3, np.uint64), leaf.reshape(-1)
    size = runs.rows * runs.width
    for number, start in enumerate(runs.starts):
        part = flat[number * size : (number + 1) * size]
        found = sum_words(part, (runs.rows, runs.width), start, runs.stride, whole)
        if found is None:
            words = part.view(_WORDS[leaf.dtype.itemsize])
            positions = runs.positions(np.arange(number * size, (number + 1) * size))
            found = *change_of_sums(positions, None, words), _count_unfinite(part)
            if whole is not None:
                whole[positions] = words
        totals += np.array(found, np.uint64)
    return int(totals[0]) % 2**32, int(totals[1]) % 2**32, int(totals[2])


def _count_unfinite(leaf: np.ndarray) -> int:
    return leaf.size - int(np.count_nonzero(np.isfinite(leaf))) if jnp.issubdtype(leaf.dtype, jnp.floating) else 0


def _sum_blocks(words: np.ndarray) -> tuple[int, int]:
    """Computes the two sums of the content with numpy, for hosts without the kernel library."""
    size = min(words.size, _BLOCK)
    spread = np.arange(size, dtype=np.uint32) * np.uint32(_GOLDEN)  # of the positions in a block
    values, scratch = np.empty((2, size), np.uint32)  # reused: allocating them per block would cost as much as the sums
    plain = mixed = 0
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        found = values[: block.size]
        np.add(spread[: block.size], np.uint32(start * _GOLDEN % 2**32), out=found)
        np.add(found, block, out=found)
        _mix_in_place(found, scratch[: block.size])
        plain += int(block.sum(dtype=np.uint64))
        mixed += int(found.sum(dtype=np.uint64))
    return plain % 2**32, mixed % 2**32


def _mix_in_place(words: np.ndarray, scratch: np.ndarray) -> None:
    """Applies `_mix` to uint32 [n] in place; `scratch` has the same size."""
    for shift, factor in ((16, _FIRST_FACTOR), (13, _SECOND_FACTOR), (16, 1)):
        np.right_shift(words, np.uint32(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor != 1:
            np.multiply(words, np.uint32(factor), out=words)


def _mix(words: jax.Array) -> jax.Array:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(_FIRST_FACTOR)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(_SECOND_FACTOR)
    return words ^ (words >> np.uint32(16))
