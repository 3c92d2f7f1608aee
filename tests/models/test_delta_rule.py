"""The gated delta rule: its forms agree, sequences of a packed row do not see each other, and states stay apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.delta_rule import (
    DeltaInputs,
    PieceChunks,
    Projected,
    copy_states,
    empty_states,
    run_pieces,
    run_rows,
    run_steps,
    solve_unit_lower,
)
from areal_jax.models.layer_parts import CHUNK, DeltaNet
from areal_jax.models.weight_rows import Init
from areal_jax.models.weights import weight_table
from tests.models.family_examples import CONFIGS, HYBRIDS

DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=12, taps=4)
# (segment, its prompt, tokens): a group whose answers begin and end inside chunks, one of one token, another group, a
# lone sequence and padding
SEGMENTS = [(1, 1, 70), (2, 1, 5), (3, 1, 1), (4, 1, 90), (5, 5, 3), (6, 5, 40), (7, 5, 64), (8, 8, 33), (0, 0, 20)]


def ids(segments=SEGMENTS):
    lengths = [length for *_, length in segments]
    return (np.repeat([row[index] for row in segments], lengths).astype(np.int32) for index in (0, 1))


SEGMENT_IDS, PARENT_IDS = ids()
TOKENS = len(SEGMENT_IDS)


@functools.cache
def inputs(slow=False):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    keys, values = (DELTA.key_heads, DELTA.key_dim), (DELTA.value_heads, DELTA.value_dim)
    decay = -np.exp(draw(TOKENS, DELTA.value_heads)) * (0.02 if slow else 1)
    beta = 1 / (1 + np.exp(-draw(TOKENS, DELTA.value_heads)))
    taps = Projected(draw(*keys, DELTA.taps), draw(*keys, DELTA.taps), draw(*values, DELTA.taps))
    return DeltaInputs(draw(TOKENS, *keys), draw(TOKENS, *keys), draw(TOKENS, *values), decay, beta, taps)


def pick(given, index):
    return given.map_tokens(lambda x: jnp.asarray(x)[index])


def by_steps(given):
    """The rule token by token, [T, H, Dv]."""

    def step(states, token):
        row = DeltaInputs(*(x[None] for x in token), given.taps)
        out, states = run_steps(row, states, jnp.zeros(1, jnp.int32), jnp.zeros(1, bool))
        return states, out[0]

    return jax.lax.scan(step, empty_states(1, DELTA, jnp.float32), tuple(given[:5]))[1]


def apart(given):
    """Every sequence by itself, token by token, each answer behind its own copy of the prompt; 0 for padding."""
    out = jnp.zeros((TOKENS, DELTA.value_heads, DELTA.value_dim))
    for segment, parent, length in SEGMENTS[:-1]:
        own = np.flatnonzero(segment == SEGMENT_IDS)
        path = own if segment == parent else np.concatenate([np.flatnonzero(parent == SEGMENT_IDS), own])
        out = out.at[own].set(by_steps(pick(given, path))[-length:])
    return out


def packed(given, chunk=CHUNK, segments=SEGMENT_IDS, parents=PARENT_IDS):
    row = given.map_tokens(lambda x: jnp.asarray(x)[None])
    return run_rows(row, jnp.asarray(segments)[None], jnp.asarray(parents)[None], chunk)[0]


run_packed = jax.jit(packed)


def with_gradient(run):
    weights = np.random.default_rng(1).normal(size=(TOKENS, DELTA.value_heads, DELTA.value_dim)).astype(np.float32)
    weights[SEGMENT_IDS == 0] = 0
    return jax.jit(
        jax.value_and_grad(lambda given: (lambda out: (jnp.sum(out * weights), out))(run(given)), has_aux=True)
    )


@functools.cache
def expected(slow):
    return with_gradient(apart)(inputs(slow))


@pytest.mark.parametrize(
    ('chunk', 'slow'),
    [
        pytest.param(64, False, marks=pytest.mark.slow),
        (64, True),
        (5, False),
        pytest.param(512, True, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_with_shared_prompts_are_sequences_apart(chunk, slow):
    (_, out), gradient = with_gradient(functools.partial(packed, chunk=chunk))(inputs(slow))
    (_, wanted), of_apart = expected(slow)
    used = SEGMENT_IDS > 0
    np.testing.assert_allclose(out[used], wanted[used], atol=3e-5)
    for found, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(of_apart), strict=True):
        assert np.linalg.norm(found - other) <= 1e-5 * np.linalg.norm(other)


def test_rows_side_by_side_are_rows_alone():
    given, other = inputs(), pick(inputs(), np.arange(TOKENS)[::-1])
    rows = DeltaInputs(*(jnp.stack([x, y]) for x, y in zip(given[:5], other[:5], strict=True)), given.taps)
    both = run_rows(rows, jnp.stack([SEGMENT_IDS] * 2), jnp.stack([PARENT_IDS] * 2))
    for row, alone in zip(both, (given, other), strict=True):
        np.testing.assert_allclose(row, packed(alone), atol=1e-5)


@pytest.mark.parametrize('segment', [1, 4, 5, 6])
def test_a_changed_token_changes_no_bit_of_other_sequences(segment):
    # the first tokens of a segment would read a neighbour's through the convolution, all of them through the state
    before = np.asarray(run_packed(inputs(slow=True)))
    changed = [np.array(x) for x in inputs(slow=True)[:5]]
    last = np.flatnonzero(segment == SEGMENT_IDS)[-1]
    for x in changed[:3]:
        x[last] += 1
    after = np.asarray(run_packed(DeltaInputs(*changed, inputs().taps)))
    sees = (segment == SEGMENT_IDS) | (segment == PARENT_IDS)
    sees[:last] = False
    np.testing.assert_array_equal(after[~sees], before[~sees])
    assert (after[sees] != before[sees]).any(axis=(1, 2)).all()


@pytest.mark.parametrize('beta', [0.98, 1.0])
def test_keys_that_are_alike_are_solved_to_the_digits_of_float32(beta):
    # powers of the matrix, as in (I - A)(I + A^2)(I + A^4)..., have errors of 6e10 here
    rng = np.random.default_rng(2)
    lower = np.tril(np.full((CHUNK, CHUNK), beta) * rng.uniform(0.9, 1.0, (2, CHUNK, CHUNK)), -1)
    wanted = rng.normal(size=(2, CHUNK, 7))
    exact = np.linalg.solve(np.eye(CHUNK) + lower, wanted)
    found = solve_unit_lower(jnp.asarray(lower, jnp.float32), jnp.asarray(wanted, jnp.float32))
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize('size', [1, 7, 16, 24, 64])
def test_the_gradient_of_the_solution_is_that_of_a_general_solver(size):
    rng = np.random.default_rng(3)
    lower = jnp.asarray(np.tril(rng.normal(size=(3, size, size)) * 0.2, -1), jnp.float32)
    wanted, weights = (jnp.asarray(rng.normal(size=(3, size, 5)), jnp.float32) for _ in range(2))
    general = lambda lower, wanted: jnp.sum(weights * jnp.linalg.solve(jnp.eye(size) + jnp.tril(lower, -1), wanted))
    own = lambda lower, wanted: jnp.sum(weights * solve_unit_lower(lower, wanted))
    for found, other in zip(*(jax.grad(f, argnums=(0, 1))(lower, wanted) for f in (own, general)), strict=True):
        np.testing.assert_allclose(found, other, atol=2e-5)


def chunks_of(pieces):
    """PieceChunks of (tokens, place, whether the sequence begins) one after the other."""
    rows, first = [], 0
    for tokens, place, begins in pieces:
        for start in range(0, tokens, CHUNK):
            rows.append((first + start, min(CHUNK, tokens - start), place, begins and not start))
        first += tokens
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return PieceChunks(*(x.astype(np.int32) for x in columns[:3]), columns[3], np.int32(len(rows)))


def test_a_sequence_cut_into_pieces_goes_on_from_its_state():
    given = inputs(slow=True)
    whole = np.asarray(by_steps(pick(given, np.arange(TOKENS))))
    states = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), empty_states(3, DELTA, jnp.float32))
    run, out, start = jax.jit(run_pieces), [], 0
    for cut in (1, 2, 61, 64, 65, 3, 128, TOKENS - 324):
        own = np.concatenate(
            [np.arange(7), np.arange(start, start + cut), np.zeros(2, int)]
        )  # a neighbour, and padding
        found, states = run(pick(given, own), states, chunks_of([(7, 0, True), (cut, 2, start == 0)]))
        out.append(found[7 : 7 + cut])
        start += cut
    np.testing.assert_allclose(np.concatenate(out), whole, atol=2e-5)
    assert np.isnan(states.rule[1]).all()
    stepped, _ = jax.jit(run_steps)(pick(given, np.arange(1)), states, jnp.array([2]), jnp.zeros(1, bool))
    assert np.isfinite(stepped).all()


def test_a_step_reads_and_writes_its_own_places_alone():
    given = inputs()
    states = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(4).normal(size=leaf.shape), leaf.dtype),
        empty_states(5, DELTA, jnp.float32),
    )
    spoiled = jax.tree.map(lambda leaf: leaf.at[jnp.array([0, 2])].set(jnp.nan), states)
    places, begins = jnp.array([3, 1, 0]), jnp.array([False, False, True])
    out, after = run_steps(pick(given, np.arange(3)), spoiled, places, begins)
    wanted, _ = run_steps(pick(given, np.arange(3)), states, places, begins)
    np.testing.assert_array_equal(out, wanted)
    for leaf, old in zip(after, spoiled, strict=True):
        np.testing.assert_array_equal(leaf[jnp.array([2, 4])], old[jnp.array([2, 4])])
    first, _ = run_steps(pick(given, np.arange(2, 3)), empty_states(1, DELTA, jnp.float32), jnp.array([0]), begins[:1])
    np.testing.assert_allclose(out[2], first[0], atol=1e-6)


def test_states_are_copied_whole():
    states = jax.tree.map(
        lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), empty_states(4, DELTA, jnp.float32)
    )
    copied = copy_states(states, jnp.array([0, 3]), jnp.array([2, 1]))
    for leaf, old in zip(copied, states, strict=True):
        np.testing.assert_array_equal(leaf, old[jnp.array([0, 3, 0, 3])])


def test_the_rule_by_hand():
    # Dk = Dv = 1: (k, v, e^g, beta) = (1, 2, 1, 0.5), (1, 2, 0.5, 0.5), (-1, 1, 1, 1) gives 1, 1.25, -1 with q = 1
    one = DeltaNet(1, 1, 1, 1, taps=1)
    silu = lambda x: x / (1 + np.exp(-x))
    inverse = lambda y: next(x for x in np.linspace(0, 4, 4_000_001) if silu(x) >= y)
    column = lambda *values: np.array(values, np.float32).reshape(3, 1, 1)
    values = column(inverse(2), inverse(2), inverse(1))
    given = DeltaInputs(
        column(9, 9, 9), column(9, 9, -9), values, np.log(column(1, 0.5, 1))[..., 0], column(0.5, 0.5, 1)[..., 0],
        Projected(*(np.ones((1, 1, 1), np.float32),) * 3),
    )  # fmt: skip
    # silu(-9) is short: its length is 1 all the same, up to the eps of lengths
    states, found = empty_states(1, one, jnp.float32), []
    for token in range(3):
        out, states = run_steps(pick(given, np.arange(token, token + 1)), states, jnp.zeros(1, int), jnp.zeros(1, bool))
        found.append(float(out[0, 0, 0]))
    length = silu(9.0) / np.sqrt(silu(9.0) ** 2 + 1e-6), silu(-9.0) / np.sqrt(silu(-9.0) ** 2 + 1e-6)
    assert found[:2] == pytest.approx([1, 1.25], abs=1e-5)
    state = 1.25 + length[1] * (1 - length[1] * 1.25)
    assert found[2] == pytest.approx(state, abs=1e-5)


@pytest.mark.parametrize('name', HYBRIDS)
def test_taps_and_rates_are_not_matrices(name):
    specs = weight_table(CONFIGS[name]).values()
    special = [spec for spec in specs if spec.init in (Init.TAPS, Init.LOG_RATE)]
    assert len(special) == 4
    assert not any(spec.is_matrix or spec.multiplies for spec in special)
