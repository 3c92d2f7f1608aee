"""What the tokens of an answer say: text, and calls of tools where the request has tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from areal_jax.rollout.http.wire.answer_reader import AnswerText, CallParser
from areal_jax.rollout.http.wire.exchange import Finish, ToolCall
from areal_jax.types import concatenate

Tools: TypeAlias = Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What some tokens add to an answer."""

    text: str = ''  # outside of calls
    calls: tuple[ToolCall, ...] = ()  # that these tokens complete
    unparsed: int = 0  # calls that are broken, and stay text
    hidden: int = 0  # calls after the first, where one was asked for
    reasoning: str = ''  # before the text


class AnswerReader(Protocol):
    """Reads one answer from its beginning. How its tokens are cut into pieces does not matter."""

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        """What int32 [n] tokens add; with `finish` they are the last."""
        ...


class PlainReader:
    """All is text."""

    def __init__(self, text: AnswerText):
        self._text = text

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        return Reading(self._text.extend(tokens, finish))


class CallReader:
    """Text and calls of a notation.

    Args:
      text: with BEGIN_TOKEN and END_TOKEN in the place of marks that are tokens.
      parser: of the same answer.
      only_first: calls after the first are hidden and counted.
      make_id: of a call.
    """

    def __init__(self, text: AnswerText, parser: CallParser, only_first: bool, make_id: Callable[[], str]):
        self._text, self._parser, self._make_id = text, parser, make_id
        self._only_first = only_first
        self._found = 0

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        before = self._parser.unparsed
        text, calls, hidden = '', [], 0
        for part in self._parser.extend(self._text.extend(tokens, finish), finish is not None):
            if isinstance(part, str):
                text += part
                continue
            self._found += 1
            if self._found > 1 and self._only_first:
                hidden += 1
            else:
                calls.append(ToolCall(self._make_id(), part.name, part.arguments, len(text)))
        return Reading(text, tuple(calls), self._parser.unparsed - before, hidden)


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """What a whole answer says."""

    text: str  # outside of calls; broken ones are text
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments, which are JSON objects
    reasoning: str = ''  # before the text
    unparsed: int = 0  # calls that are broken


class AnswerParser(Protocol):
    """Reads whole answers in the notation of one model."""

    def parse(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None = None) -> ParsedAnswer:
        """What sampled ids say, int32 [n]; without tools there are no calls.

        Args:
          prompt: int32 [P], that the answer follows: reasoning may begin in it.
        """
        ...


class WholeReader:
    """Implements AnswerReader for what reads whole answers: all of an answer comes with its end.

    Args:
      parse: the ids of an answer, int32 [n], without the stop that ended it.
      cut: takes that stop away.
      only_first, make_id: see CallReader.
    """

    def __init__(
        self,
        parse: Callable[[np.ndarray], ParsedAnswer],
        cut: Callable[[np.ndarray, Finish], np.ndarray],
        only_first: bool,
        make_id: Callable[[], str],
    ):
        self._parse, self._cut, self._only_first, self._make_id = parse, cut, only_first, make_id
        self._parts: list[np.ndarray] = []

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        self._parts.append(tokens)
        if finish is None:
            return Reading()
        found = self._parse(self._cut(concatenate(self._parts, np.int32), finish))
        shown = found.calls[:1] if self._only_first else found.calls
        calls = tuple(ToolCall(self._make_id(), name, arguments, len(found.text)) for name, arguments in shown)
        return Reading(found.text, calls, found.unparsed, len(found.calls) - len(calls), found.reasoning)
