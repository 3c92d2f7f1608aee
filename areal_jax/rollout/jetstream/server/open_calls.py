"""Turns gRPC calls into calls of ours: checks access, parses requests, and keeps records for clients."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hmac
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import NoReturn, cast

import grpc
import numpy as np
from grpc.aio import ServicerContext as Context

from areal_jax.errors import UserError
from areal_jax.rollout.http.pauses import FENCED
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.limits import FAILED, QUEUE_FULL, SMALL_BYTES, TOO_LATE
from areal_jax.rollout.http.server.replies import Bodies
from areal_jax.rollout.http.wire.exchange import INCARNATION, Answer, Call, RequestError, name_answers
from areal_jax.rollout.jetstream.record import KEPT, LARGEST_TRAILER, RECORD, SETTINGS, KeptRecords, encode_record
from areal_jax.rollout.jetstream.server.engine import StepError
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay
from areal_jax.rollout.jetstream.server.request_messages import read_control, read_request
from areal_jax.rollout.stream import DispatchError, LogprobError

_CHARACTER_BYTES = 4  # at most; a token id takes 5 bytes, and the bound has at least 4 characters per token
_ID_BYTES = 16  # random bytes of an id that the server makes
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    FENCED: grpc.StatusCode.ABORTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FAILED: grpc.StatusCode.INTERNAL,
    TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class OpenCalls:
    """The calls under way; used on the loop of gRPC alone.

    Args:
      api_key: clients must send it; '' = none.
      holder: returns the name of this process in the registry of a run; '' = it is in none.
      is_draining: whether new calls are refused.
    """

    def __init__(
        self, bridge: Bridge, relay: Relay, api_key: str, holder: Callable[[], str], is_draining: Callable[[], bool]
    ):
        self.records, self.bridge = KeptRecords(), bridge
        self.bodies = Bodies(bridge.limits, bridge.bound)
        self._relay, self._api_key, self._holder, self._is_draining = relay, api_key, holder, is_draining
        self._numbers = itertools.count()
        self._open: dict[int, OpenCall] = {}

    @property
    def most_message(self) -> int:
        """The most bytes of a message: any longer text exceeds the context; server.max_body_bytes at most."""
        return min(self.bridge.limits.body_bytes, _CHARACTER_BYTES * self.bridge.bound.most_text(1))

    async def require_allowed(self, context: Context) -> Mapping[str, str]:
        """Returns the metadata of the call by name; ends the call if its key or its process is another one."""
        found = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if self._api_key and not hmac.compare_digest(
            found.get('authorization', '').encode(), f'Bearer {self._api_key}'.encode()
        ):
            await _end(context, grpc.StatusCode.UNAUTHENTICATED, 'the key is missing or wrong: send that of the server')
        meant, holder = found.get(INCARNATION.lower(), ''), self._holder()
        if meant and holder and meant != holder:
            await _end(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f'the request is for the process {meant}, and this one is {holder}: read the registry of the run again',
            )
        return found

    async def refuse_large(self, message: bytes, context: Context) -> None:
        """Ends a call other than Decode if its message is larger than any such message, after a delay (see Places)."""
        if len(message) <= SMALL_BYTES:
            return
        try:
            async with self.bodies.taken(_name_client(context)):
                read_control(message)
        except RequestError as error:
            await end_refused(context, error)

    async def open(self, message: bytes, context: Context) -> OpenCall:
        """Opens the call of a DecodeRequest, with ids or with a text; ends the gRPC call if it is refused."""
        metadata = await self.require_allowed(context)
        try:
            if self._is_draining():
                raise RequestError('', 'this server is ending: ask another one', QUEUE_FULL)
            parse = functools.partial(read_request, self.bridge.bound, metadata.get(SETTINGS))
            async with self.bodies.parsed(message, parse, _name_client(context)) as read:
                call = await self.bridge.tokenize(read)
            self.bridge.load.admit(1, stream=True)
        except RequestError as error:
            await end_refused(context, error)
        found = self._make(call, isinstance(read.prompts[0], str))
        number = next(self._numbers)
        self._open[number] = found
        deadline = asyncio.get_running_loop().call_later(self.bridge.limits.request_s, self._expire, found)
        context.add_done_callback(lambda _: self._close(number, deadline))
        return found

    async def finish(self, call: OpenCall, context: Context) -> None:
        """Sends, after the last token, trailing metadata, or the error of a call that failed."""
        if call.error is not None:
            await end_refused(context, call.error)
        if call.answer.finish is None or not call.call.logprobs:
            return
        record = encode_record(call.call, call.answer)
        if len(record) <= LARGEST_TRAILER:
            context.set_trailing_metadata(((RECORD, record),))
        else:
            self.records.keep(call.answer.request_id, record)
            context.set_trailing_metadata(((KEPT, call.answer.request_id),))

    def _expire(self, call: OpenCall) -> None:
        sentence = f'the answer was not complete after {self.bridge.limits.request_s:g} s, the limit of this server'
        self._relay.end(call, RequestError('', f'{sentence}: ask for fewer tokens', TOO_LATE))

    def _close(self, number: int, deadline: asyncio.TimerHandle) -> None:
        deadline.cancel()
        call = self._open.pop(number)
        self.bridge.load.release(1, stream=True)
        self._relay.withdraw(call)

    def _make(self, call: Call, sends_text: bool) -> OpenCall:
        name = name_answers(call, f'request-{secrets.token_hex(_ID_BYTES)}').request_ids[0]
        answer = Answer(name, cast(np.ndarray, call.prompts[0]))
        text = self.bridge.texts.answer(call.sampling[0]) if sends_text else None
        found = OpenCall(call, answer, cast(int, call.sampling[0].max_new_tokens), text=text)
        (submission,) = self.bridge.describe(call, [answer], lambda index, delivery: None)
        # deliveries of the service go directly to JetStream's threads, not to this loop first
        found.submission = dataclasses.replace(submission, deliver=functools.partial(self._relay.deliver, found))
        return found


def _name_client(context: Context) -> str:
    """Returns the address of the peer without its port, 'ipv4:127.0.0.1'."""
    return str(context.peer()).rpartition(':')[0]


async def end_refused(context: Context, error: UserError) -> NoReturn:
    if isinstance(error, RequestError):
        code = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)
    else:
        code = grpc.StatusCode.INTERNAL if isinstance(error, LogprobError | DispatchError | StepError) else _CODES[400]
    await _end(context, code, str(error))


async def _end(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError('abort raises')
