"""The host's side of a server: one request queue, one engine, and the actions of control routes.

The HTTP side (server/) puts submissions and actions into the inbox from its own thread; replies go back through the
functions that come with them. Everything here runs on the host's loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import cast

from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.rollout.http.pauses import PauseStatus, Pausing, ServerPause
from areal_jax.rollout.http.wire.exchange import Piece
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.scoring import NO_SCORES, Scored, Scorer, ScoringRequest
from areal_jax.rollout.stream import DispatchError, LogprobError
from areal_jax.types import (
    EngineFinish,
    EngineStatus,
    GenerationRequest,
    KvPolicy,
    PublishedWeights,
    Segment,
)

FIRST_LABEL = '0'  # weight version of the weights at launch


class UpdateError(UserError):
    """An update of the weights was refused: the old weights are in use."""


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The part of an answer since the previous delivery."""

    pieces: Sequence[Piece] = ()
    finish: EngineFinish | None = None  # None: the answer continues
    matched: int | str | None = None  # the stop token or string that ended it
    version: str = ''  # weight version in use when it ended
    cached_tokens: int = 0  # prompt tokens whose KV was cached
    retractions: int = 0  # times that its KV was dropped and computed again
    error: UserError | None = None  # the engine refused it; LogprobError: it failed
    began: int = -1  # number of the weights in use when it began


@dataclasses.dataclass(frozen=True, eq=False)
class Submission:
    """One answer to generate. Compared by identity, so one can be ended even if another has the same name."""

    request: GenerationRequest
    streams: bool  # deliver after every dispatch
    deliver: Callable[[Delivery], None]
    group: str = ''  # id of its call, if that has several numbered answers; '' = one answer


@dataclasses.dataclass(frozen=True)
class Action:
    """An action of a control route; `reply` gets the result, or the UserError that refused it."""

    name: str
    run: Callable[[GenerationService], Awaitable[object]]
    reply: Callable[[object, UserError | None], None]


@dataclasses.dataclass
class WeightsDirectory:
    """Weights to load: PublishedWeights.handle of an update. The loader sets `digest`."""

    path: str
    label: str = ''  # requested weight version; '' = set later
    digest: str = ''  # hash of their manifest; '' = the directory has none


@dataclasses.dataclass(frozen=True)
class ServiceStatus:
    """A snapshot of the server."""

    engine: EngineStatus
    weight_version: str
    model_path: str
    digest: str
    pause: ServerPause | None
    pauses: tuple[PauseStatus, ...]  # all of them, with their holders
    client: str  # the registered one; '' = none
    held: int  # requests that wait for the end of a pause
    finished: dict[EngineFinish, int]
    prompt_tokens: int
    generated_tokens: int
    scored_tokens: int
    scoring_waiting: int  # sequences
    scoring_programs: int  # compiled so far
    updates: int
    update_pause_s: float  # of the last update
    failed: int  # answers with a log-prob that no policy can have, and answers of a dispatch that raised
    fault: str  # why the weights in use are not trusted; '' = no fault is known


class GenerationService:
    """Implements the actions of the routes; `serve` is its coroutine.

    Args:
      label: weight version of the engine's weights.
      model_path: the source of these weights.
      scorer: of the same engine; None = no log-probs of prompts and no alternatives.
    """

    def __init__(
        self,
        engine: LocalEngine,
        clock: Clock,
        supervisor: Supervisor,
        *,
        label: str = FIRST_LABEL,
        model_path: str = '',
        digest: str = '',
        scorer: Scorer | None = None,
    ):
        self.inbox = clock.inbox('requests of the server', may_idle=True)
        self._engine, self._clock, self._supervisor, self._scorer = engine, clock, supervisor, scorer
        self._version = engine.status().policy_version
        self._labels = {self._version: label}
        self._directory = WeightsDirectory(model_path, label, digest)
        self._staged: tuple[int, WeightsDirectory] | None = None
        self._updating = False
        self._door: dict[str, Submission] = {}  # wait for the end of the pause, in their order
        self._open: dict[str, Submission] = {}  # in the engine
        self._emptied = clock.event('no request is open')
        pausing = Pausing(
            engine, clock, supervisor, self._scorer, open_requests=self._open, emptied=self._emptied,
            cancel_all=self.cancel_all, start_held=self._start_held,
        )  # fmt: skip
        self._pauses, self._end_pauses = pausing.pauses, pausing.end_all
        self.register, self.pause, self.renew, self.resume = (
            pausing.register, pausing.pause, pausing.renew, pausing.resume,
        )  # fmt: skip
        self._finished: dict[EngineFinish, int] = {'stop': 0, 'length': 0, 'cancelled': 0}
        self._prompt_tokens = self._generated_tokens = self._updates = 0
        self._update_pause_s = 0.0
        self._failed, self._fault = 0, ''

    async def serve(self) -> None:
        """Takes submissions and actions forever; the engine must be started."""
        if self._scorer is not None:
            self._supervisor.start('scoring', self._scorer.serve())
        while True:
            item = await self.inbox.take()
            if isinstance(item, Submission):
                self._submit(item)
            else:
                self._supervisor.start(item.name, self._act(cast(Action, item)))

    async def _act(self, action: Action) -> None:
        try:
            result = await action.run(self)
        except UserError as error:
            action.reply(None, error)
        else:
            action.reply(result, None)

    # Requests.

    def open_requests(self) -> int:
        """The number of requests in the engine or waiting for the end of a pause."""
        return len(self._open) + len(self._door)

    def _submit(self, submission: Submission) -> None:
        name = submission.request.request_id
        if name in self._door or name in self._open:
            error = UserError(f'request {name!r} is open already: give every request an id of its own')
            submission.deliver(Delivery(error=error))
        elif self._pauses.mode is not None:
            self._door[name] = submission
        else:
            self._start(submission)

    def _start_held(self) -> None:
        """Starts the requests that waited for the end of the pauses."""
        held, self._door = list(self._door.values()), {}
        for submission in held:
            self._start(submission)

    def _start(self, submission: Submission) -> None:
        request = submission.request
        try:
            running = self._engine.generate(request)
        except UserError as error:
            submission.deliver(Delivery(error=error))
            return
        running.streams = submission.streams
        self._open[request.request_id] = submission
        self._prompt_tokens += len(request.prompt_tokens)
        self._supervisor.start(f'request {request.request_id}', self._follow(submission, running, self._version))

    async def _follow(self, submission: Submission, running: RunningRequest, began: int) -> None:
        """Delivers segment by segment if the request streams, else everything at the end."""
        pieces: list[Piece] = []
        try:
            async for segment in running:
                pieces.append(self._piece(segment))
                self._generated_tokens += len(segment.tokens)
                if submission.streams and running.finish_reason is None and running.error is None:
                    submission.deliver(_describe(running, pieces))
                    pieces = []
        except LogprobError as error:
            delivery = Delivery(error=self._note_failure(error))
        except DispatchError as error:
            self._failed += 1
            delivery = Delivery(error=error)
        else:
            assert running.finish_reason is not None
            self._finished[running.finish_reason] += 1
            delivery = _describe(running, pieces, self._labels[self._version], began)
        del self._open[submission.request.request_id]
        if not self._open:
            self._emptied.set()
        submission.deliver(delivery)

    def _note_failure(self, error: LogprobError) -> LogprobError:
        """Marks the weights in use as not trusted: another server, or this one with other weights, may do better."""
        self._failed += 1
        label = self._labels[self._version]
        self._fault = f'the weights of version {label!r} gave a log-prob that no policy can have: {error}'
        return error

    def _piece(self, segment: Segment) -> Piece:
        label = self._labels[segment.policy_version]
        return Piece(segment.tokens, segment.behavior_logprobs, label, segment.columns, context=segment.context)

    async def score(self, request: ScoringRequest) -> Scored | None:
        """Returns the scores of a sequence under the weights then in use; None if cancelled. Raises UserError."""
        if self._scorer is None:
            raise UserError('this server was started without a scorer: it has no log-probs of prompts')
        if request.first == len(request.tokens):
            return Scored(NO_SCORES, self._labels[self._version], self._version)
        try:
            found = await self._scorer.score(request)
        except LogprobError as error:
            raise self._note_failure(error) from None
        return None if found is None else Scored(found[1], self._labels[found[0]], found[0])

    # Actions of control routes.

    async def cancel(self, names: Collection[str]) -> None:
        """Ends the requests with these names, and all answers of calls with these names; ignores unknown names."""
        wanted = set(names) - {''}
        for name, submission in [*self._open.items(), *self._door.items()]:
            if name in wanted or submission.group in wanted:
                self._cancel(name)
        if self._scorer is not None:
            scored = self._scorer.open_requests()
            self._scorer.cancel([one for one in scored if one.name in wanted or one.group in wanted])

    async def withdraw(self, submissions: Collection[Submission]) -> None:
        """Ends the submissions that are still open; other requests with the same names continue."""
        for submission in submissions:
            name = submission.request.request_id
            if self._open.get(name, self._door.get(name)) is submission:
                self._cancel(name)

    async def withdraw_scoring(self, requests: Collection[ScoringRequest]) -> None:
        """Ends the scoring requests that are still open."""
        if self._scorer is not None:
            self._scorer.cancel(requests)

    async def cancel_all(self) -> None:
        for name in [*self._open, *self._door]:
            self._cancel(name)
        if self._scorer is not None:
            self._scorer.cancel(self._scorer.open_requests())

    async def stage(self, path: str, label: str = '', client: str = '') -> None:
        """Loads the weights of a directory while decoding continues; raises UpdateError if it cannot be loaded.

        Raises FencedError, like every update by a `client` that names itself and is fenced.
        """
        self._require_no_update(client)
        self._updating, self._staged = True, None
        version, directory = self._version + 1, WeightsDirectory(path, label)
        try:
            await self._engine.stage(PublishedWeights(version, '', directory))
        except Exception as error:  # the readers raise many types for damaged files; nothing was changed
            raise UpdateError(f'{path} was not loaded, the old weights are in use: {_one_line(error)}') from error
        finally:
            self._updating = False
        self._staged = version, directory

    async def swap(
        self, label: str | None, kv_policy: KvPolicy | None = None, *, cancel: bool = False, client: str = ''
    ) -> None:
        """Swaps the staged weights in before the next dispatch; returns when they are in use.

        Args:
          label: their weight version; None = unchanged.
          kv_policy: for requests that are being decoded; None = the engine's.
          cancel: end all open requests first.
        """
        self._require_no_update(client)
        if self._staged is None:
            raise UpdateError('no weights are staged: load some first')
        self._updating = True
        try:
            (version, directory), self._staged = self._staged, None
            self._labels[version] = label if label is not None else self._labels[self._version]
            if cancel:
                for name in [*self._open]:
                    self._engine.cancel(name)
            self._update_pause_s = await self._engine.swap(version, kv_policy)
        finally:
            self._updating = False
        self._version, self._directory, self._fault = version, directory, ''
        self._updates += 1

    async def relabel(self, label: str, client: str = '') -> None:
        """Gives the same weights another version, which later tokens carry."""
        self._require_no_update(client)
        self._updating, self._staged = True, None
        version = self._version + 1
        try:
            self._labels[version] = label
            await self._engine.renumber(version)
        finally:
            self._updating = False
        self._version = version

    async def flush_cache(self, client: str = '') -> None:
        """Forgets all KV; raises UserError while requests are open and not paused."""
        if self._pauses.mode is None and self._open:
            raise UserError(
                f'the cache was not flushed: {len(self._open)} requests are open; pause generation or wait for them'
            )
        await self.relabel(self._labels[self._version], client)

    async def look(self) -> ServiceStatus:
        return ServiceStatus(
            engine=self._engine.status(),
            weight_version=self._labels[self._version],
            model_path=self._directory.path,
            digest=self._directory.digest,
            pause=self._pauses.mode,
            pauses=self._pauses.look(),
            client=self._pauses.client,
            held=len(self._door),
            finished=dict(self._finished),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            scored_tokens=self._scorer.totals.tokens if self._scorer else 0,
            scoring_waiting=self._scorer.waiting if self._scorer else 0,
            scoring_programs=self._scorer.backend.programs if self._scorer else 0,
            updates=self._updates,
            update_pause_s=self._update_pause_s,
            failed=self._failed,
            fault=self._fault,
        )

    async def drain(self) -> None:
        """Ends all pauses, and returns when no request is open."""
        self._end_pauses()
        while self._open:
            self._emptied.clear()
            await self._clock.wait(self._emptied)
        if self._scorer is not None:
            await self._scorer.drain()

    def _cancel(self, name: str) -> None:
        submission = self._door.pop(name, None)
        if submission is None:
            self._engine.cancel(name)
        else:
            self._finished['cancelled'] += 1
            submission.deliver(Delivery(finish='cancelled', version=self._labels[self._version]))

    def _require_no_update(self, client: str) -> None:
        self._pauses.require(client)
        if self._updating:
            raise UpdateError('another update of the weights is under way: send this one when it has been answered')


def _describe(running: RunningRequest, pieces: Sequence[Piece], version: str = '', began: int = -1) -> Delivery:
    return Delivery(
        pieces, running.finish_reason, running.matched, version,
        cached_tokens=running.cached_tokens or 0, retractions=running.retractions, began=began,
    )  # fmt: skip


def _one_line(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'
