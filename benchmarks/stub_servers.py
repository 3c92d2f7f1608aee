"""Servers that compute nothing, in a process of their own: answers of fixed pieces at a fixed pace, in our protocol.

    python -m benchmarks.stub_servers PIECES TOKENS PAUSE_S

Server K is at the path /K of one port, which is printed. An answer comes in so many events of so many tokens, one each
PAUSE_S. New weights are acknowledged at once. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import sys

import numpy as np
from aiohttp import web

from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.encoding import DONE
from areal_jax.rollout.http.wire.exchange import Answer, Call, CallSampling, Finish, Piece, ReplyInfo
from benchmarks.host_toys import DIGEST

HEADERS = {'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of every answer."""

    pieces: int
    tokens: int  # of a piece
    pause_s: float  # before a piece

    @functools.lru_cache(maxsize=8)  # noqa: B019 of the newest versions
    def events(self, version: str) -> list[bytes]:
        """An answer under these weights."""
        prompt = np.zeros(1, np.int32)
        call = Call((prompt,), 'token_ids', (CallSampling(self.pieces * self.tokens),), ('',), logprobs=True)
        answer, found = Answer('', prompt), []
        for number in range(self.pieces):
            piece = Piece(
                np.arange(100, 100 + self.tokens, dtype=np.int32),
                np.linspace(-3.0, -0.1, self.tokens, dtype=np.float32),
                version,
            )
            answer.add(piece)
            if number == self.pieces - 1:
                answer.finish = Finish('length')
            found.append(vllm.render_event(call, answer, piece, ReplyInfo('', 0, str)))
        return found


class StubServers:
    """All servers of the process."""

    def __init__(self, shape: Shape):
        self._shape = shape
        self._versions: collections.defaultdict[str, str] = collections.defaultdict(lambda: '0')

    async def handle(self, request: web.Request) -> web.StreamResponse:
        server, _, path = request.path.removeprefix('/').partition('/')
        if path == vllm.PATH.removeprefix('/'):
            return await self._stream(request, server)
        if path == 'finish_weight_update':
            self._versions[server] = (await request.json())['weight_version']
            return web.json_response({'pause_seconds': 0.0})
        return web.json_response({'weight_version': self._versions[server], 'manifest_hash': DIGEST})

    async def _stream(self, request: web.Request, server: str) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has ended
            for number in range(self._shape.pieces):
                await asyncio.sleep(self._shape.pause_s)
                await response.write(self._shape.events(self._versions[server])[number])
            await response.write(DONE)
        return response


async def serve(shape: Shape) -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route('*', '/{path:.*}', StubServers(shape).handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, '127.0.0.1', 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == '__main__':
    asyncio.run(serve(Shape(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
