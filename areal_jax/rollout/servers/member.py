"""The pool's record of an engine in another process: its state, its version and requests, and its failures.

keeper.py changes its state, server_pool.py sends it requests while it serves.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Literal, Protocol, TypeVar

import numpy as np

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event, RolloutEngine
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.rollout.spare_engines import Entry
from areal_jax.types import LARGEST_LOGPROB, EngineFinish, GenerationRequest, Segment


class MovingRequest(GrowingAnswer):
    """A request that may move between engines; `engine` is the last that it was sent to, '' before the first."""

    def __init__(self, request: GenerationRequest, clock: Clock):
        super().__init__(request, clock)
        self.attempts = 0  # engines that failed it
        self.entry: Entry | None = None  # in the ledger, while an engine has it
        self.pump: asyncio.Task[None] | None = None  # takes the segments that the engine delivers
        self.lowest_version = 0  # the lowest that the engine may have generated with since it got the request
        self.taken_here = 0  # tokens from the engine that has it

    def take(self, segment: Segment) -> None:
        self.taken_here += len(segment.tokens)
        super().take(segment)

    def rest(self) -> GenerationRequest:
        return dataclasses.replace(self.request, prefix=tuple(self._received))

    def end_in_received(self) -> EngineFinish | None:
        """Returns how the answer ended if its last token was received but its end was not; None if it is unfinished."""
        sampling = self.request.sampling
        if self._received and int(self._received[-1].tokens[-1]) in sampling.stop_tokens:
            return 'stop'
        return 'length' if self.room_tokens <= 0 else None


def find_fault(segment: Segment, lowest_version: int, highest_version: int, room_tokens: int) -> str:
    """Describes the fault of a segment from another process; '' = none.

    The engine held versions `lowest_version` to `highest_version` since it got the request.
    """
    tokens, logprobs = np.asarray(segment.tokens), np.asarray(segment.behavior_logprobs)
    if tokens.ndim != 1 or not len(tokens) or logprobs.shape != tokens.shape:
        return f'tokens of the shape {tokens.shape} with log-probs of the shape {logprobs.shape}'
    if not lowest_version <= segment.policy_version <= highest_version:
        return f'tokens of version {segment.policy_version}, and it was given {lowest_version} to {highest_version}'
    if len(tokens) > room_tokens:
        return f'{len(tokens)} tokens where {room_tokens} were left'
    sound = np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)
    return '' if sound.all() else f'the log-prob {logprobs[~sound][0]}'


# The pool's interface for an engine in another process, in addition to protocols.RolloutEngine, and its errors.
#
# The clients of rollout/http/ implement it, server_pool.py drives it. Every other exception is a bug and ends the
# run.


class RemoteError(Exception):
    """An engine in another process did not do something; the message names engine, action and cause."""


class RequestFailedError(RemoteError):
    """A request did not end: an error reply, a cut connection, an unreadable answer.

    Raised by the iteration over a generation. Segments that were delivered before stay valid.
    """


class RefusedError(RemoteError):
    """An action was not done and changed nothing in the engine: it may be tried again."""


class FencedError(RemoteError):
    """The engine no longer obeys this run: its pause lease has lapsed, or another run has taken the engine over.

    What it does now is not known. Fence it, which registers the run again, and send it the weights again.
    """


class OutcomeUnknownError(RemoteError):
    """An action may be done, running or not done: a deadline passed, or the connection was lost."""


@dataclasses.dataclass(frozen=True)
class HeldWeights:
    """The weights that an engine says it decodes with."""

    version: int
    manifest_hash: str | None = None  # PublishedWeights.manifest_hash; None: the engine cannot tell
    is_fenced: bool = False  # it no longer obeys this run: see FencedError
    paused: str = ''  # by whom and since when, if another client has paused it


class RemoteEngine(RolloutEngine, Protocol):
    """An engine behind a network.

    If the engine knows leases, a pause lasts as long as this client renews it: see rollout/http/pauses.py.

    `generate`, `cancel`, `resume`, `open_requests` and `status` do not wait for the network; `status` returns the last
    known values. `stage`, `swap` and `pause` raise RefusedError, FencedError or OutcomeUnknownError if they are not
    done. Staging the version that is staged or held already is allowed and may do nothing. The pool cancels every
    action that takes longer than the pool's deadline, and then takes the outcome for unknown. A request may come again
    after its `cancel`, with more of its prefix: then it needs a new id on the wire.
    """

    async def ask(self) -> HeldWeights:
        """Asks for the engine's weights, which also shows that it serves; raises OutcomeUnknownError without an answer.

        Never returns a version before all its weights are in use.
        """
        ...

    async def fence(self) -> None:
        """Ends every open request, and every pause, of this and earlier clients.

        Nothing of these requests is delivered later. From then on the engine obeys this client alone, if it can tell
        clients apart. Raises RefusedError or OutcomeUnknownError.
        """
        ...

    async def close(self) -> None:
        """Ends this client's pause and closes its connections; the engine is not used after this. Never fails."""
        ...


# How long the pool waits for engines in other processes, and how often it tries; app/ makes it from the config.


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """The request that an engine answers before it gets work."""

    prompt_tokens: np.ndarray  # int32 [P]
    max_difference: float  # of one token, between its log-probs and the learner's
    max_mean: float  # mean of these differences: also the bound for an engine taken out for its mismatch to return
    new_tokens: int = 16
    temperature: float = 0.0  # of the learner's log-probs; 0 = greedy, with log-probs at temperature 1
    again_s: float = 60.0  # from a failed probe to the next


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Deadlines and waits are seconds of the clock."""

    max_retries: int = 3  # of a request whose engines failed; then its group is dropped
    # health checks in a row without an answer, or failed requests that each followed a passed check; then the engine
    # is out of service
    max_failures: int = 3
    max_versions_behind: int = 1  # of an engine that refuses new weights and continues decoding
    stage_s: float = 600.0
    swap_s: float = 120.0
    pause_s: float = 120.0
    ask_s: float = 10.0  # also of a fence
    probe_s: float = 300.0
    drain_s: float = 60.0  # for a leaving engine to finish its requests
    retry_s: float = 1.0  # after a refusal, or a question without an answer
    health_every_s: float = 5.0
    no_server_s: float = 300.0  # the run ends after this time without a serving engine
    probe: ProbeSettings | None = None  # None: engines get work without one


MemberState = Literal[
    'registered', 'syncing', 'probing', 'serving', 'draining', 'unknown', 'quarantined', 'gone'
]  # events.EngineStateEvent has their meanings
Result = TypeVar('Result')


class Member:
    """One incarnation of an engine."""

    def __init__(
        self, engine: RemoteEngine, incarnation: int, clock: Clock, log: EventLog, supervisor: Supervisor, url: str
    ):
        self.url, self.engine, self.name, self.incarnation = url, engine, engine.name, incarnation
        self.state: MemberState = 'registered'
        self.reason = ''  # of that state
        self.version: int | None = None  # the last that it acknowledged; None: not known
        self.swapping_to: int | None = None  # a version that it may decode with before it has acknowledged it
        self.reading: int | None = None  # a version that it may be fetching
        self.settled_version: int | None = None  # the last that it acknowledged, refused, or missed while absent
        self.pause_s = 0.0  # of its last swap
        self.is_probed = False
        self.is_paused = False
        self.is_leaving = False
        self.failed_requests = 0  # in a row, each after a passed health check
        self.missed_checks = 0  # health checks, in a row
        self.is_suspect = False  # a request failed since the last passed health check
        self.requests: dict[str, MovingRequest] = {}  # its open requests by id, in the order of arrival
        self.keeper: asyncio.Task[None] | None = None
        self.news = clock.event(f'{self.name}: news for its keeper')
        self.swapped = clock.event(f'{self.name}: end of a swap')
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._under_way: list[Event] = []  # actions; an event is set at the end of its action

    @property
    def highest_version(self) -> int:
        """The highest version that it may decode with; -1 = none."""
        return max(-1 if version is None else version for version in (self.version, self.swapping_to))

    def change_state(self, state: MemberState, reason: str) -> None:
        self.reason = reason
        if state != self.state:
            self.state = state
            self._log.write('engine_state', self.name, engine=self.name, state=state, reason=reason)

    def describe(self) -> str:
        """Returns 'engine/0 is serving', with the reason if it is out of service."""
        why = f' ({self.reason})' if self.state in ('unknown', 'quarantined') else ''
        return f'{self.name} is {self.state}{why}'

    async def act(
        self, action: str, start: Callable[[], Coroutine[object, object, Result]], deadline_s: float
    ) -> Result:
        """Runs an action and returns its result; raises RemoteError, also at the deadline and after `interrupt`."""
        done = self._clock.event(f'{self.name}: {action}')
        results: list[Result] = []
        errors: list[RemoteError] = []

        async def run() -> None:
            try:
                results.append(await start())
            except RemoteError as error:
                errors.append(error)
            except TimeoutError as error:
                errors.append(OutcomeUnknownError(f'{self.name}: {action}: {error}'))
            done.set()

        task = self._supervisor.start(f'{self.name}: {action}', run())
        self._under_way.append(done)
        try:
            in_time = await self._clock.wait(done, deadline_s)
        finally:
            self._under_way.remove(done)
            task.cancel()
        if errors:
            raise errors[0]
        if results:
            return results[0]
        cause = 'was given up' if in_time else f'took longer than {deadline_s:g} s'
        raise OutcomeUnknownError(f'{self.name}: {action} {cause}')

    def interrupt(self) -> None:
        """Abandons every action under way: its outcome is unknown."""
        for done in self._under_way:
            done.set()
