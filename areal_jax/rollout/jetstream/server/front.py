"""The threads of JetStream's server around a service: made and started, stopped at the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Literal

import grpc
from jetstream.core import orchestrator, server_lib
from jetstream.core.proto import jetstream_pb2

from areal_jax.config.addresses import join_address
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.protocols import Inbox
from areal_jax.rollout.http.pauses import CLIENT, LONGEST_LEASE_S
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.http.server.thread import ServedModel
from areal_jax.rollout.http.wire import control as wire
from areal_jax.rollout.http.wire.bodies import Body, Text, Within, read
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.jetstream import control, messages
from areal_jax.rollout.jetstream.server.engine import RelayDriver
from areal_jax.rollout.jetstream.server.open_calls import OpenCalls, end_refused
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay
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
            control.PAUSE: self._pause,
            control.RESUME: self._resume,
            control.STAGE: self._stage,
            control.SWAP: self._swap,
            control.STATUS: self._status,
            control.ABORT: self._abort,
            control.FLUSH: self._flush,
            control.REGISTER: self._register,
            control.RENEW: self._renew,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._handle(act)) for name, act in methods.items()}
        handlers[control.RECORD] = grpc.unary_unary_rpc_method_handler(self._record)
        return grpc.method_handlers_generic_handler(control.SERVICE, handlers)

    def _handle(
        self, act: Callable[[object, str], Awaitable[JsonObject]]
    ) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
        async def answer(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
            metadata = await self._calls.require_allowed(context)
            await self._calls.refuse_large(message, context)
            try:
                client = wire.read_client(metadata.get(CLIENT.lower(), ''))
                return control.encode(await act(read_control(message), client))
            except UserError as error:
                await end_refused(context, error)
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, 'the engine has not answered in time: ask again, or start it again'
                )
            raise AssertionError('abort raises')

        return answer

    async def _record(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
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
        name = read(_Request, fields)[0].request_id
        act = (lambda service: service.cancel([name])) if name else (lambda service: service.cancel_all())
        await self._bridge.act('abort', act, self._bridge.limits.reply_s)
        return {}

    async def _flush(self, fields: object, client: str) -> JsonObject:
        read(wire.Nothing, fields)
        await self._bridge.act('flush', lambda service: service.flush_cache(client), self._bridge.limits.reply_s)
        return {}


class RelayOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's orchestrator; its Decode runs unchanged, on the OpenCall instead of the message."""

    def __init__(self, driver: RelayDriver, calls: OpenCalls):
        super().__init__(driver)
        self._calls = calls

    def build(self) -> grpc.GenericRpcHandler:
        """Builds the handler for grpc.aio.Server.add_generic_rpc_handlers."""
        decode = grpc.unary_stream_rpc_method_handler(
            self.Decode, response_serializer=jetstream_pb2.DecodeResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self.HealthCheck, response_serializer=jetstream_pb2.HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(messages.SERVICE, {'Decode': decode, 'HealthCheck': check})

    async def Decode(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        call = await self._calls.open(request, context)
        try:
            async for response in super().Decode(call, context):
                yield response
        except concurrent.futures.CancelledError:
            return  # JetStream raises this if the client is gone
        await self._calls.finish(call, context)

    async def HealthCheck(self, request: bytes, context: grpc.aio.ServicerContext) -> jetstream_pb2.HealthCheckResponse:
        """Answers a health check and ignores the message, which has no fields."""
        await self._calls.refuse_large(request, context)
        return await super().HealthCheck(jetstream_pb2.HealthCheckRequest(), context)

    def _get_prefill_content(self, request: OpenCall) -> tuple[OpenCall, bool]:
        """Returns (the content for RelayDriver, whether the client gets ids alone)."""
        return request, request.text is None


_GRACE_S = 2.0  # for calls that are open at the end
_WORKERS = 4  # gRPC's threads for handlers that are no coroutines: we have none
_METADATA_BYTES = 1 << 16  # of a call: its settings may name a thousand stop tokens
_OPTIONS = (
    ('grpc.so_reuseport', 0),  # otherwise a second server would take half of the first one's connections
    ('grpc.max_metadata_size', _METADATA_BYTES),
    ('grpc.absolute_max_metadata_size', _METADATA_BYTES),
    ('grpc.max_send_message_length', -1),
)


class JetstreamFront:
    """A context manager that serves calls inside the context and closes open ones at its end.

    Args:
      listener: the bound socket of the address. gRPC binds an address itself, so it is closed just before.
      api_key: '' = no key is needed.
      on_death: called on a thread that an error has ended.
    """

    def __init__(
        self,
        inbox: Inbox,
        model: ServedModel,
        listener: socket.socket,
        *,
        limits: Limits,
        decode_steps: int,
        api_key: str = '',
        on_death: Callable[[BaseException], None] = lambda error: None,
    ):
        self._inbox, self._model, self._listener, self._limits = inbox, model, listener, limits
        self._api_key, self._on_death = api_key, on_death
        self.relay = Relay(inbox, min(limits.streams, limits.requests), decode_steps)
        self._server: _Server | None = None

    def __enter__(self) -> JetstreamFront:
        driver = RelayDriver(self.relay, self._on_death)
        try:
            self._server = _Server(self._build, driver, self._listener)
        except BaseException:
            driver.stop()  # else its threads keep the process alive
            raise
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def refuse_new(self) -> None:
        """Refuses new calls from now on; callable from any thread."""
        self._model.facts.draining = True

    def _build(self) -> OpenCalls:
        model, facts = self._model, self._model.facts
        bridge = Bridge(
            self._inbox, model.texts, self._limits,
            context_tokens=model.context_tokens, vocab_size=model.vocab_size, seed=model.seed,
        )  # fmt: skip
        return OpenCalls(bridge, self.relay, self._api_key, lambda: facts.holder, lambda: facts.draining)


class _Server(server_lib.JetStreamServer):
    """JetStream's server with two services, and with a given address, which JetStream does not support."""

    def __init__(self, build: Callable[[], OpenCalls], driver: RelayDriver, listener: socket.socket):
        self._driver = driver
        self._executor = concurrent.futures.ThreadPoolExecutor(_WORKERS)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name='grpc', daemon=True)
        self._loop_thread.start()
        asyncio.run_coroutine_threadsafe(self._prepare(build, listener), self._loop).result()

    async def _prepare(self, build: Callable[[], OpenCalls], listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        calls = self._calls = build()
        most = ('grpc.max_receive_message_length', calls.most_message)  # no legal call is larger
        self._grpc_server = grpc.aio.server(self._executor, options=(*_OPTIONS, most))
        services = RelayOrchestrator(self._driver, calls), ControlService(calls)
        self._grpc_server.add_generic_rpc_handlers(tuple(service.build() for service in services))
        listener.close()
        self._grpc_server.add_insecure_port(join_address(host, port))

    async def _async_stop(self) -> None:
        await self._grpc_server.stop(grace=_GRACE_S)
        self._calls.bodies.close()
