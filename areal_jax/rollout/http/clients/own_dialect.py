"""The protocol of our own servers, for a client: vLLM's, with staged weights and a version in each event."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection, Dialect
from areal_jax.rollout.http.clients.vllm import VllmDialect, stream_deltas
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Call, FinishWord, Piece, Reply

# of a pause: longer than a process of a run may stand still and go on as if nothing had been (60 s, tests/chaos)
LEASE_S = 90.0


class StagingDialect(Dialect, Protocol):
    """What our servers do besides; all methods raise NoReplyError and StatusError.

    A pause is a lease of the client that the connection names, of `lease_s` seconds.
    """

    lease_s: float

    async def register(self, connection: Connection) -> None:
        """Ends every request, and takes the server over from other clients that name themselves."""
        ...

    async def renew(self, connection: Connection) -> None:
        """The pause, where there is one, lasts for another lease."""
        ...

    async def stage(self, connection: Connection, directory: str) -> None:
        """Returns when the server has loaded the weights, beside those that it decodes with."""
        ...

    async def swap(self, connection: Connection, version: str) -> float:
        """The server decodes with the staged weights, and names them; returns its pause of decoding in seconds."""
        ...

    async def ask(self, connection: Connection) -> Held:
        """What the server says of its weights, and of who has paused it."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """'' for what the server does not know."""

    version: str  # what it calls its weights
    digest: str  # hash of their manifest
    client: str = ''  # that it obeys
    pauses: tuple[tuple[str, float], ...] = ()  # (holder, '' without a lease; seconds since it began)

    def find_foreign_pause(self, client: str) -> str:
        """Who else has paused the server and since when; '' = nobody."""
        for holder, seconds in self.pauses:
            if not holder:
                return f'for {seconds:.0f} s by a client without a lease: POST /resume ends it'
            if holder != client:
                return f'for {seconds:.0f} s by {holder}'
        return ''


def read_held(fields: Reply) -> Held:
    """Of the fields of a reply; what has another form counts as not known."""
    pauses = fields.values.get('pauses')
    known = [Reply(one) for one in pauses if isinstance(one, dict)] if isinstance(pauses, list) else []
    described = tuple((one.name('holder'), float(one.number('paused_seconds'))) for one in known)
    return Held(fields.name('weight_version'), fields.name('manifest_hash'), fields.name('client'), described)


class OwnDialect(VllmDialect):
    """Implements StagingDialect."""

    def __init__(self, lease_s: float = LEASE_S):
        self.lease_s = lease_s

    async def register(self, connection: Connection) -> None:
        await connection.require('POST', '/register_client')

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        await connection.require('POST', f'/pause?mode=abort&lease_s={self.lease_s:g}')

    async def renew(self, connection: Connection) -> None:
        await connection.require('POST', f'/renew_pause?lease_s={self.lease_s:g}')

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Delivers what each event adds."""

        def take(delta: vllm.Delta, event: JsonObject) -> None:
            if delta.pieces:
                deliver(delta.pieces)

        return await stream_deltas(connection, call, vocab_size, take)

    async def stage(self, connection: Connection, directory: str) -> None:
        await connection.require('POST', '/update_weights', {'update_info': {'weights_path': directory}})

    async def swap(self, connection: Connection, version: str) -> float:
        reply = await connection.require('POST', '/finish_weight_update', {'weight_version': version})
        return float(reply.fields().number('pause_seconds'))

    async def ask(self, connection: Connection) -> Held:
        return read_held((await connection.require('GET', '/weight_info')).fields())
