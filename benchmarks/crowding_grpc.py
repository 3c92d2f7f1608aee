"""A server behind JetStream in crowding.py: the messages of its crowding client, and its honest clients."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

import grpc

from areal_jax.rollout.jetstream.control import RESUME, STATUS, describe_path
from areal_jax.rollout.jetstream.messages import DECODE, SERVICE, parse_decode, render_decode
from areal_jax.rollout.jetstream.record import SETTINGS

HEALTH = f'/{SERVICE}/HealthCheck'
_TEXT, _IDS = 5, 6  # numbers of the fields of DecodeRequest with a prompt, in each of which field 1 has the content
_GREEDY = [(SETTINGS, json.dumps({'sampling_params': {'temperature': 0, 'ignore_eos': True}}))]
_LIMIT_S = 120.0
_LIVE = b'\x08\x01'  # HealthCheckResponse
_OPTIONS = (('grpc.max_send_message_length', -1), ('grpc.max_receive_message_length', -1))


# Messages. A field is its number times 8 and 2, a length as a varint, and the bytes.


def _field(number: int, content: bytes) -> bytes:
    length, size = len(content), b''
    while length > 127:
        size, length = size + bytes([(length & 127) | 128]), length >> 7
    return bytes([(number << 3) | 2]) + size + bytes([length]) + content


def _ids(size: int) -> bytes:
    return _field(_IDS, _field(1, b'\x01' * size))


def _single_ids(size: int) -> bytes:
    """Not packed: each is a field."""
    return _field(_IDS, b'\x08\x01' * (size // 2))


def _text(size: int) -> bytes:
    return _field(_TEXT, _field(1, b'ab, [{' * (size // 6)))


def _wide_text(size: int) -> bytes:
    return _field(_TEXT, _field(1, '\N{GRINNING FACE}'.encode() * (size // 4)))


def _prompts(size: int) -> bytes:
    """One prompt after the other, each in the place of the one before."""
    return (_field(_TEXT, b'') + _field(_IDS, b'')) * (size // 4)


def _nested(size: int) -> bytes:
    return b'[' + b'[[[]]],' * (size // 7) + b'0]'


def _objects(size: int) -> bytes:
    return b'{' + b'"mode":{"a":[1,2]},' * (size // 19) + b'"mode":"abort"}'


def _unknown(size: int) -> bytes:
    """Fields that the message does not have."""
    return b'\xf8\x07\x01' * (size // 3)


# kind: (path, its maker)
KINDS: Mapping[str, tuple[str, Callable[[int], bytes]]] = {
    'ids': (DECODE, _ids), 'single ids': (DECODE, _single_ids), 'text': (DECODE, _text),
    'wide text': (DECODE, _wide_text), 'prompts': (DECODE, _prompts), 'nested': (describe_path(STATUS), _nested),
    'objects': (describe_path(RESUME), _objects), 'unknown': (HEALTH, _unknown),
}  # fmt: skip


# Clients.


@contextlib.contextmanager
def open_sender(url: str) -> Iterator[Callable[[str, bytes], str]]:
    """Inside, sends a message to a path over a connection of its own, and gives the name of the status."""
    options = (*_OPTIONS, ('grpc.use_local_subchannel_pool', 1))
    with grpc.insecure_channel(url.removeprefix('http://'), options) as channel:

        def send(path: str, message: bytes) -> str:
            try:
                collections.deque(channel.unary_stream(path)(message, timeout=_LIMIT_S), 0)
            except grpc.RpcError as error:
                return str(error.code().name)
            return 'OK'

        yield send


@contextlib.asynccontextmanager
async def open_caller(url: str) -> AsyncIterator[Callable[[str, str], Awaitable[str]]]:
    """Inside, asks for an answer of four tokens, or for the health, and gives what was wrong; '' = nothing.

    A second argument, the key of other fronts, is not used.
    """
    async with grpc.aio.insecure_channel(url.removeprefix('http://')) as channel:
        message = render_decode([1, 2, 3], 4)

        async def ask(path: str, _: str) -> str:
            try:
                if path == HEALTH:
                    return '' if await channel.unary_unary(HEALTH)(b'', timeout=_LIMIT_S) == _LIVE else 'not live'
                parts = [one async for one in channel.unary_stream(path)(message, metadata=_GREEDY, timeout=_LIMIT_S)]
            except grpc.aio.AioRpcError as error:
                return f'{error.code().name}: {error.details()}'
            found = sum(len(parse_decode(part)) for part in parts)
            return '' if found == 4 else f'{found} tokens in place of 4'

        yield ask
