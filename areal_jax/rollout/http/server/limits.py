"""The limits of one server: refusals with their status, before and while a request is served, and bounds on bodies."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import resource
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import TypeVar

from areal_jax.rollout.http.wire.encoding import MOST_PROMPTS, parse_json
from areal_jax.rollout.http.wire.exchange import RequestError

_MOST = 65536  # no higher limit is requested: some programs close all descriptors below their limit one by one
_RESERVED = 112  # for files of weights, pipes of templates, and connections between accept and close
_LEAST = 16  # connections, however few descriptors there are
_OPEN = pathlib.Path('/proc/self/fd')
_OPEN_GUESS = 64  # if the system does not list them


def raise_limit() -> None:
    """Raises the soft limit of descriptors as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that allows less than it states: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def count_connections(wanted: int) -> int:
    """Returns how many of the wanted connections the limit of descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    taken = len(os.listdir(_OPEN)) if _OPEN.is_dir() else _OPEN_GUESS
    return min(wanted, max(_LEAST, soft - taken - _RESERVED))


# The log of the HTTP thread: at most one line per kind and minute, however often clients provoke it.


NAME = 'areal_jax.rollout.http.server'
_PERIOD_S = 60.0


class OncePerMinute(logging.Filter):
    """Passes the first record of a kind, then one per minute that states how many were held back."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        super().__init__()
        self._now = now
        self._kinds: dict[object, tuple[float, int]] = {}  # (when the last one passed, how many since)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.levelno, record.msg, error)
        last_s, held_back = self._kinds.get(kind, (-float('inf'), 0))
        if self._now() - last_s < _PERIOD_S:
            self._kinds[kind] = last_s, held_back + 1
            return False
        self._kinds[kind] = self._now(), 0
        if held_back:
            record.msg = f'{record.msg} (and {held_back} times since the last such line)'
        return True


@contextlib.contextmanager
def bounded_log() -> Iterator[logging.Logger]:
    """Yields the logger of the HTTP side, which is rate-limited inside the context."""
    logger, bound = logging.getLogger(NAME), OncePerMinute()
    logger.addFilter(bound)
    try:
        yield logger
    finally:
        logger.removeFilter(bound)


TOO_LONG_BODY, SLOW_BODY, TOO_MANY_STREAMS, QUEUE_FULL, TOO_LATE = 413, 408, 429, 503, 504
SMALL_BYTES = 1 << 16  # of a body that is parsed on the HTTP loop
PLACE_S = 60.0  # for a place of a large body, and for its parsing
_REST, _LEAST_REST_S, _MOST_REST_S = 4.0, 0.1, 2.0  # after a refused body: a multiple of its time, within bounds
_MOST_LARGE = 3  # larger bodies of all clients at once
FAILED = 500  # the model gave no numbers for this request


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of one server."""

    body_bytes: int = 16 << 20
    body_s: float = 30.0  # for a body to arrive
    requests: int = 1024  # answers under way or queued
    streams: int = 256  # open responses with server-sent events
    scored_tokens: int = 1 << 17  # of one request, scored by a scoring pass
    request_s: float = 3600.0  # from the body to the end of the answer
    reply_s: float = 30.0  # for the host's side to answer requests without generation
    share: float = 0.5  # of the free places of the queue, for one request; at least one place
    connections: int = 4096  # fewer if the process may not open that many
    header_s: float = 10.0  # for the head of a request to arrive
    write_s: float = 120.0  # for a client to read more


class Load:
    """Counts open answers and streams on the HTTP thread, and refuses requests beyond the limits."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.answers = self.streams = 0

    def admit(self, answers: int, stream: bool) -> None:
        """Admits a request, after which `release` must follow, or raises RequestError."""
        self.require_room(answers, stream)
        self.answers += answers
        self.streams += stream

    def require_room(self, answers: int, stream: bool) -> None:
        """Raises RequestError if `admit` would."""
        limits = self.limits
        if answers > (most := self._share_of(limits.requests)):
            raise RequestError(
                'n',
                f'n: {answers} answers in one request, and this server takes {most} at most, server.max_share='
                f'{limits.share:g} of its queue: ask for fewer',
            )
        if self.answers + answers > limits.requests:
            raise RequestError(
                '', f'the queue is full ({self.answers} of {limits.requests} answers): send it again later', QUEUE_FULL
            )
        if answers > (most := self._share_of(limits.requests - self.answers)):
            raise RequestError(
                '', f'{self.answers} of {limits.requests} answers are open, and one request may add {most}: ask for '
                'fewer, or send it again later', QUEUE_FULL,
            )  # fmt: skip
        if stream and self.streams >= limits.streams:
            raise RequestError(
                'stream',
                f'stream=True: {self.streams} streams are open, which is the limit: send it again later',
                TOO_MANY_STREAMS,
            )

    @property
    def most_answers(self) -> int:
        """The most answers of one request, if no other is open."""
        return self._share_of(self.limits.requests)

    def _share_of(self, places: int) -> int:
        """Returns how many of `places` one request may take; the rest is for others."""
        return max(1, int(self.limits.share * places))

    def release(self, answers: int, stream: bool) -> None:
        self.answers -= answers
        self.streams -= stream


class Places:
    """Places for large bodies: one in work per client, from its first byte to its token ids; on one loop.

    A refusal is sent after a delay, during which the client's place stays taken.

    Args:
      wait_s: for the place of a client; after it 429.
    """

    def __init__(self, wait_s: float):
        self._wait_s = wait_s
        self._places: dict[str, asyncio.Lock] = {}
        self._users: collections.Counter[str] = collections.Counter()
        self._room = asyncio.Semaphore(_MOST_LARGE)

    @contextlib.asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Holds the place of the client inside the context. Raises RequestError if it does not become free in time."""
        place = self._places.setdefault(client, asyncio.Lock())
        self._users[client] += 1
        try:
            async with contextlib.AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(self._wait_s):
                        await held.enter_async_context(place)
                        await held.enter_async_context(self._room)
                except TimeoutError:
                    raise RequestError(
                        'body',
                        f'the body is larger than {SMALL_BYTES} bytes, of which a client has one in work at a '
                        f'time, and none of the earlier ones was done within {self._wait_s:g} s: send it again later',
                        TOO_MANY_STREAMS,
                    ) from None
                began_s = time.monotonic()
                try:
                    yield
                except RequestError:
                    # a refusal costs the sender nothing: without a delay it would only send the body again
                    await asyncio.sleep(min(_MOST_REST_S, max(_LEAST_REST_S, _REST * (time.monotonic() - began_s))))
                    raise
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._places[client]


# Bounds on the values and the text in a request's body: the cost of parsing and of later work grows with both.


MOST_VALUES = 1 << 16  # in a body, without token ids: schemas, messages, tool calls; more than fit any context
_BEGINNINGS = b'[', b'{', b','  # every JSON value follows one of these bytes, which texts contain too
_SLICE = 1 << 20  # bytes that are searched at once
_IDS = ('input_ids', 'token_ids', 'prompt', 'tokens')  # fields with token ids, or lists of them
_TOO_LARGE = 413
_LEAST_TEXT = 1 << 20  # characters
_SLACK = 4  # texts may be longer than their tokens' text: normalizers and templates drop some
Result = TypeVar('Result')


@dataclasses.dataclass(frozen=True)
class BodyBound:
    """Upper bounds on the bodies of legal requests, by the context of the model and by its vocabulary.

    Args:
      context_tokens: the most tokens of a prompt.
      in_token: the most characters `[`, `{` and `,` in one token of the vocabulary, because texts contain them too.
      longest_token: in characters.
    """

    context_tokens: int
    in_token: int
    longest_token: int

    @classmethod
    def of(cls, context_tokens: int, vocabulary: Collection[str]) -> BodyBound:
        """Returns the bound of a model with these tokens."""
        in_token = max((sum(map(text.count, '[{,')) for text in vocabulary), default=1)
        return cls(context_tokens, max(1, in_token), max(map(len, vocabulary), default=1))

    def most_values(self, prompts: int) -> int:
        """The most value beginnings in the bytes of a body, for a route that takes `prompts` prompts."""
        return MOST_VALUES + prompts * self.context_tokens * self.in_token

    def most_text(self, prompts: int) -> int:
        """The most characters in all texts of a body; a route without prompts has no such bound."""
        return max(_LEAST_TEXT, _SLACK * prompts * self.context_tokens * self.longest_token) if prompts else 2**63

    def count(self, content: bytes | bytearray, prompts: int) -> Iterator[None]:
        """Counts beginnings of values before anything parses the bytes, and yields between slices.

        A body shorter than its bound is not searched. Raises RequestError.
        """
        most, found = self.most_values(prompts), 0
        if len(content) <= most:
            return
        for start in range(0, len(content), _SLICE):
            found += sum(content.count(one, start, start + _SLICE) for one in _BEGINNINGS)
            yield
        if found > most:
            raise _too_much(f'{found} values ("[", "{{" and ",")', most, self.context_tokens)

    def require_text(self, prompt: str, field: str) -> None:
        """Raises RequestError for a prompt that is too long for the context, before it is encoded."""
        if len(prompt) > (most := self.most_text(1)):
            raise RequestError(
                field,
                f'{field} of {len(prompt)} characters does not fit the context of {self.context_tokens} tokens, '
                f'for which {most} are the most: shorten it',
            )


def parse_large(
    function: Callable[[object], Result], bound: BodyBound, most_text: int, content: bytes | bytearray
) -> Result:
    """Returns `function` of the parsed JSON of a body.

    Raises RequestError for too many values without token ids (the larger of MOST_VALUES and the context), or for more
    text than `most_text`.
    """
    value = parse_json(bytes(content))
    found = count_values(value)
    if found > (most := max(MOST_VALUES, bound.context_tokens)):
        raise _too_much(f'{found} values besides token ids', most, bound.context_tokens)
    if (length := count_characters(value)) > most_text:
        raise _too_much(f'{length} characters of text', most_text, bound.context_tokens)
    return function(value)


def count_characters(value: object) -> int:
    """Counts the characters of all texts and names in JSON, except in lists of token ids."""
    found, layer = 0, [value]
    while layer:
        found += sum(len(one) for one in layer if isinstance(one, str))
        inside: list[object] = []
        for one in layer:
            if isinstance(one, dict):
                inside += [*one, *one.values()]
            elif isinstance(one, list) and not _are_ids(one):
                inside += one
        layer = inside
    return found


def count_values(value: object) -> int:
    """Counts the values inside objects and lists of JSON; a prompt of token ids counts as one."""
    found, layer = 0, [value]
    if isinstance(value, dict):
        found, layer = len(value), []
        for name, inner in value.items():
            layer += _skip_ids(inner) if name in _IDS else [inner]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        found += sum(map(len, layer))
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return found


def _skip_ids(value: object) -> list[object]:
    """Returns the parts of an id field's value that still count: lists of ids are left out, arrays are made of them."""
    if not isinstance(value, list) or _are_ids(value):
        return []
    return [one for one in value if not _are_ids(one)] if len(value) <= MOST_PROMPTS else [value]


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _too_much(found: str, most: int, context_tokens: int) -> RequestError:
    return RequestError(
        'body', f'the body has {found}, and a request of this route for a context of {context_tokens} tokens has '
        f'{most} at most: send less at once, or flatter schemas', _TOO_LARGE,
    )  # fmt: skip
