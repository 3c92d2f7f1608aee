"""Builds the channels whose versions travel as records from one learner process: shared memory and sockets."""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import os
import pathlib
import secrets
import socket
from collections.abc import Callable

from areal_jax.app.parts.channels import ChannelParts, build_records
from areal_jax.config import TrackedConfig
from areal_jax.config.kinds import find_channel
from areal_jax.config.ranges import ConfigError
from areal_jax.distributed.handshake import key_path, load_key
from areal_jax.distributed.peers import prove_as_client, prove_as_server
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.shm_segment import remove_with_owner, segment_path, sweep
from areal_jax.publication.carriers.stream_receiver import Reader, name_version, open_receiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.record import RecordReceiver
from areal_jax.publication.record_channel import RecordChannel

_RUN_DIGITS = 12  # of the digest of a workdir, in the name of a segment
_DELTA_SHARE = 0.5  # room for deltas behind a whole record, as a share of its bytes


def build_shm(parts: ChannelParts) -> RecordChannel:
    """A file in /dev/shm that this start of the run owns, and that goes with it; those of dead processes go first."""
    _require_one_process(parts)
    sweep()
    run = hashlib.sha256(os.fsencode(parts.workdir.absolute())).hexdigest()[:_RUN_DIGITS]
    path = segment_path(run, secrets.token_hex(4))
    deadline_s = parts.config.publication.reader_deadline_s
    sender = ShmSender(path, delta_share=_share(parts.config), hold_deadline_s=deadline_s)
    remove_with_owner(path)
    return build_records(parts.config, sender, _number(Reader), name_version)


def build_stream(parts: ChannelParts) -> RecordChannel:
    """A Unix socket, and one of TCP at publication.listen."""
    _require_one_process(parts)
    publication = parts.config.publication
    prove = functools.partial(prove_as_server, key=stream_key(parts.workdir))
    deadline_s, share = publication.reader_deadline_s, _share(parts.config)
    sender = StreamSender(prove, publication.listen, delta_share=share, frame_deadline_s=deadline_s)
    return build_records(parts.config, sender, _number_proved(parts.config, parts.workdir), name_version)


def number_readers(config: TrackedConfig, workdir: pathlib.Path | None) -> Callable[[str], RecordReceiver] | None:
    """Opens receivers in a server of a run; None for a server of no run, and where versions are no records."""
    if workdir is None or not find_channel(config.publication.channel).sends_records:
        return None
    return _number_proved(config, workdir)


def stream_key(workdir: pathlib.Path) -> bytes:
    """Made from the key of the run, so that a proof to a sender of weights is of no use anywhere else."""
    return hmac.digest(load_key(key_path(workdir)), b'publication', 'sha256')


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
    """Opens receivers of this process, each under a name of its own."""
    numbers, here = itertools.count(), f'{socket.gethostname()}-{os.getpid()}'
    return lambda address: open_receiver(address, make_reader(f'{here}-{next(numbers)}'))


def _share(config: TrackedConfig) -> float:
    return _DELTA_SHARE if config.publication.delta else 0.0


def _require_one_process(parts: ChannelParts) -> None:
    """A record has all leaves, and the learner processes of a mesh over several have some each."""
    if parts.writers:
        raise ConfigError(
            f'publication.channel={parts.config.publication.channel!r} with a learner over {len(parts.writers) + 1} '
            "processes: each writes its own leaves; use publication.channel='files'"
        )
