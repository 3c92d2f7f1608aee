"""Every config of the table is refused in one sentence: in process, and a few of them as their user meets them."""

import pathlib
import subprocess
import sys

import pytest
from absl import flags

from areal_jax.app.command_line import parse_train_command
from areal_jax.app.library import build_run
from areal_jax.errors import UserError
from tests.config.hostile_configs import HOSTILE_CONFIGS

ROOT = pathlib.Path(__file__).parents[2]
PROCESSES = ['rollout.slotz=3', 'run.steps=0', 'model.d_model=65536 model.n_layers=200', 'a positional argument']


def build(hostile, workdir):
    """As far as a run is built before it computes anything."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, '', values)
    flags.DEFINE_bool('resume', False, '', values)
    words = ['main_train', f'--config={hostile.config}', f'--workdir={workdir}', *hostile.arguments]
    command = parse_train_command(words, values)
    return build_run(command.config, workdir, resume=values['resume'].value, overrides=command.overrides)


@pytest.mark.parametrize('name', HOSTILE_CONFIGS)
def test_it_is_refused_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    hostile = HOSTILE_CONFIGS[name]
    with pytest.raises(UserError) as refused:
        build(hostile, tmp_path / 'run')
    assert hostile.message in str(refused.value)
    assert '\n' not in str(refused.value)


def test_there_are_enough_of_them():
    assert len(HOSTILE_CONFIGS) >= 90
    assert all(hostile.message for hostile in HOSTILE_CONFIGS.values())


@pytest.mark.parametrize('name', PROCESSES)
def test_the_command_prints_it_alone_and_exits_with_2(name, tmp_path):
    hostile = HOSTILE_CONFIGS[name]
    command = ['-m', 'areal_jax.main_train', f'--config={hostile.config}', f'--workdir={tmp_path / "run"}']
    done = subprocess.run(
        [sys.executable, *command, *hostile.arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith('error: ')
    assert done.stderr.count('\n') == 1
    assert hostile.message in done.stderr
    assert not (tmp_path / 'run').exists()
