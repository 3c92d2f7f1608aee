"""The connection to one JetStream server over gRPC. Its coroutines run and decode on the clock's I/O loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from areal_jax.files import JsonObject
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError, Reply, StatusError
from areal_jax.rollout.http.pauses import CLIENT, FENCED
from areal_jax.rollout.http.wire import reply
from areal_jax.rollout.http.wire.exchange import INCARNATION
from areal_jax.rollout.jetstream import control
from areal_jax.rollout.jetstream.messages import DECODE, parse_decode, render_decode
from areal_jax.rollout.jetstream.record import KEPT, RECORD, SETTINGS
from areal_jax.types import concatenate

_OPTIONS = (('grpc.max_receive_message_length', -1), ('grpc.max_send_message_length', -1))
# refusals by their HTTP status: the server states that the action was not done
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: FENCED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
}


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The result of a call of Decode."""

    tokens: np.ndarray  # int32 [n]
    record: bytes  # see record.py


class JetstreamConnection(Connection):
    """Calls to one server, any number at the same time. The clock's calls have the deadlines.

    Args:
      url: 'http://host:port'.
      api_key, holder, client: see Connection.
    """

    def __init__(self, url: str, api_key: str = '', holder: str = '', client: str = ''):
        super().__init__(url, api_key, holder, client=client)
        self._metadata = [('authorization', f'Bearer {api_key}')] if api_key else []
        self._metadata += [(INCARNATION.lower(), holder)] if holder else []
        self._metadata += [(CLIENT.lower(), client)] if client else []
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, grpc.aio.UnaryStreamCall] = {}  # of Decode under way, by request id

    async def act(self, method: str, fields: JsonObject | None = None) -> reply.Reply:
        """Calls the second service; raises StatusError for a refusal, NoReplyError without a reply."""
        return reply.Reply(control.decode(await self._ask(method, fields or {})))

    async def decode(self, request_id: str, settings: str, token_ids: Sequence[int], max_tokens: int) -> Decoded:
        """Returns the whole answer, or, if it was aborted, its part so far; raises StatusError, NoReplyError."""
        metadata = [*self._metadata, (SETTINGS, settings)]
        call = self._open_channel().unary_stream(DECODE)(render_decode(token_ids, max_tokens), metadata=metadata)
        self._calls[request_id] = call
        parts: list[np.ndarray] = []
        try:
            async for message in call:
                parts.append(parse_decode(message))
            trailing = dict(await call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as error:
            raise _translate(DECODE, error) from error
        except asyncio.CancelledError:
            if not _is_cancelling():
                raise NoReplyError(f'{DECODE}: the call was closed') from None
            raise
        except DecodeError as error:
            raise NoReplyError(f'{DECODE} answered what is no DecodeResponse ({error})') from error
        finally:
            call.cancel()  # so that the server frees the slot; no effect on an ended call
            del self._calls[request_id]
        tokens = concatenate(parts, np.int32)
        record = trailing.get(RECORD)
        if record is None:
            if KEPT not in trailing:
                raise NoReplyError(f'{DECODE}: the answer came without a record, and is of no use')
            record = await self._ask(control.RECORD, {'request_id': trailing[KEPT]})
        return Decoded(tokens, record)

    def close_call(self, request_id: str) -> None:
        """Closes the call of a request, which the server then ends, even before it has reached the engine."""
        if (call := self._calls.get(request_id)) is not None:
            call.cancel()

    async def close(self) -> None:
        await super().close()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, method: str, fields: JsonObject) -> bytes:
        path = control.describe_path(method)
        try:
            return await self._open_channel().unary_unary(path)(control.encode(fields), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _translate(path, error) from error

    def _open_channel(self) -> grpc.aio.Channel:
        if self._is_closed:
            raise NoReplyError(f'the connection to {self.url} is closed')
        if self._channel is None:  # made by the first call, since it belongs to the loop that runs it
            self._channel = grpc.aio.insecure_channel(self.url.removeprefix('http://'), options=_OPTIONS)
            self._guard = asyncio.create_task(_close_at_end(self._channel), name=f'guard of {self.url}')
        return self._channel


async def _close_at_end(channel: grpc.aio.Channel) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await channel.close()


def _is_cancelling() -> bool:
    """Whether the coroutine itself is being cancelled, and not the call that it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _translate(path: str, error: grpc.aio.AioRpcError) -> Exception:
    details = error.details() or ''
    status = _REFUSED.get(error.code())
    if status is None or not details:
        return NoReplyError(f'{path} had no reply ({error.code().name}: {details})')
    return StatusError('gRPC', path, Reply(status, details, None))
