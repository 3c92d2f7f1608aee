"""An engine in another process, as the pool knows it: its state, what it holds and how it has behaved.

keeper.py drives it from state to state, server_pool.py sends it requests while it serves.
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
    """`engine` is the last one that it was sent to, '' before the first."""

    def __init__(self, request: GenerationRequest, clock: Clock):
        super().__init__(request, clock)
        self.attempts = 0  # engines that failed it
        self.entry: Entry | None = None  # in the ledger, while an engine has it
        self.pump: asyncio.Task[None] | None = None  # takes what the engine delivers
        self.lowest_version = 0  # that the engine can generate with since it has the request
        self.taken_here = 0  # tokens from the engine that has it

    def take(self, segment: Segment) -> None:
        self.taken_here += len(segment.tokens)
        super().take(segment)

    def rest(self) -> GenerationRequest:
        """The request with everything received as its prefix."""
        return dataclasses.replace(self.request, prefix=tuple(self._received))

    def end_in_received(self) -> EngineFinish | None:
        """How the answer ended where its last token was received and the end was not."""
        sampling = self.request.sampling
        if self._received and int(self._received[-1].tokens[-1]) in sampling.stop_tokens:
            return 'stop'
        return 'length' if self.room_tokens <= 0 else None


def find_fault(segment: Segment, lowest_version: int, highest_version: int, room_tokens: int) -> str:
    """What is wrong with a segment that came from elsewhere, '' for nothing.

    The engine was given the versions from the lowest to the highest since it has the request.
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


# What the pool asks of an engine in another process besides protocols.RolloutEngine, and how such an engine fails.
#
# The clients of rollout/http/ implement it, server_pool.py drives it. Every other exception is a bug and ends the
# run.


class RemoteError(Exception):
    """Something that an engine in another process did not do; the message names engine, action and cause."""


class RequestFailedError(RemoteError):
    """A request did not end: a reply with an error, a cut connection, an answer that cannot be read.

    Raised by the iteration over a generation. Segments that were delivered before stay valid.
    """


class RefusedError(RemoteError):
    """An action was not done, and the engine holds what it held: it may be asked for the same again."""


class FencedError(RemoteError):
    """The engine obeys this run no longer: its lease of a pause has lapsed, or another run has taken the engine over.

    What it does now is not known. It is to be fenced, which registers the run anew, and to get its weights again.
    """


class OutcomeUnknownError(RemoteError):
    """An action may have been done, may be going on, or was not done: a deadline, or a lost connection."""


@dataclasses.dataclass(frozen=True)
class HeldWeights:
    """The weights that an engine decodes with, by its own word."""

    version: int
    manifest_hash: str | None = None  # PublishedWeights.manifest_hash; None: the engine cannot tell
    is_fenced: bool = False  # it obeys this run no longer: see FencedError
    paused: str = ''  # by whom and since when, where somebody else has paused it


class RemoteEngine(RolloutEngine, Protocol):
    """An engine behind a network.

    A pause holds as long as this client renews it, where the engine knows leases: see rollout/http/pauses.py.

    `generate`, `cancel`, `resume`, `open_requests` and `status` do not wait for the network; `status` gives what was
    heard last. `stage`, `swap` and `pause` raise RefusedError, FencedError or OutcomeUnknownError where they are not
    done. To stage
    the version that is staged or held already is allowed and may do nothing. The pool gives up whatever takes longer
    than its own deadline by cancelling it, and then takes the outcome for unknown. A request may come again after its
    `cancel`, with more of its prefix: on the wire it needs an id of its own then.
    """

    async def ask(self) -> HeldWeights:
        """Asks the engine what it holds, which also shows that it serves; raises OutcomeUnknownError without an answer.

        Never says a version before its weights are all in use.
        """
        ...

    async def fence(self) -> None:
        """Ends every request that this or an earlier client sent and that has not ended, also what it has paused.

        Nothing of those requests is delivered later. From then on the engine obeys this client alone, where it can tell
        clients apart. Raises RefusedError or OutcomeUnknownError.
        """
        ...

    async def close(self) -> None:
        """Ends what it has paused, and lets connections go; the engine is not used any more. Never fails."""
        ...


# How long the pool waits for engines in other processes, and how often it tries; app/ makes it from the config.


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """The request that an engine answers before it gets work."""

    prompt_tokens: np.ndarray  # int32 [P]
    max_difference: float  # of one token, between its log-probs and the learner's
    max_mean: float  # the same on average: what an engine must keep to that was taken out for its mismatch
    new_tokens: int = 16
    temperature: float = 0.0  # of the learner's log-probs; 0 = greedy, with log-probs at temperature 1
    again_s: float = 60.0  # from a failed probe to the next


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Deadlines and waits are seconds of the clock."""

    max_retries: int = 3  # of a request given up by engines that failed; then its group is dropped
    # health checks in a row without an answer, or requests that failed, each after it was found well; then the engine
    # is out of service
    max_failures: int = 3
    max_versions_behind: int = 1  # of an engine that refuses new weights and goes on decoding
    stage_s: float = 600.0
    swap_s: float = 120.0
    pause_s: float = 120.0
    ask_s: float = 10.0  # also of a fence
    probe_s: float = 300.0
    drain_s: float = 60.0  # for an engine that leaves to finish what it has
    retry_s: float = 1.0  # from a refusal, or a question without an answer, to the next
    health_every_s: float = 5.0
    no_server_s: float = 300.0  # without a serving engine the run goes on for so long
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
        self.version: int | None = None  # that it acknowledged last; None: not known
        self.swapping_to: int | None = None  # a version that it may decode with before it has acknowledged it
        self.reading: int | None = None  # a version that it may be fetching
        self.settled_version: int | None = None  # the last that it acknowledged, refused or was not there for
        self.pause_s = 0.0  # of its last swap
        self.is_probed = False
        self.is_paused = False
        self.is_leaving = False
        self.failed_requests = 0  # in a row, each after it was found well
        self.missed_checks = 0  # of its health, in a row
        self.is_suspect = False  # a request failed since it was found well
        self.requests: dict[str, MovingRequest] = {}  # that it has, by id, first come first
        self.keeper: asyncio.Task[None] | None = None
        self.news = clock.event(f'{self.name}: news for its keeper')
        self.swapped = clock.event(f'{self.name}: end of a swap')
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._under_way: list[Event] = []  # actions; an event is set at the end of its action

    @property
    def highest_version(self) -> int:
        """That it may decode with."""
        return max(-1 if version is None else version for version in (self.version, self.swapping_to))

    def change_state(self, state: MemberState, reason: str) -> None:
        self.reason = reason
        if state != self.state:
            self.state = state
            self._log.write('engine_state', self.name, engine=self.name, state=state, reason=reason)

    def describe(self) -> str:
        """'engine/0 is serving', with the reason where it is out of service."""
        why = f' ({self.reason})' if self.state in ('unknown', 'quarantined') else ''
        return f'{self.name} is {self.state}{why}'

    async def act(
        self, action: str, start: Callable[[], Coroutine[object, object, Result]], deadline_s: float
    ) -> Result:
        """What the engine was asked for; raises RemoteError, also at the deadline and after `interrupt`."""
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
        """Gives up every action under way: its outcome is unknown."""
        for done in self._under_way:
            done.set()
