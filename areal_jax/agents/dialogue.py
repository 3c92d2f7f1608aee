"""Answers the calls of a program in one episode: it generates the next turn of a conversation, within the budgets.

A resumed episode restarts its program. Calls that the program repeats are answered from the record, without sampling;
the answer that was under way continues where it stopped. The first call that differs ends the use of the record.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from areal_jax.control.episode import Call, Episode, Row
from areal_jax.errors import UserError, cut_text
from areal_jax.files import JsonObject
from areal_jax.labels import CALLED, ERRORS, WELL_FORMED
from areal_jax.protocols import Clock, Generator
from areal_jax.rollout.http.wire import answer_reader
from areal_jax.text.chat_template import can_extend, for_template, read_arguments, require_shown
from areal_jax.text.decoding import TextDecoder
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import NOT_GENERATED, GenerationRequest, Prompt, SamplingParams, Segment, Work, concatenate

Message: TypeAlias = Mapping[str, object]  # of OpenAI's chat: role, content, tool_calls, tool_call_id
Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = Sequence[Mapping[str, object]]
# Why a call begins a row. resampled: the turn that it continues has been continued already, or the same messages were
# sent before; tools: only the tools changed; history: it has the first message of an earlier call, then differs;
# conversation: it shares nothing with an earlier call; tail: the new messages are neither tool results nor user turns;
# template: the chat template cannot be continued
Fork: TypeAlias = Literal['resampled', 'tools', 'history', 'conversation', 'tail', 'template']

_COMPARED = ('role', 'content', 'tool_calls', 'tool_call_id', 'name')  # reasoning need not come back


class ChatFormat(Protocol):
    """The chat template of a model, with its tokenizer and the notation of calls in it."""

    def render(self, messages: Messages, tools: Tools) -> np.ndarray:
        """Returns int32 [P]: the whole conversation, up to where the answer begins."""
        ...

    def extend(self, messages: Messages, tools: Tools, *, closed_by: int | None) -> np.ndarray | None:
        """Returns int32 [n], the tokens after a sampled turn: its close, the messages, and the start of an answer.

        Args:
          closed_by: the last sampled token, if it ended the turn: the result begins after it. None = no token ended it.

        Returns None if the template would rewrite the history, or closes a turn with another token.
        """
        ...

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        """Returns the message in sampled ids, int32 [n], and the number of broken calls, which stay text.

        The message holds text and tool calls; the ids of the calls begin with `prefix`.
        """
        ...

    def closes(self, token: int) -> bool: ...


class Conversation:
    """The calls of one episode and the rows that hold them.

    Args:
      episode: its rows and calls grow with each call.
      prompt_tokens: int32 [P], the prompt of the draw: a row that begins with exactly these refers to it.
    """

    def __init__(self, episode: Episode, prompt_tokens: np.ndarray, renderer: ChatFormat):
        self._episode, self._prompt, self._renderer = episode, prompt_tokens, renderer
        self._hashes: dict[Call, list[bytes]] = {}  # of the messages of calls under way

    def begin(self, messages: Messages, tools: Tools = (), wish: str = '') -> Call:
        """Makes a row end where the answer to these messages begins; the wish is in the row, but in no history."""
        hashes = [_hash(message) for message in messages]
        histories, turns = _chain(hashes, tools), {call.after: call for call in self._answered()}
        known = [length for length in range(1, len(messages)) if histories[length] in turns]
        found = None
        if known:
            added = _add_wish(messages[known[-1] :], wish)
            found = self._continue(added, tools, turns[histories[known[-1]]])
        if found is None:
            fork = self._find_reason(messages, hashes, histories, known)
            found = self._fork(self._renderer.render(_add_wish(messages, wish), tools), fork)
        row, began_row = found
        first, brought = _chain(hashes[:1], ())[-1], messages[known[-1] if known else 0 :]
        call = Call(
            histories[-1], first, row, self._count_segments(row), began_row,
            messages=[_to_json(message) for message in brought], follows=histories[known[-1]] if known else '',
        )  # fmt: skip
        self._episode.calls.append(call)
        self._hashes[call] = hashes
        return call

    def end(
        self, call: Call, messages: Messages, tools: Tools, reply: Message, *, closed: bool, finish_reason: str
    ) -> None:
        """Marks the call as answered: its answer is in the row, and later calls may continue it.

        Args:
          reply: as the program gets it, and as it will send it back.
          closed: the last sampled token ends a turn of the template.
        """
        known = self._hashes.pop(call, None)  # a resumed call has none
        hashes = [*([_hash(message) for message in messages] if known is None else known), _hash(reply)]
        call.after, call.after_without_tools = (_chain(hashes, of)[-1] for of in (tools, ()))
        call.end, call.closed = len(self.tokens(call.row)), closed
        call.reply, call.finish_reason = dict(reply), finish_reason

    def undo(self, call: Call) -> None:
        """Removes the newest call of a row, with its answer; only the count of its tokens remains."""
        self._episode.calls.remove(call)
        self._hashes.pop(call, None)
        row, is_newest = self._episode.rows[call.row], call.row == len(self._episode.rows) - 1
        self._episode.discard(row.segments[call.start :])
        if not call.began_row:
            del row.segments[call.start - 1 :]  # with the environment tokens before the answer
        elif is_newest and call.row:
            self._episode.rows.pop()
        else:  # another row began after it, or it is the first one
            row.segments.clear()

    def tokens(self, row: int) -> np.ndarray:
        """int32 [n]: all of a row, its prompt included."""
        return self.tokens_before(row, self._count_segments(row))

    def tokens_before(self, row: int, segments: int) -> np.ndarray:
        """int32 [n]: the prompt of a row and its first segments."""
        own = self._episode.rows[row]
        prompt = self._prompt if own.prompt_tokens is None else own.prompt_tokens
        return concatenate([prompt, *(segment.tokens for segment in own.segments[:segments])], np.int32)

    def _answered(self) -> list[Call]:
        return [call for call in self._episode.calls if call.reply is not None]

    def _count_segments(self, row: int) -> int:
        return len(self._episode.rows[row].segments)

    def _continue(self, added: Messages, tools: Tools, turn: Call) -> tuple[int, bool] | None:
        """Returns (row, whether it is new) that continues a sampled turn; None if it cannot be continued."""
        before = self.tokens(turn.row)
        closed_by = int(before[turn.end - 1]) if turn.closed else None
        following = self._renderer.extend(added, tools, closed_by=closed_by) if can_extend(added) else None
        if following is None:
            return None
        if turn.end < len(before):
            return self._fork(np.concatenate([before[: turn.end], following]), 'resampled')
        zeros = np.zeros(len(following), np.float32)
        # not joined to segments before it: `undo` takes it away whole
        self._episode.rows[turn.row].segments.append(Segment(following.astype(np.int32), zeros, NOT_GENERATED))
        return turn.row, False

    def _fork(self, prompt: np.ndarray, fork: Fork | None) -> tuple[int, bool]:
        """Begins a new row; the first call of an episode uses the first row."""
        own = None if np.array_equal(prompt, self._prompt) else prompt.astype(np.int32)
        rows = self._episode.rows
        if fork is None:
            rows[:] = [Row(own)]  # calls that were taken out again may have left empty ones
        else:
            rows.append(Row(own, fork))
        return len(rows) - 1, True

    def _find_reason(
        self, messages: Messages, hashes: Sequence[bytes], histories: Sequence[str], known: Sequence[int]
    ) -> Fork | None:
        """The reason why these messages begin a row; None for the first call of the episode."""
        calls = self._episode.calls
        if not calls:
            return None
        if known:
            return 'template' if can_extend(messages[known[-1] :]) else 'tail'
        if histories[-1] in {call.asked for call in calls}:
            return 'resampled'
        if {call.after_without_tools for call in self._answered()}.intersection(_chain(hashes, ())[1:-1]):
            return 'tools'
        return 'history' if _chain(hashes[:1], ())[-1] in {call.first for call in calls} else 'conversation'


def digests(messages: Messages, tools: Tools) -> list[str]:
    """Digests of the first 0, 1, ... messages, each together with the tools: equal digests mean equal histories."""
    return _chain([_hash(message) for message in messages], tools)


def _hash(message: Message) -> bytes:
    return hashlib.sha256(_encode(_canonical(message))).digest()


def _chain(hashes: Sequence[bytes], tools: Tools) -> list[str]:
    digest = hashlib.sha256(_encode(list(tools)))
    found = [digest.hexdigest()]
    for one in hashes:
        digest.update(one)
        found.append(digest.hexdigest())
    return found


def _add_wish(messages: Messages, wish: str) -> Messages:
    """Appends the wish to the last message if it is the user's, else adds a user message."""
    if not wish:
        return messages
    *before, last = messages
    if last.get('role') != 'user':
        return [*messages, {'role': 'user', 'content': wish}]
    return [*before, {**last, 'content': f'{_join_content(last.get("content"))}\n\n{wish}'}]


def _to_json(message: Message) -> JsonObject:
    """The compared fields of a message, as JSON: a copy that the program cannot change."""
    return to_json({name: message[name] for name in _COMPARED if name in message})


def to_json(value: object) -> Any:
    """The value after a round trip through JSON; values that JSON cannot carry become text."""
    return json.loads(json.dumps(value, default=lambda own: dict(own) if isinstance(own, Mapping) else str(own)))


def _encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _canonical(message: Message) -> dict[str, object]:
    """A form that is equal for messages of equal meaning: null and empty fields are dropped, text parts are joined."""
    kept = {name: message.get(name) for name in _COMPARED}
    kept['content'] = _join_content(kept['content'])
    kept['tool_calls'] = [_canonical_call(call) for call in _items(kept['tool_calls'])]
    return {name: value for name, value in kept.items() if value not in (None, '', [])}


def _join_content(content: object) -> object:
    texts = [part.get('text') if isinstance(part, Mapping) else None for part in _items(content)]
    return ''.join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else content


def _canonical_call(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get('function'), Mapping):
        return call
    return [call.get('id'), function.get('name'), read_arguments(function.get('arguments'))]


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


# The chat format of a tokenizer, as agents use it: prompts, continuations of sampled turns, and calls in sampled ids.


class TokenizerFormat:
    """Implements ChatFormat."""

    def __init__(self, tokenizer: Tokenizer, parser: answer_reader.AnswerParser):
        self._tokenizer, self._parser = tokenizer, parser

    def render(self, messages: Messages, tools: Tools) -> np.ndarray:
        """See ChatFormat; raises ConversationError for messages that the template refuses, or does not show."""
        conversations, listed = [for_template(messages)], [dict(tool) for tool in tools]
        require_shown(self._tokenizer, conversations, listed)
        return self._tokenizer.encode_chats(conversations, listed)[0]

    def extend(self, messages: Messages, tools: Tools, *, closed_by: int | None) -> np.ndarray | None:
        """See ChatFormat; raises ConversationError as `render` does."""
        following, listed = for_template(messages), [dict(tool) for tool in tools]
        require_shown(self._tokenizer, [following], listed)
        return self._tokenizer.extend_chat(following, listed, closed_by=closed_by)

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        """See ChatFormat."""
        found = self._parser.parse(answer, tools)
        return _describe_message(found, prefix), found.unparsed

    def closes(self, token: int) -> bool:
        return token in self._tokenizer.end_ids


class NotationParser:
    """Implements AnswerParser for calls between two marks.

    Args:
      notation: the notation of calls that the template shows to the model.
    """

    def __init__(self, tokenizer: Tokenizer, notation: answer_reader.Notation):
        self._tokenizer, self._notation = tokenizer, notation
        spelled = ((notation.begin, answer_reader.BEGIN_TOKEN), (notation.end, answer_reader.END_TOKEN))
        self._marks = {ids[0]: mark for text, mark in spelled if len(ids := self._encode(text)) == 1}

    def parse(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None = None) -> answer_reader.ParsedAnswer:
        """See answer_reader.AnswerParser. The prompt is not read."""
        decoder = TextDecoder(self._tokenizer.token_bytes, ends=self._tokenizer.end_ids, marks=self._marks)
        text = decoder.extend(answer, is_last=True)
        parser = answer_reader.CallParser(self._notation, tuple(self._marks.values()))
        parts = parser.extend(text, is_last=True) if tools else [text]
        content = ''.join(part for part in parts if isinstance(part, str))
        calls = tuple((part.name, part.arguments) for part in parts if isinstance(part, answer_reader.FoundCall))
        return answer_reader.ParsedAnswer(content, calls, unparsed=parser.unparsed)

    def _encode(self, text: str) -> Sequence[int]:
        """The ids of a mark; () if the tokenizer cannot encode it."""
        with contextlib.suppress(ValueError):
            return [int(token) for token in self._tokenizer.encode(text)]
        return ()


def _describe_message(found: answer_reader.ParsedAnswer, prefix: str) -> JsonObject:
    message: JsonObject = {'role': 'assistant', 'content': found.text or None}
    if found.reasoning:
        message['reasoning_content'] = found.reasoning
    if found.calls:
        message['tool_calls'] = [
            {'id': f'{prefix}_{number}', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
            for number, (name, arguments) in enumerate(found.calls)
        ]
    return message


# why an episode ended; the first three are scored and trained, the others have no reward
Label: TypeAlias = Literal['stop', 'length', 'turns', 'deadline', 'agent_error', 'env_error', 'cancelled']


_MOST_FAULT = 2000  # characters of the reason why a tool failed
_ERROR = 'error:'  # begins the result of a tool that the model reads as an error
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    'string': str, 'integer': int, 'number': (int, float), 'boolean': bool, 'array': list, 'object': dict,
}  # fmt: skip


class EpisodeEnd(BaseException):
    """Ends the program if a budget is used up or the run stops. No `except Exception` of the program catches it."""

    def __init__(self, label: Label):
        super().__init__(label)
        self.label = label


class ProgramsError(UserError):
    """Raised if programs cannot run in any episode: it ends the run."""


class ToolFailedError(Exception):
    """Raised by a tool that cannot do its work: the episode ends as env_error, without a reward."""


@dataclasses.dataclass(frozen=True)
class Budgets:
    """The budgets of an episode; the sampling has another one, rollout.max_new_tokens: sampled tokens of all turns."""

    max_turns: int  # agent.max_turns; 0 = no bound
    max_turn_tokens: int  # agent.max_turn_tokens: sampled in one turn; 0 = no bound per turn
    context_tokens: int  # rollout.context_tokens: of one row
    tool_deadline_s: float  # agent.tool_deadline_s
    tool_bytes: int  # agent.tool_bytes: of the result of a tool; the rest is cut off


@dataclasses.dataclass(frozen=True)
class Reply:
    """The next turn."""

    message: Message  # to put into the history as it is
    finish_reason: str  # 'stop', 'tool_calls', or 'length': cut off by a budget

    @property
    def text(self) -> str:
        """The content; '' without any."""
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
      episode: empty, or restored from a checkpoint.
      lane: the lane of the clock on which tools are called.
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
        self._pool, self._clock, self._prompt, self.episode, self._lane = pool, clock, prompt, episode, lane
        self._sampling, self._seed, self._format, self._budgets = sampling, seed, chat_format, budgets
        self._conversation = Conversation(episode, prompt.tokens, chat_format)
        self._recorded = list(episode.calls)  # not yet repeated by a program that was started again
        self._results = list(episode.results)
        self._open: dict[int, GenerationRequest] = {}  # answers under way, by the number of their row
        self._closing: Label | None = None
        self._drained = clock.event(f'answers of episode {prompt.draw}.{episode.sample}')

    async def chat(self, messages: Messages, tools: Tools = ()) -> Reply:
        """Returns the policy's reply to a conversation; raises EpisodeEnd if no budget is left."""
        return (await self.take_turn(messages, tools)).reply

    async def take_turn(
        self, messages: Messages, tools: Tools = (), *, one_tool_call: bool = False, wish: str = ''
    ) -> Turn:
        """Returns the reply of `chat`, with its tokens.

        With `one_tool_call`, tool calls after the first are left out of the message. The model reads `wish` after the
        messages; no later history contains it.
        """
        if not messages:
            raise ValueError('chat() was called without a message: give at least one turn')
        if self._closing is not None:
            raise EpisodeEnd(self._closing)
        call = self._find_recorded(messages, tools)
        if call is None:
            if self._budgets.max_turns and len(self.episode.calls) >= self._budgets.max_turns:
                raise EpisodeEnd('turns')
            call = self._conversation.begin(messages, tools, wish)
        if call.reply is None:
            await self._answer(call, messages, tools, one_tool_call)
        return self._describe_turn(call)

    async def close(self, label: Label) -> None:
        """Cancels answers under way; returns when all of their tokens are in the rows. Later calls raise EpisodeEnd."""
        self._closing = self._closing or label
        for request in list(self._open.values()):
            self._pool.cancel(request)
        while self._open:
            self._drained.clear()
            await self._clock.wait(self._drained)

    def withdraw(self, calls: Iterable[Call]) -> None:
        """Removes calls whose replies were never delivered from the rows; no other call may continue them."""
        for call in reversed(list(calls)):
            self._conversation.undo(call)

    def withdraw_unused(self) -> None:
        """Withdraws calls that were never answered, and recorded calls that the program did not repeat."""
        self.withdraw(call for call in self.episode.calls if call.reply is None or call in self._recorded)
        self._recorded.clear()

    async def call_tool(
        self, name: str, arguments: object, tool: Callable[[], Awaitable[str]], *, most_bytes: int | None = None
    ) -> str:
        """Returns the text of a tool, cut to agent.tool_bytes (or `most_bytes`); a recorded call is not made again.

        `tool` is awaited on the I/O loop and touches no state of the run. Raises EpisodeEnd('env_error') if it raises
        ToolFailedError; any other exception, and a missed deadline, becomes the result, which the model reads.
        """
        key = digests([{'role': 'tool', 'name': name, 'content': arguments}], ())[-1]
        recorded = next((result for result in self._results if result['call'] == key), None)
        if recorded is not None:
            self._results.remove(recorded)
        else:
            detail = {'draw': self._prompt.draw, 'sample': self.episode.sample, 'tool': name}
            work = Work('tool', 1.0, detail, size={'call': len(self.episode.results)}, recorded=True)
            most = self._budgets.tool_bytes if most_bytes is None else most_bytes
            run = lambda: _describe_result(tool, self._budgets.tool_deadline_s, most)
            told = await self._clock.call(self._lane, run, work, 2 * self._budgets.tool_deadline_s)
            recorded = {'call': key, 'name': name, 'arguments': to_json(arguments), **told}
            self.episode.results.append(recorded)
            if recorded['failed'] or str(recorded['text']).startswith(_ERROR):
                self.episode.count(**{f'{ERRORS}{name}': 1})
        if recorded['failed']:
            raise EpisodeEnd('env_error') from ToolFailedError(recorded['text'])
        return str(recorded['text'])

    def _find_recorded(self, messages: Messages, tools: Tools) -> Call | None:
        if not self._recorded:
            return None
        asked = digests(messages, tools)[-1]
        found = next((call for call in self._recorded if call.asked == asked), None)
        if found is not None:
            self._recorded.remove(found)
            return found
        self.withdraw(self._recorded)  # the earlier program got their replies; this one continues differently
        for result in self._results:
            self.episode.results.remove(result)
        self._recorded.clear()
        self._results.clear()
        return None

    def _describe_turn(self, call: Call) -> Turn:
        assert call.reply is not None
        prompt, answer = self._conversation.tokens_before(call.row, call.start), []
        left = call.end - len(prompt)
        for segment in self.episode.rows[call.row].segments[call.start :]:
            if left <= 0:
                break
            answer.append(segment)
            left -= len(segment.tokens)
        return Turn(call, Reply(call.reply, call.finish_reason), prompt, tuple(answer))

    async def _answer(self, call: Call, messages: Messages, tools: Tools, one_tool_call: bool) -> None:
        """Generates into the row of the call, after the part of the answer that a resumed episode already has."""
        row = self.episode.rows[call.row]
        prompt = self._conversation.tokens_before(call.row, call.start)
        begun = tuple(row.segments[call.start :])
        room = self._room(call, len(prompt))
        if room < 1:
            if not begun:
                self._conversation.undo(call)
            raise EpisodeEnd('length')
        request = GenerationRequest(
            draw=self._prompt.draw,
            sample=self.episode.sample,
            seed=self._seed,
            prompt_tokens=prompt,
            sampling=dataclasses.replace(self._sampling, max_new_tokens=room),
            prefix=begun,
            row=call.row,
        )
        generation = self._pool.generate(request, prefer=self.episode.engine)
        self.episode.engine = generation.engine
        self._open[call.row] = request
        try:
            async for segment in generation:
                row.append(segment)
        finally:
            del self._open[call.row]
            self._drained.set()
        self.episode.engine = generation.engine  # it may have moved
        if generation.finish_reason == 'cancelled':
            raise EpisodeEnd('cancelled')  # the record keeps the partial answer, for a resumed run
        is_cut = generation.finish_reason == 'length'
        self._finish(call, messages, tools, row.segments[call.start :], is_cut, one_tool_call)

    def _room(self, call: Call, prompt_tokens: int) -> int:
        """The most tokens of the answer, including those already generated."""
        before = sum(len(segment.tokens) for segment in self._generated()) - sum(
            len(segment.tokens) for segment in self.episode.rows[call.row].segments[call.start :]
        )
        rooms = [self._sampling.max_new_tokens - before, self._budgets.context_tokens - prompt_tokens]
        return min(rooms + ([self._budgets.max_turn_tokens] if self._budgets.max_turn_tokens else []))

    def _finish(
        self, call: Call, messages: Messages, tools: Tools, answer: Sequence[Segment], is_cut: bool, one_tool_call: bool
    ) -> None:
        ids = np.concatenate([segment.tokens for segment in answer])
        reply, unparsed = self._format.parse(ids, tools, f'call_{self.episode.calls.index(call)}')
        calls = reply.get('tool_calls')
        called = len(calls) if isinstance(calls, list) else 0
        by_tool = _count_by_tool(calls if isinstance(calls, list) else (), tools)
        self.episode.count(tool_calls=called, unparsed=unparsed, **by_tool)
        if one_tool_call and called > 1:
            assert isinstance(calls, list)
            reply = {**reply, 'tool_calls': calls[:1]}
            self.episode.count(hidden=called - 1)
        reason = 'length' if is_cut else 'tool_calls' if reply.get('tool_calls') else 'stop'
        closed = self._format.closes(int(ids[-1]))
        self._conversation.end(call, messages, tools, reply, closed=closed, finish_reason=reason)

    def _generated(self) -> list[Segment]:
        rows = itertools.chain.from_iterable(row.segments for row in self.episode.rows)
        return [segment for segment in rows if segment.policy_version != NOT_GENERATED]


def _count_by_tool(calls: Iterable[Message], tools: Tools) -> dict[str, int]:
    """Counts the calls of each tool that was offered; a model may write any other name."""
    offered = {name: function for tool in tools if (name := str((function := _function(tool)).get('name', '')))}
    found: collections.Counter[str] = collections.Counter()
    for call in map(_function, calls):
        name = str(call.get('name', ''))
        if name in offered:
            found[CALLED + name] += 1
            found[WELL_FORMED + name] += fits_definition(call.get('arguments'), offered[name])
    return dict(found)


def fits_definition(arguments: object, function: JsonObject) -> bool:
    """Whether the arguments, JSON in a text, have the required parameters, of the declared types, and no others."""
    given, parameters = read_arguments(arguments), function.get('parameters')
    if not isinstance(given, dict) or not isinstance(parameters, Mapping):
        return isinstance(given, dict)
    declared, required = parameters.get('properties', {}), parameters.get('required', ())
    if not (isinstance(declared, Mapping) and set(given) <= set(declared) and set(required) <= set(given)):
        return False
    return all(_has_type(value, declared[name]) for name, value in given.items())


def _has_type(value: object, declared: object) -> bool:
    name = declared.get('type') if isinstance(declared, Mapping) else None
    wanted = _TYPES.get(name) if isinstance(name, str) else None
    return wanted is None or (isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)))


def _function(tool: Mapping[str, object]) -> JsonObject:
    """The function of a tool or of a call in the form of OpenAI's chat."""
    function = tool.get('function')
    return dict(function) if isinstance(function, Mapping) else {}


async def _describe_result(tool: Callable[[], Awaitable[str]], deadline_s: float, most_bytes: int) -> dict[str, object]:
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
