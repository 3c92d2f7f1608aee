"""Publication through the file system: a directory of Hugging Face safetensors per version, for servers to load.

Used by app/engines.py for publication.channel=files; directory.py writes, manifest.py checks the values.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from collections.abc import Collection

import jax

from areal_jax import files
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.publication.directory import write_hf_directory
from areal_jax.publication.errors import PublicationError
from areal_jax.publication.manifest import (
    decode_manifest,
    encode_manifest,
    finite_manifest,
    host_manifest,
    manifest_hash,
    require_equal,
)
from areal_jax.sharding.placement import Place
from areal_jax.types import PublishedWeights

MANIFEST = 'manifest.json'
_KEPT = 2  # newest versions that stay on the disk after their release: servers load them by path


class FilesChannel:
    """protocols.Channel over directories `v000007/` of `model.safetensors`, `config.json` and `manifest.json`.

    A version gets its name after all of it is on the disk. Only one channel at a time may use the directory.

    Args:
      verify: `receive` recomputes the digest of every leaf.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: ModelConfig,
        *,
        verify: bool,
    ):
        self._directory, self._config = pathlib.Path(directory), config
        self._verify = verify

    def transfer(self, version: int, copy: Params) -> PublishedWeights:
        """Writes `copy` as a directory; handle = its path.

        Removes directories of this and later versions: the run wrote them before it was resumed from an older
        checkpoint.
        Raises PublicationError for weights with NaN or infinity, lack of space, a failed write, or a foreign directory
        in the way.
        """
        manifest = finite_manifest(copy, version)
        digest = manifest_hash(manifest)
        for abandoned in self._directory.glob('.v*.partial'):
            shutil.rmtree(abandoned)
        for path in [path for v, path in self._versions().items() if v >= version]:
            files.remove_directory(path)
        target = self._directory / f'v{version:06d}'
        record = {'format': 1, 'version': version, 'manifest_hash': digest, 'leaves': encode_manifest(manifest)}
        write_hf_directory(target, plan_hf_files(copy, self._config), {MANIFEST: record})
        return PublishedWeights(version, digest, handle=str(target))

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Params:
        """The weights as a nested dict of jax arrays, at `place`; None = the default device.

        Raises PublicationError for a directory that is missing, torn, foreign or of other weights.
        """
        directory = pathlib.Path(published.handle)
        try:
            record = json.loads((directory / MANIFEST).read_text())
            manifest = decode_manifest(record['leaves'])
            shardings = jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place
            params = load_hf_weights(directory, self._config, shardings=shardings)
        except Exception as error:  # the readers raise many types for damaged files
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
        return params

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Removes versions below `version` from the disk, except the newest two of all and the `pinned` ones."""
        for v, path in list(self._versions().items())[:-_KEPT]:
            if v < version and v not in pinned:
                files.remove_directory(path)

    def _versions(self) -> dict[int, pathlib.Path]:
        """Complete versions by number, lowest first."""
        found = {}
        for path in self._directory.glob('v*'):
            if re.fullmatch(r'v\d{6,}', path.name) and (path / MANIFEST).exists():
                found[int(path.name[1:])] = path
        return dict(sorted(found.items()))
