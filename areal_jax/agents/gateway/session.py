"""What the program of one episode asks, in the order in which it comes, and what it got: a retry gets it again."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

from areal_jax.agents.dialogue import Turn
from areal_jax.agents.gateway.session import AskedCall, join_record
from areal_jax.agents.programs.program_host import Ending
from areal_jax.errors import UserError, cut_text
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.types import SamplingParams

LEAST_LOGGED_BYTES, LOGGED_BYTES_PER_TOKEN = (
    2**16,
    64,
)  # of one call in the event log: no text within a context has more
_MOST_REFUSED = 8  # calls without a turn, as behind a budget: then the program is ended
_MOST_DETAIL = 2000  # characters
_ENDED = 'the episode of this key has ended'


@dataclasses.dataclass(eq=False)
class AskedExchange:
    """A call and what becomes of it."""

    number: int
    asked: AskedCall
    key: str  # Idempotency-Key; '' = none
    outcome: asyncio.Future[Sequence[Turn]]
    requests: int = 0  # that wait for the outcome
    is_logged: bool = True  # its messages are in the event log, for later calls to refer to
    is_delivered: bool = False  # a reply went out


class Session:
    """One episode. On the I/O loop, but for `answer`, `refuse` and `close`, which are called on the host's.

    Args:
      run: the program, given this session; it returns when the program has ended.
      context_tokens: of a row; a call whose messages and tools cannot fit in it is not logged, and gets no turn.
    """

    def __init__(self, run: Callable[[Session], Awaitable[Ending]], sampling: SamplingParams, context_tokens: int):
        self.counts: collections.Counter[str] = collections.Counter()
        self.sampling = sampling
        self._run = run
        self._most_bytes = max(LEAST_LOGGED_BYTES, LOGGED_BYTES_PER_TOKEN * context_tokens)
        self._events: asyncio.Queue[JsonObject] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None  # None: nothing has begun, as in a replay
        self._runner: asyncio.Task[None] | None = None
        self._program: asyncio.Task[Ending] | None = None
        self._exchanges: list[AskedExchange] = []
        self._refused = 0

    async def next(self) -> JsonObject:
        """What happens next, for the log: a call of the program, or its end.

        {event: 'call', number, messages, tools, n, one_tool_call, wish}, where of `messages` the first `kept` ones are
        those of call `of`; {event: 'too_long', number, bytes}: a call that no context holds, in a short line; {event:
        'end', status, detail, undelivered, counts, outcome}, the last of an environment; {event: 'fault', detail}: no
        program can run.
        """
        if self._runner is None:
            self._loop = asyncio.get_running_loop()
            self._runner = self._loop.create_task(self._follow(), name='program')
        return await self._events.get()

    # On the host's loop.

    def answer(self, number: int, turns: Sequence[Turn]) -> None:
        """The turns that were sampled for a call."""
        self._call(self._settle, number, turns, None)

    def refuse(self, number: int, sentence: str) -> None:
        """No turn was sampled for the call."""
        self._call(self._settle, number, (), RequestError('', sentence))

    def close(self) -> None:
        """Ends the program, if it goes on."""
        self._call(self._end)

    # On the I/O loop.

    def take(self, asked: AskedCall, retried: bool, key: str) -> AskedExchange:
        """The call itself, or the earlier one that it repeats: with the same `key`, or `retried` with the same body."""
        repeats = lambda one: one.key == key if key else retried and one.asked.digest == asked.digest
        before = [one for one in self._exchanges if repeats(one)]
        if before:
            self.counts['retried'] += 1
            # of equal calls, one whose reply nobody has got and nobody waits for
            return next((one for one in before if not one.is_delivered and not one.requests), before[-1])
        exchange = AskedExchange(len(self._exchanges), asked, key, asyncio.get_running_loop().create_future())
        exchange.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._exchanges.append(exchange)
        self.counts.update(asked.counts)
        described = self._describe(exchange)
        size = len(json.dumps(described))
        exchange.is_logged = size <= self._most_bytes
        event = {'event': 'call', **described} if exchange.is_logged else {'event': 'too_long', 'bytes': size}
        self._events.put_nowait({**event, 'number': exchange.number})
        return exchange

    async def wait(self, exchange: AskedExchange) -> Sequence[Turn]:
        """The turns of a call, however many requests wait for them and go away; raises RequestError."""
        exchange.requests += 1
        try:
            return await asyncio.shield(exchange.outcome)
        finally:
            exchange.requests -= 1

    def _describe(self, exchange: AskedExchange) -> JsonObject:
        """The call, without the messages that it has in common with the call that it repeats most of."""
        turns, call = exchange.asked.messages, exchange.asked.call
        kept, of = 0, None
        for before in filter(lambda one: one.is_logged, self._exchanges[: exchange.number]):
            common = _count_common(turns, before.asked.messages)
            if common > kept:
                kept, of = common, before.number
        return {
            'of': of, 'kept': kept, 'messages': list(turns[kept:]), 'tools': [dict(tool) for tool in call.tools],
            'n': call.n, 'one_tool_call': call.one_tool_call, 'wish': exchange.asked.wish,
        }  # fmt: skip

    async def _follow(self) -> None:
        self._program = asyncio.ensure_future(self._run(self))
        try:
            ending = await self._program
        except UserError as error:
            self._events.put_nowait({'event': 'fault', 'detail': cut_text(str(error), _MOST_DETAIL)})
            return
        except asyncio.CancelledError:
            if not self._program.cancelled():
                raise
            ending = Ending('failed', f'it went on to ask after {self._refused} refusals')
        finally:
            for exchange in self._exchanges:
                if not exchange.outcome.done():
                    exchange.outcome.set_exception(RequestError('', _ENDED, 503))
        self._events.put_nowait({'event': 'end', **self._describe_end(ending)})

    def _describe_end(self, ending: Ending) -> JsonObject:
        undelivered = [exchange.number for exchange in self._exchanges if not exchange.is_delivered]
        outcome = None
        if ending.record is not None:
            unknown, strangers = join_record(ending.record.said, self._list_turns())
            undelivered = sorted({*undelivered, *unknown})
            outcome = ending.record.outcome
            self.counts['joined'] += len(ending.record.said) - strangers
            if strangers and outcome is not None:
                outcome = None
                ending = Ending('lost', f'{strangers} turns in the record of its environment were never sampled')
        counts = {name: n for name, n in sorted(self.counts.items()) if n}
        return {
            'status': ending.status, 'detail': ending.detail, 'undelivered': undelivered, 'counts': counts,
            'outcome': outcome,
        }  # fmt: skip

    def _list_turns(self) -> dict[int, Sequence[Turn]]:
        sampled = [one for one in self._exchanges if one.outcome.done() and one.outcome.exception() is None]
        return {exchange.number: exchange.outcome.result() for exchange in sampled}

    def _settle(self, number: int, turns: Sequence[Turn], error: RequestError | None) -> None:
        outcome = self._exchanges[number].outcome
        if outcome.done():
            return
        if error is None:
            outcome.set_result(turns)
            return
        outcome.set_exception(error)
        self._refused += 1
        self.counts['refused'] += 1
        if self._refused >= _MOST_REFUSED:
            self._end()

    def _end(self) -> None:
        if self._program is not None:
            self._program.cancel()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(function, *arguments)


def _count_common(turns: Sequence[Mapping[str, object]], before: Sequence[Mapping[str, object]]) -> int:
    pairs = enumerate(zip(turns, before, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(turns), len(before)))
