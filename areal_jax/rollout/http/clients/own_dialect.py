"""The protocol of our own servers, for a client: vLLM's, with staged weights and a version in each event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.dialect import Dialect
from areal_jax.rollout.http.clients.vllm import VllmDialect, stream_deltas
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Call, FinishWord, Piece


class StagingDialect(Dialect, Protocol):
    """What our servers do besides; all methods raise NoReplyError and StatusError."""

    async def stage(self, connection: Connection, directory: str) -> None:
        """Returns when the server has loaded the weights, beside those that it decodes with."""
        ...

    async def swap(self, connection: Connection, version: str) -> float:
        """The server decodes with the staged weights, and names them; returns its pause of decoding in seconds."""
        ...

    async def ask(self, connection: Connection) -> tuple[str, str]:
        """(what the server calls its weights, hash of their manifest); '' for what it does not know."""
        ...


class OwnDialect(VllmDialect):
    """Implements StagingDialect."""

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

    async def ask(self, connection: Connection) -> tuple[str, str]:
        fields = (await connection.require('GET', '/weight_info')).fields()
        return fields.name('weight_version'), fields.name('manifest_hash')
