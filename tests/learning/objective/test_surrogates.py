"""What the config says of a surrogate is what its rule does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.config.policy_choices import SURROGATES as KINDS
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.ratios import SURROGATES, Surrogate, SurrogateInputs, bounded_exp

_POLICY = np.array([-0.2, -1.5, -0.7, -3.0])
_ADVANTAGES = np.array([1.0, -1.0, -0.3, 0.4])
_LOG_RATIO = np.array([1.2, -1.1, 1.9, 0.3])


def compute(name: str, log_ratio: np.ndarray, **numbers: float) -> Surrogate:
    prepared = {'gate': np.ones(4), 'uniform': np.full(4, 0.5)}
    inputs = SurrogateInputs(bounded_exp(log_ratio), log_ratio, _POLICY, _ADVANTAGES, prepared)
    return SURROGATES[name](PolicyChoices(**numbers), inputs)


def depends(one: Surrogate, other: Surrogate) -> bool:
    return not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize('name', KINDS)
def test_a_kind_says_whether_its_rule_reads_the_ratio_and_goes_on_where_it_is_constant(name):
    assert depends(compute(name, _LOG_RATIO), compute(name, 0.5 * _LOG_RATIO)) == KINDS[name].reads_ratio
    assert depends(compute(name, 25 + _LOG_RATIO), compute(name, 30 + _LOG_RATIO)) == KINDS[name].reads_log


@pytest.mark.parametrize('name', KINDS)
def test_a_kind_lists_the_numbers_that_its_rule_reads(name):
    """Each changes something, and no other number of the choices does."""
    numbers = {f.name: f.default for f in dataclasses.fields(PolicyChoices) if isinstance(f.default, float)}
    numbers['clip_epsilon_high'] = 0.2
    plain = compute(name, _LOG_RATIO, **numbers)
    changed = {
        field
        for field in numbers
        if depends(plain, compute(name, _LOG_RATIO, **numbers | {field: numbers[field] * 0.8 + 0.003}))
    }
    assert changed == {field for field in KINDS[name].reads if field in numbers}
