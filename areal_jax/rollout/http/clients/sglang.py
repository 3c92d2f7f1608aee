"""SGLang's protocol, for a client. Also spoken by SGLang-JAX, which loads no weights, and by our own server.

Replies of SGLang 0.5.23 have the spans of the versions that drew their tokens. Servers whose replies have spans keep
their answers over an update (pause mode `retract`, some milliseconds; log-probs on both sides of the switch are exact).
On other servers an update ends every answer (mode `abort`, a second: the server's polling interval for their end).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection, StatusError, UpdateError
from areal_jax.rollout.http.clients.engine import ClientParts, ServerEngine
from areal_jax.rollout.http.clients.engine import connect as connect_dialect
from areal_jax.rollout.http.wire import sglang
from areal_jax.rollout.http.wire.exchange import Answer, Call, FinishWord, Piece

_VERSION_PATHS = ('/model_info', '/get_weight_version', '/get_model_info')  # the newest first


class SglangDialect:
    """Implements connection.Dialect. Answers are not streamed.

    Every event repeats all tokens so far, so a stream of n tokens carries n^2 / 2 of them, and SGLang-JAX breaks off
    streams with log-probs (--disable-overlap-schedule) and crashes.

    Args:
      seeds: the server takes `sampling_seed`: SGLang does with --enable-deterministic-inference.
      reads_routes: calls ask for routes. Then no answer stays on the server: computing its KV again would replace the
        routes of its tokens by routes under the new weights.
    """

    streams = False

    def __init__(self, seeds: bool = False, reads_routes: bool = False):
        self.seeds, self._reads_routes = seeds, reads_routes
        self.keeps_answers = False  # until a reply has spans

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        # with ignore_eos SGLang also ignores stop ids
        sampling = tuple(dataclasses.replace(one, ignore_eos=not one.stop_tokens) for one in call.sampling)
        call = dataclasses.replace(call, sampling=sampling)
        reply = await connection.require('POST', '/generate', sglang.render_request(call))
        (answer,) = sglang.parse_reply(reply.content, call, vocab_size)
        if answer.pieces:
            self.keeps_answers = not self._reads_routes and all(piece.version for piece in answer.pieces)
        return answer

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        answer = await self.generate(connection, call, vocab_size)
        deliver(answer.pieces)
        return 'abort' if answer.finish is None else answer.finish.reason

    async def abort(self, connection: Connection, request_id: str) -> None:
        body: JsonObject = {'rid': request_id} if request_id else {'abort_all': True}
        await connection.require('POST', '/abort_request', body)

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        await connection.require('POST', '/pause_generation', {'mode': 'retract' if keeps_answers else 'abort'})

    async def resume(self, connection: Connection) -> None:
        await connection.require('POST', '/continue_generation', {})

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        body: JsonObject = {'model_path': directory, 'weight_version': version, 'flush_cache': True}
        reply = await connection.request('POST', '/update_weights_from_disk', body)
        if reply.status != 200 or reply.fields().values.get('success') is not True:
            raise UpdateError(f'/update_weights_from_disk answered {reply.status}: {reply.message()}')
        found = await self.ask_version(connection)
        if found != version:
            raise UpdateError(f'the server calls its weights {found!r} after the update to version {version}')

    async def ask_version(self, connection: Connection) -> str:
        for path in _VERSION_PATHS:
            reply = await connection.request('GET', path)
            if reply.status == 200:
                return reply.fields().name('weight_version')
            if reply.status != 404:
                break
        raise StatusError('GET', path, reply)


def connect(parts: ClientParts) -> ServerEngine:
    """Makes the client of one SGLang server."""
    return connect_dialect(parts, SglangDialect(reads_routes=bool(parts.limits.forms)))
