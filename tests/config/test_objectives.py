"""The table of methods: what a method is, what a field beside it changes, and the page that shows it."""

from __future__ import annotations

import dataclasses

import pytest

from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.config.objectives import (
    BASE,
    OBJECTIVES,
    describe_method,
    find_objective,
    is_policy,
    resolve,
    select_used,
)
from areal_jax.config.policy_choices import PolicyChoices
from tests import objectives_page


def loss(**fields):
    config = default_config()
    config.loss.update(fields)
    return config.loss


def test_the_page_has_the_methods_of_the_program():
    page = objectives_page.PAGE.read_text()
    assert page == objectives_page.replace_table(page), 'run: python -m tests.objectives_page'


def test_the_page_names_every_field_of_a_combination():
    page = objectives_page.PAGE.read_text()
    set_elsewhere = {'longest_answer', 'seed'}  # rollout.max_new_tokens and run.seed
    names = {field.name for field in dataclasses.fields(PolicyChoices)} - set_elsewhere
    assert [name for name in sorted(names) if f'loss.{name}' not in page] == []


def test_the_default_is_decoupled_ppo():
    assert resolve(loss()) == select_used(lambda name: BASE[name])
    assert resolve(loss())['correction'] == 'truncate'


def test_a_method_names_its_choices_and_a_field_beside_it_changes_one():
    dapo = resolve(loss(objective='dapo'))
    assert (dapo['clip_epsilon'], dapo['clip_epsilon_high'], dapo['correction']) == (0.2, 0.28, 'none')
    changed = resolve(loss(objective='dapo', clip_epsilon_high=0.4, correction='mask'))
    assert changed.items() >= {'clip_epsilon_high': 0.4, 'correction': 'mask', 'correction_low': 0.5}.items()
    assert {**dapo, **changed} == {**changed}  # nothing else went


def test_a_zero_beside_a_method_counts_as_set():
    assert resolve(loss(objective='grpo'))['kl_coefficient'] == 0.04
    assert resolve(loss(objective='grpo', kl_coefficient=0.0))['kl_coefficient'] == 0.0


def test_a_combination_has_the_fields_that_its_choices_read():
    dg = resolve(loss(objective='dg'))
    assert 'delight_temperature' in dg
    assert not {'clip_epsilon', 'ratio_denominator', 'correction_level', 'delight_share'} & set(dg)
    assert 'delight_share' in resolve(loss(objective='dg', delight_gate='kondo'))


def test_an_entropy_is_clamped_only_where_it_counts():
    aent = resolve(loss(objective='aent'))
    assert (aent['entropy_coefficient'], aent['entropy_clamp']) == (2e-4, 0.3)
    assert resolve(loss(objective='aent', entropy_clamp=0.0))['entropy_clamp'] == 0.0
    assert 'entropy_clamp' not in resolve(loss(entropy_clamp=0.3))


def test_an_unknown_method_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"loss\.objective='vtrace' is not known; use one of decoupled_ppo, .*FUNCTION"
    ):
        find_objective('vtrace')


def test_an_own_objective_has_no_choices():
    assert find_objective('mine.py:build').generates
    assert [is_policy(name) for name in ('mine.py:build', 'sft', 'dg')] == [False, False, True]


@pytest.mark.parametrize('name', [kind.name for kind in OBJECTIVES.values() if is_policy(kind.name)])
def test_a_method_names_choices_that_it_uses(name):
    """A choice that its combination does not read would be dead."""
    choices = OBJECTIVES[name].choices
    assert set(choices) <= set(resolve(loss(objective=name)))


def test_every_method_differs_from_every_other():
    by_name = {kind.name: resolve(loss(objective=kind.name)) for kind in OBJECTIVES.values() if is_policy(kind.name)}
    same = [(a, b) for a in by_name for b in by_name if a < b and by_name[a] == by_name[b]]
    assert same == [('ppo', 'reinforce_pp')]  # PPO without a critic; REINFORCE++ adds a divergence in the reward


def test_a_method_is_told_with_its_combination():
    told = describe_method(loss(objective='tis', proximal='loglinear'))
    assert told.startswith('tis (')
    assert 'behavior_weight_cap 2.0' in told
    assert told.endswith('proximal loglinear')
    assert 'proximal' not in describe_method(loss(objective='dg'))
    assert [describe_method(loss(objective=name)) for name in ('sft', 'mine.py:build')] == ['sft', 'mine.py:build']
