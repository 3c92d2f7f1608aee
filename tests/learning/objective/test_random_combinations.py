"""300 random combinations, ragged, masked, near and far: values and gradients of the formulas of papers."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.objective import PROXIMAL, REFERENCE, LossTokens
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.objective.ratios import SURROGATES
from tests.learning.objective.combinations import batch_of, draw_case, poison, starts_of
from tests.learning.objective.plain_losses import Plain, Tokens, differentiate

CASES, QUICK = 300, 100
_SHARE = 1e-5  # of the sum of absolute terms
_TINY = 1e-30  # what float32 does not hold


def computed(choices, tokens: Tokens) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """(loss, gradients by log-probs and by entropies, drawn numbers) of the program."""
    objective, batch = PolicyObjective(choices), batch_of(tokens)
    prepared = objective.prepare(batch, np.asarray(tokens.policy, np.float32)[None])
    weights, denominator = token_weights(batch, choices.aggregation, choices.length_constant, np.array(tokens.prompts))
    known = {name: jnp.asarray(array[0]) for name, array in prepared.items()}
    known |= {PROXIMAL: jnp.asarray(tokens.proximal), REFERENCE: jnp.asarray(tokens.reference)}

    def loss(policy: jax.Array, entropy: jax.Array) -> jax.Array:
        given = LossTokens(
            policy_logprobs=policy, entropy=entropy, behavior_logprobs=jnp.asarray(tokens.behavior),
            advantages=jnp.asarray(tokens.advantages, jnp.float32), loss_mask=jnp.asarray(tokens.mask),
            policy_versions=jnp.asarray(tokens.versions, jnp.int32), sequence_starts=jnp.asarray(starts_of(tokens.ids)),
            token_weights=jnp.asarray(weights[0]), denominator=np.float32(denominator),
            version=np.int32(tokens.version), known={name: known[name] for name in objective.reads & set(known)}
            | {name: known[name] for name in objective.prepares},
        )  # fmt: skip
        return objective.loss(given)[0]

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(tokens.policy), jnp.asarray(tokens.entropy))
    return float(value), *map(np.asarray, gradients), prepared.get('uniform', np.zeros_like(weights))[0]


def assert_plain(found: tuple, plain: Plain) -> None:
    value, gradient, entropy_gradient, _ = found
    assert abs(value - plain.value) <= _SHARE * plain.size
    distance = np.abs(gradient - plain.gradient)
    assert (distance <= _SHARE * plain.gradient_size + _TINY).all(), (distance / plain.gradient_size).max()
    np.testing.assert_allclose(entropy_gradient, plain.entropy_gradient, rtol=_SHARE)


@pytest.mark.parametrize(
    'number', [number if number < QUICK else pytest.param(number, marks=pytest.mark.slow) for number in range(CASES)]
)
def test_a_combination_is_its_formula(number):
    choices, tokens = draw_case(number)
    found = computed(choices, poison(tokens, np.random.default_rng(number)))
    tokens = dataclasses.replace(tokens, uniform=found[3])
    assert_plain(found, differentiate(choices, tokens))


def test_the_cases_have_every_choice_of_every_axis_and_empty_masks():
    cases = [draw_case(number) for number in range(CASES)]
    counts = collections.Counter(
        (field.name, getattr(choices, field.name))
        for choices, _ in cases
        for field in dataclasses.fields(choices)
        if isinstance(getattr(choices, field.name), str)
    )
    for name, values in {
        'ratio': ('none', 'token', 'sequence', 'geometric', 'geometric_token'),
        'ratio_denominator': ('proximal', 'behavior'),
        'proximal': ('recompute', 'loglinear', 'behavior'),
        'surrogate': tuple(SURROGATES),
        'correction': ('none', 'truncate', 'mask'),
        'correction_level': ('token', 'sequence', 'geometric'),
        'gate': ('none', 'probability_shift', 'second_moment'),
        'aggregation': ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum'),
        'delight_gate': ('sigmoid', 'bernoulli', 'kondo', 'additive'),
        'kl_estimator': ('k1', 'k2', 'k3', 'unbiased'),
    }.items():  # fmt: skip
        assert {value for key, value in counts if key == name} >= set(values)
        assert min(counts[name, value] for value in values) >= 4, name
    assert sum(not tokens.mask.any() for _, tokens in cases) >= 5
    assert sum(choices.veto is not None for choices, _ in cases) >= 20
