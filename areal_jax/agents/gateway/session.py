"""The calls of one episode's program, in order of arrival, and their replies: a retry gets the same reply again."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import cast

import numpy as np

from areal_jax.agents.dialogue import Turn
from areal_jax.agents.programs.program_host import Ending, SaidTurn
from areal_jax.errors import UserError, cut_text
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import chat, messages, responses
from areal_jax.rollout.http.wire.exchange import ASKED, Call, Message, RequestError
from areal_jax.rollout.http.wire.openai import Required, describe_wishes, require_granted
from areal_jax.text.chat_template import read_arguments
from areal_jax.types import SamplingParams

DIALECTS: Mapping[str, ModuleType] = {
    '/v1/chat/completions': chat,
    '/v1/responses': responses,
    '/v1/messages': messages,
}
_LIMITS = ('max_tokens', 'max_completion_tokens', 'max_output_tokens')  # messages.py needs one
# fields that would change the distribution, cut an answer elsewhere or score a prompt, with the value that has no
# effect
_OVERRIDDEN: Mapping[str, object] = {
    'stop': [], 'stop_sequences': [], 'stop_token_ids': [], 'seed': None, 'logit_bias': {}, 'min_p': 0,
    'presence_penalty': 0, 'frequency_penalty': 0, 'repetition_penalty': 1, 'min_tokens': 0, 'ignore_eos': False,
    'top_logprobs': 0, 'prompt_logprobs': None, 'cache_salt': '', 'skip_special_tokens': True,
    'include_stop_str_in_output': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AskedCall:
    """One request of a program."""

    call: Call  # for the reply
    messages: tuple[JsonObject, ...]  # as chat templates have them
    wish: str  # additional text for the model; the history that comes back does not have it
    digest: str  # of path and body: a retry has the same
    counts: Mapping[str, int]  # fields by their treatment: 'overridden/temperature', 'ignored/user'


def read_asked_call(path: str, body: object, sampling: SamplingParams, required: Required) -> AskedCall:
    """Reads a request of a program; raises RequestError for a refused body."""
    counts: collections.Counter[str] = collections.Counter()
    call = DIALECTS[path].parse(_override(body, sampling, counts))
    require_granted(call, required)
    if call.model_columns:
        asked = ASKED.format(call.model_columns[0])
        raise RequestError(asked, f'{asked}=True is not served to programs: the run has the routes, leave it out')
    counts.update(f'ignored/{field}' for field in call.ignored)
    (prompt,) = call.prompts
    if not isinstance(prompt, tuple):
        raise RequestError(call.prompt_field, f'{call.prompt_field}: an episode has no prompts of ids: send messages')
    turns = tuple(cast(Message, turn).describe() for turn in prompt)
    return AskedCall(call, turns, describe_wishes(call.wishes), _digest(path, body), counts)


def read_count(body: object) -> tuple[list[JsonObject], list[JsonObject]]:
    """Reads the messages and tools of a request for the length of its prompt."""
    call = messages.parse_count(body)
    (prompt,) = call.prompts
    assert isinstance(prompt, tuple)
    return [turn.describe() for turn in prompt], [dict(tool) for tool in call.tools]


def _override(body: object, sampling: SamplingParams, counts: collections.Counter[str]) -> object:
    """The body without the fields that the run decides; `counts` gets those that ask for another value."""
    if not isinstance(body, Mapping):
        return body
    of_run = {'temperature': sampling.temperature, 'top_p': sampling.top_p, 'top_k': sampling.top_k or -1}
    neutral = {**_OVERRIDDEN, **of_run}
    given = {name: body[name] for name in (*neutral, *_LIMITS) if body.get(name) is not None}
    counts.update(f'overridden/{name}' for name, value in given.items() if value != neutral.get(name))
    return {name: value for name, value in body.items() if name not in neutral}


def _digest(path: str, body: object) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


# Joins the turns that the gateway gave an episode with the turns in the record of its environment.


def join_record(said: Sequence[SaidTurn], turns: Mapping[int, Sequence[Turn]]) -> tuple[list[int], int]:
    """Returns the calls that the record lacks, and the number of recorded turns that the gateway never made.

    A recorded turn matches a turn with the same ids or, if it has no ids, with the same text and tool calls.

    Args:
      turns: the turns that were sampled for each call, by its number.
    """
    left, strangers = dict(turns), 0
    for one in said:
        number = next((number for number, given in left.items() if any(_is_same(one, turn) for turn in given)), None)
        if number is None:
            strangers += 1
        else:
            del left[number]
    return list(left), strangers


def _is_same(said: SaidTurn, turn: Turn) -> bool:
    if said.tokens is not None:
        return np.array_equal(said.tokens, np.concatenate([segment.tokens for segment in turn.answer]))
    functions = [cast(JsonObject, call)['function'] for call in turn.reply.tool_calls]
    # as JSON: a dialect whose arguments are objects serializes them again
    given = [(function['name'], read_arguments(function['arguments'])) for function in functions]
    told = [(name, read_arguments(arguments)) for name, arguments in said.calls]
    return said.text == turn.reply.text and told == given


LEAST_LOGGED_BYTES, LOGGED_BYTES_PER_TOKEN = (
    2**16,
    64,
)  # of one call in the event log: no text within a context has more
_MOST_REFUSED = 8  # calls refused a turn, e.g. because a budget is used up: then the program is ended
_MOST_DETAIL = 2000  # characters
_ENDED = 'the episode of this key has ended'


@dataclasses.dataclass(eq=False)
class AskedExchange:
    """A call and its outcome."""

    number: int
    asked: AskedCall
    key: str  # Idempotency-Key; '' = none
    outcome: asyncio.Future[Sequence[Turn]]
    requests: int = 0  # requests that wait for the outcome
    is_logged: bool = True  # its messages are in the event log, for later calls to refer to
    is_delivered: bool = False  # a reply went out


class Session:
    """One episode. Used on the I/O loop; only `answer`, `refuse` and `close` are called on the host's loop.

    Args:
      run: the program, given this session; it returns when the program has ended.
      context_tokens: most tokens of a row; a call whose messages and tools cannot fit is not logged, and gets no turn.
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
        """Returns the next event, for the log: a call of the program, or its end.

        {event: 'call', number, messages, tools, n, one_tool_call, wish, kept, of}: `messages` follow the first `kept`
        messages of call `of`; {event: 'too_long', number, bytes}: a call that fits in no context, logged without its
        messages; {event: 'end', status, detail, undelivered, counts, outcome}: `outcome` only with an environment;
        {event: 'fault', detail}: no program can run.
        """
        if self._runner is None:
            self._loop = asyncio.get_running_loop()
            self._runner = self._loop.create_task(self._follow(), name='program')
        return await self._events.get()

    # On the host's loop.

    def answer(self, number: int, turns: Sequence[Turn]) -> None:
        """Delivers the turns that were sampled for a call."""
        self._call(self._settle, number, turns, None)

    def refuse(self, number: int, sentence: str) -> None:
        """Refuses a call: no turn was sampled for it."""
        self._call(self._settle, number, (), RequestError('', sentence))

    def close(self) -> None:
        """Ends the program if it still runs."""
        self._call(self._end)

    # On the I/O loop.

    def take(self, asked: AskedCall, retried: bool, key: str) -> AskedExchange:
        """The exchange of the call, or of an earlier one that it repeats: same `key`, or `retried` and same body."""
        repeats = lambda one: one.key == key if key else retried and one.asked.digest == asked.digest
        before = [one for one in self._exchanges if repeats(one)]
        if before:
            self.counts['retried'] += 1
            # of equal calls, one whose reply was not delivered and for which no request waits
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
        """Returns the turns of a call; any number of requests may wait for them and go away. Raises RequestError."""
        exchange.requests += 1
        try:
            return await asyncio.shield(exchange.outcome)
        finally:
            exchange.requests -= 1

    def _describe(self, exchange: AskedExchange) -> JsonObject:
        """Describes the call without its first messages that the most similar logged call has too."""
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
