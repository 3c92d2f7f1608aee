"""The file that --config names: a path, a file of the package, or its name."""

import pathlib

import pytest
from absl import flags

from areal_jax.app.command_line import (
    CommandLineError,
    ConfigFile,
    defines,
    find_config_file,
    load_config,
    parse_command,
)
from areal_jax.app.library import load_source
from areal_jax.app.sweep.arms import make_arms

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = 'package:configs/tiny_cpu.py'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not in a clone."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ('source', 'name', 'argument'),
    [
        ('tiny_cpu', TINY, None),
        ('sweeps/tiny', 'package:configs/sweeps/tiny.py', None),
        ('tiny_cpu:', TINY, ''),
        (f'{TINY}:a:b', TINY, 'a:b'),
        ('mine.py:3', 'mine.py', '3'),
        ('configs/tiny_cpu.py', 'configs/tiny_cpu.py', None),
        ('tiny', 'tiny', None),  # no config has this name
    ],
)
def test_a_name_is_that_of_a_config_of_the_package_and_the_rest_is_a_path(source, name, argument):
    assert find_config_file(source) == ConfigFile(name, argument)


def test_what_is_noted_names_the_same_file_again(tmp_path):
    for source in ('tiny_cpu', 'tiny_cpu:3', TINY, 'mine.py:3'):
        file = find_config_file(source)
        assert find_config_file(file.source) == file
    assert find_config_file('tiny_cpu').absolute_source == TINY
    assert find_config_file('mine.py:3').absolute_source == f'{tmp_path}/mine.py:3'


def test_a_file_of_the_working_directory_comes_before_a_name_and_a_folder_does_not(tmp_path):
    (tmp_path / 'quickstart').mkdir()
    assert find_config_file('quickstart').name == 'package:configs/quickstart.py'
    (tmp_path / 'tiny_cpu').write_text('')
    assert find_config_file('tiny_cpu').path == pathlib.Path('tiny_cpu')
    assert find_config_file(TINY).path == ROOT / 'configs' / 'tiny_cpu.py'


def test_a_config_of_the_package_is_the_file_of_the_clone():
    from_file = load_config(str(ROOT / 'configs' / 'tiny_cpu.py'))
    assert load_config('tiny_cpu') == load_config(TINY) == from_file
    assert from_file.run.steps == 200
    assert defines('sweeps/tiny', 'get_sweep')


def test_a_command_and_the_library_note_the_full_name(tmp_path):
    assert load_source('tiny_cpu')[1] == TINY
    command = parse_command(['areal-train', '--config=sweeps/tiny', '--config.run.steps=3'], flags.FlagValues())
    assert command.source == 'package:configs/sweeps/tiny.py'
    (arm,) = make_arms(command, {'a': {'run.seed': 1}}, tmp_path)
    assert arm.arguments[0] == '--config=package:configs/sweeps/tiny.py'


@pytest.mark.parametrize(
    ('source', 'said'),
    [
        ('configs/tiny_cpu.py', r"there is no file 'configs/tiny_cpu\.py'; did you mean tiny_cpu\?"),
        ('quickstrt', r"there is no file 'quickstrt'; did you mean quickstart\?"),
        ('package:configs/tiny.py', r"there is no file 'package:configs/tiny\.py'; did you mean .*tiny"),
        ('zzz.py', "there is no file 'zzz.py'; areal-config lists the configs that come with the package"),
        ('tiny_cpu:3', rf'get_config\(\) of {TINY} takes no argument: leave out :3'),
        ('package:configs', 'package:configs is not a file'),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_a_near_one(source, said):
    with pytest.raises(CommandLineError, match=said):
        load_config(source)
