"""Which choices contradict each other, which are warned of, and that a field nothing uses is refused as any other."""

from __future__ import annotations

import pytest

from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.fields import ConfigError
from areal_jax.config.loss import (
    find_group_problems,
    find_objective_problems,
    find_objective_warnings,
)
from areal_jax.config.objectives import OBJECTIVES
from areal_jax.config.policy_choices import ADVANTAGES, SURROGATES

LOCK_STEP = {'staleness.schedule': 'fixed(2)'}
OAPL = {'loss.objective': 'oapl', **LOCK_STEP}
GEOMETRIC = {'loss.ratio': 'geometric', 'loss.correction': 'none'}


def make(fields):
    config = default_config()
    config.update_from_flattened_dict(fields)
    return config


# settings, what the sentence begins with, and its fix
REFUSED = [
    (
        {'loss.ratio_denominator': 'behavior'},
        "loss.ratio_denominator='behavior' with loss.correction='truncate' (of loss.objective='decoupled_ppo')",
        "use loss.correction='none', or loss.ratio_denominator='proximal'",
    ),
    (
        {'loss.objective': 'm2po', 'loss.correction': 'mask'},
        "loss.ratio_denominator='behavior' (of loss.objective='m2po') with loss.correction='mask'",
        "use loss.correction='none'",
    ),
    *(
        (
            {'loss.ratio': 'none', 'loss.surrogate': surrogate, 'loss.correction': 'none'},
            f"loss.ratio='none' with loss.surrogate='{surrogate}', which reads a ratio",
            "use loss.surrogate='reinforce', or loss.ratio='token'",
        )
        for surrogate in ('clip', 'dual_clip', 'cispo', 'is_pg', 'sapo', 'topr', 'quadratic')
    ),
    (
        {'loss.kl_coefficient': 0.1, 'loss.kl_in': 'reward', 'loss.kl_estimator': 'unbiased'},
        "loss.kl_estimator='unbiased' with loss.kl_in='reward': no gradient flows through a reward",
        "use 'k1' or 'k3', or loss.kl_in='loss'",
    ),
    ({'loss.surrogate': 'reinforce'}, "loss.surrogate='reinforce' reads no ratio, and loss.ratio='token'", "'none'"),
    (
        {'loss.objective': 'dg', 'loss.ratio': 'token'},
        "loss.surrogate='delight' (of loss.objective='dg') reads no ratio, and loss.ratio='token' would not be used",
        "use loss.ratio='none'",
    ),
    (
        {'loss.objective': 'dg', 'loss.correction': 'truncate'},
        "loss.surrogate='delight' (of loss.objective='dg') with loss.correction='truncate': its weight takes the place",
        "use loss.correction='none', or loss.surrogate='reinforce'",
    ),
    (
        GEOMETRIC | {'loss.surrogate': 'cispo', 'loss.aggregation': 'sequence_mean'},
        "loss.surrogate='cispo' with loss.ratio='geometric': it is defined for single tokens",
        "use loss.ratio='token'",
    ),
    (
        {'loss.objective': 'gspo', 'loss.surrogate': 'is_pg', 'loss.gate': 'probability_shift'},
        "loss.gate='probability_shift' with loss.ratio='geometric' (of loss.objective='gspo')",
        "use loss.ratio='token'",
    ),
    *(
        (
            {'loss.ratio': ratio, 'loss.aggregation': 'sequence_mean'},
            f"loss.ratio='{ratio}' with loss.correction_level='token' (of loss.objective='decoupled_ppo')",
            "use loss.correction_level='geometric' or 'sequence', or loss.ratio='token'",
        )
        for ratio in ('sequence', 'geometric', 'geometric_token')
    ),
    *(
        (
            {'loss.objective': 'gspo', 'loss.aggregation': aggregation},
            f"loss.ratio='geometric' (of loss.objective='gspo') with loss.aggregation='{aggregation}'",
            "use loss.aggregation='sequence_mean' or 'sequence_sum', or loss.ratio='token'",
        )
        for aggregation in ('token_mean', 'token_sum', 'prompt_mean', 'constant')
    ),
    (
        {'loss.ratio': 'sequence', 'loss.correction': 'none', 'loss.aggregation': 'sequence_sum'},
        "loss.ratio='sequence' with loss.aggregation='sequence_sum'",
        "use loss.aggregation='sequence_mean', or loss.ratio='token'",
    ),
    (
        {'loss.gate': 'probability_shift'},
        "loss.gate='probability_shift' with loss.surrogate='clip' (of loss.objective='decoupled_ppo') are two trust",
        "use loss.surrogate='is_pg', or loss.gate='none'",
    ),
    (
        {'loss.objective': 'kimi', 'loss.whiten': 'batch'},
        "loss.surrogate='quadratic' (of loss.objective='kimi') with loss.whiten='batch'",
        "use loss.whiten='none'",
    ),
    *(
        (
            OAPL | {f'loss.{name}': value},
            f"loss.surrogate='oapl' (of loss.objective='oapl') with loss.{name}={value!r}",
            f'use loss.{name}={fix!r}, or another surrogate',
        )
        for name, value, fix in (
            ('ratio', 'token', 'sequence'),
            ('gate', 'second_moment', 'none'),
            ('veto', 0.1, None),
            ('aggregation', 'token_mean', 'sequence_mean'),
            ('kl_coefficient', 0.1, 0.0),
        )
    ),
    (
        OAPL | {'loss.ratio_denominator': 'proximal'},
        "loss.surrogate='oapl' (of loss.objective='oapl') with loss.ratio_denominator='proximal'",
        "use loss.ratio_denominator='behavior'",
    ),
    (
        OAPL | {'loss.advantage': 'group_mean', 'loss.whiten': 'batch'},
        "loss.surrogate='oapl' (of loss.objective='oapl') with loss.whiten='batch': advantages are its targets",
        "use loss.whiten='none'",
    ),
    (
        OAPL | {'loss.advantage': 'group'},
        "loss.surrogate='oapl' (of loss.objective='oapl') with loss.advantage='group'",
        "use loss.advantage='optimal_value'",
    ),
    (
        OAPL | {'task.filter': 'equal_rewards'},
        "loss.surrogate='oapl' (of loss.objective='oapl') with task.filter='equal_rewards'",
        "use task.filter='none'",
    ),
    *(
        (
            {'loss.advantage': advantage, 'loss.whiten': 'batch'},
            f"loss.whiten='batch' with loss.advantage='{advantage}', whose scale and centre carry meaning",
            "use loss.whiten='none', or loss.advantage='group'",
        )
        for advantage in ('optimal_value', 'max_rl')
    ),
    (
        {'loss.overlong_tokens': 4, 'loss.truncated_answers': 'masked'},
        "loss.overlong_tokens=4 with loss.truncated_answers='masked'",
        "use loss.truncated_answers='trained', or loss.overlong_tokens=0",
    ),
    (
        {'loss.objective': 'maxrl', 'loss.overlong_tokens': 4},
        "loss.overlong_tokens=4 with loss.advantage='max_rl' (of loss.objective='maxrl')",
        'use loss.overlong_tokens=0',
    ),
    (
        {'loss.objective': 'ppo_critic', 'loss.truncated_value': 'last', 'loss.truncated_answers': 'masked'},
        "loss.truncated_value='last' with loss.truncated_answers='masked'",
        "use loss.truncated_answers='trained', or loss.truncated_value='zero'",
    ),
    ({'loss.overlong_tokens': 17}, 'loss.overlong_tokens=17 is more than rollout.max_new_tokens=16', 'lower it'),
    (
        {'loss.correction': 'mask', 'loss.correction_low': 6.0},
        "loss.correction_low=6.0 is above loss.correction_high=5.0 (of loss.objective='decoupled_ppo')",
        'exchange them',
    ),
    (
        {'loss.surrogate': 'dual_clip', 'loss.dual_clip': 1.0},
        "loss.surrogate='dual_clip' with loss.dual_clip=1.0 would cut fresh tokens",
        'set loss.dual_clip above 1',
    ),
]  # fmt: skip


@pytest.mark.parametrize(('fields', 'begins', 'fix'), REFUSED, ids=lambda x: ' '.join(x) if isinstance(x, dict) else '')
def test_a_contradiction_names_both_fields_both_values_and_the_fix(fields, begins, fix):
    with pytest.raises(ConfigError) as refused:
        validate(make(fields))
    sentence = str(refused.value)
    assert sentence.startswith(begins)
    assert fix in sentence
    assert '\n' not in sentence


# each is one change away from a pair that is refused
LEGAL = [
    {'loss.ratio_denominator': 'behavior', 'loss.correction': 'none'},
    {'loss.objective': 'm2po', 'loss.veto': 0.1},  # masks may stand beside any denominator
    {'loss.ratio': 'none', 'loss.surrogate': 'reinforce', 'loss.correction_level': 'sequence'},
    GEOMETRIC | {'loss.aggregation': 'sequence_sum'},  # LUSPO, whose answers weigh by their length
    GEOMETRIC | {'loss.aggregation': 'sequence_mean', 'loss.surrogate': 'dual_clip'},
    {'loss.ratio': 'geometric', 'loss.correction_level': 'geometric', 'loss.aggregation': 'sequence_mean'},
    {'loss.correction_level': 'sequence'},
    {'loss.proximal': 'behavior', 'loss.behavior_weight_cap': 2.0},  # a weight of 1: harmless
    {'loss.overlong_tokens': 16},
    {'loss.truncated_answers': 'masked'},
    {'loss.correction': 'mask', 'loss.correction_low': 5.0},
    {'loss.objective': 'oapl', 'staleness.eta': 0.0},
    OAPL | {'loss.advantage': 'group_mean'},
    {'loss.advantage': 'reward', 'rollout.group_size': 1},
]


@pytest.mark.parametrize('fields', LEGAL, ids=' '.join)
def test_what_is_sound_passes(fields):
    assert validate(make(fields)) is None


@pytest.mark.parametrize('name', OBJECTIVES)
def test_every_method_is_free_of_contradictions(name):
    config = make({'loss.objective': name, 'staleness.eta': 0.0})
    assert list(find_objective_problems(config)) == []


def test_groups_of_one_are_refused_where_their_advantage_would_be_0():
    size = {'rollout.group_size': 1}
    (said,) = find_group_problems(make(size | {'loss.objective': 'rloo'}))
    assert said.startswith("rollout.group_size=1 with loss.advantage='rloo' (of loss.objective='rloo') gives every")
    (said,) = find_group_problems(make(size | {'loss.advantage': 'optimal_value'}))
    assert said.startswith(
        "rollout.group_size=1 with loss.advantage='optimal_value' gives every answer the advantage 0"
    )
    (said,) = find_group_problems(make(size | {'loss.advantage': 'mine.py:f'}))
    assert said.endswith('leaves no group to train: set learner.filter_equal_rewards=False')
    unfiltered = {'loss.advantage': 'mine.py:f', 'learner.filter_equal_rewards': False}
    for fields in (
        {'loss.advantage': 'reward'},
        unfiltered,
        {'loss.objective': 'mine.py:f'},
        {'loss.objective': 'sft'},
    ):
        assert list(find_group_problems(make(size | fields))) == []


WARNED = [
    ({'loss.objective': 'grpo'}, "loss.surrogate='clip' (of loss.objective='grpo') over loss.ratio_denominator="),
    ({'loss.clip_epsilon': 0.1}, "loss.surrogate='clip' (of loss.objective='decoupled_ppo') over"),
    ({'loss.clip_epsilon_high': 0.3}, "loss.surrogate='clip' (of loss.objective='decoupled_ppo') over"),
    ({'loss.surrogate': 'sapo'}, "loss.surrogate='sapo' over loss.ratio_denominator='proximal' with"),
    (
        {'loss.kl_coefficient': 0.1, 'loss.kl_estimator': 'k1'},
        "loss.kl_estimator='k1' with loss.kl_in='loss': the gradient of k1 is 0",
    ),
    (
        {'loss.kl_coefficient': 0.1, 'loss.kl_in': 'reward'},
        "loss.kl_in='reward' with loss.advantage='group' (of loss.objective='decoupled_ppo')",
    ),
    (
        {'loss.whiten': 'batch'},
        "loss.whiten='batch' after loss.advantage='group' (of loss.objective='decoupled_ppo'): groups are centred",
    ),
    (
        {'loss.objective': 'topr', 'rollout.max_new_tokens': 1001},
        "loss.ratio='sequence' (of loss.objective='topr') with rollout.max_new_tokens=1001: the sum of",
    ),
    (
        {'loss.correction_level': 'sequence', 'rollout.max_new_tokens': 2000},
        "loss.correction_level='sequence' with rollout.max_new_tokens=2000: the sum of",
    ),
]


@pytest.mark.parametrize(('fields', 'begins'), WARNED, ids=lambda x: ' '.join(x) if isinstance(x, dict) else '')
def test_what_does_less_than_it_says_is_warned_of(fields, begins):
    (said,) = find_objective_warnings(make(fields))
    assert said.startswith(begins)
    assert '; use ' in said


@pytest.mark.parametrize(
    'fields',
    [
        {},  # the clip of the default is nobody's wish
        {'loss.objective': 'sft', 'loss.clip_epsilon': 0.1},
        {'loss.objective': 'tis'},  # its weight acts
        {'loss.objective': 'grpo', 'learner.n_minibatches': 4},
        {'loss.objective': 'grpo', 'learner.epochs': 2},
        {'loss.objective': 'grpo', 'loss.proximal': 'behavior'},
        {'loss.objective': 'grpo', 'loss.ratio_denominator': 'behavior'},
        {'loss.kl_estimator': 'k1'},  # no divergence is asked for
        {'loss.kl_coefficient': 0.1, 'loss.kl_in': 'reward', 'loss.advantage': 'reward', 'loss.kl_estimator': 'k1'},
        {'loss.whiten': 'batch', 'loss.advantage': 'reward'},
        OAPL | {'rollout.max_new_tokens': 2000},  # it takes no exp of the sum
    ],
    ids=' '.join,
)  # fmt: skip
def test_nothing_else_is_warned_of(fields):
    assert list(find_objective_warnings(make(fields))) == []


# an axis and all its choices, other fields, who says what, and of which choices
SAID_OF = [
    (
        ('surrogate', SURROGATES), {'loss.clip_epsilon': 0.1}, find_objective_warnings, 'bounds nothing',
        ['clip', 'dual_clip', 'cispo', 'sapo', 'quadratic'],
    ),
    (('surrogate', SURROGATES), GEOMETRIC, find_objective_problems, 'it is defined for single tokens', ['cispo']),
    (
        ('advantage', ADVANTAGES), {'loss.whiten': 'batch'}, find_objective_warnings, 'groups are centred already',
        ['group', 'group_mean', 'rloo', 'max_rl', 'length_baseline'],
    ),
    (
        ('advantage', ADVANTAGES), {'loss.kl_coefficient': 0.1, 'loss.kl_in': 'reward'}, find_objective_warnings,
        'takes a part of the divergence out again', ['group', 'group_mean', 'rloo', 'max_rl', 'length_baseline'],
    ),
    (
        ('advantage', ADVANTAGES), {'loss.whiten': 'batch'}, find_objective_problems,
        'whose scale and centre carry meaning', ['max_rl', 'optimal_value', 'optimal_baseline'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(('axis', 'fields', 'find', 'sentence', 'choices'), SAID_OF, ids=lambda x: str(x)[:30])
def test_a_sentence_is_said_of_the_choices_that_it_is_true_of(axis, fields, find, sentence, choices):
    name, known = axis
    said = lambda choice: any(sentence in said for said in find(make(fields | {f'loss.{name}': choice})))
    assert [choice for choice in known if said(choice)] == choices


UNREAD = [
    {'loss.objective': 'dg', 'loss.clip_epsilon': 0.1},
    {'loss.objective': 'dg', 'loss.proximal': 'behavior'},
    {'loss.objective': 'dg', 'loss.ratio_denominator': 'behavior'},
    {'loss.objective': 'dg', 'loss.delight_share': 0.5},  # of another gate
    {'loss.objective': 'grpo', 'loss.behavior_weight_cap': 2.0},  # it has no correction
    {'loss.objective': 'grpo', 'loss.correction_level': 'sequence'},
    {'loss.objective': 'icepop', 'loss.behavior_weight_cap': 2.0},  # of 'truncate'
    {'loss.objective': 'rloo', 'loss.deviation': 'population'},  # it does not divide
    {'loss.objective': 'm2po', 'loss.proximal': 'loglinear'},
    {'loss.dual_clip': 2.0},
    {'loss.gate_threshold': 0.1},
    {'loss.sapo_positive': 2.0},
    {'loss.oapl_beta': 0.1},
    {'loss.length_constant': 9},
    {'loss.kl_estimator': 'k2'},
    {'loss.overlong_penalty': 2.0},
]


@pytest.mark.parametrize('fields', UNREAD, ids=' '.join)
def test_a_field_that_the_combination_does_not_use_is_set_but_never_read(fields):
    (path, value) = list(fields.items())[-1]
    tracked = TrackedConfig(make(fields), overrides=(path,))
    assert (path, value) in tracked.unread()
