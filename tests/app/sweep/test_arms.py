"""The arms of a sweep: read and checked before anything runs, as commands that say the same, grouped by seed."""

import math
import pathlib
import shlex

import pytest
from absl import flags

from areal_jax.app.command_line import CommandLineError, defines, parse_command, parse_train_command
from areal_jax.app.sweep.arms import group_arms, read_arms, render_command, select_arms
from areal_jax.errors import UserError
from areal_jax.main_sweep import define_flags
from tests.app.sweep.toy_sweep import ROOT, ToySweep


def test_arms_have_the_fields_of_the_file_the_command_line_and_their_own(tmp_path):
    sweep = ToySweep(tmp_path, {'b': {'staleness.eta': 0, 'run.seed': 3}, 'a': {}})
    b, a = sweep.arms('--config.loss.entropy_coefficient=0.5', '--jobs=2')
    assert (b.name, a.name) == ('b', 'a')
    assert (b.config.staleness.eta, b.seed, a.seed) == (0.0, 3, 0)
    assert a.config.loss.entropy_coefficient == b.config.loss.entropy_coefficient == 0.5
    assert a.config.run.clock == 'virtual'
    assert b.workdir == sweep.workdir / 'b'


VALUES = {
    'staleness.eta': math.inf,
    'rollout.prefill_buckets': (16, 32),
    'telemetry.tensorboard': False,
    'task.options.words': 'two "words" $HOME',
    'task.options.digits': 3,
    'optimizer.learning_rate': 1e-05,
    'staleness.max_token_age': None,
}


def test_a_printed_command_says_what_the_arm_is(tmp_path):
    sweep = ToySweep(tmp_path, {'a': VALUES})
    [arm] = sweep.arms()
    words = shlex.split(render_command(arm, resume=True))
    assert words[1:3] == ['-m', 'areal_jax.main_train']
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, '', flag_values=values)
    flags.DEFINE_bool('resume', False, '', flag_values=values)
    config = parse_train_command(words[2:], values).config
    assert config == arm.config
    assert config.rollout.prefill_buckets == (16, 32)
    assert config.task.options.words == 'two "words" $HOME'
    assert values.resume


BAD = {
    'out of range': ({'staleness.eta': -1}, "arm 'bad': staleness.eta=-1.0 must be at least 0"),
    'wrong type': ({'run.seed': 1.5}, "arm 'bad': run.seed=1.5 must be a whole number"),
    'a list': ({'rollout.prefill_buckets': [8]}, "arm 'bad': rollout.prefill_buckets=[8] must be a tuple"),
    'unknown field': ({'rollout.slotz': 4}, "arm 'bad': rollout.slotz is not a field of the config; did you mean"),
    'a section': ({'rollout': {'slots': 4}}, "arm 'bad': rollout is not a field of the config"),
    'no text': ({3: 4}, "arm 'bad': 3 is no field"),
    'no dict': (('run.seed', 1), "arm 'bad': ('run.seed', 1) is no dict"),
    'impossible combination': ({'staleness.over_age': 'drop'}, "arm 'bad': staleness.max_token_age=None and"),
    'no such choice': ({'loss.proximal': 'old'}, "arm 'bad': loss.proximal='old' is not known; use one of"),
    'None': ({'run.steps': None}, "arm 'bad': run.steps=None must be a whole number"),
    'a text that is a number': (
        {'task.options.words': '3'},
        "arm 'bad': task.options.words='3' cannot be said on a command line, which makes 3 of it: set it in",
    ),
    'servers': (
        {'rollout.server': 'own', 'run.clock': 'real', 'publication.channel': 'files'},
        "arm 'bad': rollout.server='own': a sweep starts no servers",
    ),
}


@pytest.mark.parametrize('case', BAD)
def test_a_bad_arm_is_one_sentence_with_arm_field_and_value(tmp_path, case):
    overrides, message = BAD[case]
    sweep = ToySweep(tmp_path, {'good': {}, 'bad': overrides})
    with pytest.raises(UserError) as error:
        sweep.arms()
    assert str(error.value).startswith(message)
    assert '\n' not in str(error.value)


def test_a_field_of_the_command_line_and_of_an_arm_is_refused(tmp_path):
    sweep = ToySweep(tmp_path, {'a': {'run.seed': 3}})
    with pytest.raises(UserError, match=r"arm 'a': --config.run.seed=5 is set for all arms and by this one"):
        sweep.arms('--config.run.seed=5')


@pytest.mark.parametrize('name', ['a/b', '..', '', 'a b', 'a,b', '-a', 'plots', 'results.csv', 3])
def test_a_name_that_is_no_directory_is_refused(tmp_path, name):
    with pytest.raises(CommandLineError, match='cannot name a directory of the sweep'):
        ToySweep(tmp_path, {name: {}}).arms()


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', r'has no function get_sweep\(\), which returns'),
        ('def get_sweep():\n    return []\n', r'get_sweep\(\) returns a list; it must return a dict'),
        ('def get_sweep():\n    return {}\n', r'get_sweep\(\) returns no arm'),
        ('def get_sweep():\n    return 1 / 0\n', r'line \d+ of .* raises ZeroDivisionError'),
    ],
)
def test_a_file_without_a_sweep_is_refused(tmp_path, text, message):
    sweep = ToySweep(tmp_path, {'a': {}})
    sweep.file.write_text(sweep.file.read_text().partition('def get_sweep')[0] + text)
    with pytest.raises(CommandLineError, match=message):
        sweep.arms()


def test_the_argument_of_the_file_is_that_of_both_functions(tmp_path):
    sweep = ToySweep(tmp_path, {'a': {}})
    text = sweep.file.read_text().replace('get_config()', 'get_config(size)').replace('get_sweep()', 'get_sweep(size)')
    sweep.file.write_text(text.replace("{'a': {}}", '{size: {}}'))
    argv = ['main_sweep', f'--config={sweep.file}:quick', f'--workdir={sweep.workdir}']
    assert [arm.name for arm in read_arms(parse_command(argv, define_flags()), sweep.workdir)] == ['quick']


def groups(tmp_path, arms):
    return {group.name: [arm.name for arm in group.arms] for group in group_arms(ToySweep(tmp_path, arms).arms())}


def test_arms_that_differ_in_seed_only_are_a_group(tmp_path):
    arms = {f'eta{eta}_seed{seed}': {'staleness.eta': eta, 'run.seed': seed} for seed in (0, 10) for eta in (0, 4)}
    assert groups(tmp_path, arms) == {'eta0': ['eta0_seed0', 'eta0_seed10'], 'eta4': ['eta4_seed0', 'eta4_seed10']}


def test_a_group_without_a_common_name_has_that_of_its_first_arm(tmp_path):
    arms = {'x': {'run.seed': 0}, 'y': {'run.seed': 1}, 'seed7': {'run.seed': 7, 'staleness.eta': 0}}
    assert groups(tmp_path, arms) == {'x': ['x', 'y'], 'seed7': ['seed7']}


def test_the_same_arm_twice_is_two_groups_that_can_be_compared(tmp_path):
    arms = {f'{name}_seed{seed}': {'run.seed': seed} for seed in (0, 1) for name in ('once', 'again')}
    assert groups(tmp_path, arms) == {'once': ['once_seed0', 'once_seed1'], 'again': ['again_seed0', 'again_seed1']}


def test_arms_are_selected_by_name_and_pattern(tmp_path):
    arms = ToySweep(tmp_path, {name: {} for name in ('eta0_seed0', 'eta0_seed1', 'eta4_seed0')}).arms()
    names = lambda only: [arm.name for arm in select_arms(arms, only)]
    assert len(names('')) == 3
    assert names('eta4_seed0,*_seed1') == ['eta0_seed1', 'eta4_seed0']
    with pytest.raises(CommandLineError, match="no arm has the name 'eta4_sed0'; did you mean eta4_seed0"):
        names('eta4_sed0')


SWEEPS = [path for path in sorted((ROOT / 'configs' / 'sweeps').glob('*.py')) if defines(str(path), 'get_sweep')]


@pytest.mark.parametrize('path', SWEEPS, ids=lambda path: path.stem)
def test_every_arm_of_the_sweeps_in_configs_is_valid(path, tmp_path):
    command = parse_command(['main_sweep', f'--config={path}', f'--workdir={tmp_path}'], define_flags())
    if command.config.task.name == 'reasoning_gym':  # of its own, or of the config that it imports
        pytest.importorskip('reasoning_gym')
    assert read_arms(command, pathlib.Path(tmp_path))
