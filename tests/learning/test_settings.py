"""What an update is: a setting that cannot work is named as the config names it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import Choice
from areal_jax.config.objectives import OBJECTIVES
from areal_jax.learning.objective import advantages, ratios
from areal_jax.learning.optimizer import DIRECTIONS, Schedule
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models import decoder, weights
from areal_jax.models.attention import backends
from areal_jax.sharding import rules
from tests.learning.examples import learner_settings


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'row_tokens': 0}, r'learner\.row_tokens=0 must be at least 1'),
        ({'tail_buckets': -1}, r'learner\.tail_buckets=-1 must not be negative'),
        ({'row_buckets': (64, 32)}, r'learner\.row_buckets=\(64, 32\) must be positive .* in ascending order'),
        ({'loss_scale': 2.0**33}, r'learner\.loss_scale=8589934592.0 must lie in \(0, 2\^32]'),
        ({'clip_epsilon': 0.0}, r'loss\.clip_epsilon=0\.0 must lie in \(0, 1\]'),
        ({'clip_epsilon_high': -0.1}, r'loss\.clip_epsilon_high=-0\.1 must be above 0'),
        ({'behavior_weight_cap': math.nan}, r'loss\.behavior_weight_cap=nan must be above 0'),
        ({'entropy_coefficient': math.nan}, r'loss\.entropy_coefficient=nan must not be negative'),
        ({'kl_coefficient': math.nan}, r'loss\.kl_coefficient=nan must not be negative'),
        ({'max_token_age': -1}, r'staleness\.max_token_age=-1 must not be negative, .* or be None'),
    ],
)
def test_a_number_out_of_its_range_names_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        learner_settings(**{'row_tokens': 8, 'row_loss_tokens': 4} | settings)


def test_the_ends_of_closed_ranges_are_allowed():
    assert (
        learner_settings(
            row_tokens=8, row_loss_tokens=4, clip_epsilon=1.0, kl_coefficient=0.0, max_token_age=0
        ).objective.choices.clip_epsilon
        == 1.0
    )


@pytest.mark.parametrize(
    ('path', 'implemented'),
    [
        ('optimizer.name', DIRECTIONS),
        ('loss.advantage', ['', *advantages.ESTIMATORS, 'gae']),
        ('loss.surrogate', ['', *ratios.SURROGATES]),
        ('loss.objective', OBJECTIVES),
        ('learner.layers', decoder.FORMS),
        ('learner.remat', decoder.REMAT),
        ('learner.attention', backends.IMPLEMENTATIONS),
        ('cluster.strategy', rules.STRATEGIES),
    ],
)
def test_every_declared_choice_is_implemented_and_nothing_else(path, implemented):
    field = FIELDS[path]
    assert isinstance(field, Choice)
    assert set(field.choices) == set(implemented)


def test_adapters_are_declared_for_every_projection_that_can_have_them():
    assert FIELDS['lora.targets'].default == weights.TARGETS


def test_no_setting_that_a_config_field_decides_has_a_second_default():
    with_default = {
        field.name
        for kind in (LearnerSettings, Schedule, weights.Lora)
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    assert with_default == set()
