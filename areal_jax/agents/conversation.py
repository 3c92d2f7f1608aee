"""Which row of an episode a call of a program continues: sampled ids are kept, never decoded and encoded again.

A program sends its whole history with each call. Where the history is that of an earlier call and its reply, and what
is new are results of tools and at most one turn of the user, the row of that reply goes on behind the sampled ids.
Otherwise the episode forks another row. Nothing here generates: `begin` makes a row end where an answer begins. What is
known of earlier calls is in `Episode.calls`, so that a resumed episode continues them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from areal_jax.control.episode import Call, Episode, Row
from areal_jax.files import JsonObject
from areal_jax.text.chat_template import can_extend, read_arguments
from areal_jax.types import NOT_GENERATED, Segment, concatenate

Message: TypeAlias = Mapping[str, object]  # of OpenAI's chat: role, content, tool_calls, tool_call_id
Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = Sequence[Mapping[str, object]]
# resampled: the turn that it continues has been continued already, or its first call is repeated; tools: only the tools
# changed; history: it begins as an earlier conversation and goes on otherwise; conversation: nothing is in common;
# tail: what is new is no result of a tool or turn of the user; template: the chat template cannot be continued
Fork: TypeAlias = Literal['resampled', 'tools', 'history', 'conversation', 'tail', 'template']

_COMPARED = ('role', 'content', 'tool_calls', 'tool_call_id', 'name')  # reasoning need not come back


class Renderer(Protocol):
    """The chat template of a model, with its tokenizer."""

    def render(self, messages: Messages, tools: Tools) -> np.ndarray:
        """int32 [P]: all of the conversation, up to where the answer begins."""
        ...

    def extend(self, messages: Messages, tools: Tools, *, closed_by: int | None) -> np.ndarray | None:
        """int32 [n] that follow a sampled turn: its close, the messages, and what begins an answer.

        Args:
          closed_by: the last sampled token, which ended the turn; its close is what follows it. None = none did.

        None where the template does not write a history as it wrote it before, or closes a turn with another token.
        """
        ...


class Conversation:
    """The calls of one episode and the rows that hold them.

    Args:
      episode: its rows and calls grow with each call.
      prompt_tokens: int32 [P], the prompt of the draw: a row that begins with exactly these refers to it.
    """

    def __init__(self, episode: Episode, prompt_tokens: np.ndarray, renderer: Renderer):
        self._episode, self._prompt, self._renderer = episode, prompt_tokens, renderer
        self._hashes: dict[Call, list[bytes]] = {}  # of the messages of calls under way

    def begin(self, messages: Messages, tools: Tools = (), wish: str = '') -> Call:
        """Makes a row end where the answer to these messages begins; the row has the wish, and no history has it."""
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
        """The answer is in the row: later calls may continue it.

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
        """Takes the newest call of a row out again, with its answer: it leaves nothing but the count of its tokens."""
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
        """(row, whether it is new) behind a sampled turn; None where that cannot be."""
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
        """A row of its own; the first call of an episode uses the first one."""
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
        """Why these messages begin a row; None for the first call of the episode."""
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
    """Of the first 0, 1, ... messages together with the tools: equal digests are equal histories."""
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
    """The messages with the wish at the end of the user's last words, or as words of the user behind them."""
    if not wish:
        return messages
    *before, last = messages
    if last.get('role') != 'user':
        return [*messages, {'role': 'user', 'content': wish}]
    return [*before, {**last, 'content': f'{_join_content(last.get("content"))}\n\n{wish}'}]


def _to_json(message: Message) -> JsonObject:
    """What is compared of a message, as JSON: a copy that the program cannot change."""
    return to_json({name: message[name] for name in _COMPARED if name in message})


def to_json(value: object) -> Any:
    """The value as JSON gives it back; what JSON cannot carry becomes text."""
    return json.loads(json.dumps(value, default=lambda own: dict(own) if isinstance(own, Mapping) else str(own)))


def _encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _canonical(message: Message) -> dict[str, object]:
    """Equal for messages of equal meaning: an absent field is one of null, parts of text are joined."""
    kept = {name: message.get(name) for name in _COMPARED}
    kept['content'] = _join_content(kept['content'])
    kept['tool_calls'] = [_canonical_call(call) for call in _items(kept['tool_calls'])]
    return {name: value for name, value in kept.items() if value not in (None, '', [])}


def _join_content(content: object) -> object:
    texts = [part.get('text') if isinstance(part, Mapping) else None for part in _items(content)]
    return ''.join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else content


def _canonical_call(call: object) -> object:
    """The id, the name, and the arguments as JSON, or as they are where they are none."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get('function'), Mapping):
        return call
    return [call.get('id'), function.get('name'), read_arguments(function.get('arguments'))]


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()
