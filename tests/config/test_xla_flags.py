"""What cluster.xla_flags may say, and which flags follow: those of the environment win, equal bits come first."""

import pytest

from areal_jax.config import default_config, validate
from areal_jax.config.fields import ConfigError
from areal_jax.config.xla_flags import (
    AUTO,
    GPU,
    PRESETS,
    choose_flags,
    describe_flags,
    name_variable,
    parse_flags,
    read_variable,
    write_flags,
)

REPEATS = 'deterministic', 'nondeterministic', 'autotune', 'triton_gemm'  # what decides whether bits are equal


def config_of(text, **run):
    config = default_config()
    config.cluster.xla_flags = text
    config.run.update(run)
    return config


def test_own_flags_have_a_name_and_a_value_with_or_without_dashes():
    flags = parse_flags('xla_a=1  --xla_b=false\n--xla_c=a,b=c')
    assert flags == {'xla_a': '1', 'xla_b': 'false', 'xla_c': 'a,b=c'}
    assert parse_flags(write_flags(flags)) == flags


@pytest.mark.parametrize(('text', 'said'), [
    ('', "cluster.xla_flags='' has no flags; use 'auto', 'off', or flags: 'name=value name=value'"),
    ('atuo', "'atuo' is no flag; did you mean auto?; use 'auto'"),
    ('xla_a=1 auto', "'auto' is no flag"),
    ('--xla_a', "'--xla_a' is no flag"),
    ('xla_a=1 --xla_a=2', 'names xla_a twice; give it one value'),
])  # fmt: skip
def test_another_text_is_refused_with_the_forms(text, said):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(text))
    assert said in str(caught.value)


@pytest.mark.parametrize('text', ['auto', 'off', 'xla_a=1'])
def test_each_form_is_valid(text):
    validate(config_of(text))


def test_a_cpu_has_no_flags_whatever_the_config_says():
    for text in ('auto', 'off', 'xla_a=1'):
        assert choose_flags(config_of(text), '', {}) == {}


def test_off_adds_nothing_and_own_flags_replace_the_preset():
    for hardware, preset in PRESETS.items():
        assert choose_flags(config_of('auto'), hardware, {}) == preset
        assert choose_flags(config_of('off'), hardware, {}) == {}
        assert choose_flags(config_of('xla_a=1'), hardware, {}) == {'xla_a': '1'}
    assert choose_flags(config_of('auto'), 'v99', {}) == {}


def test_flags_of_the_environment_win_by_name():
    for hardware, preset in PRESETS.items():
        name = next(iter(preset))
        environment = {name_variable(hardware): f'--xla_dump_to=/tmp --{name}=never'}
        assert choose_flags(config_of('auto'), hardware, environment) == {
            other: value for other, value in preset.items() if other != name
        }
        assert read_variable(hardware, environment)[name] == 'never'
    environment = {'XLA_FLAGS': '--xla_a=2'}
    assert choose_flags(config_of('xla_a=1 xla_b=1'), GPU, environment) == {'xla_b': '1'}


def test_a_file_of_flags_is_left_alone():
    assert choose_flags(config_of('auto'), GPU, {'XLA_FLAGS': '/etc/flags'}) == {}


def test_where_equal_bits_are_asked_for_there_is_no_preset_but_own_flags_stay():
    asked = {'XLA_FLAGS': '--xla_gpu_deterministic_ops=true'}
    for text, added in (('auto', {}), ('xla_a=1', {'xla_a': '1'})):
        assert choose_flags(config_of(text, clock='virtual'), GPU, {}) == added
        assert choose_flags(config_of(text), GPU, asked) == added
    assert choose_flags(config_of('auto'), GPU, {'XLA_FLAGS': '--xla_gpu_deterministic_ops=false'})


def test_no_preset_sets_what_decides_whether_bits_are_equal():
    for preset in PRESETS.values():
        assert not [name for name in preset if any(word in name for word in REPEATS)]
        assert parse_flags(write_flags(preset)) == preset


def test_the_description_says_which_flags_come_from_where():
    config = config_of(AUTO)
    assert describe_flags(config, {'xla_a': '1'}, {}) == 'auto, --xla_a=1'
    assert describe_flags(config, {}, {'xla_b': '2'}) == 'auto, none; of the environment: --xla_b=2'
    assert describe_flags(config_of('xla_a=1'), {'xla_a': '1'}, {}) == 'own, --xla_a=1'
