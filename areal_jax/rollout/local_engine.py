"""The engine in this process: one coroutine that plans a dispatch, runs it on its lane and delivers the outcome.

app/ builds it around a decode backend (backend.py), pool.py drives it; the dispatches are in stream.py. A dispatch is
never preempted. New weights interrupt decoding between two dispatches: the engine delivers what was generated under the
old weights, swaps, and rebuilds the KV cache of unfinished answers ('recompute') or keeps it ('keep'). Under 'wait' it
interrupts none: no new answer starts until the running ones have ended, and then it swaps.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from areal_jax.config.generation import RolloutSection
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, pinned_wake_name, publish_lane, wake_name
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.scheduler import DecodeStep, PrefillStep
from areal_jax.rollout.stream import EVALUATION, IN_TRAINING, TRAINING, DecodeStream, EngineWeights, LogprobFailure
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import (
    EngineCapabilities,
    EngineStatus,
    GenerationRequest,
    KvPolicy,
    PauseMode,
    PublishedWeights,
    Weights,
    Work,
)


class PinnedRequests:
    """Serves requests that are pinned to a version, in a second coroutine that shares the lane with training.

    While training has requests, at most one of `every_dispatches` consecutive dispatches is for pinned requests.
    Several versions may be pinned; requests are served in their order, and slots hold one version at a time.

    Args:
      engine: name of the engine, and of its lane.
      training: the stream that these dispatches give way to.
      decode_steps: tokens per slot in one dispatch.
      token_bytes: see LocalEngine.
    """

    def __init__(
        self,
        engine: str,
        backend: DecodeBackend,
        clock: Clock,
        log: EventLog,
        *,
        training: DecodeStream,
        decode_steps: int,
        every_dispatches: int,
        token_bytes: TokenBytes | None = None,
    ):
        self._engine, self.backend, self._clock, self._log = engine, backend, clock, log
        self._training, self._every = training, every_dispatches
        # version 0 is never asked for: each request here names its own
        self._stream = DecodeStream(
            engine, backend, clock, log,
            kinds=EVALUATION, version=0, decode_steps=decode_steps, token_bytes=token_bytes,
        )  # fmt: skip
        self._weights: dict[int, EngineWeights] = {}
        self._dispatches_of_training = 0  # since the last dispatch here
        self._pausing = False
        self._changed = clock.event(pinned_wake_name(engine))
        self._parked = clock.event(f'{engine}: pinned requests paused')
        self._resumed = clock.event(f'{engine}: pinned requests resumed')

    def start(self, supervisor: Supervisor) -> asyncio.Task[None]:
        slots, size = self.backend.slots, self.backend.state_bytes
        self._log.write('evaluation_slots', self._engine, engine=self._engine, slots=slots, bytes=size)
        return supervisor.start(f'{self._engine}: evaluation', self._serve())

    def release(self) -> None:
        """Drops cache and weights; nothing can be decoded after this."""
        self._stream.release()
        self._weights.clear()

    # Weights and requests.

    @property
    def serves(self) -> bool:
        """Whether a version is pinned, so that its requests are open or expected."""
        return bool(self._weights)

    def pin(self, weights: EngineWeights) -> None:
        self._weights[weights.version] = weights
        self._changed.set()

    def unpin(self, version: int) -> None:
        """Drops the weights of a version; raises RuntimeError if a request of the version is open."""
        if left := [one.request_id for one in self.open_requests() if one.version == version]:
            raise RuntimeError(f'{self._engine}: version {version} is unpinned while {left} are open')
        self._weights.pop(version, None)

    def generate(self, request: GenerationRequest) -> RunningRequest:
        """Adds a request, see DecodeStream.add; raises RuntimeError for a version that is not pinned."""
        if request.version not in self._weights:
            raise RuntimeError(
                f'{self._engine}: request {request.request_id} asks for version {request.version}, and pinned are '
                f'{sorted(self._weights)}'
            )
        running = self._stream.add(request)
        self._changed.set()
        return running

    def cancel(self, request_id: str) -> None:
        if self._stream.cancel(request_id):
            self._changed.set()

    def open_requests(self) -> list[GenerationRequest]:
        return [running.request for running in self._stream.table.open_requests()]

    # Its turn on the lane.

    def note_dispatch(self) -> None:
        self._dispatches_of_training += 1
        self._changed.set()

    def note_idle(self) -> None:
        """Wakes the coroutine, because training has no request."""
        self._changed.set()

    def _has_turn(self) -> bool:
        return self._training.table.is_empty or self._dispatches_of_training >= self._every - 1

    async def _serve(self) -> None:
        stream = self._stream
        while True:
            if self._pausing:
                await self._park()
            elif stream.table.is_empty or not self._has_turn():
                self._changed.clear()
                await self._clock.wait(self._changed)
            else:
                version, step = stream.table.version(), stream.next_step()
                assert version is not None
                assert step is not None
                self._dispatches_of_training = 0
                await stream.run(alone(step), self._weights[version])

    # Pauses, as for training.

    def pause(self) -> None:
        """Stops further dispatches from beginning."""
        self._pausing = True
        self._changed.set()

    async def wait_parked(self) -> None:
        """Returns when no dispatch is running and everything generated is delivered."""
        await self._clock.wait(self._parked)

    def resume(self) -> None:
        self._pausing = False
        self._resumed.set()

    async def _park(self) -> None:
        self._stream.requeue()
        self._resumed.clear()
        self._parked.set()
        await self._clock.wait(self._resumed)
        self._parked.clear()


def alone(step: PrefillStep | DecodeStep) -> PrefillStep | DecodeStep:
    """Limits a step to a single dispatch, so that the other stream gets its turn after it."""
    return dataclasses.replace(step, quiet=1) if isinstance(step, DecodeStep) else step


Result = TypeVar('Result')
MOST_FAILED = 3  # dispatches without a successful one of decoding between them: the last one ends the engine


class LocalEngine:
    """Continuous batching over the slots of a backend, under the weights of one version at a time.

    Implements protocols.RolloutEngine.

    Args:
      index: number of the engine; names it and its two lanes, `engine/K` to decode and `publish/K` to fetch weights.
      receive: fetches published weights (Channel.receive).
      version, params: the weights to begin with.
      rollout: its kv_policy 'recompute' rebuilds the KV of unfinished answers under new weights (the paper), 'keep'
        keeps it, and 'wait' lets them end under the weights before.
      evaluation: the backend whose slots serve requests that are pinned to a version; None = no such requests.
      every_dispatches: see PinnedRequests.
      token_bytes: the text of tokens, for requests with stop strings; None = no such requests.
      failure: the reaction to a log-prob that is NaN, infinite or above 0.
      hardware: see EngineStatus.
      on_failed_dispatch: called with the exception of a failed dispatch, which ends only the requests in slots. After
        MOST_FAILED failures without a successful decode dispatch the engine ends. None = every exception ends it.
    """

    def __init__(
        self,
        index: int,
        backend: DecodeBackend,
        clock: Clock,
        log: EventLog,
        *,
        receive: Callable[[PublishedWeights], Weights],
        version: int,
        params: Weights,
        rollout: RolloutSection,
        evaluation: DecodeBackend | None = None,
        every_dispatches: int = 1,
        token_bytes: TokenBytes | None = None,
        failure: LogprobFailure = IN_TRAINING,
        hardware: str = '',
        on_failed_dispatch: Callable[[Exception], None] | None = None,
    ):
        self.name, self._publish_lane = engine_lane(index), publish_lane(index)
        self.capabilities = EngineCapabilities(
            logprobs=('behavior', 'sampling'),
            spans=True,
            abort=True,
            pause_modes=('retract', 'in_place'),
            staging=True,
            update=(rollout.kv_policy,),
            pinned=evaluation is not None,
        )
        self._backend, self._clock, self._log = backend, clock, log
        self._receive, self._kv_policy, self._hardware = receive, rollout.kv_policy, hardware
        self._weights = EngineWeights(version, backend.prepare(params))
        self._staged: EngineWeights | None = None
        self._next_weights: EngineWeights | None = None  # to be swapped in before the next dispatch
        self._next_kv_policy = rollout.kv_policy  # of that swap
        self.stream = DecodeStream(
            self.name, backend, clock, log,
            kinds=TRAINING, version=version, decode_steps=rollout.decode_steps, token_bytes=token_bytes,
            failure=failure,
        )  # fmt: skip
        self._pinned: PinnedRequests | None = None
        if evaluation is not None:
            self._pinned = PinnedRequests(
                self.name, evaluation, clock, log,
                training=self.stream, decode_steps=rollout.decode_steps, every_dispatches=every_dispatches,
                token_bytes=token_bytes,
            )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []
        self._swapped_s: float | None = None  # when the swap began whose rebuild is not finished
        self._pause_s = 0.0
        self._on_failed_dispatch, self._failed = on_failed_dispatch, 0  # dispatches since one of decoding succeeded
        self._pausing = False
        self._pause_mode: PauseMode = 'retract'
        self._wake = clock.event(wake_name(self.name))
        self._loaded = clock.event(f'{self.name}: new weights in use')
        self._parked = clock.event(f'{self.name}: paused')

    @property
    def params(self) -> Weights:
        """The weights in use, as the backend takes them."""
        return self._weights.params

    def start(self, supervisor: Supervisor) -> None:
        self._tasks = [supervisor.start(self.name, self._serve())]
        if self._pinned is not None:
            self._tasks.append(self._pinned.start(supervisor))

    def stop(self) -> None:
        """Ends the engine, which is paused and has no requests, and drops its weights and its cache."""
        for task in self._tasks:
            task.cancel()
        self.stream.release()
        if self._pinned is not None:
            self._pinned.release()
        self._weights, self._staged = EngineWeights(self._weights.version, None), None

    # What the pool calls; protocols.RolloutEngine has the docstrings.

    def generate(self, request: GenerationRequest) -> RunningRequest:
        """Adds a request; raises the errors of DecodeStream.add."""
        if request.version is not None:
            return self._require_pinned().generate(request)
        running = self.stream.add(request)
        self._log.write('arrive', self.name, request=running.request_id)
        if not self.stream.table.is_full:  # else it waits for a slot, and the engine need not wake
            self._wake.set()
        return running

    def cancel(self, request_id: str) -> None:
        if self.stream.cancel(request_id):
            self._wake.set()
        elif self._pinned is not None:
            self._pinned.cancel(request_id)

    def status(self) -> EngineStatus:
        table, totals, version = self.stream.table, self.stream.totals, self._weights.version
        rate = totals.decoded_tokens / totals.decoded_s if totals.decoded_s else 0.0
        devices = self._backend.devices
        return EngineStatus(
            self.name, version, table.taken, table.waiting, rate, devices, self._hardware, totals.decoded_s
        )

    def open_requests(self) -> list[GenerationRequest]:
        """Lists requests in slots by slot, then waiting ones in their order; then pinned requests likewise."""
        pinned = self._pinned.open_requests() if self._pinned is not None else []
        return [*(running.request for running in self.stream.table.open_requests()), *pinned]

    async def stage(self, published: PublishedWeights) -> None:
        work = Work('load', 1, {'version': published.version})
        self._staged = await self._fetch(published, work, self._backend)

    async def swap(self, version: int, kv_policy: KvPolicy | None = None) -> float:
        """Swaps the staged weights in; returns during a pause, too. `kv_policy` None = the engine's.

        A pause ends the wait of 'wait': then running answers are recomputed.

        Raises RuntimeError if `version` is not the one staged last.
        """
        if self._staged is None or self._staged.version != version:
            held = 'nothing' if self._staged is None else f'version {self._staged.version}'
            raise RuntimeError(f'{self.name}: version {version} is to be swapped in, and {held} is staged')
        self._next_weights, self._staged = self._staged, None
        self._next_kv_policy = kv_policy or self._kv_policy
        self._wake.set()
        while self._next_weights is not None or self._swapped_s is not None:
            self._loaded.clear()
            await self._clock.wait(self._loaded)
        return self._pause_s

    async def renumber(self, version: int) -> None:
        """Gives the weights in use this version number; keeps the KV of requests that are being decoded."""
        self._staged = EngineWeights(version, self._weights.params)
        await self.swap(version, 'keep')

    async def pin(self, published: PublishedWeights) -> None:
        work = Work('pin', 1, {'version': published.version}, in_background=True)
        pinned = self._require_pinned()
        pinned.pin(await self._fetch(published, work, pinned.backend))

    def unpin(self, version: int) -> None:
        self._require_pinned().unpin(version)

    async def pause(self, mode: PauseMode = 'retract') -> None:
        self._pausing, self._pause_mode = True, mode
        self._wake.set()
        if self._pinned is not None:
            self._pinned.pause()
        await self._clock.wait(self._parked)
        if self._pinned is not None:
            await self._pinned.wait_parked()

    def resume(self) -> None:
        self._pausing = False
        self._wake.set()
        if self._pinned is not None:
            self._pinned.resume()

    async def run_beside(
        self, dispatch: Callable[[Weights], Result], work: Work, *, decodes: bool = False
    ) -> tuple[int, Result]:
        """Runs `dispatch` on the weights in use, in the backend's form; returns (their version, its result).

        It runs on the engine's lane between two dispatches, or, with `decodes`, on the lane where weights are fetched.
        """
        weights = self._weights
        lane = self._publish_lane if decodes else self.name
        return weights.version, await self._clock.run(lane, lambda: dispatch(weights.params), work)

    async def _fetch(self, published: PublishedWeights, work: Work, backend: DecodeBackend) -> EngineWeights:
        def fetch() -> Weights:
            return backend.prepare(self._receive(published))

        return EngineWeights(published.version, await self._clock.run(self._publish_lane, fetch, work))

    def _require_pinned(self) -> PinnedRequests:
        if self._pinned is None:
            raise RuntimeError(f'{self.name} was built without slots for requests of a pinned version')
        return self._pinned

    # The engine's coroutine.

    async def _serve(self) -> None:
        stream = self.stream
        while True:
            if self._next_weights is not None and not self._waits_for_answers():
                self._swap(self._next_weights)
            if self._pausing:
                await self._park()
            elif (step := stream.next_step(only_begun=self._next_weights is not None)) is not None:
                if isinstance(step, DecodeStep):
                    self._note_loaded()
                if self._pinned is not None:
                    self._pinned.note_dispatch()
                await self._run(step)
            else:
                self._note_loaded()
                if self._pinned is not None:
                    self._pinned.note_idle()
                self._wake.clear()
                await self._clock.wait(self._wake)

    async def _run(self, step: PrefillStep | DecodeStep) -> None:
        try:
            await self.stream.run(
                alone(step) if self._pinned is not None and self._pinned.serves else step, self._weights
            )
        except Exception as error:
            self._failed += 1
            if self._on_failed_dispatch is None or self._failed == MOST_FAILED:
                raise
            self._on_failed_dispatch(error)
            self.stream.recover(error)
        else:
            self._failed = 0 if isinstance(step, DecodeStep) else self._failed

    def _waits_for_answers(self) -> bool:
        if self._next_kv_policy != 'wait' or self._pausing:
            return False
        table = self.stream.table
        return table.taken > 0 or any(running.has_begun for running in table.open_requests())

    def _swap(self, weights: EngineWeights) -> None:
        """Swaps weights between two dispatches, however far the answers are."""
        interrupted = self.stream.table.running()
        if interrupted:
            requests = [running.request_id for _, running in interrupted]
            versions = {'from_version': self._weights.version, 'to_version': weights.version}
            self._log.write('interrupt', self.name, engine=self.name, requests=requests, **versions)
        self._weights, self._next_weights = weights, None
        self._swapped_s = self._clock.now()
        self.stream.change_version(weights.version, keep=self._next_kv_policy == 'keep')

    def _note_loaded(self) -> None:
        """Ends a swap whose rebuild is finished: the next dispatch decodes with the new weights."""
        if self._swapped_s is not None:
            self._pause_s, self._swapped_s = self._clock.now() - self._swapped_s, None
            fields = {'version': self._weights.version, 'pause_seconds': self._pause_s}
            self._log.write('load', self.name, engine=self.name, **fields)
            self._loaded.set()

    async def _park(self) -> None:
        """Pauses: everything generated is delivered, and a swap need not wait for the resume.

        Under 'retract', requests in slots return to the head of the queue in slot order.
        """
        if self._pause_mode == 'in_place':
            self.stream.deliver()
        elif self.stream.table.taken or not self._parked.is_set():
            self.stream.requeue()
        self._note_loaded()
        self._parked.set()
        self._wake.clear()
        await self._clock.wait(self._wake)
        if not self._pausing:
            self._parked.clear()
