"""Reads the tokens of an answer: text, and tool calls if the request has tools."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol, TypeAlias

import numpy as np

from areal_jax.rollout.http.wire.encoding import MOST_LEVELS, count_levels
from areal_jax.rollout.http.wire.exchange import Finish, ToolCall
from areal_jax.text.decoding import TextDecoder, TokenBytes
from areal_jax.types import concatenate


class AnswerText:
    """Turns the tokens of one answer into the text that they add.

    Text that may be the beginning of a stop string, or is one, is held back until it is clear that the answer continues
    after it. The work is in proportion to the new tokens, not to the answer.

    Args:
      decoder: of this answer, from its beginning.
      keep_stop: the stop string, or the text of the stop token, stays.
    """

    def __init__(self, decoder: TextDecoder, stop_strings: Sequence[str] = (), keep_stop: bool = False):
        self._decoder, self._stops, self._keep_stop = decoder, stop_strings, keep_stop
        self._held = ''  # text that may be the beginning of a stop string

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> str:
        """Returns the text that the tokens add; the last tokens of an answer must come with its `finish`."""
        if finish is None:
            self._held += self._decoder.extend(tokens)
            clear = len(self._held) - self._suspicious()
            given, self._held = self._held[:clear], self._held[clear:]
            return given
        if isinstance(finish.matched, int) and not self._keep_stop:
            tokens = tokens[:-1]
        before = self._held + self._decoder.extend(tokens[:-1])
        given = before + self._decoder.extend(tokens[-1:], is_last=True)
        if isinstance(finish.matched, str):
            # it ends after the earlier text, or at its end if no tokens come with the finish
            begin = given.find(finish.matched, max(0, len(before) - len(finish.matched) + min(1, len(tokens))))
            kept = len(finish.matched) if self._keep_stop else 0
            given = given if begin < 0 else given[: begin + kept]
        self._held = ''
        return given

    def _suspicious(self) -> int:
        """The number of characters at the end of the held text that may be (the beginning of) a stop string."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def cut_stop(
    tokens: np.ndarray,
    finish: Finish,
    keep_stop: bool,
    token_bytes: TokenBytes,
    encode: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Returns the ids of a whole answer without the stop that ended it, and without any text after a stop string.

    If a stop string begins inside a token, the text before it in this token is encoded again.

    Args:
      keep_stop: the stop stays.
    """
    if isinstance(finish.matched, int) and not keep_stop:
        return tokens[:-1]
    if not isinstance(finish.matched, str) or not len(tokens):
        return tokens
    parts, stop = token_bytes.spell_all(tokens.tolist()), finish.matched.encode()
    content = b''.join(parts)
    begin = content.find(stop, max(0, len(content) - len(parts[-1]) - len(stop) + 1))
    if begin < 0:
        return tokens
    end = begin + (len(stop) if keep_stop else 0)
    bounds = np.cumsum([0, *map(len, parts)])
    whole = max(i for i, at in enumerate(bounds.tolist()) if at == end or (at < end and _begins(content, at)))
    kept = token_bytes.read(content[bounds[whole] : end])
    return concatenate([tokens[:whole], *([encode(kept)] if kept else [])], np.int32)


def _begins(content: bytes, place: int) -> bool:
    """Whether a UTF-8 character begins at the place."""
    return content[place] & 0xC0 != 0x80


# Tool calls in the text of an answer, in the notation that the model was trained to write.


SPACE = ' \t\r\n'  # white space of JSON
# Placeholders for marks that are single tokens. Lone surrogates never occur in decoded text.
BEGIN_TOKEN, END_TOKEN = '\ud800', '\ud801'


@dataclasses.dataclass(frozen=True)
class Notation:
    """A model's notation of a call: two marks, and the format of the text between them.

    `read` returns the name of the function and its arguments, a JSON object as it was written, or None if the text is
    no call.
    """

    begin: str
    end: str
    read: Callable[[str], tuple[str, str] | None]


@dataclasses.dataclass(frozen=True)
class FoundCall:
    """A call as it was written: `text` is all of it, with its marks and the white space before it."""

    name: str
    arguments: str
    text: str


Part = str | FoundCall


class CallParser:
    """Splits the text of one answer, which comes piece by piece, into text and calls.

    The result does not depend on the pieces. The parts contain all text, in order, except white space after a call at
    the end of the answer. White space before a call belongs to the call. A malformed call stays text and is counted in
    `unparsed`: it has no closing mark, or anything but one JSON object between the marks.

    Args:
      tokens: the placeholders, of BEGIN_TOKEN and END_TOKEN, that replace a mark in the text. Such a mark counts
        anywhere, and its spelled text does not; a mark without placeholder does not count inside a JSON string.
    """

    def __init__(self, notation: Notation, tokens: Sequence[str] = ()):
        self.unparsed = 0
        self._notation = notation
        self._begin = BEGIN_TOKEN if BEGIN_TOKEN in tokens else notation.begin
        self._end = END_TOKEN if END_TOKEN in tokens else notation.end
        self._next = re.compile('|'.join([r'["\\\n]', re.escape(self._begin), re.escape(self._end)]))
        self._text = ''  # not decided yet; inside a call, not scanned yet
        self._call: list[str] = []  # of an open call: white space and mark, then scanned text
        self._in_string = False
        self._after_call = False  # nothing but white space has come since a call

    def extend(self, text: str, is_last: bool = False) -> list[Part]:
        """Returns the parts that are complete now; with the last piece of the answer, all remaining parts."""
        self._text += text
        parts: list[Part] = []
        while (found := self._advance(is_last)) is not None:
            parts += found
            if found:
                self._after_call = isinstance(found[-1], FoundCall)
        return parts

    def _advance(self, is_last: bool) -> list[Part] | None:
        """Returns the parts of one step; None if more text is needed, or none is left."""
        return self._scan_call(is_last) if self._call else self._scan_text(is_last)

    def _scan_text(self, is_last: bool) -> list[Part] | None:
        begin = self._text.find(self._begin)
        if begin >= 0:
            given = len(self._text[:begin].rstrip(SPACE))
            inside = begin + len(self._begin)
            self._call, self._in_string = [self._text[given:inside]], False
            part, self._text = self._text[:given], self._text[inside:]
            return self._spell(part)
        clear = len(self._text) - _count_begun(self._text, self._begin)
        if not is_last:
            end = len(self._text[:clear].rstrip(SPACE))
        else:
            end = 0 if self._after_call and not self._text.strip(SPACE) else len(self._text)
        part, self._text = self._text[:end], self._text[end:]
        return self._spell(part) or None

    def _scan_call(self, is_last: bool) -> list[Part] | None:
        at = 0
        while (found := self._next.search(self._text, at)) is not None:
            mark, at = found.group(), found.end()
            if mark in (self._begin, self._end):
                if self._in_string and len(mark) > 1:
                    continue
                return self._end_call(at) if mark == self._end else self._break_off(found.start())
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == '\\':
                if not self._in_string:
                    return self._break_off(at)
                if at == len(self._text) and not is_last:
                    at -= 1
                    break
                at += self._text[at : at + 1] not in (BEGIN_TOKEN, END_TOKEN)
            elif self._in_string:
                return self._break_off(at)
        else:
            at = max(at, len(self._text) - max(_count_begun(self._text, one) for one in (self._begin, self._end)))
        if is_last:
            return self._reopen()
        self._call.append(self._text[:at])
        self._text = self._text[at:]
        return None

    def _end_call(self, end: int) -> list[Part]:
        """Ends a call whose closing mark ends at `end` of the text that is not scanned yet."""
        self._call.append(self._text[:end])
        written, lead = ''.join(self._call), len(self._call[0])
        read = self._notation.read(written[lead : len(written) - len(self._end)])
        if read is None:
            return self._break_off(end, [])
        self._text, self._call = self._text[end:], []
        return [FoundCall(*read, self._write(written))]

    def _break_off(self, end: int, more: Sequence[str] | None = None) -> list[Part]:
        """Returns what was scanned up to `end` as text, because it is no call."""
        self.unparsed += 1
        written = ''.join([*self._call, *([self._text[:end]] if more is None else more)])
        kept = max(len(self._call[0]), len(written.rstrip(SPACE)))  # white space may belong to the next call
        self._text, self._call = written[kept:] + self._text[end:], []
        return self._spell(written[:kept])

    def _reopen(self) -> list[Part]:
        """Handles an answer that ends inside a call: its mark is text, and the text after it is scanned again."""
        self.unparsed += 1
        lead, *rest = self._call
        self._text, self._call = ''.join([*rest, self._text]), []
        return self._spell(lead)

    def _spell(self, text: str) -> list[Part]:
        return [self._write(text)] if text else []

    def _write(self, text: str) -> str:
        """Returns the text with its marks spelled out."""
        return text.replace(BEGIN_TOKEN, self._notation.begin).replace(END_TOKEN, self._notation.end)


def _count_begun(text: str, mark: str) -> int:
    """The number of characters at the end of the text that may be the beginning of the mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


# Hermes, the notation of Qwen and others: {"name": ..., "arguments": {...}}.


def read_hermes(text: str) -> tuple[str, str] | None:
    """Returns (name, arguments as they were written) of the JSON object in `text`; None for anything else."""
    try:
        members = _read_members(text)
        (name, _), (arguments, written) = members['name'], members['arguments']
        return require_call(name, arguments, written)
    except (ValueError, KeyError, RecursionError):
        return None


def require_call(name: object, arguments: object, written: str) -> tuple[str, str]:
    """Returns (name, arguments as written); raises ValueError for a call that no client could read or send back."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError('no name, or arguments that are no object')
    if count_levels(arguments) > MOST_LEVELS:
        raise ValueError('too many levels')
    (name + written).encode()  # raises for lone surrogates
    return name, written


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f'{constant} is no JSON')


_SPACES = re.compile(f'[{SPACE}]*')
STRICT_JSON = json.JSONDecoder(parse_constant=_refuse)  # no NaN


def _read_members(text: str) -> dict[str, tuple[object, str]]:
    """Reads the members of the one object in `text`, as values and as they were written; raises ValueError."""
    found: dict[str, tuple[object, str]] = {}
    at = _skip(text, 0, '{')
    closed = text[at : at + 1] == '}'
    while not closed:
        key, end = STRICT_JSON.raw_decode(text, at)
        if not isinstance(key, str) or key in found:
            raise ValueError(f'{key!r} is no name of its own')
        at = _skip(text, end, ':')
        value, end = STRICT_JSON.raw_decode(text, at)
        found[key] = value, text[at:end]
        at = _skip(text, end)
        closed = text[at : at + 1] == '}'
        at = at if closed else _skip(text, at, ',')
    if _skip(text, at, '}') != len(text):
        raise ValueError('more than an object')
    return found


def _skip(text: str, at: int, expected: str = '') -> int:
    """Returns the place after white space, the expected character, and white space; raises ValueError."""
    at = _end_space(text, at)
    if text[at : at + len(expected)] != expected:
        raise ValueError(f'no {expected!r}')
    return _end_space(text, at + len(expected)) if expected else at


def _end_space(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at


NOTATIONS = {'hermes': Notation('<tool_call>', '</tool_call>', read_hermes)}


Tools: TypeAlias = Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The text and calls that some tokens add to an answer."""

    text: str = ''  # outside calls
    calls: tuple[ToolCall, ...] = ()  # completed by these tokens
    unparsed: int = 0  # malformed calls, which stay text
    hidden: int = 0  # calls after the first, if only one was requested
    reasoning: str = ''  # before the text


class AnswerReader(Protocol):
    """Reads one answer from its beginning. The result does not depend on how its tokens are split into pieces."""

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        """Reads the next tokens, int32 [n]; with `finish` they are the last."""
        ...


class PlainReader:
    """Reads an answer as text only."""

    def __init__(self, text: AnswerText):
        self._text = text

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> Reading:
        return Reading(self._text.extend(tokens, finish))


class CallReader:
    """Reads text and the calls of a notation.

    Args:
      text: with BEGIN_TOKEN and END_TOKEN instead of marks that are tokens.
      parser: of the same answer.
      only_first: calls after the first are hidden and counted.
      make_id: makes the id of a call.
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
    """The parsed contents of a whole answer."""

    text: str  # outside calls; malformed calls are text
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments, which are JSON objects
    reasoning: str = ''  # before the text
    unparsed: int = 0  # malformed calls


class AnswerParser(Protocol):
    """Reads whole answers in the notation of one model."""

    def parse(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None = None) -> ParsedAnswer:
        """Parses sampled ids, int32 [n]; without tools there are no calls.

        Args:
          prompt: int32 [P], the answer's prompt: reasoning may begin in it.
        """
        ...


class WholeReader:
    """Implements AnswerReader with a parser of whole answers: the whole answer comes with its end.

    Args:
      parse: parses the ids of an answer, int32 [n], without the stop that ended it.
      cut: removes that stop.
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
