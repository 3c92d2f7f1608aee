"""The interfaces of the loop's parts: clock, engines, pool, workflow, learner, channel, verifier and prompt stream.

The controller (control/) and the pool (rollout/) are typed on these alone. The implementations are in control/clocks/,
rollout/, learning/, publication/ and tasks/. Nothing here imports jax.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from areal_jax.types import (
    EngineCapabilities,
    EngineFinish,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    Prompt,
    PublishedWeights,
    Segment,
    TrajectoryGroup,
    Verdict,
    Weights,
    Work,
)

Result = TypeVar('Result')


class Event(Protocol):
    """A named flag that coroutines wait for through the clock."""

    name: str
    waiters: dict[asyncio.Future[bool], None]  # in the order in which they came

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...


class Inbox(Protocol):
    """Where other threads put items for the program; each enters in its turn among the completions of the clock."""

    def put(self, item: Any) -> None: ...

    async def take(self) -> Any: ...


class Clock(Protocol):
    """Everything that the host side waits for goes through these calls (control/clocks/)."""

    def now(self) -> float:
        """Clock seconds: the time of the last completion released."""
        ...

    def event(self, name: str) -> Event: ...

    def inbox(self, name: str, *, may_idle: bool = False) -> Inbox: ...

    async def run(self, lane: str, fn: Callable[[], Result], work: Work) -> Result:
        """Blocking work on the lane's own thread; `fn` touches nothing that another lane reads."""
        ...

    async def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        """True when the event is set, False at the deadline."""
        ...

    async def call(self, lane: str, fn: Callable[[], Awaitable[Result]], work: Work, deadline_s: float) -> Result:
        """I/O: `fn` is called and awaited on the I/O loop; TimeoutError that names the call at its wall-time deadline.

        `fn` touches nothing that the host's loop or a lane reads.
        """
        ...


class Generation(Protocol):
    """One open request: iterate for its segments. An iterator object: nothing depends on when it is collected."""

    @property
    def finish_reason(self) -> EngineFinish | None:
        """None until the request ends."""
        ...

    @property
    def engine(self) -> str:
        """Name of the engine that generates."""
        ...

    def __aiter__(self) -> AsyncIterator[Segment]: ...

    async def __anext__(self) -> Segment: ...


class Generator(Protocol):
    """What a workflow generates with: a pool, or a pool at one version (evaluation/evaluator.py)."""

    def generate(self, request: GenerationRequest, prefer: str = '') -> Generation:
        """Starts the request; on the engine `prefer` where there is one of that name."""
        ...

    def cancel(self, request: GenerationRequest) -> None:
        """Ends the request with the reason 'cancelled'; what was delivered stays. One that is not open is ignored."""
        ...

    def cancel_all(self) -> None:
        """Ends every open request with the reason 'cancelled'."""
        ...


class RolloutEngine(Protocol):
    """What the pool drives, in this process or behind a network; tests/rollout/engine_contract.py is its contract.

    Nothing is lost or repeated: every token that was generated is in exactly one segment. An action that an engine
    refuses, or whose outcome it does not know, raises an error of its own; returning means that it was done.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Accepts the request; raises UserError for one that cannot fit the engine.

        A request with a version is decoded with the weights pinned for it, whatever is swapped in meanwhile.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Ends the request with the reason 'cancelled'; what was delivered stays. An unknown request is ignored."""
        ...

    async def stage(self, published: PublishedWeights) -> None:
        """Fetches the weights while decoding goes on; returns when they can be swapped in."""
        ...

    async def swap(self, version: int) -> float:
        """Decodes with the staged weights of this version from now on; returns the pause of decoding in seconds."""
        ...

    async def pin(self, published: PublishedWeights) -> None:
        """Fetches the weights and keeps them until `unpin`, for requests of that version."""
        ...

    def unpin(self, version: int) -> None:
        """Lets the weights of the version go; no request of it is open."""
        ...

    async def pause(self) -> None:
        """Returns when no token is being generated and every token generated so far is delivered."""
        ...

    def resume(self) -> None:
        """Ends a pause. Nobody waits for it: an engine that cannot continue fails on its own."""
        ...

    def open_requests(self) -> Sequence[GenerationRequest]:
        """Requests that have not ended, in the order in which they are served."""
        ...

    def status(self) -> EngineStatus: ...


class Pool(Generator, Protocol):
    """The engines of a run as one (rollout/pool.py)."""

    def cancel_all(self, version: int | None = None) -> None:
        """Ends every open request (of that version, where one is given) with the reason 'cancelled'."""
        ...

    async def load_weights(self, published: PublishedWeights) -> float:
        """Every engine fetches the weights and swaps them in; returns the longest pause of decoding in seconds."""
        ...

    async def pin(self, published: PublishedWeights) -> None:
        """Every engine fetches the weights and keeps them for requests of that version."""
        ...

    def unpin(self, version: int) -> None:
        """Every engine lets the weights of the version go; its open requests are cancelled."""
        ...

    def pinned_versions(self) -> Sequence[int]:
        """Those that engines keep or are fetching."""
        ...

    async def pause(self) -> None:
        """Returns when no engine decodes and every token generated so far is delivered."""
        ...

    def resume(self) -> None: ...

    def open_requests(self) -> int:
        """Requests of training that have not ended, whether an engine has them or not."""
        ...

    def serving_engines(self) -> int:
        """Engines that take new requests of training."""
        ...

    def watch(self, note_room: Callable[[], None]) -> None:
        """Calls `note_room` when a request of training has ended, and when an engine came or went."""
        ...

    def order(self) -> list[tuple[str, int, int]]:
        """(engine, draw, sample) of every open request of training, in the order in which engines serve them."""
        ...

    def state(self) -> dict[str, Any]:
        """What is known and decided of engines that a resumed run has too; JSON-able."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, before any request is open."""
        ...


class ChangingPool(Pool, Protocol):
    """A pool whose engines join and leave while it generates."""

    async def join(self, engine: RolloutEngine) -> None:
        """Takes in an engine that has started; returns when it has the version of the others and gets requests."""
        ...

    async def leave(self, name: str, reason: str) -> RolloutEngine:
        """The engine, paused and without requests: they go on elsewhere with everything generated so far."""
        ...


class Episode(Protocol):
    """One answer in the making, as a workflow sees it (control/episode.py)."""

    sample: int
    segments: list[Segment]
    finish_reason: FinishReason | None
    engine: str

    def append(self, segment: Segment) -> None: ...


class Workflow(Protocol):
    """How a prompt becomes an answer: one turn, several turns, tools (rollout/scoring.py)."""

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Appends segments to the episode and sets its engine and finish reason; an episode with segments continues.

        The finish reason stays None where a request was cancelled: such an episode has no answer.
        """
        ...


class Learner(Protocol):
    """The trainer: plain blocking calls that the controller runs on the lane `learner`, in order."""

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        """Trains on one batch; `version` is the version before it. Returns metrics, also for empty data."""
        ...

    def publish(self, version: int) -> Weights:
        """A copy of the weights that no later update can touch, for Channel.transfer."""
        ...

    def save(self) -> Weights:
        """A host-safe copy of weights and optimizer state, for the checkpoint's writer on the lane `disk`.

        Over several processes it holds this process's part; the others write theirs when the writer tells them to.
        """
        ...

    def restore(self, saved: Weights) -> None: ...


class Channel(Protocol):
    """Carries weights from the learner to the engines."""

    def transfer(self, version: int, copy: Weights) -> PublishedWeights:
        """Makes the copy of Learner.publish available to every engine; runs on the lane `publish/0`."""
        ...

    def receive(self, published: PublishedWeights) -> Weights:
        """The weights as an engine's backend takes them, checked against the manifest.

        Runs on the lane `publish/K` of engine K: from several threads at the same time. The channels of publication/
        also take the devices of the engine, which app/parts/engines.py binds.
        """
        ...

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Versions below `version` will not be received any more, but for the `pinned` ones.

        All engines that there are have `version`, where no schedule asks for earlier ones.
        """
        ...


class Verifier(Protocol):
    """Scores answers outside the event loop, with a deadline."""

    async def verify(
        self,
        prompt: Prompt,
        answer_tokens: np.ndarray,
        finish_reason: FinishReason,
        describe_episode: Callable[[], dict[str, Any]] | None = None,
    ) -> Verdict:
        """The verdict on one answer; `describe_episode` is called for a scorer that asks for the episode as JSON."""
        ...


class PromptStream(Protocol):
    """A resumable, seeded stream of prompts."""

    def draw(self) -> Prompt:
        """The next prompt; its `draw` is one more than the last."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able position in the stream."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
