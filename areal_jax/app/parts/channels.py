"""Builds the channel that carries weights from the learner to the engines of a run."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import itertools
import os
import pathlib
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from areal_jax.app.export.run_export import build_companions, separates_head
from areal_jax.app.model.model import Model
from areal_jax.app.parts.learner_builder import build_blocks
from areal_jax.app.parts.part_settings import build_schedule, build_shard_versions, moves_devices
from areal_jax.config import TrackedConfig
from areal_jax.config.addresses import OWN_HOST
from areal_jax.config.kinds import CHANNEL, STREAM, find_channel, resolve
from areal_jax.distributed import rendezvous
from areal_jax.distributed.handshake import key_path, load_key
from areal_jax.distributed.peers import prove_as_client, prove_as_server
from areal_jax.learning.blockwise import cut_blocks, leaf_sizes
from areal_jax.models.decoder import Decoder
from areal_jax.protocols import Channel
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.shm_segment import name_run, remove_with_owner, segment_path, sweep
from areal_jax.publication.carriers.stream_receiver import Reader, open_receiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.files_channel import DeviceChannel, FilesChannel, VersionWriter
from areal_jax.publication.record import RecordReceiver, RecordSender
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.publication.shard_channel import ShardCarrier, ShardChannel, ShardSender
from areal_jax.publication.shard_versions import Everywhere
from areal_jax.publication.versions import name_version
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import Allocation
from areal_jax.types import PublishedWeights, Tree


class PlacedChannel(Channel, Protocol):
    """A channel whose engines name the devices on which they need the weights."""

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Tree:
        """See protocols.Channel; `place` None = the channel chooses the devices."""
        ...


@dataclasses.dataclass(frozen=True)
class ChannelParts:
    """The arguments of the `build` function of a config.kinds.ChannelKind."""

    config: TrackedConfig
    workdir: pathlib.Path
    model: Model
    allocation: Allocation
    writers: Sequence[VersionWriter] = ()  # the other processes of the learner
    publish_everywhere: Callable[[ShardSender], Everywhere] | None = None  # calls the senders of all processes


def build_channel(parts: ChannelParts) -> PlacedChannel:
    """Builds the channel that publication.channel names."""
    channel: PlacedChannel = resolve(find_channel(parts.config.publication.channel).build, CHANNEL)(parts)
    return channel


def build_device(parts: ChannelParts) -> DeviceChannel:
    """Builds the channel within a process. Engines that share a device decode with the copy that it holds there."""
    config, device = parts.config, _find_shared_device(parts.allocation)
    return DeviceChannel(device, verify=config.publication.verify, keeps_newest=_is_received_again(config))


def _is_received_again(config: TrackedConfig) -> bool:
    """Whether an engine may ask again for a version that all engines have: moved ones, an evaluation, another batch."""
    return moves_devices(config) or config.evaluation.every > 0 or build_schedule(config) is not None


def _find_shared_device(allocation: Allocation) -> jax.Device | None:
    return allocation.engines[0][0] if allocation.engine_shares(0) else None


def build_files(parts: ChannelParts) -> FilesChannel | RecordChannel:
    """Builds the channel of directories under publication.directory: weights, tokenizer and, if asked, delta files."""
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
    """Returns a function that maps a leaf's path to its file, one per block of trained leaves; None = one file."""
    if (blocks := build_blocks(parts.config)) is None:
        return None
    cut = cut_blocks(leaf_sizes(Decoder(parts.model.decoder.config).abstract()), blocks.blocks)
    number = {path: block for block, paths in enumerate(cut) for path in paths}
    return number.__getitem__


def build_records(
    config: TrackedConfig,
    sender: RecordSender,
    open_receiver: Callable[[str], RecordReceiver],
    name_version: Callable[[str, int, str], str] = lambda address, version, manifest_hash: address,
) -> RecordChannel:
    """Builds the channel over a carrier, with the deltas that publication.delta and its fields ask for."""
    publication = config.publication
    base_every = publication.base_every if publication.delta else 1
    return RecordChannel(
        sender, open_receiver,
        name=publication.channel, name_version=name_version,
        delta=publication.delta, base_every=base_every, verify=publication.verify,
    )  # fmt: skip


# Builds the channels whose versions travel as records: shared memory and sockets.


_DELTA_SHARE = 0.5  # room for deltas behind a whole record, as a share of its bytes


def build_carried(parts: ChannelParts) -> RecordChannel | ShardChannel:
    """Builds the channel of records over shared memory or sockets, from the one process of a learner or from all."""
    config, sender = parts.config, open_sender(parts.config, parts.workdir)
    readers = _open_readers(config, parts.workdir)
    if parts.publish_everywhere is None:
        return build_records(config, sender, readers, name_version)
    own = share_sender(config, sender)
    versions = build_shard_versions(config, parts.publish_everywhere(own))
    return ShardChannel(versions, readers, own, verify=config.publication.verify)


def open_sender(config: TrackedConfig, workdir: pathlib.Path, own_host: str = '') -> ShardCarrier:
    """Opens the carrier of this process, one of a learner, for a channel of records.

    `own_host`: where this process listens if publication.listen='own'; '' = at its interface towards the coordinator.
    """
    publication = config.publication
    deadline_s, share = publication.reader_deadline_s, _share(config)
    if publication.channel == STREAM.name:
        prove = functools.partial(prove_as_server, key=stream_key(workdir))
        listen = publication.listen
        if listen == OWN_HOST:
            listen = own_host or rendezvous.own_host(config.distributed.coordinator)
        return StreamSender(prove, listen, delta_share=share, frame_deadline_s=deadline_s)
    sweep()
    path = segment_path(name_run(workdir), secrets.token_hex(4))
    sender = ShmSender(path, delta_share=share, hold_deadline_s=deadline_s)
    remove_with_owner(path)
    return sender


def share_sender(config: TrackedConfig, sender: ShardCarrier) -> ShardSender:
    """Builds the end of this process over its carrier."""
    return ShardSender(sender, delta=config.publication.delta)


def number_readers(config: TrackedConfig, workdir: pathlib.Path | None) -> Callable[[str], RecordReceiver] | None:
    """Returns a function that opens receivers in a run's server; None without a run, or if versions are no records."""
    if workdir is None or not find_channel(config.publication.channel).sends_records:
        return None
    return _number_proved(config, workdir)


def stream_key(workdir: pathlib.Path) -> bytes:
    """Derives a key from the run's key, so that a proof to a sender of weights cannot be reused elsewhere."""
    return hmac.digest(load_key(key_path(workdir)), b'publication', 'sha256')


def _open_readers(config: TrackedConfig, workdir: pathlib.Path) -> Callable[[str], RecordReceiver]:
    return _number_proved(config, workdir) if config.publication.channel == STREAM.name else _number(Reader)


def _number_proved(config: TrackedConfig, workdir: pathlib.Path) -> Callable[[str], RecordReceiver]:
    publication = config.publication
    make_reader = functools.partial(
        Reader,
        prove=functools.partial(prove_as_client, key=stream_key(workdir)),
        frame_deadline_s=publication.reader_deadline_s,
        record_deadline_s=publication.record_deadline_s,
    )
    return _number(make_reader)


def _number(make_reader: Callable[[str], Reader]) -> Callable[[str], RecordReceiver]:
    """Returns a function that opens receivers of this process, each under a unique name."""
    numbers, here = itertools.count(), f'{socket.gethostname()}-{os.getpid()}'
    return lambda address: open_receiver(address, make_reader(f'{here}-{next(numbers)}'))


def _share(config: TrackedConfig) -> float:
    return _DELTA_SHARE if config.publication.delta else 0.0
