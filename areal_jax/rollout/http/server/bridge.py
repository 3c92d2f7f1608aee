"""The bridge between the HTTP loop and the service on the host's loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.protocols import Inbox
from areal_jax.rollout.http.pauses import CLIENT, FENCED, FencedError, LeasedError
from areal_jax.rollout.http.server.limits import FAILED, BodyBound, Limits, Load
from areal_jax.rollout.http.service import Action, Delivery, GenerationService, ServiceStatus, Submission
from areal_jax.rollout.http.wire.answer_reader import (
    BEGIN_TOKEN,
    END_TOKEN,
    NOTATIONS,
    AnswerParser,
    AnswerReader,
    AnswerText,
    CallParser,
    CallReader,
    PlainReader,
    Reading,
    WholeReader,
    cut_stop,
)
from areal_jax.rollout.http.wire.encoding import refuse
from areal_jax.rollout.http.wire.exchange import (
    ASKED,
    Answer,
    Call,
    CallSampling,
    Finish,
    FinishWord,
    Message,
    Piece,
    RequestError,
    join_pieces,
    name_answers,
    tokenize_call,
)
from areal_jax.rollout.http.wire.openai import Required, find_misses, grant, require_unread
from areal_jax.rollout.scoring import ScoringRequest
from areal_jax.rollout.stream import DispatchError, LogprobError
from areal_jax.text.chat_template import TokenizerError, ToolsNotShownError, require_place
from areal_jax.text.decoding import TextDecoder
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import EngineFinish, GenerationRequest, SamplingParams


class Texts:
    """The conversions between text and tokens of one model; used on the HTTP thread and its workers."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.token_bytes = tokenizer, tokenizer.token_bytes
        self.end_ids = tokenizer.end_ids
        self._hidden = tokenizer.special_token_ids()
        self.reads = tokenizer.reads  # whether the chat template reads a variable of this name

    def bound(self, context_tokens: int) -> BodyBound:
        """Returns the bound on bodies of requests to this model."""
        return BodyBound.of(context_tokens, self._tokenizer.vocabulary())

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text, int32 [n], with nothing added: text that spells a special token becomes that token."""
        return self._tokenizer.encode(text)

    def encode_prompt(self, text: str, *, adds_special: bool) -> np.ndarray:
        """Encodes a plain prompt, as for /v1/completions and /tokenize.

        Args:
          adds_special: with the tokens that the tokenizer adds around texts, most often BOS.
        """
        return self._tokenizer.encode_prompt(text) if adds_special else self._tokenizer.encode(text)

    def apply_template(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> np.ndarray:
        """Encodes a conversation, int32 [P]: only the template's special tokens are special, text in messages is not.

        Calls take turns, because one process renders all of them. The first call starts it.
        Raises RequestError for tools that the template of the model does not show.
        """
        conversations = [[message.describe() for message in messages]]
        try:
            if not self._tokenizer.takes_tools:
                require_place(conversations, tools)  # even if the form writes the content of any turn
            return self._tokenizer.encode_chats(conversations, tools)[0]
        except ToolsNotShownError as error:
            raise refuse(error.field, error.value, error.reason) from error

    def decode(self, tokens: np.ndarray, *, skip_special: bool) -> str:
        """Decodes int32 [n]; special tokens are spelled out, except the end of an answer at the very end."""
        return self.open(skip_special=skip_special).extend(tokens, is_last=True)

    def open(self, *, skip_special: bool, marks: Mapping[int, str] | None = None) -> TextDecoder:
        """Returns a decoder for a text whose tokens come in pieces; `marks`: see TextDecoder."""
        hidden = self._hidden if skip_special else ()
        return TextDecoder(self.token_bytes, hidden, self.end_ids, marks)

    def spell(self, tokens: np.ndarray, *, skip_special: bool = False) -> str:
        """Returns the whole text of int32 [n], an EOS at its end included."""
        return TextDecoder(self.token_bytes, self._hidden if skip_special else ()).extend(tokens, is_last=True)

    def special_tokens(self) -> dict[str, str | None]:
        """Returns the text of the token that ends an answer; None if the model has no such special token."""
        eos = self.end_ids[0]
        return {'eos_token': self.spell(np.array([eos], np.int32)) if eos in self._hidden else None}

    def answer(self, sampling: CallSampling) -> AnswerText:
        """Returns the text reader of one answer, from its beginning."""
        decoder = self.open(skip_special=sampling.skip_special_tokens)
        return AnswerText(decoder, sampling.stop_strings, sampling.keep_stop)

    def token_text(self, token: int) -> str:
        """Returns the text of a token after others; '' for a token that ends an answer."""
        return '' if token in self.end_ids else self.token_bytes.text_of(token)


# The choice of the reader for the tokens of an answer.


_ID_BYTES = 12  # random bytes of a tool call's id


class AnswerReaders:
    """Makes the answer readers of one model.

    Args:
      parser: for tool calls in another notation than Hermes.
    """

    def __init__(self, texts: Texts, parser: AnswerParser | None = None):
        self._texts, self._parser, self._notation = texts, parser, NOTATIONS['hermes']
        spelled = ((BEGIN_TOKEN, self._notation.begin), (END_TOKEN, self._notation.end))
        self._marks = {token: mark for mark, text in spelled if (token := _find_token(texts, text)) is not None}

    def open(self, call: Call, prompt: int = 0) -> AnswerReader:
        """Returns a reader of one answer to the prompt with this index; it finds calls if the request has tools."""
        sampling = call.sampling[prompt]
        if not call.tools:
            return PlainReader(self._texts.answer(sampling))
        if self._parser is not None:
            before = cast(np.ndarray, call.prompts[prompt])
            return WholeReader(
                functools.partial(self._parser.parse, tools=call.tools, prompt=before),
                functools.partial(
                    cut_stop,
                    keep_stop=sampling.keep_stop,
                    token_bytes=self._texts.token_bytes,
                    encode=self._texts.encode,
                ),
                call.one_tool_call,
                _make_id,
            )
        decoder = self._texts.open(skip_special=sampling.skip_special_tokens, marks=self._marks)
        text = AnswerText(decoder, sampling.stop_strings, sampling.keep_stop)
        parser = CallParser(self._notation, tuple(self._marks.values()))
        return CallReader(text, parser, call.one_tool_call, _make_id)


def _find_token(texts: Texts, text: str) -> int | None:
    """Returns the token that a text is; None if it is several, or has characters that the tokenizer does not know."""
    try:
        ids = texts.encode(text)
    except TokenizerError:
        return None
    return int(ids[0]) if len(ids) == 1 else None


def _make_id() -> str:
    return f'call_{secrets.token_hex(_ID_BYTES)}'


# Counts of the contents of requests and answers since the start, for /metrics; on the HTTP loop alone.


class Counts:
    """The counts of one server. Labels are names of fields that the parsers know, so there are few."""

    def __init__(self) -> None:
        self.calls = self.unparsed = self.hidden = 0
        self.ignored: collections.Counter[str] = collections.Counter()
        self.wishes: collections.Counter[str] = collections.Counter()
        self.missed: collections.Counter[str] = collections.Counter()

    def note_call(self, call: Call) -> None:
        """Counts the fields of an accepted request."""
        self.note_ignored(call.ignored)
        self.wishes.update(wish.field for wish in call.wishes)

    def note_ignored(self, fields: Iterable[str]) -> None:
        """Counts fields of a request that have no influence, also for requests without an answer."""
        self.ignored.update(fields)

    def note_reading(self, reading: Reading) -> None:
        """Counts the tool calls in a part of an answer."""
        self.calls += len(reading.calls)
        self.unparsed += reading.unparsed
        self.hidden += reading.hidden

    def note_misses(self, fields: Iterable[str]) -> None:
        """Counts the fields whose wishes the complete answers to a request do not fulfil."""
        self.missed.update(fields)


_FINISH: dict[EngineFinish, FinishWord] = {'stop': 'stop', 'length': 'length', 'cancelled': 'abort'}
_CONFLICT = 409
_BRIDGE_ID_BYTES = 16  # random bytes of an id that the server makes: a client can only end requests whose id it knows
Result = TypeVar('Result')


class Bridge:
    """Passes calls from HTTP routes to the service; made and used on the HTTP loop alone.

    Args:
      vocab_size: of the model: ids are below it.
      seed: of the noise of requests without a seed.
      required: the treatment of requests whose answers must be a tool call or JSON.
      parser: for tool calls in another notation than Hermes.
      recorded: the columns of the model that pieces have.
    """

    def __init__(
        self, inbox: Inbox, texts: Texts, limits: Limits, *, context_tokens: int, vocab_size: int, seed: int,
        required: Required = 'refuse', parser: AnswerParser | None = None, recorded: Collection[str] = (),
    ):  # fmt: skip
        self.counts, self.required, self._recorded = Counts(), required, recorded
        self._readers = AnswerReaders(texts, parser)
        self.texts, self.load, self.context_tokens = texts, Load(limits), context_tokens
        self._inbox, self.vocab_size, self._seed = inbox, vocab_size, seed
        self.bound = texts.bound(context_tokens)
        self._loop = asyncio.get_running_loop()
        self._draws = itertools.count(1)

    @property
    def limits(self) -> Limits:
        return self.load.limits

    async def act(
        self, name: str, run: Callable[[GenerationService], Awaitable[Result]], deadline_s: float | None = None
    ) -> Result:
        """Returns the result of `run` on the host's loop; raises its UserError, and TimeoutError at the deadline."""
        future: asyncio.Future[object] = self._loop.create_future()

        def settle(result: object, error: UserError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(_with_status(error))
            else:
                future.set_result(result)

        self._inbox.put(Action(name, run, lambda result, error: self._call_back(settle, result, error)))
        async with asyncio.timeout(deadline_s):
            return cast(Result, await future)

    async def look(self) -> ServiceStatus:
        """Returns the status of the service; raises TimeoutError if the host's loop does not answer in time."""
        return await self.act('look', lambda service: service.look(), self.limits.reply_s)

    async def tokenize(self, call: Call) -> Call:
        """Replaces texts and messages by token ids; raises RequestError, also if the model can not take the prompt."""
        if unknown := [name for name in call.model_columns if name not in self._recorded]:
            fix = 'is not served: start the server with rollout.record_routes=True and a model with experts'
            raise refuse(ASKED.format(unknown[0]), True, fix)
        call = await self.encode(call)
        for prompt, sampling in zip(call.prompts, call.sampling, strict=True):
            self._require_fit(call, cast(np.ndarray, prompt), sampling)
        return call

    async def encode(self, call: Call) -> Call:
        """Replaces texts and messages by token ids, also in prompts that are too long for the context."""
        require_unread(call, self.texts.reads)
        call = grant(call, self.required)
        if call.echo or any(not isinstance(prompt, np.ndarray) for prompt in call.prompts):
            call = await _run_to_its_end(self._tokenize, call)
        return call

    def open(self, call: Call) -> Exchange:
        """Submits a call of token ids; returns the exchange that yields its answers and must be closed."""
        exchange = Exchange(self, call)
        self.counts.note_call(call)
        for submission in exchange.submissions:
            self._inbox.put(submission)
        return exchange

    def withdraw(self, submissions: Sequence[Submission]) -> None:
        """Ends the submissions that are still open, without waiting for their end."""
        self._inbox.put(Action('withdraw', lambda service: service.withdraw(submissions), lambda result, error: None))

    def withdraw_scoring(self, requests: Sequence[ScoringRequest]) -> None:
        """Ends the scoring requests that are still open, without waiting for their end."""
        self._inbox.put(
            Action('withdraw', lambda service: service.withdraw_scoring(requests), lambda result, error: None)
        )

    def open_reader(self, call: Call, answer: int) -> AnswerReader:
        """Returns a reader of the answer with this index."""
        return self._readers.open(call, answer // call.n)

    def describe(self, call: Call, answers: Sequence[Answer], put: Callable[[int, Delivery], None]) -> list[Submission]:
        """Returns the submissions for the answers of a call; `put` is called with each answer's deliveries."""
        draw = next(self._draws)
        found = []
        for answer in answers:
            prompt, sample = divmod(answer.index, call.n)
            sampling = call.sampling[prompt]
            if sampling.max_new_tokens == 0:
                put(answer.index, Delivery(finish='length'))
                continue
            noise = (draw, self._seed) if sampling.seed is None else (call.draw, sampling.seed)
            request = GenerationRequest(
                draw=noise[0],
                sample=call.sample + sample if sampling.seed is not None else answer.index,
                seed=noise[1],
                prompt_tokens=answer.prompt_tokens,
                sampling=self._sampling(sampling, len(answer.prompt_tokens)),
                name=answer.request_id,
                cache_salt=call.cache_salt,
            )
            deliver = functools.partial(self._call_back, put, answer.index)
            found.append(Submission(request, call.stream, deliver, find_group(call, answer.request_id)))
        return found

    def _call_back(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls the function on the HTTP loop; called on the host's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tokenize(self, call: Call) -> Call:
        for prompt in call.prompts:
            if isinstance(prompt, str):
                self.bound.require_text(prompt, call.prompt_field)
        try:
            encode = functools.partial(self.texts.encode_prompt, adds_special=call.adds_special)
            tokenized = tokenize_call(call, encode, self.texts.apply_template)
            return self._with_texts(call, tokenized) if call.echo else tokenized
        except TokenizerError as error:
            raise RequestError(call.prompt_field, f'{call.prompt_field} has no token ids: {error}') from error

    def _with_texts(self, call: Call, tokenized: Call) -> Call:
        """Returns the tokenized call with the texts that it echoes: as they were sent, or decoded from token ids."""
        texts = [
            given if isinstance(given, str) else self.texts.spell(cast(np.ndarray, ids))
            for given, ids in zip(call.prompts, tokenized.prompts, strict=True)
        ]
        return dataclasses.replace(tokenized, prompt_texts=tuple(texts))

    def _require_fit(self, call: Call, prompt: np.ndarray, sampling: CallSampling) -> None:
        if (largest := int(prompt.max())) >= self.vocab_size:
            raise RequestError(
                call.prompt_field,
                f'{call.prompt_field} has token {largest}, and the model {self.vocab_size} tokens: '
                'use ids of its own tokenizer',
            )
        new = 1 if sampling.max_new_tokens is None or call.fits_limit else sampling.max_new_tokens
        if len(prompt) + new > self.context_tokens:
            raise RequestError(
                call.prompt_field,
                f'{call.prompt_field} of {len(prompt)} tokens and {new} new '
                f'ones do not fit the context of {self.context_tokens} tokens: shorten it or ask for fewer',
            )

    def _stop_tokens(self, sampling: CallSampling) -> tuple[int, ...]:
        ends = () if sampling.ignore_eos else self.texts.end_ids
        return tuple(dict.fromkeys((*ends, *sampling.stop_tokens)))

    def _sampling(self, wanted: CallSampling, prompt_tokens: int) -> SamplingParams:
        room = self.context_tokens - prompt_tokens
        return SamplingParams(
            max_new_tokens=min(wanted.max_new_tokens or room, room),
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            stop_tokens=self._stop_tokens(wanted),
            min_p=wanted.min_p,
            min_new_tokens=wanted.min_new_tokens,
            repetition_penalty=wanted.repetition_penalty,
            frequency_penalty=wanted.frequency_penalty,
            presence_penalty=wanted.presence_penalty,
            logit_bias=wanted.logit_bias,
            stop_strings=wanted.stop_strings,
        )


class Exchange:
    """The answers to one call, as far as they are received. Once it is made, `close` must follow.

    Raises RequestError if the server has no room for the call.
    """

    def __init__(self, bridge: Bridge, call: Call):
        bridge.load.require_room(call.n_answers, call.stream)  # first: a call may ask for millions of answers
        self._bridge, self._call = bridge, call
        self._began = time.monotonic()
        self._news: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        self._unfinished = call.n_answers
        names = name_answers(call, f'request-{secrets.token_hex(_BRIDGE_ID_BYTES)}').request_ids
        self.answers = [
            Answer(name, cast(np.ndarray, call.prompts[index // call.n]), index, prompt_text=_echo(call, index))
            for index, name in enumerate(names)
        ]
        self._readers = [bridge.open_reader(call, index) for index in range(len(names))]
        self.submissions = bridge.describe(call, self.answers, self.put)
        bridge.load.admit(call.n_answers, call.stream)  # last: if an earlier step fails, nothing must be released

    def put(self, index: int, delivery: Delivery) -> None:
        """Takes a delivery of the service for one answer."""
        self._news.put_nowait((index, delivery))

    async def pieces(self) -> AsyncIterator[tuple[Answer, Piece]]:
        """Yields (answer with the piece, piece) as they arrive; ends with the last answer. Raises RequestError."""
        while self._unfinished:
            for index, delivery in (await self._take_news()).items():
                if delivery.error is not None:
                    status = FAILED if isinstance(delivery.error, LogprobError | DispatchError) else 400
                    raise RequestError(self._call.prompt_field if status == 400 else '', str(delivery.error), status)
                answer = self.answers[index]
                answer.cached_tokens, answer.retractions = delivery.cached_tokens, delivery.retractions
                pieces = self._with_text(index, delivery)
                for position, piece in enumerate(pieces, start=1):
                    answer.add(piece)
                    if delivery.finish is not None and position == len(pieces):
                        self._finish(answer, delivery)
                    yield answer, piece

    async def finish(self) -> list[Answer]:
        """Returns all answers, complete."""
        async for _ in self.pieces():
            pass
        return self.answers

    def note_misses(self) -> list[str]:
        """Counts and returns the fields whose wishes at least one of the complete answers misses."""
        misses = find_misses(self._call, self.answers)
        self._bridge.counts.note_misses(misses)
        return misses

    async def finish_within(self, seconds: float) -> list[Answer]:
        """Returns all answers, complete; raises TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            return await self.finish()

    def close(self) -> None:
        """Ends unfinished answers, and makes room for other calls."""
        self._bridge.load.release(self._call.n_answers, self._call.stream)
        open_names = {answer.request_id for answer in self.answers if answer.finish is None}
        if unfinished := [one for one in self.submissions if one.request.request_id in open_names]:
            self._bridge.withdraw(unfinished)

    async def _take_news(self) -> dict[int, Delivery]:
        """Returns one delivery for each answer with news: deliveries that came while a reader was slow are merged."""
        index, delivery = await self._news.get()
        found = {index: delivery}
        while not self._news.empty():
            index, delivery = self._news.get_nowait()
            before = found[index].pieces if index in found else ()
            found[index] = dataclasses.replace(delivery, pieces=[*before, *delivery.pieces])
        return found

    def _with_text(self, index: int, delivery: Delivery) -> Sequence[Piece]:
        """Returns the pieces with their texts and calls; one empty piece if the delivery has none."""
        reader = self._readers[index]
        found: list[Piece] = []
        pieces = join_pieces(delivery.pieces) or [Piece(np.zeros(0, np.int32), np.zeros(0, np.float32), '')]
        for position, piece in enumerate(pieces):
            is_last = delivery.finish is not None and position == len(pieces) - 1
            reading = reader.extend(piece.tokens, _describe_finish(delivery) if is_last else None)
            self._bridge.counts.note_reading(reading)
            found.append(
                dataclasses.replace(piece, text=reading.text, calls=reading.calls, reasoning=reading.reasoning)
            )
        return found

    def _finish(self, answer: Answer, delivery: Delivery) -> None:
        assert delivery.finish is not None
        self._unfinished -= 1
        answer.finish = _describe_finish(delivery)
        answer.version, answer.began = delivery.version, delivery.began
        answer.latency_s = time.monotonic() - self._began


async def _run_to_its_end(function: Callable[[Call], Result], call: Call) -> Result:
    """Runs `function` in a thread and waits for it even if the caller is cancelled: one large text per client."""
    work = asyncio.ensure_future(asyncio.to_thread(function, call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def find_group(call: Call, request_id: str) -> str:
    """Returns the id of a call with several answers, which are numbered 'NAME_0', 'NAME_1'; else ''."""
    group, _, number = request_id.rpartition('_')
    return group if call.n_answers > 1 and number.isdecimal() else ''


def _with_status(error: UserError) -> UserError:
    if isinstance(error, FencedError):
        return RequestError(CLIENT, str(error), FENCED)
    return RequestError('', str(error), _CONFLICT) if isinstance(error, LeasedError) else error


def _echo(call: Call, answer: int) -> str:
    return call.prompt_texts[answer // call.n] if call.prompt_texts else ''


def _describe_finish(delivery: Delivery) -> Finish:
    assert delivery.finish is not None
    word = _FINISH[delivery.finish]
    return Finish(word, delivery.matched, 'Aborted' if word == 'abort' else '')
