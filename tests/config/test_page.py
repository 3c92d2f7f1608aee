"""Fields as text: what areal-config finds and prints. tests/config/test_config.py has the page docs/config.md."""

import pytest

from areal_jax import main_config
from areal_jax.config.declarations import FIELDS, SECTIONS
from areal_jax.config.fields import ConfigError
from areal_jax.config.page import find_fields, render_fields
from areal_jax.installation import list_configs


def names(*words):
    return find_fields(words)


def test_a_field_or_a_section_is_looked_up_by_its_name():
    assert names('staleness.eta') == ['staleness.eta']
    assert names('staleness') == [path for path in FIELDS if path.startswith('staleness.')]


def test_a_word_is_looked_for_in_names_rules_and_meanings():
    assert 'loss.objective' in names('decoupled_ppo')  # one of its choices
    assert 'staleness.eta' in names('Eq. 3')  # its meaning, in any case
    assert names('eta')[0] == 'staleness.eta'  # and not rope_theta
    found = names('slots')
    assert found[0] == 'rollout.slots'
    assert 'evaluation.slots' in found
    of_names = ['slots' in path for path in found]  # and then those that have it in what they mean
    assert of_names == sorted(of_names, reverse=True)


def test_of_several_words_all_must_match():
    assert names('rollout', 'tokens') == [path for path in names('rollout') if path in names('tokens')]


def test_a_word_without_a_field_is_refused_with_a_near_name():
    with pytest.raises(ConfigError, match=r"^no field of the config matches 'stalness'; did you mean staleness\?$"):
        names('stalness')
    with pytest.raises(ConfigError, match='areal-config without words lists the sections'):
        names('qqqqqq')


def test_what_is_printed_of_a_field_is_what_is_declared():
    field = FIELDS['rollout.slots']
    assert render_fields(['rollout.slots']).splitlines() == [
        f'--config.rollout.slots={field.default}', f'    must {field.rule()}', f'    {field.meaning}',
    ]  # fmt: skip
    assert max(map(len, render_fields(list(FIELDS), columns=60).splitlines()[1:])) <= 90


def test_without_words_the_sections_and_configs_are_listed(capsys):
    assert main_config.main([]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith('  ')]
    assert lines == [*SECTIONS, *list_configs()]


def test_a_word_without_a_field_ends_the_command_with_2(capsys):
    assert main_config.main(['wokflow']) == 2
    assert capsys.readouterr().err == "error: no field of the config matches 'wokflow'; did you mean workflow?\n"
