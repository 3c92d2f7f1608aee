"""The interfaces of the loop's parts: clock, engines, pool, workflow, learner, channel, verifier and prompt stream.

The controller (control/) and the pool (rollout/) depend only on these types. The implementations are in
control/clocks/, rollout/, learning/, publication/ and tasks/. Nothing here imports jax.
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
    """A queue in which other threads put items for the program; each enters in turn among the clock's completions."""

    def put(self, item: Any) -> None: ...

    async def take(self) -> Any: ...


class Clock(Protocol):
    """The calls through which the host waits for everything (control/clocks/)."""

    def now(self) -> float:
        """Clock seconds: the time of the last completion released."""
        ...

    def event(self, name: str) -> Event: ...

    def inbox(self, name: str, *, may_idle: bool = False) -> Inbox: ...

    async def run(self, lane: str, fn: Callable[[], Result], work: Work) -> Result:
        """Does blocking work on the lane's thread; `fn` touches no data that another lane reads."""
        ...

    async def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        """Waits for the event; returns True when it is set, False at the deadline."""
        ...

    async def call(self, lane: str, fn: Callable[[], Awaitable[Result]], work: Work, deadline_s: float) -> Result:
        """Does I/O: `fn` is called and awaited on the I/O loop. Raises TimeoutError at its wall-time deadline.

        The error names the call. `fn` touches no data that the host's loop or a lane reads.
        """
        ...


class Generation(Protocol):
    """One open request: iterate for its segments. An iterator object, so garbage collection has no effect on it."""

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
    """A source of generations for a workflow: a pool, or a pool at one version (evaluation/evaluator.py)."""

    def generate(self, request: GenerationRequest, prefer: str = '') -> Generation:
        """Starts the request, on the engine `prefer` if it exists."""
        ...

    def cancel(self, request: GenerationRequest) -> None:
        """Ends the request with the reason 'cancelled'; delivered segments stay. Ignores a request that is not open."""
        ...

    def cancel_all(self) -> None:
        """Ends every open request with the reason 'cancelled'."""
        ...


class RolloutEngine(Protocol):
    """An engine of the pool, in this process or behind a network; tests/rollout/engine_contract.py is its contract.

    Nothing is lost or repeated: every generated token is in exactly one segment. An action that an engine refuses, or
    whose outcome it does not know, raises an error; returning means that the action was done.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Accepts the request; raises UserError for one that cannot fit the engine.

        A request with a version is decoded with the weights pinned for it, even if others are swapped in meanwhile.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Ends the request with the reason 'cancelled'; delivered segments stay. Ignores an unknown request."""
        ...

    async def stage(self, published: PublishedWeights) -> None:
        """Fetches the weights while decoding continues; returns when they can be swapped in."""
        ...

    async def swap(self, version: int) -> float:
        """Decodes with the staged weights of this version from now on; returns the pause of decoding in seconds."""
        ...

    async def pin(self, published: PublishedWeights) -> None:
        """Fetches the weights and keeps them until `unpin`, for requests of that version."""
        ...

    def unpin(self, version: int) -> None:
        """Releases the weights of the version, which has no open request."""
        ...

    async def pause(self) -> None:
        """Returns when no token is being generated and every token generated so far is delivered."""
        ...

    def resume(self) -> None:
        """Ends a pause. No caller waits for it: an engine that cannot continue fails by itself."""
        ...

    def open_requests(self) -> Sequence[GenerationRequest]:
        """Requests that have not ended, in the order in which they are served."""
        ...

    def status(self) -> EngineStatus: ...


class Pool(Generator, Protocol):
    """The engines of a run as one (rollout/pool.py)."""

    def cancel_all(self, version: int | None = None) -> None:
        """Ends every open request (only those pinned to `version`, if given) with the reason 'cancelled'."""
        ...

    async def load_weights(self, published: PublishedWeights) -> float:
        """Fetches the weights on every engine and swaps them in; returns the longest pause of decoding in seconds."""
        ...

    async def pin(self, published: PublishedWeights) -> None:
        """Fetches the weights on every engine and keeps them for requests of that version."""
        ...

    def unpin(self, version: int) -> None:
        """Releases the weights of the version on every engine, and cancels the version's open requests."""
        ...

    def pinned_versions(self) -> Sequence[int]:
        """The versions that engines keep or are fetching."""
        ...

    async def pause(self) -> None:
        """Returns when no engine decodes and every token generated so far is delivered."""
        ...

    def resume(self) -> None: ...

    def open_requests(self) -> int:
        """The number of training requests that have not ended, with or without an engine."""
        ...

    def serving_engines(self) -> int:
        """The number of engines that take new training requests."""
        ...

    def watch(self, note_room: Callable[[], None]) -> None:
        """Calls `note_room` whenever a training request has ended, or an engine has joined or left."""
        ...

    def order(self) -> list[tuple[str, int, int]]:
        """(engine, draw, sample) of every open training request, in the order in which engines serve them."""
        ...

    def state(self) -> dict[str, Any]:
        """The observations of engines, and decisions on them, that a resumed run keeps; JSON-able."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, before any request is open."""
        ...


class ChangingPool(Pool, Protocol):
    """A pool whose engines join and leave while it generates."""

    async def join(self, engine: RolloutEngine) -> None:
        """Takes in a started engine; returns when it has the others' version and gets requests."""
        ...

    async def leave(self, name: str, reason: str) -> RolloutEngine:
        """Removes and returns an engine, paused; its requests continue on others with all their generated tokens."""
        ...


class Episode(Protocol):
    """One unfinished answer, as a workflow sees it (control/episode.py)."""

    sample: int
    segments: list[Segment]
    finish_reason: FinishReason | None
    engine: str

    def append(self, segment: Segment) -> None: ...


class Workflow(Protocol):
    """Turns a prompt into an answer: one turn, several turns, tools (rollout/scoring.py)."""

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Appends segments to the episode and sets its engine and finish reason; an episode with segments continues.

        The finish reason stays None if a request was cancelled: such an episode has no answer.
        """
        ...


class Learner(Protocol):
    """The trainer: plain blocking calls that the controller runs on the lane `learner`, in order."""

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        """Trains on one batch; `version` is the version before the update. Returns metrics, even for empty data."""
        ...

    def publish(self, version: int) -> Weights:
        """Returns a copy of the weights that later updates do not change, for Channel.transfer."""
        ...

    def save(self) -> Weights:
        """Returns a host-safe copy of weights and optimizer state, for the checkpoint writer on the lane `disk`.

        With several processes it holds this process's part; the others write their parts when the writer tells them.
        """
        ...

    def restore(self, saved: Weights) -> None: ...


class Channel(Protocol):
    """Carries weights from the learner to the engines."""

    def transfer(self, version: int, copy: Weights) -> PublishedWeights:
        """Makes the copy of Learner.publish available to every engine; runs on the lane `publish/0`."""
        ...

    def receive(self, published: PublishedWeights) -> Weights:
        """Returns the weights in the form for an engine's backend, verified against the manifest.

        Runs on the lane `publish/K` of engine K, so on several threads at the same time. The channels of publication/
        also take the devices of the engine, which app/parts/engines.py binds.
        """
        ...

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Notes that versions below `version` will not be received any more, except the `pinned` ones.

        Unless a schedule asks for earlier versions, all present engines have `version`.
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
        """Returns the verdict on an answer; calls `describe_episode` for a scorer that asks for the episode as JSON."""
        ...


class PromptStream(Protocol):
    """A resumable, seeded stream of prompts."""

    def draw(self) -> Prompt:
        """Takes the next prompt; its `draw` is one more than the last."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able position in the stream."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
