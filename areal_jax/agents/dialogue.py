"""Answers the calls of a program in one episode: it generates the next turn of a conversation, within the budgets.

A resumed episode starts its program again. Calls that it repeats are answered from the record, without a token sampled;
the answer that was under way goes on where it was. The first call that differs ends the use of the record.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from areal_jax.agents.dialogue import Conversation, Message, Messages, Renderer, Tools, digests, to_json
from areal_jax.control.episode import Call, Episode
from areal_jax.errors import UserError, cut_text
from areal_jax.protocols import Clock, Generator
from areal_jax.types import NOT_GENERATED, GenerationRequest, Prompt, SamplingParams, Segment, Work

# why an episode ended; the first three are scored and trained, the others have no reward
Label: TypeAlias = Literal['stop', 'length', 'turns', 'deadline', 'agent_error', 'env_error', 'cancelled']


_MOST_FAULT = 2000  # characters of why a tool cannot do its work


class EpisodeEnd(BaseException):
    """Ends the program of an episode, whatever it catches: a budget is used up, or the run stops."""

    def __init__(self, label: Label):
        super().__init__(label)
        self.label = label


class ProgramsError(UserError):
    """No program can run, whatever the episode: it ends the run."""


class ToolFailedError(Exception):
    """Raised by a tool that cannot do its work: the episode ends as env_error, without a reward."""


class ChatFormat(Renderer, Protocol):
    """A chat template together with the notation of calls in it."""

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        """The message in sampled ids, int32 [n]: text, and calls of tools, whose ids begin with `prefix`.

        And the number of calls that are broken, and stay text.
        """
        ...

    def closes(self, token: int) -> bool:
        """Whether the token ends a turn."""
        ...


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Of an episode; rollout.max_new_tokens bounds the sampled tokens of all turns and comes with the sampling."""

    max_turns: int  # agent.max_turns; 0 = no bound
    max_turn_tokens: int  # agent.max_turn_tokens: sampled in one turn; 0 = no bound of its own
    context_tokens: int  # rollout.context_tokens: of a row
    tool_deadline_s: float  # agent.tool_deadline_s
    tool_bytes: int  # agent.tool_bytes: of the result of a tool; the rest is cut off


@dataclasses.dataclass(frozen=True)
class Reply:
    """The next turn."""

    message: Message  # to put into the history as it is
    finish_reason: str  # 'stop', 'tool_calls', or 'length': cut off by a budget

    @property
    def text(self) -> str:
        """The content; '' where there is none."""
        return str(self.message.get('content') or '')

    @property
    def tool_calls(self) -> Sequence[Message]:
        calls = self.message.get('tool_calls')
        return calls if isinstance(calls, (list, tuple)) else ()


@dataclasses.dataclass(frozen=True)
class Turn:
    """A reply with the tokens that it was made of."""

    call: Call
    reply: Reply
    prompt_tokens: np.ndarray  # int32 [P], all of the row before the answer
    answer: tuple[Segment, ...]


class Dialogue:
    """The calls of one episode.

    Args:
      episode: empty, or that of a checkpoint.
      lane: of the clock, on which tools are called.
    """

    def __init__(
        self,
        pool: Generator,
        clock: Clock,
        prompt: Prompt,
        episode: Episode,
        *,
        sampling: SamplingParams,
        seed: int,
        chat_format: ChatFormat,
        budgets: Budgets,
        lane: str,
    ):
        self._pool, self._clock, self._prompt, self._episode, self._lane = pool, clock, prompt, episode, lane
        self._sampling, self._seed, self._format, self._budgets = sampling, seed, chat_format, budgets
        self._conversation = Conversation(episode, prompt.tokens, chat_format)
        self._recorded = list(episode.calls)  # not yet repeated by a program that was started again
        self._results = list(episode.results)
        self._open: dict[int, GenerationRequest] = {}  # answers under way, by the number of their row
        self._closing: Label | None = None
        self._drained = clock.event(f'answers of episode {prompt.draw}.{episode.sample}')

    @property
    def episode(self) -> Episode:
        return self._episode

    async def chat(self, messages: Messages, tools: Tools = ()) -> Reply:
        """The reply of the policy to a conversation; raises EpisodeEnd where no budget is left."""
        return (await self.take_turn(messages, tools)).reply

    async def take_turn(
        self, messages: Messages, tools: Tools = (), *, one_tool_call: bool = False, wish: str = ''
    ) -> Turn:
        """The same with its tokens.

        With `one_tool_call` calls of tools after the first stay out of the message. The model reads the `wish` behind
        the messages, and no later history has it.
        """
        if not messages:
            raise ValueError('chat() was called without a message: give at least one turn')
        if self._closing is not None:
            raise EpisodeEnd(self._closing)
        call = self._find_recorded(messages, tools)
        if call is None:
            self._require_turn()
            call = self._conversation.begin(messages, tools, wish)
        if call.reply is None:
            await self._answer(call, messages, tools, one_tool_call)
        return self._describe_turn(call)

    async def close(self, label: Label) -> None:
        """Ends answers under way; returns when all of their tokens are in the rows. Later calls raise EpisodeEnd."""
        self._closing = self._closing or label
        for request in list(self._open.values()):
            self._pool.cancel(request)
        while self._open:
            self._drained.clear()
            await self._clock.wait(self._drained)

    def withdraw(self, calls: Iterable[Call]) -> None:
        """Takes calls whose replies reached nobody out of the rows; none of them is continued by another one."""
        for call in reversed(list(calls)):
            self._conversation.undo(call)

    def withdraw_unused(self) -> None:
        """The same for answers that never ended, and for calls of a record that its program did not repeat."""
        self.withdraw(call for call in self._episode.calls if call.reply is None or call in self._recorded)
        self._recorded.clear()

    async def call_tool(
        self, name: str, arguments: object, tool: Callable[[], Awaitable[str]], *, most_bytes: int | None = None
    ) -> str:
        """The text that a tool gives, cut to agent.tool_bytes (or `most_bytes`); a recorded call is not made again.

        `tool` is awaited on the I/O loop and touches nothing of the run. Raises EpisodeEnd('env_error') where it raises
        ToolFailedError; what else it raises, and a deadline, is the result: the model reads it.
        """
        key = digests([{'role': 'tool', 'name': name, 'content': arguments}], ())[-1]
        recorded = next((result for result in self._results if result['call'] == key), None)
        if recorded is not None:
            self._results.remove(recorded)
        else:
            detail = {'draw': self._prompt.draw, 'sample': self._episode.sample, 'tool': name}
            work = Work('tool', 1.0, detail, size={'call': len(self._episode.results)}, recorded=True)
            most = self._budgets.tool_bytes if most_bytes is None else most_bytes
            run = lambda: _describe_result(tool, self._budgets.tool_deadline_s, most)
            told = await self._clock.call(self._lane, run, work, 2 * self._budgets.tool_deadline_s)
            recorded = {'call': key, 'name': name, 'arguments': to_json(arguments), **told}
            self._episode.results.append(recorded)
        if recorded['failed']:
            raise EpisodeEnd('env_error') from ToolFailedError(recorded['text'])
        return str(recorded['text'])

    def _find_recorded(self, messages: Messages, tools: Tools) -> Call | None:
        """The call of the record that this one repeats; the first one that repeats none drops the record."""
        if not self._recorded:
            return None
        asked = digests(messages, tools)[-1]
        found = next((call for call in self._recorded if call.asked == asked), None)
        if found is not None:
            self._recorded.remove(found)
            return found
        self.withdraw(self._recorded)  # the program of before got them, this one goes another way
        for result in self._results:
            self._episode.results.remove(result)
        self._recorded.clear()
        self._results.clear()
        return None

    def _require_turn(self) -> None:
        if self._budgets.max_turns and len(self._episode.calls) >= self._budgets.max_turns:
            raise EpisodeEnd('turns')

    def _describe_turn(self, call: Call) -> Turn:
        assert call.reply is not None
        prompt, answer = self._conversation.tokens_before(call.row, call.start), []
        left = call.end - len(prompt)
        for segment in self._episode.rows[call.row].segments[call.start :]:
            if left <= 0:
                break
            answer.append(segment)
            left -= len(segment.tokens)
        return Turn(call, Reply(call.reply, call.finish_reason), prompt, tuple(answer))

    async def _answer(self, call: Call, messages: Messages, tools: Tools, one_tool_call: bool) -> None:
        """Generates into the row of the call, after what a resumed episode has of the answer already."""
        row = self._episode.rows[call.row]
        prompt = self._conversation.tokens_before(call.row, call.start)
        begun = tuple(row.segments[call.start :])
        room = self._room(call, len(prompt))
        if room < 1:
            if not begun:
                self._conversation.undo(call)
            raise EpisodeEnd('length')
        request = GenerationRequest(
            draw=self._prompt.draw,
            sample=self._episode.sample,
            seed=self._seed,
            prompt_tokens=prompt,
            sampling=dataclasses.replace(self._sampling, max_new_tokens=room),
            prefix=begun,
            row=call.row,
        )
        generation = self._pool.generate(request, prefer=self._episode.engine)
        self._episode.engine = generation.engine
        self._open[call.row] = request
        try:
            async for segment in generation:
                row.append(segment)
        finally:
            del self._open[call.row]
            self._drained.set()
        self._episode.engine = generation.engine  # it may have moved
        if generation.finish_reason == 'cancelled':
            raise EpisodeEnd('cancelled')  # the record keeps what there is, for a run that goes on
        is_cut = generation.finish_reason == 'length'
        self._finish(call, messages, tools, row.segments[call.start :], is_cut, one_tool_call)

    def _room(self, call: Call, prompt_tokens: int) -> int:
        """Most tokens of the answer, those that it has included."""
        before = sum(len(segment.tokens) for segment in self._generated()) - sum(
            len(segment.tokens) for segment in self._episode.rows[call.row].segments[call.start :]
        )
        rooms = [self._sampling.max_new_tokens - before, self._budgets.context_tokens - prompt_tokens]
        return min(rooms + ([self._budgets.max_turn_tokens] if self._budgets.max_turn_tokens else []))

    def _finish(
        self, call: Call, messages: Messages, tools: Tools, answer: Sequence[Segment], is_cut: bool, one_tool_call: bool
    ) -> None:
        ids = np.concatenate([segment.tokens for segment in answer])
        reply, unparsed = self._format.parse(ids, tools, f'call_{self._episode.calls.index(call)}')
        calls = reply.get('tool_calls')
        called = len(calls) if isinstance(calls, list) else 0
        self._episode.count(tool_calls=called, unparsed=unparsed)
        if one_tool_call and called > 1:
            assert isinstance(calls, list)
            reply = {**reply, 'tool_calls': calls[:1]}
            self._episode.count(hidden=called - 1)
        reason = 'length' if is_cut else 'tool_calls' if reply.get('tool_calls') else 'stop'
        closed = self._format.closes(int(ids[-1]))
        self._conversation.end(call, messages, tools, reply, closed=closed, finish_reason=reason)

    def _generated(self) -> list[Segment]:
        rows = itertools.chain.from_iterable(row.segments for row in self._episode.rows)
        return [segment for segment in rows if segment.policy_version != NOT_GENERATED]


async def _describe_result(tool: Callable[[], Awaitable[str]], deadline_s: float, most_bytes: int) -> dict[str, object]:
    """What the log keeps of a call: JSON, whatever the tool does."""
    import asyncio

    try:
        async with asyncio.timeout(deadline_s):
            text = str(await tool())
    except ToolFailedError as error:
        return {'text': cut_text(str(error), _MOST_FAULT), 'failed': True}
    except TimeoutError:
        text = f'error: no result within {deadline_s:g} s'
    except Exception as error:
        text = f'error: {type(error).__name__}: {error}'
    content = text.encode(errors='replace')
    if len(content) > most_bytes:
        text = content[:most_bytes].decode(errors='ignore') + ' [cut off]'
    return {'text': text, 'failed': False}
