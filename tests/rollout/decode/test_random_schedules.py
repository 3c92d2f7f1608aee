"""An engine under random schedules, against a decoder that keeps no cache.

Arrivals in groups and in parts of groups, further turns and forks of what has ended, ends, cancels, preemptions, swaps,
pauses, shared prompts, and answers that go on elsewhere: one by one, or all on an engine with an empty cache. Each is
counted, so that none is missing.
Between the engine and its backend stands a recorder. It knows what every block holds and which weights wrote it, so
that every token can be decoded again by itself, and it spoils all free blocks that keep nothing before each call. It
does the same for the pool of the layers with a window, if they have one of their own, and for the states of delta nets.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.supervisor import Supervisor
from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import DeltaState
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.cache_table import CacheTable
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.models import family_examples
from tests.rollout.decode.plain_decoder import choose, next_logits
from tests.toy_states import ToyStates
from tests.toys import PRICES

CONTEXT, STEPS, VOCABULARY = 48, 4, 300
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=1e4
)
DECODER = Decoder(CONFIG)
TIE, LOGPROB_ERROR = 1e-4, 1e-5
DELTA_ERROR = 2e-3  # a delta net multiplies rounding: two float32 sides may each be 5e-4 from float64, see assert_near
FLOAT32_ERROR = 2e-5  # where the other side computes in float32 too, and of many more tokens
UNKNOWN = -1  # version of a position that nothing was written to


@functools.cache
def weights(version, decoder=DECODER):
    """Nested dicts of numpy arrays; of another decoder with every parameter drawn.

    The scale keeps rounding below LOGPROB_ERROR: at 1.5 a sequence of seed 1 has errors from 2e-6 to 1.5e-5 nats in
    float32, depending on nothing but the order of the width, and 2e-5 in engines with and without native attention.
    """
    if decoder is not DECODER:
        return family_examples.draw(decoder.config, version)
    return jax.tree.map(np.asarray, DECODER.init(version, scale=1.25))


@functools.cache
def backend(block_tokens, cache_tokens, decoder=DECODER, window_blocks=None, attention='auto', mla='absorbed'):
    return JaxDecodeBackend(
        decoder, slots=4, context_tokens=CONTEXT, block_tokens=block_tokens, cache_blocks=cache_tokens // block_tokens,
        window_blocks=window_blocks, attention=attention, mla=mla,
        prefill_buckets=(8, 16), decode_steps=STEPS, batch_buckets=(2, 4), filtered=True, dtype='float32',
    )  # fmt: skip


@functools.cache
def spoil_program(one):
    """Writes NaN to the listed places, `parts` in the layers with a pool of their own, `states` in delta nets."""
    config = one.placement.config

    def spoil(state, blocks, offsets, parts, states):
        bad = jnp.full((len(blocks), config.n_kv_heads, config.head_dim), jnp.nan)

        def spoiled(index, layer):
            if config.mixer(index) == 'delta':
                return DeltaState(*(leaf.at[states].set(jnp.nan) for leaf in layer))
            at = blocks if one.windows is None or config.window(index) is None else parts
            return one.placement.attention.write(layer, bad, bad, at, offsets)

        return state._replace(layers=tuple(spoiled(*each) for each in enumerate(state.layers)))

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
        self.answers = {}  # by identity of the request, (request, [Decoded])
        self.occurred = collections.Counter()
        self.forget()

    def forget(self):
        """The next state is a new one."""
        shape = self.inner.cache_blocks + 1, self.inner.block_tokens
        self.versions, self.tokens = np.full(shape, UNKNOWN), np.full(shape, UNKNOWN)
        self.held_states = ToyStates(self.inner.states)
        if self.inner.windows is not None:
            self.parts = np.full((self.inner.windows.blocks, self.inner.block_tokens, 2), UNKNOWN)

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
            self._check_parts(piece, places, piece.start)
            self._move_state(piece.state, places[: piece.start], piece.tokens, prepared.version)
            self._write_parts(piece, piece.start, piece.tokens, prepared.version)
            self._write(places[piece.start : piece.span.stop], piece.tokens, prepared.version)
            self.occurred['prefill behind cached positions'] += piece.start > 0
        return self.inner.prefill(prepared.params, self._spoil(state), pieces)

    def copy(self, state, copies, parts=(), states=()):
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        assert all(self.table.pool.count(block) == 1 for block in targets)
        self.occurred['state copied'] += len(states)
        state = self._spoil(state, [source for source, _ in parts], [source for source, _ in states])
        self.held_states.copy(states)
        for source, target in parts:
            self.parts[target] = self.parts[source]
        for array in (self.versions, self.tokens):
            array[targets] = array[sources]
        self.occurred['block copied'] += len(targets)
        return self.inner.copy(state, copies, parts, states)

    def generate(self, prepared, state, rows, steps):
        state, output = self.inner.generate(prepared.params, self._spoil(state), rows, steps)
        for index, (row, count) in enumerate(zip(rows, output.counts(), strict=True)):
            answer, places = self.answer(row.request), self._places(row.blocks)
            sequence = [*row.request.prompt_tokens, *row.request.prefix_tokens, *(one.token for one in answer)]
            assert [self.tokens[place] for place in places[: row.position]] == sequence[:-1]
            assert (row.token, row.position) == (sequence[-1], len(sequence) - 1)
            before = [int(self.versions[place]) for place in places[: row.position]]
            self._check_parts(row, places, row.position)
            self.occurred['block shared'] += sum(self.table.pool.count(block) > 1 for block in row.blocks)
            for step in range(count):
                cut = output.columns['sampling_logprobs'][step, index]
                token, logprob = output.tokens[step, index], output.logprobs[step, index]
                versions = [*before, *[prepared.version] * (step + 1)]
                answer.append(Decoded(int(token), float(logprob), float(cut), versions))
            written = [*sequence, *(one.token for one in answer[len(answer) - count :])][row.position : -1]
            self._write(places[row.position : row.position + count], written, prepared.version)
            self._write_parts(row, row.position, written, prepared.version)
            self._move_state(row.state, places[: row.position], written, prepared.version)
        return state, output

    def _places(self, blocks):
        """(block, offset) of every position."""
        return [(block, offset) for block in blocks for offset in range(self.inner.block_tokens)]

    def _write(self, places, tokens, version):
        for place, token in zip(places, tokens, strict=True):
            assert self.table.pool.count(place[0]) == 1, f'block {place[0]} is written while it is shared'
            self.versions[place], self.tokens[place] = version, token

    def _move_state(self, place, before, tokens, version):
        """The recurrent state at `place` is behind the tokens at the places `before`; after the dispatch also these."""
        self.held_states.begin(
            place, [int(self.tokens[one]) for one in before], [int(self.versions[one]) for one in before]
        )
        self.held_states.advance(place, list(map(int, tokens)), version)

    def _check_parts(self, row, places, start):
        """The layers with a window have what the token at `start` sees, as the others do."""
        if self.inner.windows is not None:
            size = self.inner.block_tokens
            for position in range(max(0, start + 1 - self.inner.windows.tokens), start):
                version, token = self.parts[row.parts[position // size], position % size]
                assert (version, token) == (self.versions[places[position]], self.tokens[places[position]])
            gone = row.parts[: -(-start // size)] == self.inner.windows.blank
            self.occurred['part is gone'] += bool(gone.any())

    def _write_parts(self, row, start, tokens, version):
        if self.inner.windows is not None:
            for position, token in enumerate(tokens, start=start):
                at = row.parts[position // self.inner.block_tokens], position % self.inner.block_tokens
                self.parts[at] = version, token

    def _spoil(self, state, copied=(), copied_states=()):
        padding, size = self.inner.cache_blocks, self.inner.block_tokens
        pool = self.table.pool
        free = [block for block in range(padding) if not pool.count(block) and block not in pool.index]
        self.versions[free] = self.tokens[free] = UNKNOWN
        blocks = np.full(padding * size, padding, np.int32)
        blocks[: len(free) * size] = np.repeat(free, size)
        parts = np.full(padding * size, 0 if self.inner.windows is None else self.inner.windows.padding, np.int32)
        if self.inner.windows is not None:
            unused = sorted({*range(self.inner.windows.blocks)} - {*self.table.windows.places.tolist()} - {*copied})
            self.parts[unused] = UNKNOWN
            parts[: len(unused) * size] = np.repeat(unused, size)[: len(parts)]
        offsets = (np.arange(padding * size) % size).astype(np.int32)
        return self._write_nan(state, blocks, offsets, parts, self._spoil_states(copied_states))

    def _spoil_states(self, copied):
        """The places of states that nothing holds and that keep nothing, then the padding's; int32 [places + 1]."""
        if self.inner.states is None:
            return None
        free = sorted(self.table.states.empty - {*copied})
        for place in free:
            self.held_states.places[place] = [UNKNOWN], [UNKNOWN]
        return np.array([*free, *[self.inner.states.padding] * (self.inner.states.places + 1 - len(free))], np.int32)

    def _write_nan(self, state, blocks, offsets, parts, states):
        return spoil_program(self.inner)(state, blocks, offsets, parts, states)


class Schedule:
    """One random schedule: everything in it is a function of the seed."""

    def __init__(self, seed, *, block_tokens, cache_tokens, kv_policy, decoder=DECODER, recorder=None, **pool):
        self.weights = lambda version: weights(version, decoder)
        self.rng, self.log = np.random.default_rng(seed), EventLog()
        self.log.listeners.append(check_types)
        lanes = {'engine/0': 1, 'publish/0': 1, 'script': 1}
        self.clock = VirtualClock(lanes, self.log, PRICES | {'script': 1.0})
        self.backend = recorder or Recorder(backend(block_tokens, cache_tokens, decoder, **pool))
        self.occurred = self.backend.occurred
        self.kv_policy, self.decode_steps = kv_policy, int(self.rng.integers(1, STEPS + 1))
        self.supervisor = Supervisor(self.clock)
        self.tasks, self.absent, self.results = {}, [], []  # absent: members of a group that has begun to arrive
        self.draws, self.version, self.swap = 0, 0, None
        self.engine = self._build_engine()

    def _build_engine(self):
        """An engine with an empty cache and the version that is in use."""
        engine = LocalEngine(
            0, self.backend, self.clock, self.log, receive=lambda p: (p.version, self.weights(p.version)),
            version=self.version, params=(self.version, self.weights(self.version)),
            rollout=RolloutSection(kv_policy=self.kv_policy, decode_steps=self.decode_steps),
        )  # fmt: skip
        self.backend.forget()
        self.backend.table = engine.stream.cache
        place = self.backend.table.place

        def counted(running, *, at_any_cost):
            placed = place(running, at_any_cost=at_any_cost)
            if placed and running.cached.prefix is not None:
                prefix = running.cached.prefix
                self.occurred['prefix hit'] += prefix.is_complete
                self.occurred['kept sequence gone on with'] += (
                    prefix.expected == 1 and not prefix.is_complete and (prefix.filled > 0)
                )
            return placed

        self.backend.table.place = counted
        return engine

    def run(self, actions):
        async def program():
            self.engine.start(self.supervisor)
            await self._act(actions)

        self.clock.execute(self.supervisor.run(program()))
        self.backend.table.check([])
        self._count()
        return self

    def _count(self):
        """What the results and the log show to have occurred."""
        for _, segments, reason in self.results:
            self.occurred[reason] += 1
            self.occurred['answer of several versions'] += len({one.policy_version for one in segments}) > 1
        last = {result[0].request_id: result for result in self.results}
        self.occurred['swap'] = len(self.events('interrupt'))
        self.occurred['preemption'] = len(self.events('preempt'))
        for event in self.events('preempt'):
            request, segments, reason = last[event['request']]
            length = len(request.prompt_tokens) + len(request.prefix_tokens) + sum(len(one.tokens) for one in segments)
            self.occurred['preempted answer goes on'] += reason != 'cancelled' and length > event['tokens']
        for _, answer in self.backend.answers.values():
            self.occurred['keys of earlier weights read'] += any(len({*one.versions}) > 1 for one in answer)

    def events(self, kind):
        return [event for event in self.log.events if event['kind'] == kind]

    async def _act(self, actions):
        for _ in range(actions):
            names = ['arrive', 'come_late', 'cancel', 'move', 'swap', 'pause', 'resume_elsewhere', 'take_turn']
            await getattr(self, f'_{self.rng.choice(names, p=[0.2, 0.2, 0.1, 0.1, 0.1, 0.08, 0.06, 0.16])}')()
            await self._pass_time(self.rng.exponential(0.08))
            self.backend.table.check(self.engine.stream.table.open_requests())
        for request in self.absent:
            self._submit(request)
        while self.tasks:
            await next(iter(self.tasks.values()))
        if self.swap is not None:
            await self.swap

    async def _pass_time(self, seconds):
        await self.clock.run('script', lambda: None, Work('script', float(seconds)))

    async def _take_turn(self):
        """A group goes on behind an answer that has ended, or behind a part of it."""
        ended = [result for result in self.results if result[2] != 'cancelled']
        if ended:
            request, segments, _ = ended[-1 - int(self.rng.integers(min(3, len(ended))))]
            said = np.concatenate([request.prompt_tokens, request.prefix_tokens, *(one.tokens for one in segments)])
            part = said[: int(self.rng.integers(len(said) // 2, len(said) + 1)) if self.rng.random() < 0.3 else None]
            heard = self.rng.integers(0, VOCABULARY, self.rng.integers(1, 5))
            self._start(np.concatenate([part[: CONTEXT - 8], heard]).astype(np.int32))

    async def _arrive(self):
        """The first members of a group; the others come later."""
        self._start(self.rng.integers(0, VOCABULARY, self.rng.integers(1, 25)).astype(np.int32))

    def _start(self, prompt):
        rng, self.draws = self.rng, self.draws + 1
        cuts = rng.choice(3)
        sampling = SamplingParams(
            max_new_tokens=int(rng.integers(1, min(24, CONTEXT - len(prompt)))),
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
            name, table = str(self.rng.choice(sorted(self.tasks))), self.engine.stream.table
            for running in table.open_requests():
                if running.request_id == name:
                    is_decoded = table.has_slot(running) and running.has_begun
                    self.occurred['cancel in the middle' if is_decoded else 'cancel before the first token'] += 1
            self.engine.cancel(name)

    async def _move(self):
        """A request is taken away, and what it has delivered comes back with it."""
        if not self.tasks:
            return
        name = str(self.rng.choice(sorted(self.tasks)))
        task = self.tasks[name]
        self.engine.cancel(name)
        self._go_on(*await task)

    def _go_on(self, request, segments, reason):
        if reason == 'cancelled':
            resumed = dataclasses.replace(request, prefix=(*request.prefix, *segments))
            self.occurred['resumed answer'] += bool(resumed.prefix)
            self._submit(resumed)

    async def _resume_elsewhere(self):
        """All requests go on, with what they have delivered, on an engine with an empty cache; so a run is resumed."""
        if self.swap is not None and not self.swap.done():
            return
        await self.engine.pause()
        names = [request.request_id for request in self.engine.open_requests()]
        tasks = [self.tasks[name] for name in names]
        for name in names:
            self.engine.cancel(name)
        results = [await task for task in tasks]
        self.backend.table.check([])
        self.engine = self._build_engine()
        self.engine.start(self.supervisor)
        self.occurred['resumed engine'] += any(segments for _, segments, _ in results)
        for result in results:
            self._go_on(*result)

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
        begun = [running for running in self.engine.stream.table.open_requests() if running.has_begun]
        self.occurred['pause in the middle'] += bool(begun)
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


_PLAIN = functools.partial(next_logits, CONFIG)


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


def assert_as_decoded_without_a_cache(schedule, next_logits=_PLAIN, error=LOGPROB_ERROR):
    """The same tokens unless two were as good, and log-probs to rounding: (tokens that differ, all tokens)."""
    by_version = {version: schedule.weights(version) for version in range(schedule.version + 1)}
    flips, errors = 0, []
    for request, decoded in schedule.backend.answers.values():
        sequence = [*request.prompt_tokens.tolist(), *request.prefix_tokens.tolist()]
        for one in decoded:
            logits = next_logits(by_version, sequence, one.versions)
            choice = choose(logits, request, len(sequence))
            assert choice.token == one.token or choice.margin < TIE
            flips += choice.token != one.token
            errors.append(abs(one.logprob - choice.logprobs[one.token]))
            np.testing.assert_allclose(one.logprob, choice.logprobs[one.token], rtol=0, atol=error)
            if request.sampling.cuts and choice.margin >= TIE:
                np.testing.assert_allclose(one.cut_logprob, choice.cut_logprobs[one.token], rtol=0, atol=error)
            sequence.append(one.token)
    assert np.mean(errors) <= LOGPROB_ERROR
    return flips, len(errors)


def checked_run(seed, block_tokens, cache_tokens, kv_policy, actions=40, decoder=DECODER, pool=None, **reference):
    """The schedule after its run, and the numbers of assert_as_decoded_without_a_cache."""
    sizes = {'block_tokens': block_tokens, 'cache_tokens': cache_tokens}
    schedule = Schedule(seed, **sizes, kv_policy=kv_policy, decoder=decoder, **(pool or {})).run(actions)
    assert_delivered(schedule)
    numbers = assert_as_decoded_without_a_cache(schedule, **reference)
    for request, answer in schedule.backend.answers.values():
        read = answer[0].versions[: len(request.prompt_tokens) - 1] if answer else []
        assert len({*read}) <= 1  # KV of several versions, as of an answer under 'keep', is nobody's prompt
    if kv_policy == 'recompute':
        decoded = [one for _, answer in schedule.backend.answers.values() for one in answer]
        assert all(set(one.versions) == {one.versions[-1]} for one in decoded)
    return schedule, *numbers


ALWAYS = {
    'stop', 'length', 'cancelled', 'cancel in the middle', 'cancel before the first token', 'swap',
    'answer of several versions', 'prefix hit', 'block copied', 'pause in the middle', 'resumed answer',
    'resumed engine', 'prefill behind cached positions', 'kept sequence gone on with',
}  # fmt: skip
OF_A_SMALL_CACHE = {'preemption', 'preempted answer goes on'}


def expected_events(block_tokens, cache_tokens, kv_policy):
    """What must occur, and what cannot."""
    possible = {
        'block shared': block_tokens < CONTEXT,
        'keys of earlier weights read': kv_policy == 'keep',
        **dict.fromkeys(OF_A_SMALL_CACHE, cache_tokens < 4 * CONTEXT),
    }
    return ALWAYS | {name for name, can in possible.items() if can}


@pytest.mark.parametrize(
    ('block_tokens', 'cache_tokens', 'kv_policy'),
    [
        pytest.param(4, 64, 'recompute', id='recompute'),
        pytest.param(4, 64, 'keep', id='keep', marks=pytest.mark.slow),  # of a family, below
        pytest.param(CONTEXT, 4 * CONTEXT, 'recompute', id='a block for each slot', marks=pytest.mark.slow),
    ],
)
def test_random_schedules_give_what_a_decoder_without_a_cache_gives(block_tokens, cache_tokens, kv_policy):
    occurred = collections.Counter()
    for seed in range(3):
        schedule, flips, checked = checked_run(seed, block_tokens, cache_tokens, kv_policy)
        assert flips == 0
        assert checked > 100
        occurred += schedule.occurred  # keeps what is above 0
    assert set(occurred) == expected_events(block_tokens, cache_tokens, kv_policy)


CASES = {name: (config, {}) for name, config in family_examples.CONFIGS.items()}
CASES['deepseek_v3 expanded'] = family_examples.CONFIGS['deepseek_v3'], {'mla': 'expanded'}
QUICK = ('qwen3_5_moe', 'deepseek_v3')  # test_window_pool.py has windows
SEEDS = {True: (3, 5), False: (0, 1)}  # of hybrids: prompts of one token, and turns behind rows that end in a dispatch


# the decoder of a family that keeps the keys of earlier tokens, but nothing else: no blocks, pieces, prefixes or rows
@pytest.mark.parametrize('kv_policy', [pytest.param('recompute', marks=pytest.mark.slow), 'keep'])
@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES],
)
def test_every_family_gives_under_random_schedules_what_it_gives_token_by_token(name, kv_policy):
    config, pool = CASES[name]
    occurred = collections.Counter()
    # what 'keep' keeps depends on the form: of latents, the weights of keys and values are those that read them
    form = config if pool.get('mla') == 'expanded' else config.absorb()
    reference = family_examples.TokenByToken(form, CONTEXT)
    error = DELTA_ERROR if config.delta else FLOAT32_ERROR
    for seed in SEEDS[config.delta is not None]:
        schedule, flips, checked = checked_run(
            seed, 4, 64, kv_policy, decoder=Decoder(config), pool=pool, next_logits=reference.next_logits, error=error
        )
        assert flips == 0
        assert checked > 100
        occurred += schedule.occurred
    assert {'prefix hit', 'preempted answer goes on', 'block copied', 'resumed engine', 'swap'} <= set(occurred)
    assert ('state copied' in occurred) == (config.delta is not None)
    assert ('keys of earlier weights read' in occurred) == (kv_policy == 'keep')


def test_a_free_block_that_is_read_shows():
    one = backend(4, 64)
    recorder = Recorder(one)
    recorder.table = CacheTable(one.cache_blocks, 4, context_tokens=CONTEXT, steps=STEPS, version=0)
    held = recorder.table.pool.allocate(3)
    prepared, state = recorder.prepare((0, weights(0))), one.initial_state()
    request = GenerationRequest(0, 0, 0, np.arange(9, dtype=np.int32), SamplingParams(3, 1.0, 0, 1.0, ()))
    state = recorder.prefill(prepared, state, [PrefillPiece(request.prompt_tokens[:-1], 0, held)])
    row = DecodeRow(request, 8, 8, 12, held)
    state, output = one.generate(prepared.params, state, [row], 1)
    assert not output.unsound()
    _, output = one.generate(prepared.params, state, [row._replace(blocks=[*held[:1], 9, *held[2:]])], 1)
    assert output.unsound()


@pytest.mark.slow
def test_many_long_schedules():
    flips = checked = 0
    for seed in range(10, 50):
        block_tokens, cache_tokens = [(4, 64), (CONTEXT, 4 * CONTEXT), (4, 64)][seed % 3]
        policy = ('recompute', 'keep')[seed % 2]
        _, *numbers = checked_run(seed, block_tokens, cache_tokens, policy, actions=60, error=FLOAT32_ERROR)
        flips, checked = flips + numbers[0], checked + numbers[1]
    assert checked > 10_000
    assert flips < checked / 10_000
