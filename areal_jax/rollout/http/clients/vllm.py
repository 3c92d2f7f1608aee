"""vLLM's protocol, for a client.

The server is started with --enable-scale-out, --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1
(launch/test_external.sh): without them it takes no tokens, gives log-probs before the temperature, or has no control.
"""

from __future__ import annotations

from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.dialect import UpdateError
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, Call

_PREFIX = 'generate-tokens-'  # what the server puts before our ids


class VllmDialect:
    """Implements dialect.Dialect."""

    seeds = True

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        reply = await connection.require('POST', '/inference/v1/generate', vllm.render_request(call))
        (answer,) = vllm.parse_reply(reply.content, call, vocab_size)
        return answer

    async def abort(self, connection: Connection, request_id: str) -> None:
        ids = [_PREFIX + request_id] if request_id else []
        await connection.require('POST', '/abort_requests', {'request_ids': ids})

    async def pause(self, connection: Connection) -> None:
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
        return str(reply.fields().get('weight_version', ''))
