"""What a server of ours loads when it is told to: any directory of weights, or a version of a run with deltas."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax

from areal_jax.formats.hf_config import read_hf_config
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.finiteness import require_finite_shards
from areal_jax.models.decoder import Decoder
from areal_jax.publication.carriers.files_carrier import FilesReceiver, read_delta
from areal_jax.publication.carriers.stream_receiver import parse_version_name
from areal_jax.publication.files_channel import find_version, load_version
from areal_jax.publication.record import Held, RecordReceiver
from areal_jax.publication.versions import parse_delta, parse_version
from areal_jax.publication.weights_reader import WeightsReader
from areal_jax.rollout.decode.decode_weights import PreparedWeights
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.http.service import UpdateError, WeightsDirectory
from areal_jax.rollout.http.wire.request_fields import LARGEST_VERSION, read_integer
from areal_jax.sharding.placement import Place
from areal_jax.types import PublishedWeights, Weights

OpenReceiver: TypeAlias = Callable[[str], RecordReceiver]  # from an address


class VersionLoader:
    """Called with a WeightsDirectory, returns its weights for the backend and sets its digest.

    A path `v000007.delta` opens a reader of its directory, which then takes every version there by what changed. So
    does the address of a version in shared memory or behind a socket. Other paths are loaded whole.

    Args:
      open_receiver: of an address, in a server of a run; None = it takes no version from an address.
    """

    def __init__(
        self, backend: JaxDecodeBackend, decoder: Decoder, place: Place, open_receiver: OpenReceiver | None = None
    ):
        self._backend, self._decoder, self._place, self._open = backend, decoder, place, open_receiver
        self._readers: dict[pathlib.Path, WeightsReader] = {}  # by directory of versions
        self._carried: tuple[str, WeightsReader] | None = None  # (address, its reader): one start of a learner

    def __call__(self, published: PublishedWeights) -> Weights:
        """Raises as `load_directory` does, UpdateError also for a delta in another dtype than the server's."""
        directory = published.handle
        assert isinstance(directory, WeightsDirectory)
        if (named := parse_version_name(directory.path)) is not None:
            return self._read_address(directory, *named)
        path = pathlib.Path(directory.path)
        delta, whole = parse_delta(path), parse_version(path)
        if delta is not None:
            header = read_delta(path, delta).header
            self._require_dtype(path, (leaf.dtype for leaf in header.leaves.values()))
            return self._read(directory, delta, header.manifest_hash)
        if whole is not None and path.parent in self._readers:
            return self._read(directory, whole, find_version(path, whole).manifest_hash)
        return load_directory(published, decoder=self._decoder, place=self._place, dtype=self._backend.dtype.name)

    def _read(self, directory: WeightsDirectory, version: int, manifest_hash: str) -> Weights:
        folder, transposed = pathlib.Path(directory.path).parent, self._backend.find_transposed()
        if folder not in self._readers:
            receiver = FilesReceiver(folder, self._decoder.config, f'{socket.gethostname()}-{os.getpid()}')
            self._readers[folder] = WeightsReader(receiver, self._place, transposed=transposed or ())
        return self._take(self._readers[folder], directory, version, manifest_hash)

    def _read_address(self, directory: WeightsDirectory, address: str, held: Held) -> Weights:
        if self._open is None:
            raise UpdateError(
                f'{directory.path} is a version of a run whose channel this server does not read: start it with the '
                '--workdir and the publication.channel of the run'
            )
        if self._carried is None or self._carried[0] != address:
            self._close_carried()
            transposed = self._backend.find_transposed()
            self._carried = address, WeightsReader(self._open(address), self._place, transposed=transposed or ())
        return self._take(self._carried[1], directory, held.version, held.manifest_hash)

    def _close_carried(self) -> None:
        """The reader of an earlier start of the learner: its sender is gone."""
        if self._carried is not None:
            self._carried[1].close()
            self._carried = None

    def _take(self, reader: WeightsReader, directory: WeightsDirectory, version: int, manifest_hash: str) -> Weights:
        weights, held = reader.receive(version, manifest_hash)
        self._require_dtype(directory.path, (str(leaf.dtype) for leaf in jax.tree.leaves(weights)))
        directory.digest = held.manifest_hash
        return weights if self._backend.find_transposed() is None else PreparedWeights(weights)

    def _require_dtype(self, path: str | pathlib.Path, dtypes: Iterable[str]) -> None:
        own = self._backend.dtype.name
        for dtype in dtypes:
            if dtype != own:
                raise UpdateError(
                    f'{path} is in {dtype}, and this server decodes in {own}: start it with publication.dtype='
                    f'{dtype!r}, or publish with publication.delta=False'
                )


def load_directory(published: PublishedWeights, *, decoder: Decoder, place: Place, dtype: str) -> Weights:
    """The weights of a WeightsDirectory, checked against its manifest where it has one; sets its digest.

    Raises UpdateError for a model of another shape, PublicationError for files that are not whole, NonFiniteError for
    weights with NaN or infinity.
    """
    directory = published.handle
    assert isinstance(directory, WeightsDirectory)
    path = pathlib.Path(directory.path)
    named = read_integer(directory.label, LARGEST_VERSION)
    found = find_version(path, (parse_version(path) or 0) if named is None else named)
    _require_shape(path, decoder)
    params = trees.cast(load_version(found, decoder.config, place, verify=True), dtype)
    require_finite_shards(params, f'{path} as {dtype}', 'get the files again, or load other weights')
    directory.digest = found.manifest_hash
    return params


def _require_shape(path: pathlib.Path, decoder: Decoder) -> None:
    theirs = read_hf_config(path)
    for field in dataclasses.fields(theirs):
        one, other = getattr(decoder.config, field.name), getattr(theirs, field.name)
        if one != other and field.name != 'context_tokens':  # that is no part of the weights
            raise UpdateError(
                f'{path} is a model with {field.name}={other!r}, and this server holds one with {one!r}: start a '
                'server with it'
            )
