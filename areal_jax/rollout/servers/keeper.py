"""Keeps one engine in another process at the newest version: brings it into service and back after it failed.

server_pool.py starts one keeper for each engine. The commit of a version has three parts: the engine stages the weights
while it decodes, swaps them in between two dispatches, and acknowledges with the version that it holds. If the outcome
of a call is unknown, the keeper sends only one request: which version do you hold?
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Literal, Protocol, TypeVar

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.rollout.servers.member import (
    HeldWeights,
    Member,
    ProbeSettings,
    RefusedError,
    RemoteError,
    ServerSettings,
    find_fault,
)
from areal_jax.telemetry.metrics import Line, number
from areal_jax.telemetry.names import MISMATCH_OF
from areal_jax.types import GenerationRequest, KvPolicy, PublishedWeights, SamplingParams, Segment, concatenate

# the softmax of log-probs: at the request's temperature, or before any temperature
LogprobsMode = Literal['processed', 'raw']


@dataclasses.dataclass(frozen=True)
class ServerFacts:
    """Facts that a server states, or that a run needs from servers; None: not stated, or not needed."""

    kv_policy: KvPolicy | None = None  # of unfinished answers at a swap
    context_tokens: int | None = None  # of prompt and answer; a server may have more than needed
    dtype: str | None = None  # of the weights that it decodes with
    logprobs_mode: LogprobsMode | None = None
    hardware: str | None = None  # see EngineStatus; never needed


SAYS_NOTHING = ServerFacts()


def state_facts(
    rollout: RolloutSection, dtype: str, mode: LogprobsMode | None, hardware: str | None = None
) -> ServerFacts:
    """Returns what a server with this config has, or what a run needs."""
    return ServerFacts(rollout.kv_policy, rollout.context_tokens, dtype, mode, hardware)


_FIELDS = {  # of the config
    'kv_policy': 'rollout.kv_policy',
    'context_tokens': 'rollout.context_tokens',
    'dtype': 'publication.dtype',
    'logprobs_mode': 'rollout.temperature',
}


def require_fit(server: str, has: ServerFacts, needs: ServerFacts) -> None:
    """Raises UserError, naming the server, for the first fact that does not fit.

    Args:
      server: its name and address.
    """
    for name, field in _FIELDS.items():
        found, needed = getattr(has, name), getattr(needs, name)
        if found is None or needed is None:
            continue
        if found < needed if name == 'context_tokens' else found != needed:
            raise UserError(
                f'the server {server} has {name}={found!r}, and this run needs {needed!r} ({field}): start it with '
                'the config of the run'
            )


# Takes an engine out of service if its log-probs differ from the learner's, which measures this in every update.


_TOKENS = 500  # over which the mean is taken


class MismatchWatch:
    """Watches the mean |mismatch| of each engine over windows of at least 500 tokens of age 0, in nats.

    Args:
      most: largest mean of a sound engine (rollout.max_mismatch).
      quarantine: called with the engine and a sentence (ServerPool.quarantine).
    """

    def __init__(self, most: float, quarantine: Callable[[str, str], None]):
        self._most, self._quarantine = most, quarantine
        self._tokens: collections.Counter[str] = collections.Counter()  # of the window under way
        self._sums: dict[str, float] = {}

    def note_update(self, metrics: Line) -> None:
        """Reads the metrics of an update (learning/diagnostics/measurement.py)."""
        for name in metrics:
            if name.startswith(MISMATCH_OF) and name.endswith('/n'):
                engine = name.removeprefix(MISMATCH_OF).removesuffix('/n')
                tokens, mean = number(metrics, name), number(metrics, f'{MISMATCH_OF}{engine}/mean_abs')
                self.note(engine, int(tokens or 0), math.nan if mean is None else mean)  # JSON has no NaN

    def note(self, engine: str, tokens: int, mean: float) -> None:
        """Adds the mean |mismatch| of `tokens` tokens of age 0 that the engine generated."""
        if not tokens:
            return
        self._tokens[engine] += tokens
        self._sums[engine] = self._sums.get(engine, 0.0) + tokens * mean
        if self._tokens[engine] < _TOKENS:
            return
        count, total = self._tokens.pop(engine), self._sums.pop(engine)
        if not total / count <= self._most:  # also NaN
            self._quarantine(
                engine,
                f"its log-probs differ from the learner's by {total / count:.3g} on average over {count} tokens "
                f'(rollout.max_mismatch={self._most:g})',
            )


# The request that an engine in another process answers before it gets work, and the checks of its answer.


PROBE_DRAW = 2**31 - 1  # no draw of a prompt stream is that high

# version, prompt tokens int32 [P], answer tokens int32 [A] -> the learner's log-probs of the answer, float32 [A]; None:
# the learner no longer has that version
Score = Callable[[int, np.ndarray, np.ndarray], Awaitable[np.ndarray | None]]


class ProbeError(RemoteError):
    """An engine answered the probe wrongly."""


def make_probe(settings: ProbeSettings, number: int) -> GenerationRequest:
    """Makes the probe request; `number` tells the probes of one engine apart."""
    sampling = SamplingParams(settings.new_tokens, temperature=settings.temperature, top_k=0, top_p=1.0, stop_tokens=())
    return GenerationRequest(PROBE_DRAW, number, 0, settings.prompt_tokens, sampling)


async def answer_probe(member: Member, request: GenerationRequest, version: int) -> list[Segment]:
    """Returns the answer of an engine that holds the version; raises ProbeError if the answer is malformed."""
    generation, segments, room = member.engine.generate(request), [], request.sampling.max_new_tokens
    async for segment in generation:
        if fault := find_fault(segment, version, version, room):
            raise ProbeError(fault)
        segments.append(segment)
        room -= len(segment.tokens)
    if room or generation.finish_reason != 'length':
        raise ProbeError(f'an answer with {room} tokens left and the reason {generation.finish_reason!r}')
    return segments


def compare(segments: list[Segment], reference: np.ndarray) -> tuple[float, float]:
    """Returns the largest and the mean difference between the answer's log-probs and the learner's, float32 [A]."""
    differences = np.abs(concatenate([s.behavior_logprobs for s in segments], np.float32) - reference)
    return float(differences.max()), float(differences.mean())


Result = TypeVar('Result')
_Phase = Literal['stage', 'swap', 'acknowledge']


class PoolSide(Protocol):
    """The pool's interface for a keeper."""

    @property
    def target(self) -> PublishedWeights:
        """The weights that every engine should decode with."""
        ...

    async def wait_running(self) -> None: ...

    def admit(self, member: Member) -> None:
        """Lets the engine serve: it holds the newest version and has answered its probe."""
        ...

    def withdraw(self, member: Member, state: Literal['syncing', 'unknown', 'quarantined'], reason: str) -> None:
        """Takes the engine out of service; its requests move to other engines."""
        ...

    def note_paused(self, member: Member, pause: str) -> None:
        """Notes that another client has paused the engine, as `pause` describes: it gets no requests meanwhile."""
        ...

    def note_settled(self, member: Member) -> None:
        """Notes that the engine has acknowledged or refused the version `member.settled_version`."""
        ...

    def note_healthy(self, member: Member) -> None:
        """Notes that the engine has just answered a health check."""
        ...

    def remove(self, name: str, reason: str) -> None:
        """Removes an engine that is gone; its requests move to other engines. Ends its keeper."""
        ...


class Keeper:
    """One coroutine for one engine."""

    def __init__(
        self, member: Member, pool: PoolSide, clock: Clock, log: EventLog, settings: ServerSettings, score: Score
    ):
        self._member, self._pool, self._clock, self._log = member, pool, clock, log
        self._settings, self._score = settings, score
        self._probes = 0

    async def run(self) -> None:
        member = self._member
        while member.state != 'gone':
            if member.is_leaving:
                await self._drain()
            elif member.state == 'registered':
                await self._take_over()
            elif member.state in ('unknown', 'quarantined'):
                await self._wait(self._settings.retry_s)
                await self._take_over()
            elif member.version != self._pool.target.version:
                await self._commit(self._pool.target)
            elif not member.is_probed:
                await self._probe()
            elif member.state != 'serving':
                self._pool.admit(member)
            else:
                await self._watch()

    async def _wait(self, seconds: float) -> bool:
        self._member.news.clear()
        return await self._clock.wait(self._member.news, seconds)

    # The commit of a version.

    async def _commit(self, target: PublishedWeights) -> None:
        member, settings = self._member, self._settings
        member.reading = target.version
        try:
            await self._do('stage', target, lambda: member.engine.stage(target), settings.stage_s)
            await self._pool.wait_running()
            if member.state in ('unknown', 'quarantined') or self._pool.target.version != target.version:
                return
            member.swapping_to = target.version
            try:
                swap = member.engine.swap
                member.pause_s = await self._do('swap', target, lambda: swap(target.version), settings.swap_s)
                held = await self._do('acknowledge', target, member.engine.ask, settings.ask_s)
            finally:  # only now: before the acknowledgement it decodes with new weights under the old member.version
                member.swapping_to = None
                member.swapped.set()
        except RefusedError as error:
            member.reading = None
            await self._note_refusal(target, str(error))
        except RemoteError as error:
            self._pool.withdraw(member, 'unknown', str(error))
        else:
            self._acknowledge(held, target)

    async def _do(
        self, phase: _Phase, target: PublishedWeights, start: Callable[[], Coroutine[object, object, Result]],
        deadline_s: float,
    ) -> Result:  # fmt: skip
        began_s, outcome = self._clock.now(), 'unknown'
        try:
            result = await self._member.act(f'{phase} of version {target.version}', start, deadline_s)
            outcome = 'done'
        except RefusedError:
            outcome = 'refused'
            raise
        finally:
            seconds, name = self._clock.now() - began_s, self._member.name
            fields = {'phase': phase, 'outcome': outcome, 'seconds': seconds}
            self._log.write('stage', name, engine=name, version=target.version, **fields)
        return result

    def _acknowledge(self, held: HeldWeights, target: PublishedWeights) -> None:
        member = self._member
        if not _holds(held, target):
            reason = f'it was given {_describe(target)} and says that it holds {_describe(held)}'
            self._pool.withdraw(member, 'quarantined', reason)
            return
        member.version = member.settled_version = target.version
        member.reading = None
        fields = {'version': target.version, 'pause_seconds': member.pause_s}
        self._log.write('load', member.name, engine=member.name, **fields)
        self._pool.note_settled(member)

    async def _note_refusal(self, target: PublishedWeights, reason: str) -> None:
        """Lets the engine serve its old version if that is new enough; waits, after which the commit is tried again."""
        member = self._member
        behind = target.version - (-1 if member.version is None else member.version)
        if member.state == 'serving' and behind > self._settings.max_versions_behind:
            self._pool.withdraw(member, 'syncing', f'it is {behind} versions behind: {reason}')
        member.settled_version = target.version
        self._pool.note_settled(member)
        await self._wait(self._settings.retry_s)

    # The probe.

    async def _probe(self) -> None:
        member, probe, version = self._member, self._settings.probe, self._member.version
        if probe is None:
            member.is_probed = True
            return
        assert version is not None
        member.change_state('probing', f'version {version} is in use')
        self._probes += 1
        request = make_probe(probe, self._probes)
        try:
            segments = await member.act('probe', lambda: answer_probe(member, request, version), self._settings.probe_s)
        except ProbeError as error:
            await self._note_failed_probe(version, f'it answered with {error}')
            return
        except RemoteError as error:
            member.engine.cancel(request.request_id)
            self._pool.withdraw(member, 'unknown', str(error))
            return
        tokens = concatenate([segment.tokens for segment in segments], np.int32)
        reference = await self._score(version, request.prompt_tokens, tokens)
        if reference is None:
            self._log_probe(version, 'undecided', 'the learner has other weights by now')
            await self._wait_for_version(version, probe.again_s)
            return
        largest, mean = compare(segments, reference)
        text = f"log-probs differ from the learner's by {largest:.3g} at most and {mean:.3g} on average"
        if largest <= probe.max_difference and mean <= probe.max_mean:  # False for NaN
            self._log_probe(version, 'passed', text)
            member.is_probed = True
        else:
            allowed = f'allowed are {probe.max_difference:g} and {probe.max_mean:g}'
            await self._note_failed_probe(version, f'its {text}, {allowed}')

    async def _wait_for_version(self, version: int, seconds: float) -> None:
        """Waits for another version, at most `seconds`: a learner does not return to a version that it has left."""
        member, end_s = self._member, self._clock.now() + seconds
        while member.state == 'probing' and not member.is_leaving and self._pool.target.version == version:
            if not await self._wait(end_s - self._clock.now()):
                return

    async def _note_failed_probe(self, version: int, detail: str) -> None:
        self._log_probe(version, 'failed', detail)
        assert self._settings.probe is not None
        self._pool.withdraw(self._member, 'quarantined', f'the probe failed: {detail}')
        await self._wait(self._settings.probe.again_s)

    def _log_probe(self, version: int, outcome: str, detail: str) -> None:
        name = self._member.name
        self._log.write('probe', name, engine=name, version=version, outcome=outcome, detail=detail)

    # While it serves, after it failed, and when it leaves.

    async def _watch(self) -> None:
        member, settings = self._member, self._settings
        if not member.is_suspect and await self._wait(settings.health_every_s) and not member.is_suspect:
            return
        target = self._pool.target  # there may be a newer one when it answers
        if member.state != 'serving' or member.is_leaving or member.version != target.version:
            return
        try:
            held = await member.act('health check', member.engine.ask, settings.ask_s)
        except RemoteError as error:
            member.missed_checks += 1
            if member.missed_checks >= settings.max_failures:
                self._pool.withdraw(member, 'unknown', str(error))
            else:
                await self._wait(settings.retry_s)
            return
        if member.state != 'serving':
            return
        if held.is_fenced:
            self._pool.withdraw(member, 'unknown', 'it obeys this run no longer: a lease lapsed, or another run came')
            return
        if held.paused:
            self._pool.note_paused(member, held.paused)
            return
        if not _holds(held, target):
            reason = f'it says that it holds {_describe(held)}, and {_describe(target)} was loaded'
            self._pool.withdraw(member, 'unknown', reason)
            return
        member.missed_checks, member.is_suspect = 0, False
        self._pool.note_healthy(member)

    async def _take_over(self) -> None:
        """Asks which version the engine holds, and ends its old requests and pauses (fence).

        A new engine is fenced first: if an earlier run left it paused, it would answer no question. A new engine gets
        the weights whatever version it claims to hold.
        """
        member, settings = self._member, self._settings
        is_new = member.state == 'registered'
        fence = lambda: member.act('fence', member.engine.fence, settings.ask_s)
        try:
            if is_new:
                await fence()
            while (held := await member.act('question what it holds', member.engine.ask, settings.ask_s)).paused:
                self._pool.note_paused(member, held.paused)
                await self._wait(settings.retry_s)
            if not is_new:
                await fence()
        except RemoteError as error:
            if is_new:
                self._pool.withdraw(member, 'unknown', str(error))
            return
        self._log.write('fence', member.name, engine=member.name)
        member.missed_checks = member.failed_requests = 0
        member.is_suspect, member.is_paused, member.reading = False, False, None
        target = self._pool.target
        member.version = target.version if _holds(held, target) and not is_new else None
        member.change_state('syncing', f'it answers and holds {_describe(held)}')

    async def _drain(self) -> None:
        member = self._member
        end_s = self._clock.now() + self._settings.drain_s
        while member.requests and self._clock.now() < end_s and member.state == 'draining':
            await self._wait(end_s - self._clock.now())
        self._pool.remove(member.name, 'it left')


def _holds(held: HeldWeights, target: PublishedWeights) -> bool:
    return held.version == target.version and held.manifest_hash in (None, target.manifest_hash)


def _describe(weights: HeldWeights | PublishedWeights) -> str:
    digest = f' ({weights.manifest_hash})' if weights.manifest_hash else ''
    return f'version {weights.version}{digest}'
