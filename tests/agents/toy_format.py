"""A chat format of characters, and a pool whose answers are given: ids that no encoding of their text gives."""

from __future__ import annotations

import asyncio

import numpy as np

from areal_jax.types import Segment

CLOSE, BEGIN = 3, 9


def user(text):
    return {'role': 'user', 'content': text}


def result(text, call='c1'):
    return {'role': 'tool', 'content': text, 'tool_call_id': call}


def reply(text, **fields):
    return {'role': 'assistant', 'content': text, **fields}


class ToyFormat:
    """Writes a character as its number, a role as its length, and a close after each turn.

    An answer is read as the characters of its ids less 500; 'T' in it is a call of the tool `add`.
    """

    is_stable = True

    def render(self, messages, tools):
        turns = [id_ for message in messages for id_ in self._turn(message)]
        return np.array([*(900 for _ in tools), *turns, BEGIN], np.int32)

    def extend(self, messages, tools, *, closed_by):
        if not self.is_stable:
            return None
        turns = [id_ for message in messages for id_ in self._turn(message)]
        return np.array([*([CLOSE] if closed_by is None else []), *turns, BEGIN], np.int32)

    def parse(self, answer, tools, prefix):
        text = ''.join(chr(token - 500) for token in answer if token != CLOSE)
        if tools and 'T' in text:
            function = {'name': 'add', 'arguments': '{}'}
            call = {'id': f'{prefix}_0', 'type': 'function', 'function': function}
            return reply(text.replace('T', ''), tool_calls=[call]), 0
        return reply(text), 0

    def closes(self, token):
        return token == CLOSE

    def _turn(self, message):
        return [len(message['role']), *map(ord, message['content'] or ''), CLOSE]


def ids_of(text, closed=True):
    return [ord(character) + 500 for character in text] + ([CLOSE] if closed else [])


class ToyPool:
    """Answers requests in turn with these ids, a version later each; remembers the requests."""

    def __init__(self, *answers, reason='stop'):
        self.answers, self.reason, self.requests, self.version = list(answers), reason, [], 0

    def generate(self, request, prefer=''):
        self.requests.append(request)
        self.version += 1
        ids = self.answers.pop(0)
        reason = 'cancelled' if ids is None else self.reason
        if ids is not None and len(ids) >= request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], 'length'
        return _Generation(ids or [], self.version, reason)

    def cancel(self, request):
        raise AssertionError('every answer has ended')


class SlowPool(ToyPool):
    """Answers come when the test releases them, one for each call of `release`, from any thread."""

    def __init__(self, *answers):
        super().__init__(*answers)
        self.cancelled, self._open, self._released = [], {}, 0

    def generate(self, request, prefer=''):
        generation = super().generate(request, prefer)
        generation.gate = self._open[request.row] = asyncio.get_running_loop().create_future()
        self._let_go()
        return generation

    def cancel(self, request):
        self.cancelled.append(request)
        self._end(request.row, 'cancelled')

    def release(self):
        self._released += 1
        for gate in list(self._open.values()):
            gate.get_loop().call_soon_threadsafe(self._let_go)

    def _let_go(self):
        for row in list(self._open):
            if self._released:
                self._released -= 1
                self._end(row, 'let go')

    def _end(self, row, how):
        gate = self._open.pop(row, None)
        if gate is not None and not gate.done():
            gate.set_result(how)


class _Generation:
    engine, gate = 'engine/0', None

    def __init__(self, ids, version, reason):
        logprobs = np.full(len(ids), -1.0, np.float32)
        self.left = [Segment(np.array(ids, np.int32), logprobs, version)] if ids else []
        self.finish_reason = reason

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.gate is not None and await self.gate == 'cancelled':
            self.left, self.finish_reason = [], 'cancelled'
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()
