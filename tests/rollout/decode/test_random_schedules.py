"""An engine under random schedules, against a decoder that keeps no cache.

Arrivals in groups and in parts of groups, ends, cancels, preemptions, swaps, pauses and answers that go on elsewhere.
Between the engine and its backend stands a recorder. It knows what every block holds and which weights wrote it, so
that every token can be decoded again by itself, and it spoils all free blocks before each call.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.events import EventLog, check_types
from areal_jax.control.supervisor import Supervisor
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.rollout.decode.plain_decoder import choose, next_logits
from tests.toys import PRICES

CONTEXT, STEPS, VOCABULARY = 48, 4, 300
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=1e4
)
DECODER = Decoder(CONFIG)
TIE, LOGPROB_ERROR = 1e-4, 2e-5
UNKNOWN = -1  # version of a position that nothing was written to


@functools.cache
def weights(version):
    """Nested dicts of numpy arrays."""
    return jax.tree.map(np.asarray, DECODER.init(version, scale=1.5))


@functools.cache
def backend(block_tokens, cache_tokens):
    return JaxDecodeBackend(
        DECODER, slots=4, context_tokens=CONTEXT, block_tokens=block_tokens, cache_blocks=cache_tokens // block_tokens,
        prefill_buckets=(16, 32), decode_steps=STEPS, batch_buckets=(2, 4), filtered=True, dtype='float32',
    )  # fmt: skip


@functools.cache
def spoil_program(one):
    """Writes NaN to the listed places of a state."""
    heads, size = CONFIG.n_kv_heads, CONFIG.head_dim

    def spoil(state, blocks, offsets):
        bad = jnp.full((len(blocks), heads, size), jnp.nan)
        return tuple(one._attention.write(layer, bad, bad, blocks, offsets) for layer in state)

    return jax.jit(spoil, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Prepared:
    version: int
    params: object


@dataclasses.dataclass
class Decoded:
    """A token as the backend generated it."""

    token: int
    logprob: float
    cut_logprob: float
    versions: list  # of all positions that it was computed from, the last one that of the dispatch


class Recorder:
    """rollout.backend.DecodeBackend around another one."""

    def __init__(self, inner):
        self.inner, self.table = inner, None  # the engine's CacheTable
        shape = inner.cache_blocks + 1, inner.block_tokens
        self.versions, self.tokens = np.full(shape, UNKNOWN), np.full(shape, UNKNOWN)
        self.answers = {}  # by identity of the request, (request, [Decoded])
        self.shared = 0  # blocks of decoded rows that others hold too

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prepare(self, published):
        version, params = published
        return Prepared(version, self.inner.prepare(jax.tree.map(jnp.asarray, params)))

    def answer(self, request):
        return self.answers.setdefault(id(request), (request, []))[1]

    def prefill(self, prepared, state, pieces):
        for piece in pieces:
            places = self._places(piece.blocks)
            assert all(self.versions[place] != UNKNOWN for place in places[: piece.start])
            self._write(places[piece.start : piece.span.stop], piece.tokens, prepared.version)
        return self.inner.prefill(prepared.params, self._spoil(state), pieces)

    def copy(self, state, sources, targets):
        assert all(self.table.pool.count(block) == 1 for block in targets)
        for array in (self.versions, self.tokens):
            array[list(targets)] = array[list(sources)]
        return self.inner.copy(self._spoil(state), sources, targets)

    def generate(self, prepared, state, rows, steps):
        state, output = self.inner.generate(prepared.params, self._spoil(state), rows, steps)
        for index, (row, count) in enumerate(zip(rows, output.counts(), strict=True)):
            answer, places = self.answer(row.request), self._places(row.blocks)
            sequence = [*row.request.prompt_tokens, *row.request.prefix_tokens, *(one.token for one in answer)]
            assert [self.tokens[place] for place in places[: row.position]] == sequence[:-1]
            assert (row.token, row.position) == (sequence[-1], len(sequence) - 1)
            before = [int(self.versions[place]) for place in places[: row.position]]
            self.shared += sum(self.table.pool.count(block) > 1 for block in row.blocks)
            for step in range(count):
                cut = output.sampling_logprobs[step, index]
                token, logprob = output.tokens[step, index], output.logprobs[step, index]
                versions = [*before, *[prepared.version] * (step + 1)]
                answer.append(Decoded(int(token), float(logprob), float(cut), versions))
            written = [*sequence, *(one.token for one in answer[len(answer) - count :])][row.position : -1]
            self._write(places[row.position : row.position + count], written, prepared.version)
        return state, output

    def _places(self, blocks):
        """(block, offset) of every position."""
        return [(block, offset) for block in blocks for offset in range(self.inner.block_tokens)]

    def _write(self, places, tokens, version):
        for place, token in zip(places, tokens, strict=True):
            assert self.table.pool.count(place[0]) == 1, f'block {place[0]} is written while it is shared'
            self.versions[place], self.tokens[place] = version, token

    def _spoil(self, state):
        padding, size = self.inner.cache_blocks, self.inner.block_tokens
        free = [block for block in range(padding) if not self.table.pool.count(block)]
        self.versions[free] = self.tokens[free] = UNKNOWN
        blocks = np.full(padding * size, padding, np.int32)
        blocks[: len(free) * size] = np.repeat(free, size)
        return spoil_program(self.inner)(state, blocks, (np.arange(padding * size) % size).astype(np.int32))


class Schedule:
    """One random schedule: everything in it is a function of the seed."""

    def __init__(self, seed, *, block_tokens, cache_tokens, kv_policy):
        self.rng, self.log = np.random.default_rng(seed), EventLog()
        self.log.listeners.append(check_types)
        lanes = {'engine/0': 1, 'publish/0': 1, 'script': 1}
        self.clock = VirtualClock(lanes, self.log, PRICES | {'script': 1.0})
        self.backend = Recorder(backend(block_tokens, cache_tokens))
        self.engine = LocalEngine(
            0, self.backend, self.clock, self.log, receive=lambda p: (p.version, weights(p.version)), version=0,
            params=(0, weights(0)), kv_policy=kv_policy, decode_steps=int(self.rng.integers(1, STEPS + 1)),
        )  # fmt: skip
        self.backend.table = self.engine._stream._scheduler.cache
        self.supervisor = Supervisor(self.clock)
        self.tasks, self.absent, self.results = {}, [], []  # absent: members of a group that has begun to arrive
        self.draws, self.version, self.swap = 0, 0, None

    def run(self, actions):
        async def program():
            self.engine.start(self.supervisor)
            await self._act(actions)

        self.clock.execute(self.supervisor.run(program()))
        self.backend.table.check([])
        return self

    def events(self, kind):
        return [event for event in self.log.events if event['kind'] == kind]

    async def _act(self, actions):
        for _ in range(actions):
            names = ['arrive', 'come_late', 'cancel', 'move', 'swap', 'pause']
            await getattr(self, f'_{self.rng.choice(names, p=[0.35, 0.25, 0.1, 0.1, 0.12, 0.08])}')()
            await self._pass_time(self.rng.exponential(0.08))
            self.backend.table.check(self.engine._stream.table.open_requests())
        for request in self.absent:
            self._submit(request)
        while self.tasks:
            await next(iter(self.tasks.values()))
        if self.swap is not None:
            await self.swap

    async def _pass_time(self, seconds):
        await self.clock.run('script', lambda: None, Work('script', float(seconds)))

    async def _arrive(self):
        """The first members of a group; the others come later."""
        rng, self.draws = self.rng, self.draws + 1
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 25)).astype(np.int32)
        cuts = rng.choice(3)
        sampling = SamplingParams(
            max_new_tokens=int(rng.integers(1, CONTEXT - len(prompt))),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_k=int(rng.integers(2, 30)) if cuts == 1 else 0,
            top_p=float(rng.uniform(0.5, 0.95)) if cuts == 2 else 1.0,
            stop_tokens=tuple(rng.choice(VOCABULARY, 4, replace=False).tolist()),
        )
        size = int(rng.integers(1, 5))
        group = [GenerationRequest(self.draws, sample, 2**33 + 7, prompt, sampling) for sample in range(size)]
        first = int(rng.integers(1, size + 1))
        for request in group[:first]:
            self._submit(request)
        self.absent += group[first:]

    async def _come_late(self):
        if self.absent:
            self._submit(self.absent.pop(int(self.rng.integers(len(self.absent)))))

    async def _cancel(self):
        if self.tasks:
            self.engine.cancel(str(self.rng.choice(sorted(self.tasks))))

    async def _move(self):
        """A request is taken away, and what it has delivered comes back with it."""
        if not self.tasks:
            return
        name = str(self.rng.choice(sorted(self.tasks)))
        task = self.tasks[name]
        self.engine.cancel(name)
        request, segments, reason = await task
        if reason == 'cancelled':
            self._submit(dataclasses.replace(request, prefix=(*request.prefix, *segments)))

    async def _swap(self):
        if self.swap is None or self.swap.done():
            self.version += 1
            published = PublishedWeights(self.version, '', None)

            async def swap():
                await self.engine.stage(published)
                await self.engine.swap(published.version)

            self.swap = self.supervisor.start('swap', swap())

    async def _pause(self):
        await self.engine.pause()
        await self.rng.choice([self._arrive, self._come_late, self._cancel])()
        self.engine.resume()

    def _submit(self, request):
        running = self.engine.generate(request)

        async def collect():
            segments = [segment async for segment in running]
            self.results.append((request, segments, running.finish_reason))
            del self.tasks[request.request_id]
            return self.results[-1]

        self.tasks[request.request_id] = self.supervisor.start(request.request_id, collect())


def assert_delivered(schedule):
    """Every request ended for its reason with what the backend generated for it."""
    for request, segments, reason in schedule.results:
        decoded = schedule.backend.answer(request)
        found = [
            (int(token), float(logprob), segment.policy_version)
            for segment in segments
            for token, logprob in zip(segment.tokens, segment.behavior_logprobs, strict=True)
        ]
        expected = [(one.token, one.logprob, one.versions[-1]) for one in decoded]
        assert found == expected[: len(found)]
        length = len(request.prefix_tokens) + len(found)
        if reason == 'cancelled':
            continue
        assert len(found) == len(expected)
        is_stop = found[-1][0] in request.sampling.stop_tokens
        assert is_stop if reason == 'stop' else length == request.sampling.max_new_tokens
        assert all(token not in request.sampling.stop_tokens for token, *_ in found[:-1])


def assert_as_decoded_without_a_cache(schedule):
    """The same tokens unless two were as good, and log-probs to rounding: (tokens that differ, all tokens)."""
    by_version = {version: weights(version) for version in range(schedule.version + 1)}
    flips = checked = 0
    for request, decoded in schedule.backend.answers.values():
        sequence = [*request.prompt_tokens.tolist(), *request.prefix_tokens.tolist()]
        for one in decoded:
            logits = next_logits(CONFIG, by_version, sequence, one.versions)
            choice = choose(logits, request, len(sequence))
            assert choice.token == one.token or choice.margin < TIE
            flips, checked = flips + (choice.token != one.token), checked + 1
            np.testing.assert_allclose(one.logprob, choice.logprobs[one.token], rtol=0, atol=LOGPROB_ERROR)
            if request.sampling.cuts and choice.margin >= TIE:
                np.testing.assert_allclose(one.cut_logprob, choice.cut_logprobs[one.token], rtol=0, atol=LOGPROB_ERROR)
            sequence.append(one.token)
    return flips, checked


def checked_run(seed, block_tokens, cache_tokens, kv_policy, actions=40):
    """The schedule after its run, and the numbers of assert_as_decoded_without_a_cache."""
    schedule = Schedule(seed, block_tokens=block_tokens, cache_tokens=cache_tokens, kv_policy=kv_policy).run(actions)
    assert_delivered(schedule)
    numbers = assert_as_decoded_without_a_cache(schedule)
    if kv_policy == 'recompute':
        decoded = [one for _, answer in schedule.backend.answers.values() for one in answer]
        assert all(set(one.versions) == {one.versions[-1]} for one in decoded)
    return schedule, *numbers


@pytest.mark.parametrize(
    ('seed', 'block_tokens', 'cache_tokens', 'kv_policy'),
    [
        pytest.param(0, 4, 64, 'recompute', id='recompute 0'),
        pytest.param(1, 4, 64, 'recompute', id='recompute 1'),
        pytest.param(2, 4, 64, 'keep', id='keep'),
        pytest.param(3, CONTEXT, 4 * CONTEXT, 'recompute', id='a block for each slot'),
    ],
)
def test_a_random_schedule_gives_what_a_decoder_without_a_cache_gives(seed, block_tokens, cache_tokens, kv_policy):
    schedule, flips, checked = checked_run(seed, block_tokens, cache_tokens, kv_policy)
    assert flips == 0
    assert checked > 100
    # the schedule holds what it is meant to hold
    assert schedule.events('interrupt')
    assert (len(schedule.events('preempt')) > 0) == (cache_tokens < 4 * CONTEXT)
    assert (schedule.backend.shared > 0) == (block_tokens < CONTEXT)
    assert any(request.prefix for request, *_ in schedule.results)
    assert {reason for *_, reason in schedule.results} >= {'length', 'cancelled'}


@pytest.mark.slow
def test_many_long_schedules():
    reasons, flips, checked = set(), 0, 0
    for seed in range(10, 50):
        block_tokens, cache_tokens = [(4, 64), (CONTEXT, 4 * CONTEXT), (4, 64)][seed % 3]
        schedule, *numbers = checked_run(seed, block_tokens, cache_tokens, ('recompute', 'keep')[seed % 2], actions=60)
        flips, checked = flips + numbers[0], checked + numbers[1]
        reasons |= {reason for *_, reason in schedule.results}
    assert reasons == {'stop', 'length', 'cancelled'}
    assert checked > 10_000
    assert flips < checked / 10_000
