"""A toy engine and learner whose tokens can be worked out by hand.

Weights are one integer w. The token at position p of (draw, sample) is 1 + (7 w + 3 draw + sample + p) % 9, except
that the answer ends with token 0 when it has `length(draw, sample)` tokens, if 0 is a stop token. The log-prob is
-(1 + w % 5) - p / 100, minus 1000 for every version by which the KV cache is stale; where a request cuts the softmax,
half of the mass is kept.
The learner turns w into a hash of all that it trains on, so equal weights mean equal batches, tokens, log-probs and
versions.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.config.generation import RolloutSection
from areal_jax.control.buffer import GroupFilter, equal_rewards
from areal_jax.control.clocks.loop import Lane, LoopClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import Controller, LoopSettings, StepRecord
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.gate import StalenessGate
from areal_jax.control.lock_step import VersionRing, parse_schedule
from areal_jax.control.reallocation import Reallocation
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import EvaluationBeside, Evaluator
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.protocols import Clock, Verifier, Workflow
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillBucket, PrefillPiece, SamplingSupport, Span
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.state_pool import StateSizes
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry.facts import VersionScores
from areal_jax.types import GenerationRequest, Prompt, PublishedWeights, SamplingParams, TrajectoryGroup, Verdict, Work
from tests.toy_states import ToyStates

STOP = 0
LONGEST = 7
PRICES = {
    'decode': 0.01, 'prefill': 0.001, 'train': 0.002, 'publish': 0.005, 'load': 0.005, 'snapshot': 0.001,
    'reward': 0.002, 'save': 0.03, 'evaluation_decode': 0.01, 'evaluation_prefill': 0.001, 'pin': 0.005,
}  # fmt: skip


def length(draw: int, sample: int) -> int:
    """Tokens of the answer, its stop token included: 1..LONGEST."""
    return 1 + (draw * 5 + sample * 3) % LONGEST


def token(w: int, draw: int, sample: int, position: int) -> int:
    return 1 + (7 * w + 3 * draw + sample + position) % 9


def logprob(w: int, position: int, stale: int = 0) -> float:
    return -(1 + w % 5) - position / 100 - 1000 * stale


class ToyCache:
    """What every position of every block holds: the version of its weights and its token, -1 = nothing."""

    def __init__(self, blocks: int, block_tokens: int, states: StateSizes | None):
        self.states = ToyStates(states)
        self.versions = np.full((blocks, block_tokens), -1, np.int64)
        self.tokens = np.full((blocks, block_tokens), -1, np.int64)
        self.donated = False

    def read(self, blocks: Sequence[int], stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Versions and tokens of the positions before `stop` of a sequence."""
        size = self.tokens.shape[1]
        assert len(blocks) * size >= stop, f'{len(blocks)} blocks do not hold {stop} positions'
        assert len(set(blocks)) == len(blocks), f'a block stands twice in {blocks}'
        listed = np.array(blocks, np.int64)
        return self.versions[listed].reshape(-1)[:stop], self.tokens[listed].reshape(-1)[:stop]

    def write(self, blocks: Sequence[int], start: int, tokens: Sequence[int], version: int) -> None:
        size = self.tokens.shape[1]
        for position, one in enumerate(tokens, start):
            place = blocks[position // size], position % size
            self.versions[place], self.tokens[place] = version, one


class ToyBackend:
    """Weights are (w, version); the state is a ToyCache, in which each row must find exactly its own tokens.

    Args:
      states: also of recurrent layers, of which pieces and rows must find those behind exactly the tokens before them.
    """

    devices = ('toy',)
    state_bytes, records_context, windows = 0, False, None
    sampling = SamplingSupport(vocab_size=64, cuts=True, adjusts=True, stop_tokens=4, biased_tokens=4)

    def __init__(
        self, slots: int, cache_blocks: int | None = None, *, context_tokens: int = 32, block_tokens: int = 4,
        largest_piece: int = 32, states: StateSizes | None = None,
    ):  # fmt: skip
        self.slots, self.context_tokens, self.block_tokens = slots, context_tokens, block_tokens
        self.cache_blocks = slots * -(-context_tokens // block_tokens) if cache_blocks is None else cache_blocks
        self.largest_piece, self.states = largest_piece, states
        self.prefills: list[list[list[int]]] = []  # the pieces of each
        self.batches: list[int] = []  # rows of each dispatch of decoding
        self._sequences: dict[int, tuple[GenerationRequest, list[int]]] = {}  # by identity of the request

    def prepare(self, weights: tuple[int, int]) -> PreparedWeights:
        return PreparedWeights(*weights)

    def initial_state(self) -> ToyCache:
        return ToyCache(self.cache_blocks, self.block_tokens, self.states)

    def prefill_bucket(self, spans: Sequence[Span]) -> PrefillBucket | None:
        tokens, prior = (-(-n // 8) * 8 for n in (sum(b - a for a, b in spans), max(a for a, _ in spans)))
        return PrefillBucket(tokens, prior) if tokens <= max(8, self.largest_piece) else None

    def prefill(self, weights: PreparedWeights, state: ToyCache, pieces: Sequence[PrefillPiece]) -> ToyCache:
        assert isinstance(weights, PreparedWeights)
        assert self.prefill_bucket([piece.span for piece in pieces]) is not None
        new, written = _donate(state), []
        for piece in pieces:
            assert 1 <= len(piece.tokens) <= self.largest_piece
            versions, before = new.read(piece.blocks, piece.start)
            new.states.begin(piece.state, before.tolist(), versions.tolist())
            assert (versions >= 0).all(), 'a piece begins behind positions that are not in the cache'
            last = -(-(piece.start + len(piece.tokens)) // self.block_tokens)
            written += piece.blocks[piece.start // self.block_tokens : last]
        assert len(set(written)) == len(written), 'two pieces write to one block'
        for piece in pieces:
            new.write(piece.blocks, piece.start, piece.tokens.tolist(), weights.version)
            new.states.advance(piece.state, piece.tokens.tolist(), weights.version)
        self.prefills.append([piece.tokens.tolist() for piece in pieces])
        return new

    def copy(
        self, state: ToyCache, copies: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> ToyCache:  # fmt: skip
        assert not parts
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        assert len(targets) == len(set(targets))
        new = _donate(state)
        for array in (new.versions, new.tokens):
            array[targets] = array[sources]
        new.states.copy(states)
        return new

    def read_context(self, state: ToyCache, blocks: Sequence[int], tokens: int) -> dict[str, np.ndarray]:
        raise AssertionError('nothing is recorded')

    def batch_bucket(self, rows: Sequence[DecodeRow]) -> int:
        return next(bucket for bucket in (1, 2, 4, 8, 16, 32, 64) if bucket >= len(rows))

    def generate(
        self, weights: PreparedWeights, state: ToyCache, rows: Sequence[DecodeRow], steps: int
    ) -> tuple[ToyCache, DecodeOutput]:
        assert isinstance(weights, PreparedWeights)
        assert 1 <= len(rows) <= self.slots
        self.batches.append(len(rows))
        shape = steps, len(rows)
        cut = np.zeros(shape, np.float32)
        read = steps * sum(-(-(row.position + steps) // self.block_tokens) * self.block_tokens for row in rows)
        arrays = (np.zeros(shape, dtype) for dtype in (np.int32, np.float32, bool))
        output = DecodeOutput(*arrays, {SAMPLING_LOGPROBS.name: cut}, read)
        new = _donate(state)
        for index, row in enumerate(rows):
            request = row.request
            tokens = self._tokens_of(request)
            assert (row.position, row.token) == (len(tokens) - 1, tokens[-1])
            versions, found = new.read(row.blocks, row.position)
            assert found.tolist() == tokens[:-1], f'{request.request_id} reads {found.tolist()} for {tokens[:-1]}'
            new.states.begin(row.state, tokens[:-1], versions.tolist())
            stale = weights.version - min(versions.tolist(), default=weights.version)
            for step in range(steps):
                position = len(tokens)
                new.write(row.blocks, position - 1, tokens[-1:], weights.version)
                new.states.advance(row.state, tokens[-1:], weights.version)
                drawn, last = self.draw_token(weights.w, request, position)
                tokens.append(drawn)
                output.tokens[step, index] = tokens[-1]
                output.logprobs[step, index] = logprob(weights.w, position, stale)
                cut[step, index] = output.logprobs[step, index] + np.log(2) * request.sampling.changes_softmax
                output.valid[step, index] = True
                if last or len(tokens) == row.limit:
                    break
        return new, output

    def draw_token(self, w: int, request: GenerationRequest, position: int) -> tuple[int, bool]:
        """(the token at a position of the sequence, whether it ends the answer)."""
        answered = position + 1 - len(request.prompt_tokens)
        last = STOP in request.sampling.stop_tokens and answered == length(request.draw, request.sample)
        return STOP if last else token(w, request.draw, request.sample, position), last

    def _tokens_of(self, request: GenerationRequest) -> list[int]:
        """Prompt and answer so far, as this backend has generated it."""
        if id(request) not in self._sequences:
            self._sequences[id(request)] = request, [*request.prompt_tokens.tolist(), *request.prefix_tokens.tolist()]
        return self._sequences[id(request)][1]


class PreparedWeights(NamedTuple):
    """Published weights in the toy backend's own form."""

    w: int
    version: int


def _donate(state: ToyCache) -> ToyCache:
    """The state for the next call; the given one must not be used again."""
    assert not state.donated
    new = copy.copy(state)
    state.donated = True
    return new


class ToyLearner:
    def __init__(self, w: int = 0):
        self.w = w
        self.trained: list[list[int]] = []

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        self.trained.append([group.draw for group in groups])
        content = [
            (g.draw, t.sample, t.reward, t.tokens.tolist(), t.behavior_logprobs.tolist(), t.policy_versions.tolist())
            for g in groups
            for t in g.trajectories
        ]
        segments = [s for g in groups for t in g.trajectories for s in t.segments]
        content += [(values.tolist(),) for s in segments for values in s.columns.values()]
        self.w = int.from_bytes(hashlib.sha256(repr((self.w, content)).encode()).digest()[:6], 'big')
        ages = [version - v for g in groups for t in g.trajectories for v in t.policy_versions.tolist() if v >= 0]
        return {
            'staleness/token_age_max': max(ages),
            'staleness/token_age_histogram': [ages.count(age) for age in range(max(ages) + 1)],
        }

    def publish(self, version: int) -> int:
        return self.w

    def save(self) -> int:
        return self.w

    def restore(self, saved: int) -> None:
        self.w = saved


class ToyChannel:
    def transfer(self, version: int, copy: int) -> PublishedWeights:
        return PublishedWeights(version, str(copy), (copy, version))

    def receive(self, published: PublishedWeights) -> tuple[int, int]:
        return published.handle

    def release(self, version: int, pinned: Collection[int] = ()) -> None: ...


class ToyStream:
    """Prompts of 1 + draw % 3 tokens."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self) -> Prompt:
        draw, self.next = self.next, self.next + 1
        return toy_prompt(draw)

    def state(self) -> dict[str, int]:
        return {'next': self.next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.next = state['next']


def toy_prompt(draw: int) -> Prompt:
    return Prompt(draw, np.arange(1, 2 + draw % 3, dtype=np.int32), 'toy', {})


class ToyVerifier:
    """The reward is the sum of the answer's tokens modulo 2; how long it takes is up to `delays`."""

    def __init__(self, clock: Clock, delays: Sequence[float] = (1.0,), fail: Sequence[int] = (), lane: str = 'reward'):
        self._clock, self._delays, self._lane = clock, delays, lane
        self.fail = fail  # draws whose answers are not scored

    async def verify(
        self, prompt: Prompt, answer_tokens: np.ndarray, finish_reason: str, describe_episode: Any = None
    ) -> Verdict:
        amount = self._delays[(prompt.draw * 7 + len(answer_tokens)) % len(self._delays)]
        work = Work('reward', amount, recorded=True)
        reply: dict[str, Any] = {'reward': float(answer_tokens.sum() % 2)}
        if prompt.draw in self.fail:
            reply = {'reward': 0.0, 'attempts': 2, 'label': 'crash'}
        return Verdict(**await self._clock.call(self._lane, lambda: _ready(reply), work, 10.0))


async def _ready(value: Any) -> Any:
    return value


class ToyRun:
    """The production controller, gate, buffer, pool and engine around the toys."""

    def __init__(
        self,
        *,
        steps: int = 6,
        groups_per_update: int = 3,
        group_size: int = 2,
        eta: float = 2,
        engines: int = 1,
        slots: int = 4,
        cache_blocks: int | None = None,
        decode_steps: int = 2,
        kv_policy: str = 'recompute',
        schedule: str = 'natural',
        delays: Sequence[float] = (1.0,),
        fail: Sequence[int] = (),
        prices: Mapping[str, float] = PRICES,
        max_running: float = 8,  # inf: as many groups as the slots need
        buffer_capacity: int = 64,
        max_token_age: int | None = None,
        over_age: str = 'off',
        checkpoint_every: int = 0,
        top_k: int = 0,
        evaluation_every: int = 0,
        every_dispatches: int = 4,
        max_filtered: int = 0,  # above 0: groups with equal rewards are dropped, at most so many in a row
        resume: Mapping[str, Any] | None = None,
        log: EventLog | None = None,
        make_clock: Callable[[Mapping[str, int], EventLog, float], LoopClock] | None = None,  # of lanes, log, start_s
        make_verifier: Callable[[Clock], Verifier] | None = None,
        make_workflow: Callable[[ToyRun], Workflow] | None = None,  # called when the gate and the pool are there
        learner: Any = None,
        unscored: Sequence[int] = (),  # draws of the evaluation that no verifier scores
        make_reallocation: Callable[[ToyRun], Reallocation] | None = None,  # called when pool and learner are there
        more_lanes: Mapping[str, int] = MappingProxyType({}),
        hardware: Sequence[str] = (),  # of engines that differ: a class that adds nothing but age is left out
    ):
        state = resume['run_state'] if resume else None
        self.log = log or (EventLog(next_seq=state['next_seq'], next_run=state['next_run']) if state else EventLog())
        self.log.listeners.append(check_types)
        self.steps: list[StepRecord] = []
        self.checkpoints: list[dict[str, Any]] = []
        lanes = {'learner': 1, 'reward': 2, 'disk': 1}
        lanes |= {lane(i): 1 for i in range(engines) for lane in (engine_lane, publish_lane)}
        lanes |= more_lanes
        start_s = state['clock_s'] if state else 0.0
        make = make_clock or (lambda lanes, log, start_s: VirtualClock(lanes, log, prices, start_s=start_s))
        self.clock = make(lanes, self.log, start_s)
        self.supervisor = Supervisor(self.clock)
        self.learner, self.channel = learner or ToyLearner(), ToyChannel()
        channel = self.channel
        self.gate = StalenessGate(
            groups_per_update=groups_per_update, eta=eta, max_running=max_running, buffer_capacity=buffer_capacity,
            max_admitted=steps * groups_per_update,
        )  # fmt: skip
        version = state['version'] if state else 0
        if resume:
            self.learner.restore(resume['arrays'])
        parsed = parse_schedule(schedule, seed=0)
        ring = VersionRing(parsed, lambda published: published.handle[0]) if parsed else None
        published = newest = channel.transfer(version, self.learner.w)
        if ring:
            for held, w in resume['earlier'].items() if resume else ():
                ring.add(channel.transfer(held, w))
            ring.add(published)
            published = ring.in_use(state['generated_update'] if state else None)
        self.backends = [ToyBackend(slots, cache_blocks) for _ in range(engines)]
        self.pinned_backends = [ToyBackend(3) if evaluation_every else None for _ in range(engines)]
        self.engines = [
            LocalEngine(
                i, backend, self.clock, self.engine_log(), receive=lambda published: self.receive(published),
                version=published.version, params=published.handle,
                rollout=RolloutSection(kv_policy=kv_policy, decode_steps=decode_steps),
                evaluation=self.pinned_backends[i], every_dispatches=every_dispatches,
                hardware=hardware[i] if hardware else '',
            )
            for i, backend in enumerate(self.backends)
        ]  # fmt: skip
        self.spare_slots = slots if hardware else 0
        self.pool = pool = self.build_pool(newest)
        self.newest = newest
        self.reallocation = make_reallocation(self) if make_reallocation else None
        sampling = SamplingParams(max_new_tokens=LONGEST, temperature=1.0, top_k=top_k, top_p=1.0, stop_tokens=(STOP,))
        self.verifier = make_verifier(self.clock) if make_verifier else ToyVerifier(self.clock, delays, fail)
        self.stream = ToyStream()
        self.note_step: Callable[[StepRecord], object] = self.steps.append  # tests put others in its place
        self.save_checkpoint, self.receive = self._save, channel.receive  # and of these
        self.controller = Controller(
            LoopSettings(
                steps, group_size, groups_per_update, max_token_age if over_age == 'drop' else None, checkpoint_every,
                max_failed_groups=32, slots=slots,
            ),
            clock=self.clock, log=self.log, supervisor=self.supervisor, stream=self.stream, pool=pool,
            workflow=make_workflow(self) if make_workflow else SingleTurn(pool, sampling, seed=0),
            verifier=self.verifier,
            learner=self.learner, channel=channel, gate=self.gate, ring=ring,
            update_tokens=self.price_update, observer_state=self.observer_state,
            on_step=lambda record: self.note_step(record),
            save_checkpoint=lambda *state: self.save_checkpoint(*state),
            on_published=self._note_published,
            group_filter=GroupFilter(equal_rewards(), max_filtered) if max_filtered else None,
            reallocation=self.reallocation,
        )  # fmt: skip
        self.newest, self.resumed, self.unscored = newest, state, unscored
        self.beside = self._build_beside(evaluation_every, steps, sampling) if evaluation_every else None
        if state:
            self.controller.restore(state)

    def engine_log(self) -> EventLog:
        """The log as an engine writes to it."""
        return self.log

    def build_pool(self, published: PublishedWeights) -> Any:
        return Pool(self.engines, self.clock, self.log, self.supervisor, spare_slots=self.spare_slots)

    def _build_beside(self, every: int, steps: int, sampling: SamplingParams) -> EvaluationBeside:
        self.clock.lanes['reward/evaluation'] = Lane(1)
        self.lost = self.clock.event('loss of an evaluation')
        self.rows: list[VersionScores] = []
        self.said: list[str] = []

        def make_evaluator(pool: Any, version: int) -> Evaluator:
            return Evaluator(
                pool=pool, verifier=ToyVerifier(self.clock, fail=self.unscored, lane='reward/evaluation'),
                clock=self.clock, supervisor=self.supervisor, log=self.log,
                problems=[toy_prompt(draw) for draw in range(100, 108)], sampling=sampling, samples=1, seed=0,
                decode=str, final_answer=lambda prompt, text: text, max_failed=3, version=version,
            )  # fmt: skip

        return EvaluationBeside(
            every=every, steps=steps, pool=self.pool, clock=self.clock, supervisor=self.supervisor, log=self.log,
            make_evaluator=make_evaluator, on_scores=self.rows.append, say=self.said.append,
            lost=self.lost,
        )  # fmt: skip

    def _note_published(self, published: PublishedWeights) -> None:
        if self.beside:
            self.beside.note_published(published)

    def price_update(self, groups: Sequence[TrajectoryGroup]) -> int:
        return sum(len(t.tokens) for g in groups for t in g.trajectories)

    def observer_state(self) -> dict[str, Any]:
        return {'evaluating': self.beside.under_way} if self.beside else {}

    def _save(self, step: int, arrays: Any, earlier: Mapping[int, Any], run_state: Mapping[str, Any]) -> None:
        self.checkpoints.append({'step': step, 'arrays': arrays, 'earlier': earlier, 'run_state': run_state})

    async def program(self) -> bool:
        for engine in self.engines:
            engine.start(self.supervisor)
        if self.beside and self.resumed:
            self.beside.resume(self.newest, self.resumed['observer']['evaluating'], ())
        finished = await self.controller.run()
        if finished and self.beside:
            finished = await self.beside.finish(self.controller.stop_requested)
        return finished

    def run(self) -> ToyRun:
        self.finished = self.clock.execute(self.supervisor.run(self.program()))
        return self

    @property
    def groups(self) -> list[TrajectoryGroup]:
        return [group for step in self.steps for group in step.groups]
