"""The programs of a learner: rows and scalars that they read, what each computes, and when they are compiled."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.learning.forward import forward
from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.objectives import Likelihood
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import training_rows
from areal_jax.learning.programs import CompiledPrograms, Programs, describe_state, place_state
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples
from tests.learning.examples import make_optimizer, random_groups, tiny_decoder
from tests.learning.objective.tokens import loss_of

_DECODER = tiny_decoder(n_layers=1)
_TEMPERATURE = 0.7
_GROUPS = random_groups(3, 3)
_ADVANTAGES = [np.random.default_rng(9).normal(size=len(g.trajectories)).astype(np.float32) for g in _GROUPS]
_TRAJECTORIES = [t for g in _GROUPS for t in g.trajectories]


@pytest.fixture(scope='module')
def params():
    return _DECODER.init(seed=1, scale=2.0)


def _attend_causally(q, k, v, cache, window):
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum('qhd,khd->hqk', q, k) / jnp.sqrt(q.shape[-1])
    distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    causal = (distance >= 0) & (distance < (window or len(q)))
    return jnp.einsum('hqk,khd->qhd', jax.nn.softmax(jnp.where(causal, scores, -1e30)), v), cache


def _unpacked_loss(params):
    """One trajectory at a time, padded at its end where causal attention cannot see; logits [trajectory, T, V]."""
    length = max(len(t.tokens) for t in _TRAJECTORIES)

    def padded(arrays):
        return np.stack([np.pad(a, (0, length - len(a))) for a in arrays])

    tokens, mask = padded([t.tokens for t in _TRAJECTORIES]), padded([t.loss_mask for t in _TRAJECTORIES])
    behavior = padded([t.behavior_logprobs for t in _TRAJECTORIES])[:, 1:]

    def logits_of(one):
        hidden, _ = _DECODER.hidden(params, one, jnp.arange(length), _attend_causally)
        return hidden @ _DECODER.head(params).T / _TEMPERATURE

    logits = jax.vmap(logits_of)(tokens)
    policy = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    advantages = np.concatenate(_ADVANTAGES)[:, None] * np.ones_like(behavior)
    loss, _ = loss_of(policy, behavior, behavior, advantages, mask[:, 1:], float(mask.sum()))
    return loss, (policy, logits)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def _microbatch_loss(params, rows, denominator):
    policy, entropy = forward(_DECODER, params, rows, _TEMPERATURE)
    behavior = rows['behavior_logprobs']
    loss, _ = loss_of(policy, behavior, behavior, rows['advantages'], rows['loss_mask'], denominator)
    return loss, (policy, entropy)


def _packed_loss_and_gradient(params, rows, denominator):
    parts = [
        _microbatch_loss(params, {name: array[m] for name, array in rows.items()}, denominator)
        for m in range(len(rows['tokens']))
    ]
    loss, gradient = jax.tree.map(lambda *p: sum(p), *[(loss, gradient) for (loss, _), gradient in parts])
    return (loss, np.stack([policy for (_, (policy, _)), _ in parts])), gradient


@pytest.fixture(scope='module')
def unpacked(params):
    return jax.jit(jax.value_and_grad(_unpacked_loss, has_aux=True))(params)


@pytest.mark.parametrize(
    ('mode', 'row_tokens', 'rows_per_microbatch'),
    [
        ('ordinary', 14, 1),  # at most one or two trajectories a row
        pytest.param('ordinary', 40, 2, marks=pytest.mark.slow),
        pytest.param('shared_prompt', 24, 1, marks=pytest.mark.slow),  # some groups are split over rows
        ('shared_prompt', 48, 3),
    ],
)
def test_packed_equals_one_trajectory_at_a_time(params, unpacked, mode, row_tokens, rows_per_microbatch):
    (batch,), _ = pack(
        _GROUPS,
        _ADVANTAGES,
        mode=mode,
        fill='first_fit',
        row_tokens=row_tokens,
        row_loss_tokens=24,
        rows_per_microbatch=rows_per_microbatch,
        n_minibatches=1,
    )
    (loss, (policy, _)), gradient = unpacked
    (packed, found), packed_gradient = _packed_loss_and_gradient(params, *training_rows(batch, Likelihood()))
    np.testing.assert_allclose(packed, loss, rtol=1e-5)
    for index, t in enumerate(_TRAJECTORIES):
        predicted = np.flatnonzero(t.loss_mask) - 1
        expected = np.asarray(policy)[index, predicted]
        np.testing.assert_allclose(found[batch.trajectory_ids == index], expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), packed_gradient, gradient)


@pytest.mark.parametrize('attention', ['dense', 'blocked'])
def test_a_model_with_a_window_sees_no_further_in_packed_rows(attention):
    # 3 positions: most answers no longer see the start of their prompt
    decoder = Decoder(dataclasses.replace(_DECODER.config, kinds=(LayerKind(3),)))
    params = decoder.init(seed=1, scale=2.0)
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='shared_prompt', fill='first_fit',
        row_tokens=48, row_loss_tokens=24, rows_per_microbatch=3, n_minibatches=1,
    )  # fmt: skip
    rows, _ = training_rows(batch, Likelihood())
    run = jax.jit(functools.partial(forward, decoder, attention=attention), static_argnames='temperature')
    found = run(params, {name: array[0] for name, array in rows.items()}, temperature=1.0)[0]

    @jax.jit
    def logprobs_of(tokens):
        hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), _attend_causally)
        return jax.nn.log_softmax(hidden @ decoder.head(params).T)

    for index, t in enumerate(_TRAJECTORIES[:3]):
        predicted = np.flatnonzero(t.loss_mask)
        expected = logprobs_of(np.pad(t.tokens, (0, 32 - len(t.tokens))))[predicted - 1, t.tokens[predicted]]
        np.testing.assert_allclose(found[batch.trajectory_ids[0] == index], expected, atol=1e-5)


def test_last_token_of_an_answer_has_gradient(params):
    # raising the log-prob of the last token alone moves the weights: it is a target although it is never read
    (batch,), _ = pack(
        _GROUPS[:1], _ADVANTAGES[:1], mode='shared_prompt', fill='first_fit',
        row_tokens=64, row_loss_tokens=32, rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    rows, _ = training_rows(batch, Likelihood())
    one = {name: array[0] for name, array in rows.items()}
    last = np.flatnonzero(batch.trajectory_ids[0, 0] == 0)[-1]
    assert one['targets'][0, last] == _TRAJECTORIES[0].tokens[-1]
    gradient = jax.jit(jax.grad(lambda p, r: forward(_DECODER, p, r, 1.0)[0][0, last]))(params, one)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) > 1e-3


def test_entropy_is_of_the_distribution_at_the_temperature(params, unpacked):
    (_, (_, logits)), _ = unpacked
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='shared_prompt', fill='first_fit',
        row_tokens=48, row_loss_tokens=24, rows_per_microbatch=3, n_minibatches=1,
    )  # fmt: skip
    rows, denominator = training_rows(batch, Likelihood())
    (_, (_, entropy)), _ = _microbatch_loss(params, {name: array[0] for name, array in rows.items()}, denominator)
    expected = jax.scipy.special.entr(jax.nn.softmax(logits)).sum(-1)[0, np.flatnonzero(_TRAJECTORIES[0].loss_mask) - 1]
    np.testing.assert_allclose(entropy[batch.trajectory_ids[0] == 0], expected, atol=1e-5)


def test_rows_carry_the_weights_of_their_aggregation():
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='ordinary', fill='first_fit',
        row_tokens=40, row_loss_tokens=24, rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    rows, denominator = training_rows(batch, Likelihood('sequence_mean'))
    weights, expected = token_weights(batch, 'sequence_mean')
    np.testing.assert_array_equal(rows['token_weights'], weights)
    assert denominator == expected == len(_TRAJECTORIES)
    np.testing.assert_allclose(weights.sum(), len(_TRAJECTORIES), rtol=1e-5)  # every trajectory weighs 1


_TWO_LEARNERS_GROUPS = random_groups(5, 5)
_KINDS = {
    'float32': {},
    'a mesh, a reference, bfloat16': {'mesh': (2, 4), 'dtype': 'bfloat16', 'kl_coefficient': 0.1},
    'scan': {'accumulate': 'scan'},
    'adapters, in float16': {'lora': Lora(2, 4.0, ('query', 'up')), 'dtype': 'float16'},
}


_QUICK_KINDS = [pytest.param(k, marks=[pytest.mark.slow] if k in ('float32', 'scan') else []) for k in _KINDS]


@pytest.fixture(autouse=True)
def _keeps_nothing(monkeypatch):
    """What other tests have compiled is compiled anew."""
    monkeypatch.setattr(CompiledPrograms, 'kept', collections.OrderedDict())


def make_learner(*, mesh=(1, 1), lora=None, optimizer='adamw', compile_ahead=False, **settings):
    decoder = Decoder(tiny_decoder(n_layers=1).config, lora=lora)
    return examples.make_learner(
        make_mesh(*mesh), decoder=decoder, params=decoder.init(seed=2, scale=2.0),
        optimizer=make_optimizer(optimizer, clip_norm=1.0), parts={'compile_ahead': compile_ahead},
        **{'rows_per_microbatch': 8} | settings,
    )  # fmt: skip


@pytest.mark.parametrize('kind', _KINDS)
def test_the_described_state_is_the_one_that_is_placed(kind):
    learner = make_learner(**_KINDS[kind])
    state, definitions = learner.state, learner.programs.definitions
    settings = definitions.settings
    described = describe_state(state.params, state.frozen, settings, definitions)
    placed = place_state(state.params, state.frozen, settings, learner.programs)
    form = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding)
    assert jax.tree.map(form, vars(described)) == jax.tree.map(form, vars(placed))


@pytest.mark.parametrize('kind', _QUICK_KINDS)
def test_programs_compiled_ahead_are_those_of_the_updates(kind):
    """Two updates and a publication bring no new program, and change the weights like those of another learner."""
    ahead, other = make_learner(compile_ahead=True, **_KINDS[kind]), make_learner(**_KINDS[kind])
    assert ahead.warm_up() == other.warm_up()
    with CompilationCounter() as compilations:
        for version in (2, 3):
            metrics, expected = (
                ahead.update(_TWO_LEARNERS_GROUPS, version),
                other.update(_TWO_LEARNERS_GROUPS, version),
            )
            np.testing.assert_equal(metrics, expected)
        jax.tree.map(np.testing.assert_array_equal, ahead.publish(4), other.publish(4))
    assert compilations.count == 0


class _SlowDefinitions:
    """One program, whose definition waits until the test lets it go on."""

    def __init__(self):
        self.begun, self.may_end, self.made = threading.Event(), threading.Event(), 0

    def double(self):
        self.made += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return jax.jit(lambda x: 2 * x)


def test_a_thread_waits_for_the_program_that_another_one_compiles():
    definitions = _SlowDefinitions()
    programs, results = CompiledPrograms(definitions), []
    threads = [threading.Thread(target=lambda: results.append(programs.run('double', np.float32(3)))) for _ in range(2)]
    threads[0].start()
    assert definitions.begun.wait(60)
    threads[1].start()
    definitions.may_end.set()
    for thread in threads:
        thread.join(60)
    assert (results, definitions.made, len(programs.compiled)) == ([6, 6], 1, 1)


def names(programs):
    return {name for name, _ in programs}


def test_a_learner_traces_ahead_and_compiles_from_when_it_may():
    """Nothing is traced or compiled in the thread that waits for the programs."""
    learner = make_learner(compile_ahead=True)
    learner.wait_traced()
    assert 'accumulate' in names(learner.programs.traced)
    assert 'accumulate' not in names(learner.programs._programs)  # what places the state is there
    learner.begin_compiling()
    with CompilationCounter() as compilations:
        programs = learner.finish_compiling()
    assert programs == make_learner().warm_up()
    assert compilations.count == 0
    assert not learner.programs.traced


@pytest.mark.parametrize('kind', _QUICK_KINDS)
def test_an_equal_learner_compiles_nothing(kind):
    learner = make_learner(**_KINDS[kind])
    declared = learner.warm_up()
    equal = make_learner(**_KINDS[kind])
    with CompilationCounter() as compilations:
        assert equal.warm_up() == declared
    assert compilations.count == 0
    programs = learner.programs.compiled
    assert all(programs[key] is program for key, program in equal.programs.compiled.items())


@pytest.mark.parametrize(
    'changed',
    [
        {'clip_epsilon': 0.3},
        pytest.param({'mesh': (1, 2)}, marks=pytest.mark.slow),
        {'optimizer': 'lion'},
        pytest.param({'lora': Lora(1, 4.0, ('query',))}, marks=pytest.mark.slow),
    ],
)
def test_another_learner_compiles_its_own(changed):
    learner, other = make_learner(), make_learner(**changed)
    learner.warm_up()
    other.warm_up()
    assert not {id(one) for one in learner.programs.compiled.values()} & {
        id(one) for one in other.programs.compiled.values()
    }


def test_settings_of_jax_reach_the_next_learner():
    learner = make_learner()
    learner.warm_up()
    before = jax.config.jax_default_matmul_precision
    jax.config.update('jax_default_matmul_precision', 'highest')
    try:
        other = make_learner()
        other.warm_up()
    finally:
        jax.config.update('jax_default_matmul_precision', before)
    key = next(key for key in learner.programs.compiled if key[0] == 'accumulate')
    assert learner.programs.compiled[key] is not other.programs.compiled[key]


def test_the_memory_of_programs_is_that_of_the_one_that_needs_most():
    programs = CompiledPrograms(_Sums())
    assert programs.temporary_bytes == 0
    programs.compile('short', {'tokens': np.zeros(1000, np.float32)})
    short = programs.temporary_bytes
    assert 4 * 1000**2 <= short < 4 * 1100**2  # the products of all pairs
    programs.compile('long', {'tokens': np.zeros(2000, np.float32)})
    assert programs.temporary_bytes == pytest.approx(4 * short, rel=0.1)


class _Sums:
    """Programs that hold the products of all pairs of their numbers."""

    def short(self):
        return jax.jit(lambda x: jnp.sort(x['tokens'][:, None] * x['tokens'][None]).sum())

    long = short


def test_the_oldest_programs_are_let_go(monkeypatch):
    monkeypatch.setattr('areal_jax.learning.programs.MOST_KEPT', 3)
    learner = make_learner()
    declared = learner.warm_up()
    assert (len(learner.programs.compiled), len(CompiledPrograms.kept)) == (declared, 3)


def test_a_learner_that_is_closed_compiles_nothing():
    learner = make_learner(compile_ahead=True)
    learner.wait_traced()
    learner.close()
    assert 'accumulate' not in names(learner.programs.compiled)


def test_warm_up_raises_what_the_thread_met_that_compiled_ahead(monkeypatch):
    threads = []

    def fail(self):
        threads.append(threading.current_thread().name)
        raise RuntimeError('no memory for the compiler')

    monkeypatch.setattr(Programs, 'accumulate', fail)
    learner = make_learner(compile_ahead=True)
    with pytest.raises(RuntimeError, match='no memory for the compiler'):
        learner.warm_up()
    assert threads == ['learner warm-up']
