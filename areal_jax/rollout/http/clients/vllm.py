"""vLLM's protocol, for a client.

The server is started with --enable-scale-out, --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1
(launch/test_external.sh): without them it takes no tokens, gives log-probs before the temperature, or has no control.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from areal_jax.columns import join
from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection, Dialect, NoReplyError, UpdateError
from areal_jax.rollout.http.clients.engine import ClientParts, ServerEngine
from areal_jax.rollout.http.clients.engine import connect as connect_dialect
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.encoding import parse_event
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, FinishWord, Piece
from areal_jax.rollout.http.wire.reply import Reply, cut_by_spans
from areal_jax.types import concatenate

TakeDelta = Callable[[vllm.Delta, JsonObject], None]  # the delta of an event, and the event
_PREFIX = 'generate-tokens-'  # the server's prefix of our ids


class VllmDialect:
    """Implements connection.Dialect. Events have log-probs; the versions of all tokens are in the last one."""

    seeds = streams = True
    keeps_answers = False  # tokens of a stream whose server died have a known version only if calls end at a pause

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        reply = await connection.require('POST', vllm.PATH, vllm.render_request(call))
        (answer,) = vllm.parse_reply(reply.content, call, vocab_size)
        return answer

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Delivers at the end, which tells the versions of all tokens, or when the stream is cut off: tokens received
        until then are valid if no other client loads weights into the server. Calls with routes are not streamed.
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
        # named after the load: if the name reads back as this version, its weights are loaded
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
    """Splits an answer's pieces by the versions of all its tokens in the last event; raises ReplyError."""
    (choice,) = Reply(last_event, 'event').entries('choices', 1)
    tokens = concatenate([piece.tokens for piece in pieces], np.int32)
    logprobs = concatenate([piece.logprobs for piece in pieces], np.float32)
    columns = join([piece.columns for piece in pieces])
    return cut_by_spans(Reply(choice, 'choice'), tokens, logprobs, columns)


def connect(parts: ClientParts) -> ServerEngine:
    """Makes the client of one vLLM server."""
    return connect_dialect(parts, VllmDialect())


# The protocol of our own servers, for a client: vLLM's, with staged weights and a version in each event.


# of a pause: longer than a process of a run may be stopped and continue unharmed (60 s, checks/chaos)
LEASE_S = 90.0


class StagingDialect(Dialect, Protocol):
    """The additional actions of this project's servers; all methods raise NoReplyError and StatusError.

    A pause is a lease of `lease_s` seconds, held by the client that the connection names.
    """

    lease_s: float

    async def register(self, connection: Connection) -> None:
        """Ends every request, and takes the server over from other clients that name themselves."""
        ...

    async def renew(self, connection: Connection) -> None:
        """Extends the pause, if there is one, by another lease from now."""
        ...

    async def stage(self, connection: Connection, directory: str) -> None:
        """Returns when the server has loaded the weights, in addition to the weights in use."""
        ...

    async def swap(self, connection: Connection, version: str) -> float:
        """Swaps the staged weights in and names them; returns the server's pause of decoding in seconds."""
        ...

    async def ask(self, connection: Connection) -> Held:
        """Asks the server for its weights and its pauses."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """A server's weights, client and pauses; '' = unknown to the server."""

    version: str  # the name of its weights
    digest: str  # hash of their manifest
    client: str = ''  # the one that it obeys
    pauses: tuple[tuple[str, float], ...] = ()  # (holder, '' without a lease; seconds since it began)

    def find_foreign_pause(self, client: str) -> str:
        """Returns who else has paused the server and for how long; '' = no other client."""
        for holder, seconds in self.pauses:
            if not holder:
                return f'for {seconds:.0f} s by a client without a lease: POST /resume ends it'
            if holder != client:
                return f'for {seconds:.0f} s by {holder}'
        return ''


def read_held(fields: Reply) -> Held:
    """Reads the fields of a reply; malformed fields count as unknown."""
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
        """Delivers the pieces of each event at once."""

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
