"""A request inside an engine of this process, and the tokens generated for it.

stream.py extends and ends it; the pool iterates over it. Work here is per dispatch and per segment: tokens stay
in numpy arrays.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from areal_jax.columns import ColumnArrays, of_request
from areal_jax.protocols import Clock
from areal_jax.rollout.blocks import CachedSequence, root_digest
from areal_jax.text.decoding import TextStart, TokenBytes
from areal_jax.types import EngineFinish, GenerationRequest, Segment, concatenate, is_repeated, repeat


class SegmentIterator:
    """Iterates over the segments of a request; implements protocols.Generation.

    `engine` is the generating engine, '' before there is one. The iteration ends with `finish_reason`, or raises
    `error`, after all delivered segments.
    """

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str = ''):
        self.request, self.request_id, self.engine = request, request.request_id, engine
        self.finish_reason: EngineFinish | None = None
        self.error: Exception | None = None  # why it ended without a reason
        self._undelivered: collections.deque[Segment] = collections.deque()
        self._clock, self._news = clock, clock.event(f'segments of request {self.request_id}')

    def deliver(self, segment: Segment) -> None:
        self._undelivered.append(segment)
        self._news.set()

    def end(self, reason: EngineFinish) -> None:
        self.finish_reason = reason
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Makes the iteration raise the error, after all delivered segments."""
        self.error = error
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        while not self._undelivered:
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._undelivered.popleft()


class GrowingAnswer(SegmentIterator):
    """An answer from another process; also keeps the received segments, so that another engine can continue it."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str = ''):
        super().__init__(request, clock, engine)
        self.received_tokens = sum(len(segment.tokens) for segment in request.prefix)
        self._received = list(request.prefix)

    @property
    def tokens(self) -> np.ndarray:
        """The answer so far, prefix included; int32 [n]."""
        return concatenate([segment.tokens for segment in self._received], np.int32)

    @property
    def room_tokens(self) -> int:
        """The number of tokens that the answer may still get."""
        return self.request.sampling.max_new_tokens - self.received_tokens

    def take(self, segment: Segment) -> None:
        self.received_tokens += len(segment.tokens)
        self._received.append(segment)
        self.deliver(segment)


# Stop strings: which token of an answer completes the first of them. Texts exist on the host only; stream.py asks.


class StopSearch:
    """Looks for the first of some strings in the text of an answer that grows.

    If one token completes several strings, the string that begins first wins, then the string listed first. The work is
    in proportion to the new tokens and the longest string, not to the answer. Bytes are compared: the bytes of a string
    are found in the bytes of the tokens exactly where the text has the string, because no character of UTF-8 begins
    inside another one.

    Args:
      strings: not empty. U+FFFD in a string matches only that character, not invalid bytes; a string with a lone
        surrogate never matches.
    """

    def __init__(self, strings: Sequence[str], token_bytes: TokenBytes):
        self._strings = [(string.encode(), string) for string in strings if _has_bytes(string)]
        self._longest = max((len(content) for content, _ in self._strings), default=1)
        self._start = TextStart(token_bytes)
        self._tail = b''  # end of the text so far, in which a string may begin

    def pass_over(self, tokens: Iterable[int]) -> None:
        """Reads the next tokens of the answer without looking for strings in them."""
        self._keep(self._tail + b''.join(self._start.spell(tokens)))

    def find(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Returns (how many of the next tokens belong to the answer, the string that the last of them completes)."""
        for count, added in enumerate(self._start.spell(tokens), start=1):
            passed = len(self._tail)
            content = self._tail + added
            string = self._first_match(content, passed)
            if string is not None:
                return count, string
            self._keep(content)
        return None

    def _keep(self, content: bytes) -> None:
        self._tail = content[max(0, len(content) - self._longest + 1) :]

    def _first_match(self, content: bytes, passed: int) -> str | None:
        """Returns the string that begins first, of all strings that end after `passed` bytes."""
        found = [
            (at, index)
            for index, (one, _) in enumerate(self._strings)
            if (at := content.find(one, max(0, passed - len(one) + 1))) >= 0
        ]
        return self._strings[min(found)[1]][1] if found else None


def _has_bytes(string: str) -> bool:
    return not any('\ud800' <= character <= '\udfff' for character in string)


_NO_LOGPROBS, _NO_COLUMNS = np.zeros(0, np.float32), dict[str, np.ndarray]()
_DIGEST_BYTES = 16  # of a prompt's key: two different prompts share one with a chance of 2^-128


class GrowingArray:
    """An array that grows along its first axis, in amortised constant time per element.

    As long as it repeats one value (types.repeat), its memory does not depend on the length.
    """

    def __init__(self, values: np.ndarray):
        self._array, self.length = values, len(values)
        self._repeats = is_repeated(values) or not len(values)  # `_array` begins with the value

    def __len__(self) -> int:
        return self.length

    @property
    def last(self) -> Any:
        """The last element; the array must not be empty."""
        return self._array[0 if self._repeats else self.length - 1]

    def extend(self, values: np.ndarray) -> None:
        end = self.length + len(values)
        if self._repeats and is_repeated(values) and (not self.length or self._array[0] == values[0]):
            if not self.length:
                self._array = values
            self.length = end
            return
        if self._repeats:
            self._array, self._repeats = self.view().copy(), False
        if end > len(self._array):
            grown = np.empty((2 * end, *self._array.shape[1:]), self._array.dtype)
            grown[: self.length] = self._array[: self.length]
            self._array = grown
        self._array[self.length : end] = values
        self.length = end

    def view(self, start: int = 0) -> np.ndarray:
        """Returns the elements from `start` on; later calls do not change them."""
        if self._repeats and self.length:
            return repeat(self._array[0], self.length - start, self._array.dtype)
        return self._array[start : self.length]


class RunningRequest(SegmentIterator):
    """One request from its arrival to its end."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str, limit: int):
        """`limit` is the number of tokens, prompt included, at which the request ends with the reason 'length'."""
        super().__init__(request, clock, engine)
        self.limit = limit
        self.streams = False  # every dispatch delivers, however short the segments are
        self.stop_search: StopSearch | None = None  # in tokens generated here; made by stream.py
        self.matched: int | str | None = None  # the stop token or string that ended it, if any
        self.cached: CachedSequence | None = (
            None  # its part of the KV cache; cache_table.py keeps it and the next three
        )
        self.prompt_digests: Sequence[bytes] | None = None  # of the prompt without its last token, see blocks.py
        self.cached_tokens: int | None = None  # of the prompt, already computed when it began; None = it has not begun
        self.retractions = 0  # times that its KV was dropped and had to be computed again
        self._given = np.asarray(request.prompt_tokens, np.int32)  # the samples of a group share it
        if request.prefix:
            self._given = concatenate([self._given, request.prefix_tokens], np.int32)
        self._tokens: GrowingArray | None = None  # made when the first token is generated
        self._delivered = len(self._given)  # tokens before the segment under way
        self._version = 0  # of the segment under way
        self._logprobs = GrowingArray(_NO_LOGPROBS)  # of the segment under way, like the next
        self._columns: dict[str, GrowingArray] = {}
        self._context: ColumnArrays = {}  # of the prompt, until the first segment is delivered
        self._known = of_request(request.sampling)
        self._needs_columns = any(column.needed for column in self._known)

    def __len__(self) -> int:
        return len(self._given) if self._tokens is None else self._tokens.length

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and all generated tokens, int32 [T]; a view that does not change when more are generated."""
        return self._given if self._tokens is None else self._tokens.view()

    @property
    def last_token(self) -> int:
        return int(self._given[-1] if self._tokens is None else self._tokens.last)

    @property
    def has_begun(self) -> bool:
        """Whether any token of the answer was generated, here or on an earlier engine."""
        return len(self) > len(self.request.prompt_tokens)

    @functools.cached_property
    def root_digest(self) -> bytes:
        """The digest of the empty sequence, see blocks.root_digest."""
        return root_digest(self.request.cache_salt or '')

    @functools.cached_property
    def prompt_key(self) -> bytes:
        """A key that is equal for requests with the same cache_salt and the same prompt without its last token."""
        content = np.ascontiguousarray(self.request.prompt_tokens[:-1], np.int32)
        salt = self.request.cache_salt
        key = hashlib.blake2b(salt.encode()).digest() if salt else b''
        return hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES, key=key).digest()

    def extend(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, columns: ColumnArrays = _NO_COLUMNS
    ) -> None:
        """Adds n >= 1 tokens of one version to the segment under way; a different set of columns begins a new segment.

        `tokens` int32 [n]; `logprobs` float32 [n]; `columns` may have more than the request needs.
        Raises RuntimeError if the segment under way has another version, ColumnError for a missing column.
        """
        if len(self) > self._delivered and self._version != version:
            raise RuntimeError(f'request {self.request_id}: flush version {self._version} before {version}')
        if columns or self._columns or self._needs_columns:
            self._extend_columns(columns)
        if self._tokens is None:
            self._tokens = GrowingArray(self._given)
            self._given = self._given[:0]
        self._version = version
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def _extend_columns(self, columns: ColumnArrays) -> None:
        own = {column.name: columns[column.name] for column in self._known if column.name in columns}
        if missing := [column for column in self._known if column.needed and column.name not in own]:
            fault = f'is not known of tokens that {self.engine} generated for request {self.request_id}'
            raise missing[0].error(fault, 'use another engine, or sampling parameters that do without it')
        if own.keys() != self._columns.keys():
            self.flush()
            self._columns = {name: GrowingArray(values[:0]) for name, values in own.items()}
        for name, values in own.items():
            self._columns[name].extend(values)

    def give_context(self, columns: ColumnArrays) -> None:
        """Sets the columns of the prompt that the first segment delivers, see Segment.context."""
        self._context = columns

    def flush(self) -> None:
        """Delivers the segment under way."""
        if len(self) == self._delivered:
            return
        tokens = _keep(self.tokens[self._delivered :])
        columns = {name: values.view().copy() for name, values in self._columns.items()}
        self.deliver(Segment(tokens, _keep(self._logprobs.view()), self._version, columns, self._context))
        self._logprobs, self._columns, self._context = GrowingArray(_NO_LOGPROBS), {}, {}
        self._delivered = len(self)

    def finish(self, reason: EngineFinish) -> None:
        """Delivers the segment under way and ends the iteration."""
        self.flush()
        self.end(reason)

    def fail(self, error: Exception) -> None:
        """Delivers the segment under way; then the iteration raises the error."""
        self.flush()
        super().fail(error)


def _keep(view: np.ndarray) -> np.ndarray:
    """Copies the view, so that it does not keep the longer array alive; a repeated value needs no copy."""
    return view if is_repeated(view) else view.copy()
