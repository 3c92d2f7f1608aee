"""Which row of an episode a call of a program continues: sampled ids are kept, never decoded and encoded again.

A program sends its whole history with each call. Where the history is that of an earlier call and its reply, and what
is new are results of tools and at most one turn of the user, the row of that reply goes on behind the sampled ids.
Otherwise the episode forks another row. Nothing here generates: `begin` makes a row end where an answer begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from areal_jax.control.episode import Episode, Row
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

    def extend(self, messages: Messages, tools: Tools, *, closed: bool) -> np.ndarray | None:
        """int32 [n] that follow a sampled turn: its close, unless `closed`, the messages, and what begins an answer.

        None where the template does not write a history as it wrote it before.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A sampled turn: the first `end` tokens of the row, its prompt included, end with it."""

    row: int
    end: int
    closed: bool  # the last of them ends a turn


@dataclasses.dataclass(frozen=True)
class Opened:
    """A call that is being answered."""

    row: int  # number of the row that the answer is appended to
    before: int | None  # segments of the row before the call; None = the call began the row
    history: bytes  # digest of its messages and tools


class Conversation:
    """The calls of one episode and the rows that hold them.

    Args:
      episode: its rows grow with each call.
      prompt_tokens: int32 [P], the prompt of the draw: a row that begins with exactly these refers to it.
    """

    def __init__(self, episode: Episode, prompt_tokens: np.ndarray, renderer: Renderer):
        self._episode, self._prompt, self._renderer = episode, prompt_tokens, renderer
        self._turns: dict[bytes, _Turn] = {}  # by the history that ends with the sampled turn
        self._without_tools: set[bytes] = set()  # the same histories, whatever the tools were
        self._asked: set[bytes] = set()  # histories of calls
        self._begun: set[str] = set()  # first messages of conversations

    def begin(self, messages: Messages, tools: Tools = ()) -> Opened:
        """Makes a row end where the answer to these messages begins."""
        histories = list(_digests(messages, tools))
        known = [length for length in range(1, len(messages)) if histories[length] in self._turns]
        opened = self._continue(messages, tools, known[-1], histories) if known else None
        if opened is None:
            fork = self._find_reason(messages, histories, known)
            opened = self._fork(self._renderer.render(messages, tools), fork, histories[-1])
        self._asked.add(histories[-1])
        self._begun.add(_canonical(messages[0]))
        return opened

    def end(self, opened: Opened, messages: Messages, tools: Tools, reply: Message, *, closed: bool) -> None:
        """The answer is in the row: later calls may continue it.

        Args:
          reply: as the program gets it, and as it will send it back.
          closed: the last sampled token ends a turn of the template.
        """
        turn = _Turn(opened.row, len(self.tokens(opened.row)), closed)
        *_, history = _digests([*messages, reply], tools)
        *_, without_tools = _digests([*messages, reply], ())
        self._turns[history] = turn
        self._without_tools.add(without_tools)

    def undo(self, opened: Opened) -> None:
        """The call was cancelled: it leaves nothing behind."""
        self._asked.discard(opened.history)
        row = self._episode.rows[opened.row]
        if opened.before is not None:
            del row.segments[opened.before :]
        elif opened.row == len(self._episode.rows) - 1 and opened.row:
            self._episode.rows.pop()
        else:  # another row began after it, or it is the first one
            row.segments.clear()

    def tokens(self, row: int) -> np.ndarray:
        """int32 [n]: all of a row, its prompt included."""
        own = self._episode.rows[row]
        prompt = self._prompt if own.prompt_tokens is None else own.prompt_tokens
        return concatenate([prompt, *(segment.tokens for segment in own.segments)], np.int32)

    def _continue(self, messages: Messages, tools: Tools, length: int, histories: Sequence[bytes]) -> Opened | None:
        """Behind the turn that ends the first `length` messages; None where that cannot be."""
        added, turn = messages[length:], self._turns[histories[length]]
        following = self._renderer.extend(added, tools, closed=turn.closed) if _may_follow(added) else None
        if following is None:
            return None
        before = self.tokens(turn.row)
        if turn.end < len(before):
            return self._fork(np.concatenate([before[: turn.end], following]), 'resampled', histories[-1])
        row = self._episode.rows[turn.row]
        opened = Opened(turn.row, len(row.segments), histories[-1])
        if len(following):
            row.segments.append(_environment(following))  # not joined: `undo` takes it away whole
        return opened

    def _fork(self, prompt: np.ndarray, fork: Fork | None, history: bytes) -> Opened:
        """A row of its own; the first call of an episode uses the first one."""
        own = None if np.array_equal(prompt, self._prompt) else prompt.astype(np.int32)
        rows = self._episode.rows
        if fork is None:
            rows[0] = Row(own)
            return Opened(0, None, history)
        rows.append(Row(own, fork))
        return Opened(len(rows) - 1, None, history)

    def _find_reason(self, messages: Messages, histories: Sequence[bytes], known: Sequence[int]) -> Fork | None:
        """Why these messages begin a row; None for the first call of the episode."""
        if not self._asked:
            return None
        if known:
            return 'template' if _may_follow(messages[known[-1] :]) else 'tail'
        if histories[-1] in self._asked:
            return 'resampled'
        if self._without_tools.intersection(list(_digests(messages, ()))[1:-1]):
            return 'tools'
        return 'history' if _canonical(messages[0]) in self._begun else 'conversation'


def count_forks(episode: Episode) -> dict[str, int]:
    """Rows beyond the first one, by the reason for which they began."""
    reasons = [row.fork for row in episode.rows if row.fork]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def _may_follow(added: Messages) -> bool:
    """Results of tools, then at most one turn of the user; at least one message."""
    roles = [message.get('role') for message in added]
    results = roles[:-1] if roles and roles[-1] == 'user' else roles
    return bool(roles) and all(role == 'tool' for role in results)


def _environment(tokens: np.ndarray) -> Segment:
    return Segment(tokens.astype(np.int32), np.zeros(len(tokens), np.float32), NOT_GENERATED)


def _digests(messages: Messages, tools: Tools) -> Sequence[bytes]:
    """Of the first 0, 1, ... messages together with the tools: equal digests are equal histories."""
    digest = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode('utf-8', 'surrogatepass'))
    found = [digest.digest()]
    for message in messages:
        digest.update(hashlib.sha256(_canonical(message).encode('utf-8', 'surrogatepass')).digest())
        found.append(digest.digest())
    return found


def _canonical(message: Message) -> str:
    """A text that is equal for messages of equal meaning: an absent field is one of null, parts of text are joined."""
    kept = {name: message.get(name) for name in _COMPARED}
    kept['content'] = _join_content(kept['content'])
    kept['tool_calls'] = [_canonical_call(call) for call in _items(kept['tool_calls'])]
    return json.dumps({name: value for name, value in kept.items() if value not in (None, '', [])}, sort_keys=True)


def _join_content(content: object) -> object:
    texts = [part.get('text') if isinstance(part, Mapping) else None for part in _items(content)]
    return ''.join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else content


def _canonical_call(call: object) -> object:
    """The id, the name, and the arguments as JSON, or as they are where they are none."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get('function'), Mapping):
        return call
    arguments = function.get('arguments')
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get('id'), function.get('name'), arguments]


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()
