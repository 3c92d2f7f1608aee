"""Builds the channels that carry versions as records: shared memory and sockets."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import secrets
import socket

from areal_jax.app.parts.channels import ChannelParts, build_records
from areal_jax.distributed.key import key_path, load_key
from areal_jax.distributed.wire import prove_as_client, prove_as_server
from areal_jax.publication.receivers import Reader, name_version, open_receiver, parse_version_name
from areal_jax.publication.record import RecordReceiver, RecordSender
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.publication.shm_carrier import ShmSender
from areal_jax.publication.shm_segment import segment_path, sweep
from areal_jax.publication.stream_sender import StreamSender


def build_shm(parts: ChannelParts) -> RecordChannel:
    """Shared memory of this host, in a segment of this start of the run; segments of dead processes are removed."""
    sweep()
    path = segment_path(_name_run(parts.workdir), secrets.token_hex(4))
    deadline_s = parts.config.publication.reader_deadline_s
    return _build(parts, ShmSender(path, hold_deadline_s=deadline_s), parts.config.publication.record_deadline_s)


def build_stream(parts: ChannelParts) -> RecordChannel:
    """Sockets: of this host, and with publication.listen of an interface that others reach."""
    publication = parts.config.publication
    prove = functools.partial(prove_as_server, key=load_key(key_path(parts.workdir)))
    sender = StreamSender(prove, publication.listen, frame_deadline_s=publication.reader_deadline_s)
    return _build(parts, sender, publication.record_deadline_s)


def describe_reader(workdir: pathlib.Path, record_deadline_s: float) -> Reader:
    """This process as a reader of the versions of a run."""
    prove = functools.partial(prove_as_client, key=load_key(key_path(workdir)))
    return Reader(f'{socket.gethostname()}-{os.getpid()}', prove, record_deadline_s=record_deadline_s)


def _build(parts: ChannelParts, sender: RecordSender, record_deadline_s: float) -> RecordChannel:
    reader = describe_reader(parts.workdir, record_deadline_s)

    def open_version(named: str) -> RecordReceiver:
        found = parse_version_name(named)
        assert found is not None, f'{named} was not made by name_version'
        return open_receiver(found[0], reader)

    return build_records(parts.config, sender, open_version, name_version)


def _name_run(workdir: pathlib.Path) -> str:
    return f'{workdir.name}-{hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:8]}'
