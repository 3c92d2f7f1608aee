"""Serves the requests of an engine that are pinned to a version: evaluation beside training.

LocalEngine has one where the run evaluates while it trains. Slots, cache and dispatches are its own, so that no request
of training shares a dispatch with one of an evaluation; new weights of training interrupt nothing here.
"""

from __future__ import annotations

import asyncio
import dataclasses

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import pinned_wake_name
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.scheduler import DecodeStep, PrefillStep
from areal_jax.rollout.stream import EVALUATION, DecodeStream, EngineWeights
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import GenerationRequest


class PinnedRequests:
    """A coroutine in addition to the one of training, on the same lane, which runs the dispatches of both in turn.

    While training has requests, at most one of `every_dispatches` consecutive dispatches is one of these. Several
    versions may be pinned; requests are served in their order, and slots hold one version at a time.

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
        """Lets cache and weights go; nothing is decoded any more."""
        self._stream.release()
        self._weights.clear()

    # Weights and requests.

    @property
    def serves(self) -> bool:
        """Whether a version is pinned: its requests come or are here."""
        return bool(self._weights)

    def pin(self, weights: EngineWeights) -> None:
        self._weights[weights.version] = weights
        self._changed.set()

    def unpin(self, version: int) -> None:
        """Raises RuntimeError where a request of the version is open."""
        if left := [one.request_id for one in self.open_requests() if one.version == version]:
            raise RuntimeError(f'{self._engine}: version {version} is unpinned while {left} are open')
        self._weights.pop(version, None)

    def generate(self, request: GenerationRequest) -> RunningRequest:
        """Raises RuntimeError for a version that is not pinned; else see DecodeStream.add."""
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
        """Training begins a dispatch."""
        self._dispatches_of_training += 1
        self._changed.set()

    def note_idle(self) -> None:
        """Training has no request."""
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
        """No dispatch begins from now on."""
        self._pausing = True
        self._changed.set()

    async def wait_parked(self) -> None:
        """Returns when none is under way and everything generated is delivered."""
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
    """The dispatch, after which another one may have its turn."""
    return dataclasses.replace(step, quiet=1) if isinstance(step, DecodeStep) else step
