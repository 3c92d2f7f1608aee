"""Answers the second service (rollout/jetstream/control.py) on the port of JetStream's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import grpc

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.rollout.http.pauses import CLIENT, LONGEST_LEASE_S
from areal_jax.rollout.http.wire import control as wire
from areal_jax.rollout.http.wire.bodies import Body, Text, Within, read
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.jetstream.control import (
    ABORT,
    FLUSH,
    PAUSE,
    RECORD,
    REGISTER,
    RENEW,
    RESUME,
    SERVICE,
    STAGE,
    STATUS,
    SWAP,
    encode,
)
from areal_jax.rollout.jetstream.server.open_calls import OpenCalls, end_refused
from areal_jax.rollout.jetstream.server.request_messages import read_control

Seconds = Annotated[float, Within(0, LONGEST_LEASE_S)]  # of a lease; 0 = not given


class _Request(Body):
    request_id: Text = ''


class _Pause(Body):
    mode: Literal['abort', 'retract', 'in_place', 'wait'] = 'abort'
    lease_s: Seconds = 0.0


class _Renewal(Body):
    lease_s: Seconds = 0.0


class _Stage(Body):
    path: Text = ''
    version: Text = ''


class _Swap(Body):
    version: Text = ''


class ControlService:
    """The handlers, on the loop of gRPC.

    Each takes the fields of a message and the name of its sender, and returns the fields of the reply.
    """

    def __init__(self, calls: OpenCalls):
        self._calls, self._bridge = calls, calls.bridge

    def build(self) -> grpc.GenericRpcHandler:
        """Builds the handler for grpc.aio.Server.add_generic_rpc_handlers."""
        methods = {
            PAUSE: self._pause, RESUME: self._resume, STAGE: self._stage, SWAP: self._swap, STATUS: self._status,
            ABORT: self._abort, FLUSH: self._flush, REGISTER: self._register, RENEW: self._renew,
        }  # fmt: skip
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._handle(act)) for name, act in methods.items()}
        handlers[RECORD] = grpc.unary_unary_rpc_method_handler(self._record)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _handle(
        self, act: Callable[[object, str], Awaitable[JsonObject]]
    ) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
        async def answer(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
            metadata = await self._calls.require_allowed(context)
            await self._calls.refuse_large(message, context)
            try:
                client = wire.read_client(metadata.get(CLIENT.lower(), ''))
                return encode(await act(read_control(message), client))
            except UserError as error:
                await end_refused(context, error)
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, 'the engine has not answered in time: ask again, or start it again'
                )
            raise AssertionError('abort raises')

        return answer

    async def _record(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers the record of an answer, once."""
        await self._calls.require_allowed(context)
        await self._calls.refuse_large(message, context)
        try:
            name = read(_Request, read_control(message))[0].request_id
        except RequestError as error:
            await end_refused(context, error)
        if record := self._calls.records.take(name):
            return record
        await context.abort(
            grpc.StatusCode.NOT_FOUND, f'request_id={name!r} has no record here: it was fetched, or is too old'
        )
        raise AssertionError('abort raises')

    async def _register(self, fields: object, client: str) -> JsonObject:
        """Registers a client; ends every request and the pauses of other such clients, refused from now on."""
        read(wire.Nothing, fields)
        name = wire.require_client(client)
        await self._bridge.act('register', lambda service: service.register(name))
        return {}

    async def _pause(self, fields: object, client: str) -> JsonObject:
        asked, _ = read(_Pause, fields)
        lease = wire.read_lease(client, asked.lease_s)
        await self._bridge.act('pause', lambda service: service.pause(asked.mode, lease))
        return {}

    async def _renew(self, fields: object, client: str) -> JsonObject:
        lease = wire.read_lease(wire.require_client(client), read(_Renewal, fields)[0].lease_s)
        assert lease is not None
        found = await self._bridge.act('renew', lambda service: service.renew(lease), self._bridge.limits.reply_s)
        return {'renewed': found}

    async def _resume(self, fields: object, client: str) -> JsonObject:
        read(wire.Nothing, fields)
        await self._bridge.act('resume', lambda service: service.resume(client), self._bridge.limits.reply_s)
        return {}

    async def _stage(self, fields: object, client: str) -> JsonObject:
        asked, _ = read(_Stage, fields)
        await self._bridge.act('stage', lambda service: service.stage(asked.path, asked.version, client))
        return {}

    async def _swap(self, fields: object, client: str) -> JsonObject:
        label = read(_Swap, fields)[0].version
        await self._bridge.act('swap', lambda service: service.swap(label or None, client=client))
        return {'pause_seconds': (await self._bridge.look()).update_pause_s}

    async def _status(self, fields: object, client: str) -> JsonObject:
        read(wire.Nothing, fields)
        status = await self._bridge.look()
        return {
            'weight_version': status.weight_version,
            'manifest_hash': status.digest or None,
            'pause': status.pause,
            'pauses': wire.render_pauses(status.pauses),
            'client': status.client or None,
            'running': status.engine.running,
            'waiting': status.engine.waiting + status.held,
            'generated_tokens': status.generated_tokens,
            'updates': status.updates,
            'fault': status.fault,
            'records_kept': len(self._calls.records),
        }

    async def _abort(self, fields: object, client: str) -> JsonObject:
        """Ends one request, or all if the id is ''."""
        name = read(_Request, fields)[0].request_id
        act = (lambda service: service.cancel([name])) if name else (lambda service: service.cancel_all())
        await self._bridge.act('abort', act, self._bridge.limits.reply_s)
        return {}

    async def _flush(self, fields: object, client: str) -> JsonObject:
        read(wire.Nothing, fields)
        await self._bridge.act('flush', lambda service: service.flush_cache(client), self._bridge.limits.reply_s)
        return {}
