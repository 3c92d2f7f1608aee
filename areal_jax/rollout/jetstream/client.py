"""A server of ours behind JetStream as an engine: like `own`, but an answer comes as a whole, with its record.

During generation only tokens arrive, without their log-probs: tokens streamed by a server that dies are lost, and
generated again elsewhere with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from areal_jax.rollout.http.clients.connection import Connection, UpdateError
from areal_jax.rollout.http.clients.engine import ClientParts
from areal_jax.rollout.http.clients.own import OwnEngine, connect_dialect
from areal_jax.rollout.http.clients.vllm import LEASE_S, Held, read_held
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, FinishWord, Piece
from areal_jax.rollout.jetstream import control
from areal_jax.rollout.jetstream.record import decode_record, render_settings

if TYPE_CHECKING:
    from areal_jax.rollout.jetstream.channel import JetstreamConnection  # imports grpc


class JetstreamDialect:
    """Implements vllm.StagingDialect over gRPC; its connection is a JetstreamConnection."""

    seeds, streams, keeps_answers = True, False, False

    def __init__(self, lease_s: float = LEASE_S):
        self.lease_s = lease_s

    async def register(self, connection: Connection) -> None:
        await _of(connection).act(control.REGISTER)

    async def renew(self, connection: Connection) -> None:
        await _of(connection).act(control.RENEW, {'lease_s': self.lease_s})

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        prompt = cast(np.ndarray, call.prompts[0])
        sent, limit = _of(connection), call.sampling[0].max_new_tokens or 1
        decoded = await sent.decode(call.request_ids[0], render_settings(call), prompt.tolist(), limit)
        pieces, reason, version = decode_record(decoded.record, decoded.tokens, call.columns, vocab_size)
        return Answer(call.request_ids[0], prompt, pieces=pieces, finish=Finish(reason), version=version)

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Delivers the whole answer at its end."""
        answer = await self.generate(connection, call, vocab_size)
        assert answer.finish is not None
        if answer.pieces:
            deliver(answer.pieces)
        return answer.finish.reason

    async def abort(self, connection: Connection, request_id: str) -> None:
        if request_id:
            _of(connection).close_call(request_id)
        else:
            await _of(connection).act(control.ABORT, {})

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        await _of(connection).act(control.PAUSE, {'mode': 'abort', 'lease_s': self.lease_s})

    async def resume(self, connection: Connection) -> None:
        await _of(connection).act(control.RESUME)

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        await self.stage(connection, directory)
        await self.swap(connection, version)
        if (found := await self.ask_version(connection)) != version:
            raise UpdateError(f'the server calls its weights {found!r} after the update to version {version}')

    async def ask_version(self, connection: Connection) -> str:
        return (await self.ask(connection)).version

    async def stage(self, connection: Connection, directory: str) -> None:
        await _of(connection).act(control.STAGE, {'path': directory})

    async def swap(self, connection: Connection, version: str) -> float:
        return float((await _of(connection).act(control.SWAP, {'version': version})).number('pause_seconds'))

    async def ask(self, connection: Connection) -> Held:
        return read_held(await _of(connection).act(control.STATUS))


def connect(parts: ClientParts) -> OwnEngine:
    """Makes the client of one server of ours behind JetStream."""
    from areal_jax.rollout.jetstream.channel import JetstreamConnection

    connection = JetstreamConnection(parts.entry.url, parts.api_key, parts.entry.holder, parts.client)
    return connect_dialect(parts, JetstreamDialect(parts.lease_s), connection)


def _of(connection: Connection) -> JetstreamConnection:
    return cast('JetstreamConnection', connection)
