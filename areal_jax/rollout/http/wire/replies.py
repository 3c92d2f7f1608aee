"""Replies of servers, read by clients: a reply whose tokens can not be trusted is refused as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Piece, ReplyError
from areal_jax.types import LARGEST_LOGPROB

_MISSING_LOGPROB = -9999.0  # what vLLM writes where it has none
_LARGEST_TOKEN = 2**31 - 1


class Reply:
    """A JSON object of a reply, with its name for errors."""

    def __init__(self, values: object, name: str = 'reply'):
        if not isinstance(values, dict):
            raise ReplyError(f'{name} of the server is no JSON object but {str(values)[:60]!r}: send the request again')
        self.values: JsonObject = values
        self._name = name

    def error(self, field: str, fault: str) -> ReplyError:
        """For a field that is wrong: raise it."""
        return ReplyError(f'{field} in the {self._name} of the server has {fault}: the reply is not used')

    def object(self, field: str) -> Reply:
        return Reply(self.values.get(field), field)

    def integer(self, field: str, most: int) -> int:
        """From 0 to `most`; 0 where it is absent."""
        found = self.values.get(field, 0)
        if type(found) is not int or not 0 <= found <= most:
            raise self.error(field, f'{found!r}, which is no integer from 0 to {most}')
        return found

    def list(self, field: str, length: int | None = None) -> Sequence[object]:
        found = self.values.get(field)
        if not isinstance(found, list) or (length is not None and len(found) != length):
            raise self.error(field, f'no list of {"any length" if length is None else length}')
        return found


def read_logprobs(
    reply: Reply, field: str, pairs: Sequence[Sequence[object]], vocab_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n] tokens and float32 [n] log-probs from (log-prob, token) pairs."""
    most = _LARGEST_TOKEN if vocab_size is None else vocab_size - 1
    for logprob, token in pairs:
        if type(token) is not int or not 0 <= token <= most:
            raise reply.error(field, f'the token {token!r}, which is no id from 0 to {most}')
        number = isinstance(logprob, float | int) and not isinstance(logprob, bool)
        if not number or not math.isfinite(logprob) or logprob == _MISSING_LOGPROB or logprob > LARGEST_LOGPROB:  # type: ignore[arg-type, operator]
            raise reply.error(field, f'the log-prob {logprob!r}, which no policy can have')
    tokens = np.array([token for _, token in pairs], np.int32)
    return tokens, np.array([logprob for logprob, _ in pairs], np.float32)


def cut_by_spans(
    reply: Reply, tokens: np.ndarray, logprobs: np.ndarray, cut: np.ndarray | None = None, first: int = 0
) -> list[Piece]:
    """One piece for each span of `weight_versions`; of version '' where the server sends none.

    `first` is the index of tokens[0] in the answer: spans count from the answer's beginning.
    """
    spans = reply.values.get('weight_versions')
    if not spans:
        return [Piece(tokens, logprobs, '', cut)] if len(tokens) else []
    if not isinstance(spans, list):
        raise reply.error('weight_versions', f'no list but {spans!r}')
    pieces, end, last = [], first, first + len(tokens)
    for span in spans:
        fits = isinstance(span, dict) and isinstance(span.get('version'), str)
        bounds = (span.get('start'), span.get('end')) if fits else (None, None)
        if not all(type(bound) is int for bound in bounds) or bounds[0] > bounds[1]:  # type: ignore[operator]
            raise reply.error('weight_versions', f'the span {span!r}')
        if bounds[1] <= end:
            continue  # of tokens that came before these
        if max(bounds[0], first) != end or bounds[1] > last:
            break
        part = slice(end - first, bounds[1] - first)
        pieces.append(Piece(tokens[part], logprobs[part], span['version'], None if cut is None else cut[part]))
        end = bounds[1]
    if end != last:
        raise reply.error('weight_versions', f'spans that do not cover {len(tokens)} tokens: {spans!r}')
    return pieces
