"""Arrow 8 through the file system: one directory of Hugging Face safetensors per version, whole or absent."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.models import hf
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.errors import PublicationError
from areal_jax.publication.manifest import (
    decode_manifest,
    device_manifest,
    encode_manifest,
    host_manifest,
    manifest_hash,
    require_equal,
)
from areal_jax.types import PublishedWeights

WEIGHTS, CONFIG, MANIFEST = 'model.safetensors', 'config.json', 'manifest.json'
_HEADER_BYTES = 1 << 20  # more than the index of the tensors and the JSON files take


class FilesChannel:
    """types.Channel over directories `v000007/` of `model.safetensors`, `config.json` and `manifest.json`.

    A version appears under its name only when all of it is on the disk. The directory belongs to one channel at a time.

    Args:
      keep: newest versions that stay on the disk even when released, >= 1: for servers that load by path.
      verify: `receive` recomputes the digest of every leaf.
      shardings: where the engines want the weights; None = the default device.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: ModelConfig,
        *,
        keep: int = 2,
        verify: bool = False,
        shardings: Any = None,
    ):
        if keep < 1:
            raise ValueError(f'keep={keep}: the newest version must stay; use keep >= 1')
        self._directory, self._config = pathlib.Path(directory), config
        self._keep, self._verify, self._shardings = keep, verify, shardings

    def transfer(self, version: int, copy: Any) -> PublishedWeights:
        """Writes `copy` as a directory; handle = its path.

        Directories of this and later versions are of an earlier run that was resumed from before them: they go.
        Raises PublicationError for lack of space, a failed write, or a foreign directory in the way.
        """
        manifest = device_manifest(copy)
        digest = manifest_hash(manifest)
        for abandoned in self._directory.glob('.v*.partial'):
            shutil.rmtree(abandoned)
        for path in [path for v, path in self._versions().items() if v >= version]:
            _remove(path)
        target = self._directory / f'v{version:06d}'
        record = {'format': 1, 'version': version, 'manifest_hash': digest, 'leaves': encode_manifest(manifest)}
        write_hf_directory(target, copy, self._config, {MANIFEST: record})
        return PublishedWeights(version, digest, handle=str(target))

    def receive(self, published: PublishedWeights) -> Any:
        """The weights as a nested dict of jax arrays.

        Raises PublicationError for a directory that is missing, torn, foreign or of other weights.
        """
        directory = pathlib.Path(published.handle)
        try:
            record = json.loads((directory / MANIFEST).read_text())
            manifest = decode_manifest(record['leaves'])
            params = read_hf_directory(directory, self._config)
        except Exception as error:  # whatever a torn file makes the readers raise
            raise PublicationError(
                f'{directory} does not hold version {published.version} as it was published '
                f'({type(error).__name__}: {error}): receive a version before it is released, and let nothing else '
                'write there'
            ) from error
        if manifest_hash(manifest) != published.manifest_hash:
            raise PublicationError(
                f'{directory} holds weights with manifest {manifest_hash(manifest)[:12]}, version {published.version} '
                f'was published with {published.manifest_hash[:12]}: give every run a publication.directory of its own'
            )
        if self._verify:
            require_equal(manifest, host_manifest(params), published.version)
        return jax.block_until_ready(jax.device_put(params, self._shardings))

    def release(self, version: int) -> None:
        """Removes versions below `version` from the disk, except the newest `keep` of all."""
        for v, path in list(self._versions().items())[: -self._keep]:
            if v < version:
                _remove(path)

    def _versions(self) -> dict[int, pathlib.Path]:
        """Complete versions by number, lowest first."""
        found = {}
        for path in self._directory.glob('v*'):
            if re.fullmatch(r'v\d{6,}', path.name) and (path / MANIFEST).exists():
                found[int(path.name[1:])] = path
        return dict(sorted(found.items()))


def write_hf_directory(
    target: pathlib.Path, params: Any, config: ModelConfig, records: Mapping[str, Any] | None = None
) -> None:
    """Writes float weights, `config.json` and JSON `records` by file name; the directory appears whole or not at all.

    A directory of the same name written here before is replaced. Raises PublicationError for one that was not, for lack
    of space (naming needed and free bytes), and for a failed write.
    """
    if target.exists() and not (target / WEIGHTS).exists() and any(target.iterdir()):
        raise PublicationError(
            f'{target} exists and holds no {WEIGHTS}: it is not ours to replace; choose another name'
        )
    tensors = hf.to_hf_names(jax.tree.map(np.asarray, params), config)
    # the writer dumps memory as it lies: a transposed view must become rows first
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    partial = _beside(target, 'partial')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free_space(target.parent, sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_BYTES)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_files(partial, tensors, {CONFIG: hf.hf_config(config), **(records or {})})
        if target.exists():
            _remove(target)
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PublicationError(
            f'writing {target} failed ({error}); the disk has {_free_bytes(target.parent)} bytes free. '
            'Make room or name another publication.directory'
        ) from error


def read_hf_directory(directory: pathlib.Path, config: ModelConfig) -> Any:
    """Weights as a nested dict of numpy arrays; raises what the readers of torn files raise."""
    from safetensors.numpy import load_file

    return hf.from_hf_names(load_file(directory / WEIGHTS), config)


def _write_files(directory: pathlib.Path, tensors: Mapping[str, np.ndarray], records: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(tensors), directory / WEIGHTS, metadata={'format': 'pt'})  # transformers refuses files without
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for name, record in records.items():
        (directory / name).write_text(json.dumps(record, indent=1, sort_keys=True))
    for path in (*directory.iterdir(), directory):
        _sync(path)


def _require_free_space(directory: pathlib.Path, needed: int) -> None:
    free = _free_bytes(directory)
    if free < needed:
        raise PublicationError(
            f'{directory} has {free} bytes free, one version of the weights needs {needed}: '
            'make room or name another publication.directory'
        )


def _free_bytes(directory: pathlib.Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _remove(path: pathlib.Path) -> None:
    """Out of sight at once: a removal that is cut short leaves nothing that looks like a version."""
    hidden = _beside(path, 'removed.partial')
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(f'.{path.name}.{suffix}')


def _sync(path: pathlib.Path) -> None:
    """The file, or the names in the directory, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
