"""Builds the channel that carries weights from the learner to the engines of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from areal_jax.app.export.run_export import build_companions, separates_head
from areal_jax.app.model.model import Model
from areal_jax.app.parts.part_settings import build_blocks, build_schedule, moves_devices
from areal_jax.config import TrackedConfig
from areal_jax.config.kinds import CHANNEL, find_channel, resolve
from areal_jax.learning.blockwise.block_learner import leaf_sizes
from areal_jax.learning.blockwise.blocks import cut_blocks
from areal_jax.models.decoder import Decoder
from areal_jax.protocols import Channel
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.files_channel import DeviceChannel, FilesChannel, VersionWriter
from areal_jax.publication.record import Held, RecordReceiver, RecordSender
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import Allocation
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
    config, device = parts.config, _find_shared_device(parts.allocation)
    return DeviceChannel(device, verify=config.publication.verify, keeps_newest=_is_received_again(config))


def _is_received_again(config: TrackedConfig) -> bool:
    """Whether engines may ask for a version that all of them have: moved ones, an evaluation, another batch."""
    return moves_devices(config) or config.evaluation.every > 0 or build_schedule(config) is not None


def _find_shared_device(allocation: Allocation) -> jax.Device | None:
    return allocation.engines[0][0] if allocation.engine_shares(0) else None


def build_files(parts: ChannelParts) -> FilesChannel | RecordChannel:
    """Directories under publication.directory, with the tokenizer beside the weights, and files of deltas."""
    publication, shape = parts.config.publication, parts.model.decoder.config
    directory = pathlib.Path(publication.directory or parts.workdir / 'publication')
    companions, separate_head = build_companions(parts.workdir, parts.model), separates_head(parts.config)
    if publication.delta:
        sender = FilesSender(directory, shape, companions=companions, separate_head=separate_head)
        return build_records(parts.config, sender, lambda address: FilesReceiver(directory, shape))
    return FilesChannel(
        directory,
        shape,
        verify=publication.verify,
        companions=companions,
        writers=parts.writers,
        separate_head=separate_head,
        file_of=_find_files(parts),
    )


def _find_files(parts: ChannelParts) -> Callable[[str], int] | None:
    """A file for each block of leaves that is trained by itself; None = one file."""
    if (blocks := build_blocks(parts.config)) is None:
        return None
    cut = cut_blocks(leaf_sizes(Decoder(parts.model.decoder.config).abstract()), blocks.blocks)
    number = {path: block for block, paths in enumerate(cut) for path in paths}
    return number.__getitem__


def build_records(
    config: TrackedConfig,
    sender: RecordSender,
    open_receiver: Callable[[str], RecordReceiver],
    name_version: Callable[[str, Held], str] = lambda address, held: address,
) -> RecordChannel:
    """The channel over a carrier, as publication.delta and its fields ask."""
    publication = config.publication
    base_every = publication.base_every if publication.delta else 1
    return RecordChannel(
        sender, open_receiver,
        name=publication.channel, name_version=name_version,
        delta=publication.delta, base_every=base_every, verify=publication.verify,
    )  # fmt: skip
