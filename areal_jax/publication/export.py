"""Writes weights as directories that transformers and vllm load: published versions, and the final export of a run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from areal_jax import files
from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import INDEX, WEIGHT_DTYPES, WEIGHTS
from areal_jax.formats.hf_export import HfCompanions, HfFiles, plan_hf_files, write_record
from areal_jax.formats.safetensors_file import SafetensorsError
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Params, leaf_at
from areal_jax.publication.manifest import decode_manifest, encode_manifest, finite_host_manifest, manifest_hash
from areal_jax.publication.versions import MANIFEST, EncodedDigest, PublicationError, clear_versions, version_path
from areal_jax.sharding.rules import SharedLeaf, path_name
from areal_jax.types import Tree

ANOTHER = 'name another publication.directory'


def write_hf_directory(
    target: pathlib.Path,
    contents: HfFiles,
    records: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: str = ANOTHER,
    announce: files.Announce = files.announce_nothing,
    links: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Writes planned files and JSON `records` by file name; an earlier directory of the same name is replaced.

    `elsewhere` is the alternative to making room that errors name for a full disk. `announce` gets the bytes written.
    `links` names files on the same disk that already hold the content of a file; they are hard-linked instead of
    written, if the file system has hard links.

    Raises PublicationError for a directory in the way that holds no weights, for lack of space (naming needed and
    free bytes), for a failed write, and for values that the dtype of the files cannot hold.
    """
    partial = open_directory(target, contents.nbytes, elsewhere)
    done, total = 0, contents.nbytes

    def note(nbytes: int) -> None:
        nonlocal done
        announce(done, total)
        done += nbytes

    with writing(target, elsewhere):
        for name in contents.weights:
            if not (links and name in links and _link(links[name], partial / name)):
                contents.write_weights(partial, name, note=note)
        finish_directory(target, contents, records)


def _link(source: pathlib.Path, target: pathlib.Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def open_directory(target: pathlib.Path, nbytes: int, elsewhere: str = ANOTHER) -> pathlib.Path:
    """Makes an empty hidden directory in which to write `target`; raises PublicationError as `write_hf_directory`."""
    if target.exists() and not any((target / name).exists() for name in (WEIGHTS, INDEX)) and any(target.iterdir()):
        raise PublicationError(
            f'{target} exists and holds no {WEIGHTS}: it is not ours to replace; choose another name'
        )
    partial = files.partial_name(target)
    with writing(target, elsewhere):
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free_space(target, nbytes, elsewhere)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    return partial


def finish_directory(
    target: pathlib.Path, contents: HfFiles, records: Mapping[str, Mapping[str, object]] | None = None
) -> None:
    """Writes all files but the weights, which are there, and names the directory `target`. Use it inside `writing`."""
    partial = files.partial_name(target)
    for name, record in (records or {}).items():
        write_record(partial / name, record)
    contents.write_rest(partial)  # syncs the records too
    if target.exists():
        files.remove_directory(target)
    partial.rename(target)
    files.sync(target.parent)


@contextlib.contextmanager
def writing(target: pathlib.Path, elsewhere: str = ANOTHER, *, remove: bool = True) -> Iterator[None]:
    """Raises PublicationError if the block fails for a reason that the user can fix.

    `remove`: removes the files written for `target` in that case.
    """
    try:
        yield
    except (OSError, PublicationError, HfError, SafetensorsError) as error:
        if remove:
            shutil.rmtree(files.partial_name(target), ignore_errors=True)
        if isinstance(error, PublicationError):
            raise
        if isinstance(error, OSError):
            raise PublicationError(
                f'writing {target} failed ({error}); the disk has {files.free_bytes(target.parent)} bytes free. '
                f'Make room or {elsewhere}'
            ) from error
        raise PublicationError(f'writing {target} failed: {error}') from error


def _require_free_space(target: pathlib.Path, needed: int, elsewhere: str) -> None:
    free = files.free_bytes(target.parent)
    if free < needed:
        raise PublicationError(
            f'writing {target} failed: {target.parent} has {free} bytes free, one version of the weights needs '
            f'{needed}: make room or {elsewhere}'
        )


FILE_BYTES = 5_000_000_000  # largest file of weights


def export_hf(
    directory: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    dtype: str,
    file_bytes: int | None = None,
    companions: HfCompanions | None = None,
    announce: Announce = announce_nothing,
) -> None:
    """Writes `config.json` and safetensors, atomically; replaces an earlier export.

    vllm 0.32 does not support two configs that transformers runs. It refuses Qwen models with windows in some layers
    only. For qwen2 it assumes head_dim = d_model / n_heads, and silently computes wrong results for any other head_dim.

    Args:
      params: nested dict of arrays in list form, without adapters.
      dtype: of the files: float32, bfloat16 or float16.
      file_bytes: more bytes of weights than this become several files with `model.safetensors.index.json`; None =
        FILE_BYTES.
      companions: tokenizer, chat template and so on; None = config and weights alone.
      announce: gets the bytes written so far, and their total.

    Raises PublicationError for an unknown `dtype` or one that cannot hold the values, a source that is the directory
    itself, lack of space, or a foreign directory in the way; HfError for a config that the family cannot have;
    WeightsError for adapters that are not merged.
    """
    target, original = pathlib.Path(directory), None if companions is None else companions.source
    if dtype not in WEIGHT_DTYPES:
        raise PublicationError(f'dtype={dtype!r} is unknown; use one of {", ".join(WEIGHT_DTYPES)}')
    if original is not None and original.resolve() == target.resolve():
        raise PublicationError(f'{target} is where the weights came from; export to another directory')
    contents = plan_hf_files(
        params,
        config,
        dtype=dtype,
        file_bytes=file_bytes or FILE_BYTES,
        companions=companions,
    )
    write_hf_directory(target, contents, elsewhere='write to another disk', announce=announce)


# One version of the weights on the disk, written by several processes: each writes whole leaves to a separate file.
#
# begin       one process checks for room and makes the hidden directory
# write       every process writes the file of its leaves, and returns their digests
# finish      the first process writes everything else, and gives the directory its name


class PartWriter:
    """Writes this process's part of a version.

    `directory` holds all versions. `copy` is the version: a tree of SharedLeaf, or of arrays with one process.

    Args:
      companions: tokenizer and so on, written with each version by the process that calls `finish`.
      separate_head: see `plan_hf_files`; equal in all processes.
    """

    def __init__(self, config: ModelConfig, companions: HfCompanions | None = None, *, separate_head: bool = False):
        self._config, self._companions, self._separate_head = config, companions, separate_head

    def begin(self, directory: str, version: int, copy: Tree) -> None:
        """Removes this and later versions, which the run wrote before it was resumed, and begins a new one.

        Raises PublicationError for lack of space and for a foreign directory in the way.
        """
        clear_versions(pathlib.Path(directory), version)
        open_directory(version_path(pathlib.Path(directory), version), self._plan(copy).nbytes)

    def write(self, directory: str, version: int, copy: Tree) -> dict[str, EncodedDigest]:
        """Writes the leaves of this process, one at a time, and returns their part of the manifest.

        Fetches each of these leaves once, and no leaf of another process.
        Raises PublicationError for NaN or infinity, a failed write, and a directory that this process does not see.
        """
        target = version_path(pathlib.Path(directory), version)
        partial = files.partial_name(target)
        if not partial.is_dir():
            raise PublicationError(
                f'process {jax.process_index()} does not see {partial}, which another process made: let all processes '
                'share publication.directory under one path'
            )
        manifest: dict[str, EncodedDigest] = {}

        def fetch(path: str) -> np.ndarray:
            leaf = leaf_at(copy, path)
            whole = leaf.join() if isinstance(leaf, SharedLeaf) else np.asarray(leaf)
            manifest.update(encode_manifest(finite_host_manifest({path: whole}, version)))
            return whole

        plan = self._plan(copy)
        with writing(target, remove=False):  # other processes are writing there
            for name in self._own_files(plan, copy):
                plan.write_weights(partial, name, fetch)
        return manifest

    def finish(
        self, directory: str, version: int, copy: Tree, manifest: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, str]:
        """Gives the version its name, and returns (manifest hash, path); `manifest` covers all processes.

        Raises PublicationError for a leaf that no process wrote, and for a failed write.
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
        """The names of the files that this process writes: one, or none if it owns no leaf."""
        owners = sorted({_find_owner(leaf) for leaf in jax.tree.leaves(copy)})
        return [name for name, owner in zip(plan.weights, owners, strict=True) if owner == jax.process_index()]


def _find_owner(leaf: SharedLeaf | jax.Array | np.ndarray) -> int:
    return leaf.owner if isinstance(leaf, SharedLeaf) else 0
