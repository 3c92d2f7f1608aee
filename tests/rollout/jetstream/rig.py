"""A server behind JetStream around the toy backend, in threads of this process; skips where there is no JetStream."""

from __future__ import annotations

import asyncio
import importlib.util
import time

import pytest

from areal_jax.rollout.jetstream import control
from tests.rollout.http.server.rig import PROMPT, ToyServer

needs_jetstream = pytest.mark.skipif(
    importlib.util.find_spec('jetstream') is None,
    reason='this interpreter has no JetStream: bash launch/test_external.sh jetstream',
)


class JetstreamToyServer(ToyServer):
    """Inside, it serves gRPC at `url`."""

    death = None  # of a thread of JetStream

    def on_failed_dispatch(self, error):
        """Told to nobody: the answers say it."""

    def make_front(self, model, listener, limits, api_key):
        from areal_jax.rollout.jetstream.server.compatibility import import_jetstream

        import_jetstream()
        from areal_jax.rollout.jetstream.server.front import JetstreamFront

        return JetstreamFront(
            self.service.inbox, model, listener,
            limits=limits, decode_steps=self.decode_steps, api_key=api_key,
            on_death=lambda error: self.note_death(error),
        )  # fmt: skip

    def note_death(self, error):
        self.death = error

    def talk(self, script, seconds=60):
        """`script(talk)` is a coroutine function, on a loop of the test."""

        async def main():
            async with asyncio.timeout(seconds), grpc_channel(self.url) as channel:
                return await script(Talk(channel))

        return asyncio.run(main())

    def free_slots(self):
        """Of JetStream, once all calls have ended: waits until its threads have put each slot back."""
        deadline = time.monotonic() + 20
        while (free := self.front_slots()) < self.http.relay.slots and time.monotonic() < deadline:
            time.sleep(0.01)
        return free

    def front_slots(self):
        return self.http.relay.count_free()


def grpc_channel(url):
    import grpc

    return grpc.aio.insecure_channel(url.removeprefix('http://'))


class Talk:
    """A plain client of JetStream, with JetStream's own messages."""

    def __init__(self, channel):
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        self.channel, self.messages = channel, jetstream_pb2
        self.stub = jetstream_pb2_grpc.OrchestratorStub(channel)

    def decode(self, ids=PROMPT, new=12, *, text=None, metadata=()):
        """The call; iterate over it."""
        request = self.messages.DecodeRequest
        content = (
            {'token_content': request.TokenContent(token_ids=ids)}
            if text is None
            else {'text_content': request.TextContent(text=text)}
        )
        return self.stub.Decode(request(max_tokens=new, **content), metadata=list(metadata))

    async def read(self, call):
        """(ids, text) of a whole answer."""
        samples = [response.stream_content.samples[0] async for response in call]
        return [i for one in samples for i in one.token_ids], ''.join(one.text for one in samples)

    async def control(self, method, fields=(), metadata=()):
        call = self.channel.unary_unary(control.describe_path(method))
        return control.decode(await call(control.encode(dict(fields)), metadata=list(metadata)))


async def refusal(awaited):
    """(status, sentence) of a call that is refused."""
    import grpc

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaited
    return caught.value.code().name, caught.value.details()
