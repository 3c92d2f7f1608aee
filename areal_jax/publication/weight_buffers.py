"""One version of the weights in reusable memory, which jax arrays use without a copy.

On a CPU jax takes an aligned numpy array without a copy, so a version may be overwritten only while no array over it is
alive: not in an engine, not in a request that is pinned to a version, not in a dispatch under way. Each array that is
lent is tracked by a weak reference.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import shutil
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from areal_jax.files import remove_directory
from areal_jax.formats.hf_config import CONFIG, read_hf_config
from areal_jax.formats.hf_export import COMPANIONS, HfCompanions, plan_hf_files
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import is_float32
from areal_jax.publication.delta import Changes, apply_changes, apply_wide, decode_changes
from areal_jax.publication.export import write_hf_directory
from areal_jax.publication.files_channel import not_as_published, parse_manifest
from areal_jax.publication.manifest import (
    LeafDigest,
    digest_leaf,
    encode_manifest,
    manifest_hash,
    require_equal,
)
from areal_jax.publication.record import Held, Part, Record, RecordHeader, RecordReceiver, put_leaf
from areal_jax.publication.shard_plan import Shard, parse_shard
from areal_jax.publication.versions import MANIFEST, PublicationError, add_sums, list_versions, version_path
from areal_jax.types import Tree

_Wide: TypeAlias = tuple[Shard, Part]
_LINE = 64  # bytes of alignment at which jax takes an array without a copy


@dataclasses.dataclass(frozen=True)
class Delta:
    """A decoded delta record, which several sets of buffers can apply and revert."""

    header: RecordHeader
    base: Held
    changes: Mapping[str, Sequence[Changes]]  # of the leaves of 16-bit elements that changed; several of one in shards
    wide: Mapping[str, Sequence[tuple[Shard, Part]]]  # of leaves of 32-bit elements, see delta.encode_wide

    @property
    def held(self) -> Held:
        """The version that a reader holds after applying the delta."""
        return Held(self.header.version, self.header.manifest_hash)


def decode_delta(record: Record) -> Delta:
    """Decodes a delta; raises PublicationError for a damaged part, and for leaves that should have 16-bit elements."""
    header = record.header
    changes, wide = collections.defaultdict[str, list[Changes]](list), collections.defaultdict[str, list[_Wide]](list)
    assert header.base is not None
    for (name, digest), part in zip(sorted(header.leaves.items()), record.parts, strict=True):
        shard = parse_shard(name, digest.shape)
        path = shard.path
        if jnp.dtype(digest.dtype).itemsize != 2 and not is_float32(path):
            raise PublicationError(
                f'the delta of version {header.version} has the leaf {path!r} in {digest.dtype}: only 16-bit elements '
                "have deltas; use publication.dtype='bfloat16' on both sides"
            )
        if len(part) and is_float32(path):
            wide[path].append((shard, part))
        elif len(part):
            changes[path].append(decode_changes(part, math.prod(shard.shape)))
    return Delta(header, header.base, changes, wide)


class WeightBuffers:
    """The bits of every leaf of one version, and its manifest.

    Args:
      transposed: paths of matrices that are stored transposed, as the engine takes them.
    """

    def __init__(self, transposed: Collection[str] = ()):
        self.held: Held | None = None  # None: nothing that can be relied on
        self._transposed = frozenset(transposed)
        self.manifest: dict[str, LeafDigest] = {}
        self._memory: dict[str, np.ndarray] = {}  # uint8 [bytes], by path
        self._lent: list[weakref.ref[np.ndarray]] = []

    @property
    def in_use(self) -> bool:
        """Whether an array over the buffers is alive anywhere."""
        self._lent = [lent for lent in self._lent if lent() is not None]
        return bool(self._lent)

    def lend(self) -> dict[str, np.ndarray]:
        """Returns the leaves by path, as the engine takes them; no write is allowed while a view of them is alive."""
        lent = {}
        for path, digest in self.manifest.items():
            # its base is no array, so views of the leaf keep the leaf itself alive: the buffer is not written meanwhile
            leaf = np.frombuffer(self._memory[path].data, jnp.dtype(digest.dtype))
            self._lent.append(weakref.ref(leaf))
            lent[path] = leaf.reshape(digest.shape[::-1] if path in self._transposed else digest.shape)
        return lent

    def load(self, record: Record) -> None:
        """Copies a whole record; raises PublicationError if its computed digests are not the header's."""
        self._require_free()
        self.held, header = None, record.header
        found = {}
        for (name, digest), part in zip(sorted(header.leaves.items()), record.parts, strict=True):
            dtype, shard = jnp.dtype(digest.dtype), parse_shard(name, digest.shape)
            if len(part) != shard.size * dtype.itemsize:
                raise PublicationError(
                    f'weights of version {header.version}: leaf {name!r} has {len(part)} bytes, and {digest} has '
                    f'{shard.size * dtype.itemsize}: publish the version again'
                )
            values = np.frombuffer(part, dtype).reshape(digest.shape)
            if shard.path in self._transposed:
                found[name] = digest_leaf(values, name)
                np.copyto(self._view(shard, dtype), values.view(_words(dtype)))
            else:
                found[name] = digest_leaf(values, name, self._words(shard, dtype))
        require_equal(header.leaves, found, header.version)
        manifest = dict(header.manifest)
        for path in self._memory.keys() - manifest.keys():
            del self._memory[path]
        self.manifest, self.held = manifest, Held(header.version, header.manifest_hash)

    def apply(self, delta: Delta, *, back: bool = False) -> None:
        """Advances to the version of the delta, or with `back` returns to its base; compares the digests.

        Raises PublicationError if the buffers hold another version than the delta starts from, and if the digests
        differ from the record's; after different digests `held` is None.
        """
        self._require_free()
        start, end = (delta.held, delta.base) if back else (delta.base, delta.held)
        if self.held != start:
            raise PublicationError(
                f'the delta of version {delta.header.version} is for {_describe(start)}, and {_describe(self.held)} is '
                'held: take the versions in their order'
            )
        after = delta.header.manifest
        if after.keys() != self.manifest.keys():
            raise PublicationError(f'the delta of version {delta.header.version} has other leaves than its base')
        self.held, found = None, dict(self.manifest)
        for path, several in delta.changes.items():
            rows = found[path].shape[0] if path in self._transposed else 0
            for changes in several:
                digest = found[path]
                sums = apply_changes(self._memory[path].view(np.uint16), changes, rows=rows, back=back)
                found[path] = dataclasses.replace(digest, content=add_sums(digest.content, sums))
        for path, parts in delta.wide.items():
            dtype = jnp.dtype(found[path].dtype)
            for shard, part in parts:
                apply_wide(self._view(shard, dtype), part, back=back)
            found[path] = digest_leaf(self._memory[path].view(dtype).reshape(found[path].shape))
        if back and manifest_hash(found) != end.manifest_hash:
            raise PublicationError(f'version {end.version} is not what was published: take it from its whole record')
        if not back:
            require_equal(after, found, end.version)
        self.manifest, self.held = found, end

    def copy_from(self, other: WeightBuffers) -> None:
        """Copies the version of `other`, which may be in use."""
        self._require_free()
        self.held = None
        for path, memory in other._memory.items():
            np.copyto(self._room(path, memory.size), memory)
        self.manifest, self.held = dict(other.manifest), other.held

    def require_published(self) -> None:
        """Recomputes the digest of every leaf; raises PublicationError if something else has changed the memory."""
        found = {}
        for path, digest in self.manifest.items():
            leaf = self._memory[path].view(jnp.dtype(digest.dtype))
            lies = leaf.reshape(digest.shape[::-1]).T if path in self._transposed else leaf.reshape(digest.shape)
            found[path] = digest_leaf(lies)
        try:
            require_equal(self.manifest, found, -1 if self.held is None else self.held.version)
        except PublicationError:
            self.held = None
            raise

    def _room(self, path: str, nbytes: int) -> np.ndarray:
        """Returns the memory of a leaf; allocates it if there is none of that size."""
        memory = self._memory.get(path)
        if memory is None or memory.size != nbytes:
            raw = np.empty(nbytes + _LINE, np.uint8)
            first = -raw.ctypes.data % _LINE
            self._memory[path] = memory = raw[first : first + nbytes]
        return memory

    def _words(self, shard: Shard, dtype: np.dtype) -> np.ndarray:
        """Returns the memory of the leaf of a shard, as words of the width of `dtype`."""
        return self._room(shard.path, math.prod(shard.shape) * dtype.itemsize).view(_words(dtype))

    def _view(self, shard: Shard, dtype: np.dtype) -> np.ndarray:
        """Returns the memory of a shard as words of the width of `dtype`, in the axes of the leaf."""
        words = self._words(shard, dtype)
        is_turned = shard.path in self._transposed
        leaf = words.reshape(shard.shape[::-1]).T if is_turned else words.reshape(shard.shape)
        return leaf[shard.slices] if shard.shape else leaf

    def _require_free(self) -> None:
        assert not self.in_use, 'buffers that an array of jax uses are not written'


def _words(dtype: np.dtype) -> np.dtype:
    """The unsigned dtype of the same width, whose elements numpy copies without interpreting them."""
    return np.dtype(f'u{dtype.itemsize}')


def _describe(held: Held | None) -> str:
    return 'nothing' if held is None else f'version {held.version} (manifest {held.manifest_hash[:12]})'


# Makes Hugging Face directories from records, on the disk of a server that can load nothing else.
#
# A reader of a chain of records (record.py): it holds the bits of the newest version, applies the changes since, and
# writes the directory that a server then loads. app/roles/receiver.py runs one next to each such server.


_KEPT = 2  # directories: the version in use, which a server may load again, and the next one
_HEAD = 'head'


@dataclasses.dataclass(frozen=True)
class Template:
    """The parts that all versions of a run share.

    Args:
      source: a directory with config.json, the tokenizer and the other files of the model.
      config: of the model, as the learner has it.
      separate_head: whether a head that is tied to the embedding is also written as a separate tensor.
    """

    source: pathlib.Path
    config: ModelConfig
    separate_head: bool


def copy_template(version: pathlib.Path, target: pathlib.Path) -> Template:
    """Copies the files of a version except its weights to `target`, because the learner removes old versions.

    Raises PublicationError for a directory that no run has published, HfError for another model's config.
    """
    try:
        _, manifest = parse_manifest((version / MANIFEST).read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_as_published(version, -1, error) from error
    target.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, *COMPANIONS):
        if (version / name).is_file():
            shutil.copyfile(version / name, target / name)
    stored, tied = read_hf_config(target), _HEAD not in manifest
    return Template(target, dataclasses.replace(stored, tie_embeddings=tied), tied and not stored.tie_embeddings)


class HfReceiver:
    """Makes directories of versions under `directory`. Calls may come from several threads; one runs at a time.

    Args:
      receiver: of the records.
      template: its files go into every directory; all versions have its config and head.
    """

    def __init__(self, receiver: RecordReceiver, template: Template, directory: pathlib.Path):
        self._receiver, self._template, self._directory = receiver, template, directory
        self._buffers, self._lock = WeightBuffers(), threading.Lock()
        self._written: Held | None = None  # the newest directory

    @property
    def held(self) -> Held | None:
        """The version in memory; None: nothing that can be relied on."""
        return self._buffers.held

    def bring(self, version: int, manifest_hash: str) -> pathlib.Path:
        """Returns the directory of a version, and writes it unless it is there.

        If deltas do not lead to this manifest, fetches the chain from its whole record on, once.

        Raises PublicationError for a version that is missing or not as it was published, and for a full disk; the
        directories of earlier versions do not change.
        """
        wanted = Held(version, manifest_hash)
        with self._lock:
            if self._written == wanted:
                return version_path(self._directory, version)
            self._hold(wanted)
            target = self._write(wanted)
            self._written = wanted
            self._remove_old(version)
            self._receiver.acknowledge(wanted)
            return target

    def close(self) -> None:
        self._receiver.close()

    def _hold(self, wanted: Held) -> None:
        if self._buffers.in_use:  # an error that is still being reported may refer to the buffers
            self._buffers = WeightBuffers()
        first, held = None, self._buffers.held
        if held is not None and held.version < wanted.version:
            try:
                self._receiver.fetch(wanted.version, held, self._consume)
            except PublicationError as error:
                first = error
        if self._buffers.held != wanted:
            try:
                self._receiver.fetch(wanted.version, None, self._consume)
            except PublicationError as error:
                raise error from first
        if self._buffers.held != wanted:
            found, self._buffers.held = self._buffers.held, None
            raise PublicationError(
                f'version {wanted.version} with manifest {wanted.manifest_hash[:12]} was asked for, and its records '
                f'lead to {found}: give every run a publication.directory of its own'
            )

    def _consume(self, record: Record) -> None:
        if record.header.base is None:
            self._buffers.load(record)
        else:
            self._buffers.apply(decode_delta(record))

    def _write(self, wanted: Held) -> pathlib.Path:
        template, target = self._template, version_path(self._directory, wanted.version)
        tree: dict[str, Tree] = {}
        for path, leaf in self._buffers.lend().items():
            put_leaf(tree, path, leaf)
        plan = plan_hf_files(
            tree,
            template.config,
            companions=HfCompanions(source=template.source),
            separate_head=template.separate_head,
        )
        manifest = {
            'format': 1, 'version': wanted.version, 'manifest_hash': wanted.manifest_hash,
            'leaves': encode_manifest(self._buffers.manifest),
        }  # fmt: skip
        write_hf_directory(target, plan, {MANIFEST: manifest}, elsewhere='name another --directory')
        return target

    def _remove_old(self, version: int) -> None:
        """Keeps the newest two versions up to `version`; removes all others, and so those from before a resume."""
        made = list_versions(self._directory)
        kept = sorted(v for v in made if v <= version)[-_KEPT:]
        for v, path in made.items():
            if v not in kept:
                remove_directory(path)
