"""The channels that publication.py measures: a sender of records and its readers, by name."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

from areal_jax.models.shape import ModelConfig
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.record import RecordReceiver, RecordSender
from areal_jax.publication.record_channel import RecordChannel

Open = Callable[[pathlib.Path, ModelConfig], tuple[RecordSender, Callable[[str], RecordReceiver]]]


def open_files(directory: pathlib.Path, config: ModelConfig) -> tuple[RecordSender, Callable[[str], RecordReceiver]]:
    return FilesSender(directory, config), lambda address: FilesReceiver(directory, config)


CARRIERS: Mapping[str, Open] = {'files': open_files}


def open_channel(name: str, directory: pathlib.Path, config: ModelConfig, *, delta: bool) -> RecordChannel:
    """Without a whole version but the first, so that what is measured is a delta."""
    sender, open_receiver = CARRIERS[name](directory, config)
    return RecordChannel(sender, open_receiver, name=name, delta=delta, base_every=1 << 30)
