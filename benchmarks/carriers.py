"""The channels that publication.py measures: a sender of records and its readers, by name."""

from __future__ import annotations

import functools
import pathlib
import secrets
from collections.abc import Callable, Mapping

from areal_jax.distributed.peers import prove_as_client, prove_as_server
from areal_jax.models.families import ModelConfig
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path, sweep
from areal_jax.publication.carriers.stream_receiver import Reader, open_receiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.record import RecordReceiver, RecordSender
from areal_jax.publication.record_channel import RecordChannel

Ends = tuple[RecordSender, Callable[[str], RecordReceiver]]
Open = Callable[[pathlib.Path, ModelConfig], Ends]
_KEY = b'of the benchmark'


def open_files(directory: pathlib.Path, config: ModelConfig) -> Ends:
    return FilesSender(directory, config), lambda address: FilesReceiver(directory, config)


def open_shm(directory: pathlib.Path, config: ModelConfig) -> Ends:
    sweep()
    sender = ShmSender(segment_path('benchmark', secrets.token_hex(4)))
    return sender, lambda address: open_receiver(address, Reader('engine'))


def open_stream(directory: pathlib.Path, config: ModelConfig) -> Ends:
    sender = StreamSender(functools.partial(prove_as_server, key=_KEY))
    prove = functools.partial(prove_as_client, key=_KEY)
    return sender, lambda address: open_receiver(address, Reader('engine', prove))


CARRIERS: Mapping[str, Open] = {'files': open_files, 'shm': open_shm, 'stream': open_stream}


def open_channel(name: str, directory: pathlib.Path, config: ModelConfig, *, delta: bool) -> RecordChannel:
    """Without a whole version but the first, so that what is measured is a delta."""
    sender, open_receiver = CARRIERS[name](directory, config)
    return RecordChannel(sender, open_receiver, name=name, delta=delta, base_every=1 << 30)
