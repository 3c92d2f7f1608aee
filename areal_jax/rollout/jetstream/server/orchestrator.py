"""JetStream's LLMOrchestrator, whose calls are ours: settings in, tokens as they come, the record behind them.

Messages arrive as bytes: gRPC would parse one of any size on its loop, before anybody is asked whether it may come.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator

import grpc
from jetstream.core import orchestrator
from jetstream.core.proto import jetstream_pb2

from areal_jax.rollout.jetstream.messages import SERVICE
from areal_jax.rollout.jetstream.server.engine import RelayDriver
from areal_jax.rollout.jetstream.server.open_calls import OpenCalls
from areal_jax.rollout.jetstream.server.relay import OpenCall


class RelayOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's Decode runs unchanged, on the OpenCall in the place of the message."""

    def __init__(self, driver: RelayDriver, calls: OpenCalls):
        super().__init__(driver)
        self._calls = calls

    def build(self) -> grpc.GenericRpcHandler:
        """For grpc.aio.Server.add_generic_rpc_handlers."""
        decode = grpc.unary_stream_rpc_method_handler(
            self.Decode, response_serializer=jetstream_pb2.DecodeResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self.HealthCheck, response_serializer=jetstream_pb2.HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {'Decode': decode, 'HealthCheck': check})

    async def Decode(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        call = await self._calls.open(request, context)
        try:
            async for response in super().Decode(call, context):
                yield response
        except concurrent.futures.CancelledError:
            return  # JetStream's word for a client that is gone
        await self._calls.finish(call, context)

    async def HealthCheck(self, request: bytes, context: grpc.aio.ServicerContext) -> jetstream_pb2.HealthCheckResponse:
        """Whatever the message has: there are no fields in it."""
        await self._calls.refuse_large(request, context)
        return await super().HealthCheck(jetstream_pb2.HealthCheckRequest(), context)

    def _get_prefill_content(self, request: OpenCall) -> tuple[OpenCall, bool]:
        """(what RelayDriver finds as the content, whether the client gets ids alone)."""
        return request, request.text is None
