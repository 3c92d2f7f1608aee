"""Opens the receiver that an address names: 'shm:PATH', 'unix:PATH', 'tcp:HOST:PORT', or several of these, by commas.

A carrier that a file of this host stands for is used where the file is here, so that one address serves all readers.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

from areal_jax.publication.carriers.shm_carrier import SCHEME as SHM
from areal_jax.publication.carriers.shm_carrier import ShmReceiver
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from areal_jax.publication.carriers.stream_socket import TCP, UNIX, Prove
from areal_jax.publication.record import Held, RecordReceiver
from areal_jax.publication.versions import PublicationError


@dataclasses.dataclass(frozen=True)
class Reader:
    """Who receives, and how long it waits."""

    name: str  # unique among the readers of a sender
    prove: Prove | None = None  # the key of the run, as the side that connects; None: it uses no sockets
    frame_deadline_s: float = 30.0
    record_deadline_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A carrier, by the beginning of its addresses."""

    open: Callable[[str, Reader], RecordReceiver]  # (rest of the address, reader)
    is_here: Callable[[str], bool]  # whether this host can have what the rest of the address names


def name_version(address: str, held: Held) -> str:
    """'shm:PATH#7@3f2a...': a version at an address, as a server is told which one to load."""
    return f'{address}#{held.version}@{held.manifest_hash}'


def parse_version_name(text: str) -> tuple[str, Held] | None:
    """(address, version) of a text that `name_version` made; None for any other, a path of a directory, say."""
    address, mark, named = text.rpartition('#')
    version, _, manifest_hash = named.partition('@')
    if not mark or not version.isdecimal() or not address.startswith(tuple(SCHEMES)):
        return None
    return address, Held(int(version), manifest_hash)


def open_receiver(address: str, reader: Reader) -> RecordReceiver:
    """A receiver for the first carrier that reaches this host, of an address or of the name of a version there.

    Raises PublicationError for an unknown scheme, an address of other hosts only, and a sender that is not there.
    """
    tried = list[str]()
    named = parse_version_name(address)
    for choice in (address if named is None else named[0]).split(','):
        name, colon, rest = choice.partition(':')
        scheme = SCHEMES.get(f'{name}{colon}')
        if scheme is None:
            raise PublicationError(
                f'{choice!r} is no address of weights; it must begin with one of {", ".join(SCHEMES)}: start learner '
                'and engines from one installation'
            )
        if scheme.is_here(rest):
            return scheme.open(rest, reader)
        tried.append(rest)
    raise PublicationError(
        f'{" and ".join(tried)} is not on this host, where {reader.name} reads weights: start it on the host of the '
        "learner, or use publication.channel='stream' with publication.listen"
    )


def _open_shm(rest: str, reader: Reader) -> RecordReceiver:
    return ShmReceiver(pathlib.Path(rest), reader.name)


def _open_stream(prefix: str) -> Callable[[str, Reader], RecordReceiver]:
    def open_stream(rest: str, reader: Reader) -> RecordReceiver:
        if reader.prove is None:
            raise PublicationError(f'{prefix}{rest} needs the key of the run: start {reader.name} with --workdir')
        return StreamReceiver(
            f'{prefix}{rest}',
            reader.name,
            reader.prove,
            frame_deadline_s=reader.frame_deadline_s,
            record_deadline_s=reader.record_deadline_s,
        )

    return open_stream


def _exists(rest: str) -> bool:
    return pathlib.Path(rest).exists()


SCHEMES: Mapping[str, Scheme] = {
    SHM: Scheme(_open_shm, _exists),
    UNIX: Scheme(_open_stream(UNIX), _exists),
    TCP: Scheme(_open_stream(TCP), lambda rest: True),
}
