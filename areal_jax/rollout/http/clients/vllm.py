"""vLLM's protocol, for a client.

The server is started with --enable-scale-out, --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1
(launch/test_external.sh): without them it takes no tokens, gives log-probs before the temperature, or has no control.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from areal_jax.columns import join
from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError, UpdateError
from areal_jax.rollout.http.clients.engine import ClientParts, ServerEngine
from areal_jax.rollout.http.clients.engine import connect as connect_dialect
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, FinishWord, Piece, Reply, cut_by_spans
from areal_jax.rollout.http.wire.sglang import parse_event
from areal_jax.types import concatenate

TakeDelta = Callable[[vllm.Delta, JsonObject], None]  # what an event adds, and the event
_PREFIX = 'generate-tokens-'  # what the server puts before our ids


class VllmDialect:
    """Implements dialect.Dialect. Events have log-probs; the versions of all tokens are in the last one."""

    seeds = streams = True
    keeps_answers = False  # what a stream brought before its server died has a version only where calls end at a pause

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        reply = await connection.require('POST', vllm.PATH, vllm.render_request(call))
        (answer,) = vllm.parse_reply(reply.content, call, vocab_size)
        return answer

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Delivers at the end, which tells the versions of all tokens, or where the stream is cut off: what came until
        then is right as long as no other client loads weights into the server. Calls with routes are not streamed.
        """
        if not call.stream:
            answer = await self.generate(connection, call, vocab_size)
            deliver(answer.pieces)
            return 'abort' if answer.finish is None else answer.finish.reason
        pieces: list[Piece] = []
        last: JsonObject = {}

        def take(delta: vllm.Delta, event: JsonObject) -> None:
            nonlocal last
            last = event
            pieces.extend(delta.pieces)

        try:
            reason = await stream_deltas(connection, call, vocab_size, take)
        except NoReplyError:
            deliver([dataclasses.replace(piece, version='') for piece in pieces])
            raise
        deliver(_cut_by_versions(last, pieces))
        return reason

    async def abort(self, connection: Connection, request_id: str) -> None:
        ids = [_PREFIX + request_id] if request_id else []
        await connection.require('POST', '/abort_requests', {'request_ids': ids})

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        assert not keeps_answers, 'the class does not say that it can'
        await connection.require('POST', '/pause?mode=abort')

    async def resume(self, connection: Connection) -> None:
        await connection.require('POST', '/resume')

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        load: JsonObject = {'method': 'reload_weights', 'kwargs': {'weights_path': directory}}
        reply = await connection.request('POST', '/collective_rpc', load)
        if reply.status != 200:
            raise UpdateError(f'/collective_rpc answered {reply.status}: {reply.message()}')
        # the name follows the weights: a name that reads back as this version has its weights under it
        await connection.require('POST', '/update_weight_version', {'new_version': version})
        found = await self.ask_version(connection)
        if found != version:
            raise UpdateError(f'the server calls its weights {found!r} after the update to version {version}')

    async def ask_version(self, connection: Connection) -> str:
        reply = await connection.require('GET', '/weight_info')
        return reply.fields().name('weight_version')


async def stream_deltas(connection: Connection, call: Call, vocab_size: int, take: TakeDelta) -> FinishWord:
    """Calls `take` for each event; returns how the answer ended. Raises ReplyError, NoReplyError and StatusError."""
    received, ended = 0, cast(Finish | None, None)

    def take_line(line: str) -> None:
        nonlocal received, ended
        if (event := parse_event(line)) is None:
            return
        for delta in vllm.parse_event(event, call, [received], vocab_size):
            received += sum(len(piece.tokens) for piece in delta.pieces)
            ended = delta.finish or ended
            take(delta, event)

    await connection.stream(vllm.PATH, vllm.render_request(call), take_line)
    if ended is None:
        raise NoReplyError(f'POST {vllm.PATH}: the stream ended after {received} tokens, and the answer did not')
    return ended.reason


def _cut_by_versions(last_event: JsonObject, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of an answer by the versions that the last event tells of all its tokens; raises ReplyError."""
    (choice,) = Reply(last_event, 'event').entries('choices', 1)
    tokens = concatenate([piece.tokens for piece in pieces], np.int32)
    logprobs = concatenate([piece.logprobs for piece in pieces], np.float32)
    columns = join([piece.columns for piece in pieces])
    return cut_by_spans(Reply(choice, 'choice'), tokens, logprobs, columns)


def connect(parts: ClientParts) -> ServerEngine:
    """The client of one server of this kind."""
    return connect_dialect(parts, VllmDialect())
