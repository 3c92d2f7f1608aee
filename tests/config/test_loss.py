"""Which fields of the sections `loss` and `critic` an objective uses."""

from __future__ import annotations

import pytest

from areal_jax.app.parts.learner_builder import build_objective
from areal_jax.config import FIELDS, TrackedConfig
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.loss import CriticSection, LossSection
from tests.config.test_training import make_config

CUT = {'rollout.top_k': 4}
NO_FILTER = {'learner.filter_equal_rewards': False}
OBJECTIVE = """
import dataclasses
import jax.numpy as jnp
from areal_jax.learning.objective.objective import REFERENCE, Objective

class Mean(Objective):
    aggregation = 'token_mean'
    reads = frozenset()
    def loss(self, tokens):
        return tokens.mean(tokens.policy_logprobs), {}

class Pulled(Mean):
    reads = frozenset({REFERENCE})
"""


def of(objective, **fields):
    return {'loss.objective': objective} | {f'loss.{name}': value for name, value in fields.items()}


@pytest.mark.parametrize(
    ('path', 'value', 'unused', 'used'),
    [
        ('loss.denominator', 'all', NO_FILTER, of('grpo')),
        ('loss.denominator', 'all', of('sft'), of('distillation')),
        ('loss.truncated_sampling', 'full_softmax', {}, CUT),
        ('loss.truncated_sampling', 'full_softmax', CUT | of('sft'), CUT | of('mine.py:f')),
        ('loss.dpo_beta', 0.5, of('reward_model'), of('dpo')),
        ('loss.divergence', 'reverse', {}, of('distillation')),
        ('loss.teacher', 'a', of('grpo'), of('distillation')),
        ('loss.reference', 'a', {}, of('grpo')),
        ('loss.reference', 'a', of('sft'), of('dpo')),
        ('loss.reference', 'a', of('grpo', kl_coefficient=0.0), of('mine.py:f')),
        ('loss.aggregation', 'sequence_mean', of('dpo'), of('sft')),
        ('loss.aggregation', 'sequence_mean', of('mine.py:f'), of('distillation')),
        ('loss.length_constant', 9, of('sft', aggregation='constant'), of('distillation', aggregation='constant')),
        ('loss.length_constant', 9, {}, of('dr_grpo')),
        ('loss.behavior_weight_cap', 2.0, of('distillation', divergence='forward'), of('distillation')),
        ('loss.proximal', 'loglinear', of('rloo'), {}),
        ('loss.kl_estimator', 'k2', {}, of('grpo')),
        ('loss.kl_in', 'reward', {}, of('ppo', kl_coefficient=0.1)),
        ('loss.overlong_penalty', 2.0, {}, of('grpo', overlong_tokens=2)),
        ('loss.truncated_answers', 'masked', of('sft'), of('cispo')),
        ('loss.reward_scale', 2.0, of('distillation'), of('vcpo')),
        ('critic.learning_rate', 0.5, {}, of('ppo_critic')),
        ('critic.learning_rate', 0.5, of('dpo'), of('reward_model')),
        ('critic.model', 'copy', of('reward_model'), of('mine.py:f')),
        ('critic.trunk_gradient', 0.5, of('ppo_critic') | {'critic.model': 'copy'}, of('ppo_critic')),
    ],
)
def test_a_field_is_used_or_has_its_default_and_is_named(path, value, unused, used):
    section, name = path.split('.')
    tracked = TrackedConfig(make_config(unused | {path: value}), [path])
    assert getattr(getattr(tracked, section), name) == FIELDS[path].default
    with pytest.raises(ConfigError, match=f'set but never read: {path}='):
        tracked.require_all_read()
    tracked = TrackedConfig(make_config(used | {path: value}), [path])
    assert getattr(getattr(tracked, section), name) == value
    tracked.require_all_read()


def test_sections_hold_what_is_set_and_leave_choices_to_the_method():
    defaults = {path.partition('.')[2]: FIELDS[path].default for path in FIELDS if path.startswith('loss.')}
    assert {name: getattr(LossSection(), name) for name in defaults} == defaults
    assert TrackedConfig(make_config(of('gspo'))).loss == LossSection(objective='gspo')
    assert not CriticSection().own_model
    assert CriticSection(model='copy').own_model
    with pytest.raises(ConfigError, match=r'^loss\.clip_epsilon=2\.0 must lie in \(0, 1\]'):
        LossSection(clip_epsilon=2.0)


@pytest.mark.parametrize('purpose', Purpose)
def test_options_are_used_by_an_objective_of_the_users_own_alone(purpose):
    config = make_config(of('mine.py:f'))
    config.loss.options.rate = 0.5
    unread = TrackedConfig(config, purpose=purpose).unread()
    assert ('loss.options.rate' in dict(unread)) == (purpose is not Purpose.TRAINING)
    config.loss.objective = 'grpo'
    assert dict(TrackedConfig(config, purpose=purpose).unread())['loss.options.rate'] == 0.5


def test_an_objective_of_the_users_own_says_when_it_is_built_what_it_does_not_use(tmp_path):
    (tmp_path / 'mine.py').write_text(OBJECTIVE)
    fields = {'loss.reference': 'a', 'loss.teacher': 'b', 'critic.trunk_gradient': 0.5}
    for name, unused in (('Mean', fields.keys()), ('Pulled', fields.keys() - {'loss.reference'})):
        tracked = TrackedConfig(make_config(of(f'{tmp_path}/mine.py:{name}') | fields), ['loss.teacher'])
        build_objective(tracked)
        assert {path for path, _ in tracked.unread()} == unused
        with pytest.raises(ConfigError, match=r"set but never read: loss\.teacher='b'"):
            tracked.require_all_read()
