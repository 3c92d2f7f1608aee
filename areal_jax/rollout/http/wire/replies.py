"""Replies of servers, read by clients: a reply whose tokens can not be trusted is refused as a whole."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence

import numpy as np

from areal_jax.columns import ColumnArrays, cut
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Piece, ReplyError
from areal_jax.types import LARGEST_LOGPROB

_MISSING_LOGPROB = -9999.0  # what vLLM writes where it has none
_LARGEST_TOKEN = 2**31 - 1
_LARGEST_NUMBER = 1e30  # also keeps integers away that no float holds
_NO_COLUMNS: ColumnArrays = {}


class Reply:
    """A JSON object of a reply, with its name for errors."""

    def __init__(self, values: object, name: str = 'reply'):
        if not isinstance(values, dict):
            raise ReplyError(f'{name} of the server is no JSON object but {show(values)}: send the request again')
        self.values: JsonObject = values
        self._name = name

    def error(self, field: str, fault: str) -> ReplyError:
        """For a field that is wrong: raise it."""
        return ReplyError(f'{field} in the {self._name} of the server has {fault}: the reply is not used')

    def name(self, field: str) -> str:
        """What names something: a text that can be sent back, an integer as one; '' for anything else."""
        found = self.values.get(field)
        text = str(found) if type(found) is int else self.text(field)
        return text if text.isprintable() else ''

    def nested(self, field: str) -> Reply:
        return Reply(self.values.get(field), field)

    def text(self, field: str) -> str:
        """'' for anything else."""
        found = self.values.get(field)
        return found if isinstance(found, str) else ''

    def number(self, field: str) -> float:
        """Of something that is reported only and never negative; 0 for anything else."""
        found = self.values.get(field)
        return found if isinstance(found, int | float) and 0 <= found < _LARGEST_NUMBER else 0

    def integer(self, field: str, most: int) -> int:
        """From 0 to `most`; 0 where it is absent."""
        found = self.values.get(field, 0)
        if type(found) is not int or not 0 <= found <= most:
            raise self.error(field, f'{show(found)}, which is no integer from 0 to {most}')
        return found

    def entries(self, field: str, length: int | None = None) -> Sequence[object]:
        found = self.values.get(field)
        if not isinstance(found, list) or (length is not None and len(found) != length):
            raise self.error(field, f'no list of {"any length" if length is None else length} but {show(found)}')
        return found


def load_json(content: str | bytes) -> object:
    """The value that a server sent; raises ReplyError for what is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting without end
        raise ReplyError(f'the server sent no JSON but {show(content[:100])}: send the request again') from error


def read_logprobs(
    reply: Reply, field: str, pairs: Sequence[Sequence[object]], vocab_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n] tokens and float32 [n] log-probs from (log-prob, token) pairs."""
    most = _LARGEST_TOKEN if vocab_size is None else vocab_size - 1
    for logprob, token in pairs:
        if type(token) is not int or not 0 <= token <= most:
            raise reply.error(field, f'the token {show(token)}, which is no id from 0 to {most}')
        number = isinstance(logprob, float | int) and not isinstance(logprob, bool)
        value = typing.cast(float, logprob)
        if not number or not -_LARGEST_NUMBER < value <= LARGEST_LOGPROB or value == _MISSING_LOGPROB:
            raise reply.error(field, f'the log-prob {show(logprob)}, which no policy can have')
    tokens = np.array([token for _, token in pairs], np.int32)
    return tokens, np.array([logprob for logprob, _ in pairs], np.float32)


def cut_by_spans(
    reply: Reply,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    columns: ColumnArrays,
    first: int = 0,
    context: ColumnArrays = _NO_COLUMNS,
) -> list[Piece]:
    """One piece for each span of `weight_versions`; of version '' where the server sends none.

    `first` is the index of tokens[0] in the answer: spans count from the answer's beginning. `context` is that of the
    first piece.
    """
    spans = reply.values.get('weight_versions')
    if not spans:
        return [Piece(tokens, logprobs, '', columns, context=context)] if len(tokens) else []
    if not isinstance(spans, list):
        raise reply.error('weight_versions', f'no list but {show(spans)}')
    pieces: list[Piece] = []
    end, last = first, first + len(tokens)
    for span in spans:
        version, begin, behind = _read_span(reply, span)
        if behind <= end:
            continue  # of tokens that came before these
        if max(begin, first) != end or behind > last:
            break
        part = slice(end - first, behind - first)
        before = _NO_COLUMNS if pieces else context
        pieces.append(Piece(tokens[part], logprobs[part], version, cut(columns, part), context=before))
        end = behind
    if end != last:
        raise reply.error('weight_versions', f'spans that do not cover {len(tokens)} tokens: {show(spans)}')
    return pieces


def _read_span(reply: Reply, span: object) -> tuple[str, int, int]:
    entry = span if isinstance(span, dict) else {}
    version, begin, behind = (entry.get(name) for name in ('version', 'start', 'end'))
    if not isinstance(version, str) or type(begin) is not int or type(behind) is not int or begin > behind:
        raise reply.error('weight_versions', f'the span {show(span)}')
    return version, begin, behind
