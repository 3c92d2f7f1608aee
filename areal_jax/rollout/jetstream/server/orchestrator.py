"""JetStream's LLMOrchestrator, whose calls are ours: settings in, tokens as they come, the record behind them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator

import grpc
from jetstream.core import orchestrator
from jetstream.core.proto import jetstream_pb2

from areal_jax.rollout.jetstream.server.driver import RelayDriver
from areal_jax.rollout.jetstream.server.open_call import OpenCall
from areal_jax.rollout.jetstream.server.open_calls import OpenCalls


class RelayOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's Decode runs unchanged, on the OpenCall in the place of the message."""

    def __init__(self, driver: RelayDriver, calls: OpenCalls):
        super().__init__(driver)
        self._calls = calls

    async def Decode(
        self, request: jetstream_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        ids = None if request.WhichOneof('content') == 'text_content' else request.token_content.token_ids
        call = await self._calls.open(ids, request.text_content.text, request.max_tokens, context)
        try:
            async for response in super().Decode(call, context):
                yield response
        except concurrent.futures.CancelledError:
            return  # JetStream's word for a client that is gone
        await self._calls.finish(call, context)

    def _get_prefill_content(self, request: OpenCall) -> tuple[OpenCall, bool]:
        """(what RelayDriver finds as the content, whether the client gets ids alone)."""
        return request, request.text is None
