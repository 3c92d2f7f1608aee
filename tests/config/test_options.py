"""Options of a free section: any key on the command line, typed by the config or by Python's literals."""

import json

import pytest
from absl import flags

from areal_jax.app.command_line import parse_command, parse_option
from areal_jax.config import TrackedConfig, default_config, flatten, validate
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError

FILE = """from areal_jax.config import default_config
def get_config():
    config = default_config()
    config.task.options.digits = 2
    config.task.options.rate = 0.5
    config.task.options.word = 'a'
    config.task.options.signed = False
    config.task.options.sizes = (1, 2)
    config.task.options.limit = None
    return config
"""


@pytest.fixture
def parse(tmp_path):
    (tmp_path / 'experiment.py').write_text(FILE)

    def parse(*settings):
        words = ['main', f'--config={tmp_path}/experiment.py', *settings]
        return parse_command(words, flags.FlagValues())

    return parse


LITERALS = {
    '3': 3, '-3': -3, '1e3': 1000.0, 'abc': 'abc', '': '', 'a b': 'a b', 'True': True, 'true': 'true', 'None': None,
    '1,2': (1, 2), "('a', 'b')": ('a', 'b'), '()': (), "'3'": '3', '3abc': '3abc', '(' * 3000: '(' * 3000,
}  # fmt: skip


@pytest.mark.parametrize('text', LITERALS, ids=lambda text: text[:10])
def test_an_option_is_a_literal_of_python_or_text(text):
    value = parse_option(text)
    assert (value, type(value)) == (LITERALS[text], type(LITERALS[text]))


def test_a_key_that_the_file_does_not_have_is_set_and_counts_as_an_override(parse):
    command = parse('--config.task.options.new=1,2', '--config.task.options.text', 'x y', '--config.run.steps=3')
    assert command.config.task.options.new == (1, 2)
    assert command.config.task.options.text == 'x y'
    assert command.config.run.steps == 3
    assert command.overrides == ('run.steps', 'task.options.new', 'task.options.text')
    validate(command.config)


DECLARED = {
    'digits=3': 3, 'rate=2': 2.0, 'rate=1e-3': 0.001, 'word=3': '3', 'signed=true': True, 'signed=False': False,
    'sizes=3,4,5': (3, 4, 5), 'sizes=3': (3,), 'limit=7': 7, 'limit=x': 'x',
}  # fmt: skip


@pytest.mark.parametrize('setting', DECLARED)
def test_a_key_that_the_file_has_keeps_its_type(parse, setting):
    value = parse(f'--config.task.options.{setting}').config.task.options[setting.partition('=')[0]]
    assert (value, type(value)) == (DECLARED[setting], type(DECLARED[setting]))


WRONG = {
    'options.digits=x': r'--config\.task\.options\.digits=x must be a whole number, as the config has 2 there',
    'options.digits=2.5': r'digits=2\.5 must be a whole number',
    'options.signed=1': r'signed=1 must be True or False',
    'options.rate=fast': r'rate=fast must be a number',
    'options.new=[1]': r'task\.options\.new=\[1\] must be a number, a text, True, False, None or a tuple of them',
    'options.new={1: 2}': r'task\.options\.new=\{1: 2\} must be a number',
    'options.new={"a": 2}': r"task\.options\.new=\{'a': 2\} must be a number",
    'options.new=1+2j': r'task\.options\.new=\(1\+2j\) must be a number',
    'options.new=((1,),)': r'task\.options\.new=\(\(1,\),\) must be a number',
    'options.a.b=3': r'task\.options\.a\.b=3: the name of an option must be that of a parameter in Python',
    'options.a-b=3': r'the name of an option must be',
    'options.=3': r'the name of an option must be',
    'options=3': r'--config\.task\.options=3: task\.options is a section; set one of its keys',
    'options.new': r'--config\.task\.options\.new needs a value: --config\.task\.options\.new=VALUE',
    'option.new=3': r'task\.option\.new is not a field of the config',
}


@pytest.mark.parametrize('setting', WRONG)
def test_what_no_option_may_be_is_one_sentence(parse, setting):
    with pytest.raises(UserError, match=WRONG[setting]) as refused:
        parse(f'--config.task.{setting}')
    assert '\n' not in str(refused.value)


def test_options_are_part_of_the_resolved_config_and_read_as_one_field():
    config = default_config()
    config.task.options.sizes = (1, 2)
    config.task.options.digits = 3
    tracked = TrackedConfig(config, ('task.options.digits',))
    assert json.loads(json.dumps(tracked.as_dict()))['task']['options'] == {'sizes': [1, 2], 'digits': 3}
    assert ('task.options.digits', 3) in list(flatten(config))
    with pytest.raises(ConfigError, match=r'set but never read: task\.options\.digits=3'):
        tracked.require_all_read()
    assert tracked.task.options.digits == 3
    tracked.require_all_read()
    assert tracked.idle_fields() == []


def test_other_sections_take_no_new_keys():
    with pytest.raises(AttributeError):
        default_config().task.digits = 3
