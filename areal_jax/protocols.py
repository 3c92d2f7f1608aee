"""Who the controller drives: clock, engines, learner, channel, verifier and prompt stream.

Nothing here imports jax. The implementations are in control/clocks/, rollout/, learning/, publication/ and tasks/.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.types import (
    EngineStatus,
    FinishReason,
    GenerationRequest,
    Prompt,
    PublishedWeights,
    Segment,
    TrajectoryGroup,
    Verdict,
    Work,
)


class Event(Protocol):
    """A named flag that coroutines wait for through the clock."""

    name: str
    waiters: dict[asyncio.Future[bool], None]  # in the order in which they came

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...


class Clock(Protocol):
    """The four calls through which the host side waits (control/clock.py), and what they need."""

    def now(self) -> float:
        """Clock seconds: the time of the last completion released."""
        ...

    def event(self, name: str) -> Event: ...

    async def run(self, lane: str, fn: Callable[[], Any], work: Work) -> Any:
        """Blocking work on the lane's own thread; `fn` touches nothing that another lane reads."""
        ...

    async def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        """True when the event is set, False at the deadline."""
        ...

    async def call(self, lane: str, fn: Callable[[], Awaitable[Any]], work: Work, deadline_s: float) -> Any:
        """I/O: `fn` is called and awaited on the I/O loop; TimeoutError that names the call at its wall-time deadline.

        `fn` touches nothing that the host's loop or a lane reads.
        """
        ...


class Generation(Protocol):
    """One running request: iterate for segments; `finish_reason` and `engine` are set when it ends."""

    finish_reason: FinishReason | None
    engine: str

    def __aiter__(self) -> AsyncIterator[Segment]: ...


class RolloutEngine(Protocol):
    """A server or an in-process engine that generates and can be interrupted to load weights."""

    name: str

    def generate(self, request: GenerationRequest) -> Generation: ...

    async def load_weights(self, published: PublishedWeights) -> None:
        """Returns when the engine decodes with `published` (or newer) weights."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def status(self) -> EngineStatus: ...


class Learner(Protocol):
    """The trainer: plain blocking calls that the controller runs on the lane `learner`, in order."""

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        """Train on one batch; `version` is that of the weights before it. Returns metrics, also for empty data."""
        ...

    def publish(self, version: int) -> Any:
        """A copy of the weights that no later update can touch, for Channel.transfer."""
        ...

    def save(self) -> Any:
        """A host-safe copy of weights and optimizer state, for the checkpoint's writer on the lane `disk`.

        Over several processes what this one has to write of it; the others write theirs when the writer says so.
        """
        ...

    def restore(self, saved: Any) -> None: ...


class Channel(Protocol):
    """Carries weights from the learner to the engines."""

    def transfer(self, version: int, copy: Any) -> PublishedWeights:
        """On the lane `publish`: make the copy of Learner.publish available to every engine."""
        ...

    def receive(self, published: PublishedWeights) -> Any:
        """On the lane `publish`: weights in the form an engine's backend takes, checked against the manifest."""
        ...

    def release(self, version: int) -> None:
        """Versions below `version` will not be received any more."""
        ...


class Verifier(Protocol):
    """Scores answers outside the event loop, with a deadline."""

    async def verify(self, prompt: Prompt, answer_tokens: np.ndarray, finish_reason: FinishReason) -> Verdict: ...


class PromptStream(Protocol):
    """A resumable, seeded stream of prompts."""

    def draw(self) -> Prompt:
        """The next prompt; its `draw` is one more than the last."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able position in the stream."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
