"""Requests to a server of verifiers over its wire: ZMQ with msgpack, several at once over one socket.

A request is [id, method, payload], a reply [id, kind, payload]. A request for an episode gets any number of replies of
the kind `delta`, which add to what is known of it, before the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import msgpack
import zmq
import zmq.asyncio

from areal_jax.files import JsonObject

_DELTA = b'delta'


class WireError(Exception):
    """A message of the server that is none of its wire."""


class EnvironmentClient:
    """For one event loop; `close` must be called on it."""

    def __init__(self, address: str):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, tuple[asyncio.Future[JsonObject], Callable[[JsonObject], None]]] = {}
        self._cancels: set[asyncio.Task[None]] = set()  # a loop keeps no task alive
        self._receiver = asyncio.get_running_loop().create_task(self._receive(), name='environment')

    async def ask(
        self, method: str, payload: JsonObject, hear: Callable[[JsonObject], None] = lambda delta: None
    ) -> JsonObject:
        """The last reply to a request; `hear` gets each delta before it. An episode is cancelled with its request.

        Raises WireError for replies that cannot be read, and what `hear` raises.
        """
        number = f'{next(self._numbers):x}'.encode()
        reply: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (reply, hear)
        try:
            await self._send(number, method, payload)
            return await reply
        except BaseException:  # also of a delta that cannot be read: nobody waits for the episode
            cancel = self._send(f'{next(self._numbers):x}'.encode(), 'cancel', {'request_id': number.decode()})
            task = asyncio.get_running_loop().create_task(cancel)  # this one has ended
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Requests under way get no reply.

        Waits for nothing: a context whose socket is still open never ends, and hangs the thread that collects it.
        """
        for task in (self._receiver, *self._cancels):
            task.cancel()
        self._socket.close()
        self._context.term()

    async def _send(self, number: bytes, method: str, payload: JsonObject) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed meanwhile
            await self._socket.send_multipart([number, method.encode(), msgpack.packb(payload, use_bin_type=True)])

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            reply, hear = self._waiting.get(frames[0], (None, None))
            if reply is None or hear is None or reply.done():  # cancelled, or its request could not be read
                continue
            try:
                content = _unpack(frames)
                if frames[1] == _DELTA:
                    hear(content)
                else:
                    reply.set_result(content)
            except Exception as error:  # of this request alone
                reply.set_exception(error)


def _unpack(frames: list[bytes]) -> JsonObject:
    try:
        _, _, payload = frames
        content = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # also of msgpack
        raise WireError(f'a message of {len(frames)} frames cannot be read: {error}') from error
    if not isinstance(content, dict):
        raise WireError(f'a message holds a {type(content).__name__}, and no object')
    return content
