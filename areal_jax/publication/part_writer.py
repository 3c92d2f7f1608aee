"""One version of the weights on the disk, written by several processes: each whole leaves in a file of its own.

begin       one process makes the hidden directory, once there is room
write       every process writes the file of its leaves, and says their digests
finish      the first one writes everything else, and gives the directory its name
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from areal_jax import files
from areal_jax.formats.hf_export import HfCompanions, HfFiles, plan_hf_files
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import leaf_at
from areal_jax.publication.export import finish_directory, open_directory, writing
from areal_jax.publication.manifest import decode_manifest, encode_manifest, finite_host_manifest, manifest_hash
from areal_jax.publication.versions import MANIFEST, PublicationError, clear_versions, version_path
from areal_jax.sharding.rules import SharedLeaf, path_name
from areal_jax.types import Tree


class PartWriter:
    """Writes the part of this process. `directory` holds all versions; `copy` is the version.

    It is a tree of SharedLeaf, or in a learner of one process of arrays.

    Args:
      companions: tokenizer and so on, which the process that finishes writes with each version.
      separate_head: see `plan_hf_files`; the same in all processes.
    """

    def __init__(self, config: ModelConfig, companions: HfCompanions | None = None, *, separate_head: bool = False):
        self._config, self._companions, self._separate_head = config, companions, separate_head

    def begin(self, directory: str, version: int, copy: Tree) -> None:
        """Removes this and later versions, which the run wrote before it was resumed, and begins a new one.

        Raises PublicationError for lack of space and for a foreign directory in the way.
        """
        clear_versions(pathlib.Path(directory), version)
        open_directory(version_path(pathlib.Path(directory), version), self._plan(copy).nbytes)

    def write(self, directory: str, version: int, copy: Tree) -> dict[str, dict[str, object]]:
        """Writes the leaves of this process, one at a time, and returns their part of the manifest.

        Fetches each of its leaves once, and none of another process.
        Raises PublicationError for NaN or infinity, a failed write, and a directory that is not seen from here.
        """
        target = version_path(pathlib.Path(directory), version)
        partial = files.partial_name(target)
        if not partial.is_dir():
            raise PublicationError(
                f'process {jax.process_index()} does not see {partial}, which another process made: let all processes '
                'share publication.directory under one path'
            )
        manifest: dict[str, dict[str, object]] = {}

        def fetch(path: str) -> np.ndarray:
            leaf = leaf_at(copy, path)
            whole = leaf.join() if isinstance(leaf, SharedLeaf) else np.asarray(leaf)
            manifest.update(encode_manifest(finite_host_manifest({path: whole}, version)))
            return whole

        plan = self._plan(copy)
        with writing(target, remove=False):  # others are writing there
            for name in self._own_files(plan, copy):
                plan.write_weights(partial, name, fetch)
        return manifest

    def finish(
        self, directory: str, version: int, copy: Tree, manifest: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, str]:
        """(manifest hash, path) of the version, which gets its name; `manifest` covers all processes.

        Raises PublicationError for a leaf that no process wrote, and a failed write.
        """
        plan, target = self._plan(copy), version_path(pathlib.Path(directory), version)
        leaves = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(copy)]
        if absent := sorted(set(leaves) - set(manifest)):
            raise PublicationError(f'writing {target} failed: no process wrote the leaf {absent[0]!r}')
        digest = manifest_hash(decode_manifest(manifest))
        record = {'format': 1, 'version': version, 'manifest_hash': digest, 'leaves': dict(manifest)}
        with writing(target):
            finish_directory(target, plan, {MANIFEST: record})
        return digest, str(target)

    def _plan(self, copy: Tree) -> HfFiles:
        owner = lambda path: _find_owner(leaf_at(copy, path))
        return plan_hf_files(
            copy, self._config, file_of=owner, companions=self._companions, separate_head=self._separate_head
        )

    def _own_files(self, plan: HfFiles, copy: Tree) -> list[str]:
        """One, or none where there are more processes than leaves."""
        owners = sorted({_find_owner(leaf) for leaf in jax.tree.leaves(copy)})
        return [name for name, owner in zip(plan.weights, owners, strict=True) if owner == jax.process_index()]


def _find_owner(leaf: SharedLeaf | jax.Array | np.ndarray) -> int:
    return leaf.owner if isinstance(leaf, SharedLeaf) else 0
