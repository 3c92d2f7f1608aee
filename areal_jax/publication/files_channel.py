"""Publication through the file system: a directory of Hugging Face safetensors per version, for servers to load.

app/parts/engines.py builds the channel for publication.channel=files, and a server loads versions with `find_version`
and `load_version`. export.py writes, versions.py names and locks directories, manifest.py checks the values.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from areal_jax import files
from areal_jax.formats.hf_directory import load_hf_weights, map_hf_weights
from areal_jax.formats.hf_export import HfCompanions, HfFiles, plan_hf_files
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.publication.export import PartWriter, write_hf_directory
from areal_jax.publication.manifest import (
    LeafDigest,
    Manifest,
    Mover,
    UnchangedLeaves,
    by_path,
    decode_manifest,
    device_manifest,
    encode_manifest,
    finite_host_manifest,
    finite_manifest,
    host_manifest,
    manifest_hash,
    require_equal,
)
from areal_jax.publication.versions import (
    MANIFEST,
    PublicationError,
    clear_versions,
    keep_while_read,
    parse_version,
    remove_old_versions,
    version_path,
)
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import is_shared
from areal_jax.types import PublishedWeights, Tree


@dataclasses.dataclass(frozen=True)
class _Version:
    params: Tree
    manifest: dict[str, LeafDigest]


class DeviceChannel:
    """protocols.Channel over device memory.

    The weights of a version are held once until they are released. Engines on the device that holds them share that
    copy, so they must not donate it; every other engine gets a copy on its own devices. Leaves that are the same arrays
    as in the last version are not moved again, and their digests are not recomputed.

    Args:
      device: where `transfer` moves the weights; None = they stay on the devices of the learner, sharded as they are.
      verify: `receive` recomputes the digest of every leaf.
      keeps_newest: whether engines may receive a version after `release` was told that all of them have it. If not,
        its copy is dropped before the update that follows.
    """

    def __init__(self, device: jax.Device | None = None, *, verify: bool, keeps_newest: bool = True):
        self._verify, self._keeps_newest = verify, keeps_newest
        self._versions: dict[int, _Version] = {}
        self._digests: UnchangedLeaves[LeafDigest] = UnchangedLeaves()
        self._mover = None if device is None else Mover(device)
        self._movers: list[tuple[Place, Mover]] = []  # of the engines, each for its place
        self.carried_bytes = 0  # of the leaves that the last `transfer` found changed

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """Holds `copy`, whose buffers no later update touches; returns when it is on the channel's device.

        Raises PublicationError for weights with NaN or infinity.
        """
        params = copy if self._mover is None else self._mover.move(copy)
        leaves = by_path(params)
        known = self._digests.find(leaves)
        changed = {path: leaf for path, leaf in leaves.items() if path not in known}
        manifest = known | finite_manifest(changed, version)
        self._digests.note(leaves, manifest)
        self.carried_bytes = sum(leaf.nbytes for leaf in changed.values())
        self._versions[version] = _Version(jax.block_until_ready(params), manifest)
        return PublishedWeights(version, manifest_hash(manifest), handle=version)

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Tree:
        """Returns the weights, a nested dict of jax arrays, at `place`; None = where the channel holds them.

        Returns after they have arrived. Raises PublicationError for a version that was released or that another channel
        published, and for a leaf that changed.
        """
        held = self._versions.get(published.version)
        if held is None or manifest_hash(held.manifest) != published.manifest_hash:
            raise PublicationError(
                f'weights of version {published.version} (manifest {published.manifest_hash[:12]}) are not in this '
                f'channel, which holds {sorted(self._versions)}: receive a version before it is released, from the '
                'channel that transferred it'
            )
        params = held.params if place is None else jax.block_until_ready(self._mover_to(place).move(held.params))
        if self._verify:
            require_equal(held.manifest, device_manifest(params), published.version)
        return params

    def _mover_to(self, place: Place) -> Mover:
        """Returns the mover of an engine's place; engines fetch from several threads, each engine in order."""
        for known, mover in self._movers:
            if known is place:
                return mover
        self._movers.append((place, mover := Mover(place)))
        return mover

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Drops the channel's references to versions below `version`, except the `pinned` ones.

        `version` itself, which all engines have, is kept only with `keeps_newest`.
        """
        lowest = version if self._keeps_newest else version + 1
        self._versions = {v: held for v, held in self._versions.items() if v >= lowest or v in pinned}


_FOREIGN = ''  # manifest hash of a directory that another program wrote


class VersionWriter(Protocol):
    """Another process that holds leaves of the version being written (distributed/remote_learner.py)."""

    def write(self, directory: str, version: int) -> None:
        """Tells the process to begin to write its leaves."""
        ...

    def written(self) -> Mapping[str, Mapping[str, object]] | str:
        """Waits until the leaves are written; returns their manifest, or one sentence that says why it failed."""
        ...


class FilesChannel:
    """protocols.Channel over directories `v000007/` of `model.safetensors`, `config.json` and `manifest.json`.

    A version gets its name after all of it is on the disk. Only one channel at a time may use the directory.

    Args:
      verify: `receive` recomputes the digest of every leaf.
      companions: tokenizer and so on, written with each version so that a server can start from any of them.
      writers: the other processes of a learner that spans several; they hold leaves of each version too.
      file_of: see `plan_hf_files`. A file whose leaves are all arrays of the last version is not written again but
        hard-linked to that version's file. None = one file.
      separate_head: see `plan_hf_files`; a reader that knows the model's own config reads the same weights.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: ModelConfig,
        *,
        verify: bool,
        companions: HfCompanions | None = None,
        writers: Sequence[VersionWriter] = (),
        separate_head: bool = False,
        file_of: Callable[[str], int] | None = None,
    ):
        self._file_of, self._last = file_of, -1  # version that was transferred last
        self._digests: UnchangedLeaves[LeafDigest] = UnchangedLeaves()
        self.carried_bytes = 0  # of the leaves that the last `transfer` wrote
        self._directory, self._config, self._separate_head = pathlib.Path(directory), config, separate_head
        self._verify, self._companions = verify, companions or HfCompanions()
        self._parts, self._writers = PartWriter(config, companions, separate_head=separate_head), writers

    def transfer(self, version: int, copy: Params) -> PublishedWeights:
        """Writes `copy` as a directory; handle = its absolute path. A tree of SharedLeaf is written by all processes.

        Removes directories of this and later versions: the run wrote them before it was resumed from an older
        checkpoint.
        Raises PublicationError for weights with NaN or infinity, lack of space, a failed write, or a foreign directory
        in the way.
        """
        if is_shared(copy):
            return self._transfer_shares(version, copy)
        leaves = by_path(copy)
        known = self._digests.find(leaves)
        copy = jax.tree.map(np.asarray, copy)  # numpy arrays do not wait for the update that is under way
        changed = {path: leaf for path, leaf in by_path(copy).items() if path not in known}
        manifest = known | finite_host_manifest(changed, version)
        digest = manifest_hash(manifest)
        clear_versions(self._directory, version)
        target = version_path(self._directory.absolute(), version)
        record = {'format': 1, 'version': version, 'manifest_hash': digest, 'leaves': encode_manifest(manifest)}
        plan = plan_hf_files(
            copy,
            self._config,
            file_of=self._file_of,
            companions=self._companions,
            separate_head=self._separate_head,
        )
        links = self._find_links(plan, known)
        write_hf_directory(target, plan, {MANIFEST: record}, links=links)
        self._digests.note(leaves, manifest)
        self._last = version
        self.carried_bytes = plan.weight_bytes(set(plan.weights) - set(links))
        return PublishedWeights(version, digest, handle=str(target))

    def _find_links(self, plan: HfFiles, known: Collection[str]) -> dict[str, pathlib.Path]:
        """The files of the last version that this version shares, by name: all their leaves are `known`."""
        if self._file_of is None:
            return {}
        before = version_path(self._directory.absolute(), self._last)
        leaves = {
            name: {tensor.path for key in tensors for tensor in plan.tensors[key]}
            for name, tensors in plan.weights.items()
        }
        kept = [name for name, paths in leaves.items() if paths <= set(known)]
        return {name: before / name for name in kept if (before / name).is_file()}

    def _transfer_shares(self, version: int, copy: Tree) -> PublishedWeights:
        directory = str(self._directory.absolute())
        self._parts.begin(directory, version, copy)
        for writer in self._writers:
            writer.write(directory, version)
        try:
            manifest: dict[str, Mapping[str, object]] = {**self._parts.write(directory, version, copy)}
        finally:
            written = [writer.written() for writer in self._writers]  # on failure too: afterwards no thread writes
        for outcome in written:
            if isinstance(outcome, str):
                raise PublicationError(outcome)
            manifest |= outcome
        digest, path = self._parts.finish(directory, version, copy, manifest)
        return PublishedWeights(version, digest, handle=path)

    def map_version(self, version: int) -> Params:
        """The weights of a version on the disk, as numpy arrays that are read when they are used.

        Raises HfError if the directory is missing or damaged.
        """
        return map_hf_weights(version_path(self._directory, version), self._config)

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Params:
        """See `load_version`."""
        return load_version(published, self._config, place, verify=self._verify)

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """See `versions.remove_old_versions`."""
        remove_old_versions(self._directory, version, pinned)


def find_version(directory: str | os.PathLike[str], version: int) -> PublishedWeights:
    """Describes the weights that a server is told to load by the path of their directory.

    A directory that another program wrote has no manifest and so no digests; `load_version` checks that its files are
    complete.

    Raises PublicationError for a directory that holds another version, or one of ours whose manifest is missing.
    """
    path = pathlib.Path(directory)
    if not (path / MANIFEST).exists() and path.is_dir() and parse_version(path) is None:
        return PublishedWeights(version, _FOREIGN, handle=str(path))
    try:
        held, manifest = parse_manifest(files.read_regular(path / MANIFEST))
    except Exception as error:  # JSON of any other form
        raise not_as_published(path, version, error) from error
    if held != version:
        raise PublicationError(
            f'{path} holds version {held}, and version {version} was asked for: name the directory of version {version}'
        )
    return PublishedWeights(version, manifest_hash(manifest), handle=str(path))


def load_version(
    published: PublishedWeights, config: ModelConfig, place: Place | None = None, *, verify: bool
) -> Params:
    """Loads the weights as a nested dict of jax arrays, at `place`; None = the default device.

    The directory is not removed while it is read. `verify` recomputes the digest of every leaf: servers always do.

    Raises PublicationError for a directory that is missing, torn, foreign or of other weights.
    """
    directory = pathlib.Path(published.handle)
    shardings = jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place
    try:
        if published.manifest_hash == _FOREIGN:
            return load_hf_weights(directory, config, shardings=shardings)
        with keep_while_read(directory) as content:
            held, manifest = parse_manifest(content)
            found = manifest_hash(manifest)
            if found != published.manifest_hash or held != published.version:
                raise PublicationError(
                    f'{published.handle} holds weights of version {held} with manifest {found[:12]}, version '
                    f'{published.version} was published with {published.manifest_hash[:12]}: give every run a '
                    'publication.directory of its own'
                )
            params = load_hf_weights(directory, config, shardings=shardings)
    except PublicationError:
        raise
    except Exception as error:  # the readers raise many types for damaged files
        raise not_as_published(directory, published.version, error) from error
    if verify:
        require_equal(manifest, host_manifest(params), published.version)
    return params


def parse_manifest(content: bytes) -> tuple[int, Manifest]:
    """Returns (version, manifest) of a manifest file; raises exceptions of many types for any other content."""
    record = json.loads(content)
    manifest, version = decode_manifest(record['leaves']), record['version']
    if record['manifest_hash'] != manifest_hash(manifest) or type(version) is not int:
        raise ValueError(f'{MANIFEST} contradicts itself')
    return version, manifest


def not_as_published(directory: pathlib.Path, version: int, error: Exception) -> PublicationError:
    return PublicationError(
        f'{directory} does not hold version {version} as it was published ({type(error).__name__}: {error}): receive a '
        'version before it is released, and let nothing else write there'
    )
