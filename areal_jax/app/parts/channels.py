"""Builds the channel that carries weights from the learner to the engines of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from areal_jax.app.export.run_export import build_companions, separates_head
from areal_jax.app.model.model import Model
from areal_jax.app.parts.part_settings import build_blocks
from areal_jax.config import TrackedConfig
from areal_jax.config.kinds import CHANNEL, find_channel, resolve
from areal_jax.learning.blockwise.block_learner import leaf_sizes
from areal_jax.learning.blockwise.blocks import cut_blocks
from areal_jax.models.decoder import Decoder
from areal_jax.protocols import Channel
from areal_jax.publication.device_channel import DeviceChannel
from areal_jax.publication.files_channel import FilesChannel, VersionWriter
from areal_jax.sharding.allocation import Allocation
from areal_jax.sharding.placement import Place
from areal_jax.types import PublishedWeights, Tree


class PlacedChannel(Channel, Protocol):
    """A channel whose engines say where they need the weights."""

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Tree:
        """See protocols.Channel; None = the channel chooses the devices."""
        ...


@dataclasses.dataclass(frozen=True)
class ChannelParts:
    """What a channel is made of; `build` of a config.kinds.ChannelKind takes it."""

    config: TrackedConfig
    workdir: pathlib.Path
    model: Model
    allocation: Allocation
    writers: Sequence[VersionWriter] = ()  # the other processes of the learner


def build_channel(parts: ChannelParts) -> PlacedChannel:
    """The channel that publication.channel names."""
    channel: PlacedChannel = resolve(find_channel(parts.config.publication.channel).build, CHANNEL)(parts)
    return channel


def build_device(parts: ChannelParts) -> DeviceChannel:
    """Engines that share a device decode with the copy that the channel holds there."""
    return DeviceChannel(_find_shared_device(parts.allocation), verify=parts.config.publication.verify)


def _find_shared_device(allocation: Allocation) -> jax.Device | None:
    return allocation.engines[0][0] if allocation.engine_shares(0) else None


def build_files(parts: ChannelParts) -> FilesChannel:
    """Directories under publication.directory, with the tokenizer beside the weights."""
    publication = parts.config.publication
    return FilesChannel(
        pathlib.Path(publication.directory or parts.workdir / 'publication'),
        parts.model.decoder.config,
        verify=publication.verify,
        companions=build_companions(parts.workdir, parts.model),
        writers=parts.writers,
        separate_head=separates_head(parts.config),
        file_of=_find_files(parts),
    )


def _find_files(parts: ChannelParts) -> Callable[[str], int] | None:
    """A file for each block of leaves that is trained by itself; None = one file."""
    if (blocks := build_blocks(parts.config)) is None:
        return None
    cut = cut_blocks(leaf_sizes(Decoder(parts.model.decoder.config).abstract()), blocks.blocks)
    number = {path: block for block, paths in enumerate(cut) for path in paths}
    return number.__getitem__
