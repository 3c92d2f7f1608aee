"""One server through its dialect, on the clock: an engine's actions with deadlines and named outcomes."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from areal_jax.columns import of_request
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.protocols import Clock
from areal_jax.rollout.http.clients.connection import Connection, Dialect, NoReplyError, StatusError, UpdateError
from areal_jax.rollout.http.pauses import FENCED
from areal_jax.rollout.http.wire.encoding import LARGEST_VERSION, read_integer
from areal_jax.rollout.http.wire.exchange import Call, CallSampling, ColumnForm, FinishWord, Piece, ReplyError
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.rollout.servers.member import FencedError, OutcomeUnknownError, RefusedError
from areal_jax.types import NOT_GENERATED, GenerationRequest, PublishedWeights, Work, concatenate

Result = TypeVar('Result')
_TROUBLE = (NoReplyError, StatusError, TimeoutError)  # of a call; after each it is unknown what the server has done


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds on the requests to a server, and on the time of its replies."""

    slots: int  # calls at the same time; further requests wait in the engine
    vocab_size: int
    context_tokens: int  # of prompt and answer
    # of the model's columns that replies must have (rollout.record_routes)
    forms: Mapping[str, ColumnForm] = dataclasses.field(default_factory=dict)
    request_s: float = 3600.0  # of one call: longer than the longest answer takes
    control_s: float = 120.0  # of a pause, an abort or a question
    load_s: float = 600.0  # of loading weights
    loads: int = 3  # attempts of one update while its outcome is unknown


class Server:
    """A server; raises OutcomeUnknownError, naming engine and action, if an action has no good reply, and FencedError.

    Calls for tokens run on the lane `lane`, loads of weights on `load_lane`, everything else on `control_lane`.

    Args:
      receiver: the program next to the server that makes directories of versions (app/roles/receiver.py); None: the
        server loads the learner's directories.
    """

    def __init__(
        self,
        dialect: Dialect,
        connection: Connection,
        clock: Clock,
        limits: ServerLimits,
        *,
        lane: str,
        control_lane: str,
        load_lane: str,
        receiver: Connection | None = None,
    ):
        self.url, self.seeds, self.streams, self.limits = connection.url, dialect.seeds, dialect.streams, limits
        self._dialect, self._connection, self._clock = dialect, connection, clock
        self._lane, self._control_lane, self._load_lane = lane, control_lane, load_lane
        self._receiver = receiver

    async def stream(self, call: Call, deliver: Callable[[Sequence[Piece]], None]) -> FinishWord:
        """Streams an answer, see Dialect.stream. Raises ReplyError if its rest is lost; delivered tokens are valid."""
        stream = lambda: self._dialect.stream(self._connection, call, self.limits.vocab_size, deliver)
        work = Work('generate', call.sampling[0].max_new_tokens or 1)
        try:
            return await self._clock.call(self._lane, stream, work, self.limits.request_s)
        except _TROUBLE as error:
            raise ReplyError(str(error)) from error

    async def probe(self) -> str:
        """Generates one token and returns its weights' name: other routes may still reply when the engine is dead."""
        generate = lambda: self._dialect.generate(self._connection, make_probe(), self.limits.vocab_size)
        try:
            answer = await self._clock.call(self._lane, generate, Work('generate'), self.limits.control_s)
        except (*_TROUBLE, ReplyError) as error:
            raise OutcomeUnknownError(f'{self._lane}: one token, to see that it serves: {error}') from error
        return answer.pieces[-1].version if answer.pieces else ''

    async def abort(self, wire_id: str, action: str = 'abort') -> None:
        """Aborts the call `wire_id`; '' = every call."""
        await self._act(action, lambda: self._dialect.abort(self._connection, wire_id))

    @property
    def keeps_answers(self) -> bool:
        """Whether the server keeps answers, judged by its replies so far; see Dialect."""
        return self._dialect.keeps_answers

    async def pause(self, action: str, keeps_answers: bool = False) -> None:
        """Pauses the server; `action` names the purpose in errors."""
        await self._act(action, lambda: self._dialect.pause(self._connection, keeps_answers))

    async def resume(self, deadline_s: float | None = None) -> None:
        await self._act('resume', lambda: self._dialect.resume(self._connection), deadline_s)

    async def ask_version(self) -> str:
        return await self._act('version', lambda: self._dialect.ask_version(self._connection))

    async def load(self, published: PublishedWeights, directory: str) -> None:
        """Loads the weights while paused; the update is sent again while its outcome is unknown."""
        failure = ''
        for _ in range(self.limits.loads):
            try:
                await self._clock.call(
                    self._load_lane,
                    lambda: self._dialect.update(self._connection, directory, str(published.version)),
                    Work('load', 1, {'version': published.version}),
                    self.limits.load_s,
                )
            except (*_TROUBLE, UpdateError) as error:
                failure = str(error)
            else:
                return
        raise OutcomeUnknownError(f'{self._lane}: load of version {published.version} from {directory}: {failure}')

    async def prepare(self, published: PublishedWeights, locate: Callable[[PublishedWeights], str]) -> str:
        """Returns the directory of a version that the server can load; raises RefusedError without one."""
        if self._receiver is not None:
            return await self._bring(self._receiver, published)
        directory = locate(published)
        await self.require_files(published, directory)
        return directory

    async def _bring(self, receiver: Connection, published: PublishedWeights) -> str:
        """Makes the receiver write the version, checked against the manifest; returns the directory."""
        body: JsonObject = {'version': published.version, 'manifest_hash': published.manifest_hash}
        ask = lambda: receiver.require('POST', '/versions', body)
        work = Work('load', 1, {'version': published.version})
        try:
            reply = await self._clock.call(self._load_lane, ask, work, self.limits.load_s)
        except _TROUBLE as error:
            raise RefusedError(f'{self._lane}: the receiver of version {published.version}: {error}') from error
        return reply.fields().name('directory')

    async def require_files(self, published: PublishedWeights, directory: str) -> None:
        """Raises RefusedError for a directory without weights: some servers do not survive the attempt to load it."""
        work = Work('load', 1, {'version': published.version})
        if not await self._clock.run(self._load_lane, lambda: _holds_weights(pathlib.Path(directory)), work):
            raise RefusedError(
                f'{self._lane}: {directory} holds no config.json with safetensors: publish the version again'
            )

    async def close(self) -> None:
        for connection in (self._connection, *([] if self._receiver is None else [self._receiver])):
            await self._clock.call(self._control_lane, connection.close, Work('control'), self.limits.control_s)

    async def _act(self, action: str, act: Callable[[], Awaitable[Result]], deadline_s: float | None = None) -> Result:
        deadline_s = self.limits.control_s if deadline_s is None else deadline_s
        try:
            return await self._clock.call(self._control_lane, act, Work('control'), deadline_s)
        except _TROUBLE as error:
            fenced = isinstance(error, StatusError) and error.status == FENCED
            kind = FencedError if fenced else OutcomeUnknownError
            raise kind(f'{self._lane}: {action}: {error}') from error


def read_version(name: str) -> int:
    """Reads the version from a server's name of its weights; NOT_GENERATED if this project did not make the name."""
    version = read_integer(name, LARGEST_VERSION)
    return NOT_GENERATED if version is None else version


def _holds_weights(directory: pathlib.Path) -> bool:
    return (directory / 'config.json').is_file() and any(directory.glob('*.safetensors'))


# The calls that ask a server for the rest of a request's answer.


class ServerRequest(GrowingAnswer):
    """A request on a server; if the rest of the answer is lost, raises RequestFailedError after its segments."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str):
        super().__init__(request, clock, engine)
        self.wire_id = ''  # of the call under way
        self.versions: list[int] = []  # of the weights in use during the call, in order
        self.vain_calls = 0  # in a row that the server or another client aborted before their first token


NO_FORMS: Mapping[str, ColumnForm] = {}
_SEED_MASK = 2**31 - 1  # largest seed that every server takes


def make_call(
    request: GenerationRequest,
    generated: np.ndarray,
    wire_id: str,
    *,
    seeds: bool,
    streams: bool,
    forms: Mapping[str, ColumnForm] = NO_FORMS,
) -> Call:
    """Makes the call for the rest of the answer; `generated` int32 [n] is the answer so far, its prefix included.

    The seed depends on the request and the position: with the request alone, the rest of an answer would be drawn with
    the noise of its beginning. `forms` are of the requested columns of the model; they need a reply that is not
    streamed, because most servers have no columns in their events.
    """
    sampling = request.sampling
    parameters = CallSampling(
        max_new_tokens=sampling.max_new_tokens - len(generated),
        temperature=sampling.temperature,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=True,
        seed=_seed(f'{request.request_id}/{len(generated)}') if seeds else None,
        skip_special_tokens=False,
    )
    prompt = concatenate([request.prompt_tokens, generated], np.int32)
    return Call(
        prompts=(prompt,),
        prompt_field='prompt',
        sampling=(parameters,),
        request_ids=(wire_id,),
        stream=streams and not forms,
        logprobs=True,
        columns=tuple(forms),
        forms=forms,
    )


def make_own_call(
    request: GenerationRequest, generated: np.ndarray, wire_id: str, forms: Mapping[str, ColumnForm] = NO_FORMS
) -> Call:
    """Makes the call for a server of this project, which uses the request's noise of the run at every position.

    Columns of the model include the prompt's entries in the first call for an answer only.
    """
    sampling, prompt = request.sampling, concatenate([request.prompt_tokens, generated], np.int32)
    parameters = CallSampling(
        max_new_tokens=sampling.max_new_tokens - len(generated),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=True,
        seed=request.seed,
        skip_special_tokens=False,
    )
    return Call(
        prompts=(prompt,),
        prompt_field='prompt',
        sampling=(parameters,),
        request_ids=(wire_id,),
        stream=True,
        logprobs=True,
        columns=(*(one.name for one in of_request(sampling) if one.published and one.shape is not None), *forms),
        first_row=len(prompt) - 1 if forms and len(generated) else 0,
        forms=forms,
        draw=request.draw,
        sample=request.noise_sample,
    )


def require_fit(request: GenerationRequest, engine: str, vocab_size: int, context_tokens: int) -> None:
    """Raises UserError for a request that would harm the server or be truncated silently."""
    prompt, sampling = request.prompt_tokens, request.sampling
    asked = len(prompt) + sampling.max_new_tokens
    if not len(prompt) or asked > context_tokens:
        raise UserError(
            f'draw {request.draw}: a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones '
            f'(rollout.max_new_tokens) do not fit the context of {engine}, {context_tokens} tokens: start the server '
            'with a longer one or shorten the prompt'
        )
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if len(outside):
        raise UserError(
            f'draw {request.draw}: the prompt has the token {outside[0]}, and {engine} serves a vocabulary of '
            f'{vocab_size}: use the tokenizer of its model'
        )


def require_plain(request: GenerationRequest, engine: str) -> None:
    """Raises UserError for a request that would lack its log-probs."""
    if request.sampling.changes_softmax or request.sampling.stop_strings:
        raise UserError(
            f'{engine} has no log-probs of a softmax that is cut, penalised or biased, and watches no stop strings '
            f'(rollout.top_k, rollout.top_p and the like): switch them off or use rollout.server=own'
        )


def require_own(request: GenerationRequest, engine: str) -> None:
    """Raises UserError for parameters that depend on the answer so far, which is a part of the call's prompt."""
    if request.sampling.adjusts or request.sampling.stop_strings:
        raise UserError(
            f'{engine} continues answers as a part of their prompts, where penalties, biases, min_new_tokens and stop '
            'strings would count wrong: switch them off'
        )


def make_probe() -> Call:
    """Makes a call for one greedy token, whatever it is, after a prompt that every vocabulary has."""
    return Call(
        prompts=(np.zeros(1, np.int32),),
        prompt_field='prompt',
        sampling=(CallSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True, skip_special_tokens=False),),
        request_ids=('',),
        logprobs=True,
    )


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) & _SEED_MASK
