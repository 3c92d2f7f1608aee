"""What the Tab key offers, asked of bash itself; zsh and fish where they are installed, and their text."""

import pathlib
import re
import shutil
import subprocess

import pytest

from areal_jax.commands.command import find_commands
from areal_jax.commands.completion import render
from areal_jax.config.declarations import FIELDS

_ASK = """
source "$1"; cd "$2"
complete -p areal-train areal-check-log > /dev/null || exit 1
COMP_LINE=$3; COMP_POINT=${#3}; COMPREPLY=()
_areal_jax "${3%% *}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope='module')
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp('completion') / 'areal_jax.bash'
    path.write_text(render('bash'))
    return path


@pytest.fixture
def folder(tmp_path):
    for name in ('runs/tiny', 'configs'):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / 'configs' / 'mine.py').write_text('')
    (tmp_path / 'read me.txt').write_text('')
    return tmp_path


def complete(script: pathlib.Path, folder: pathlib.Path, line: str, before: str = '') -> list[str]:
    command = ['bash', '--norc', '-c', before + _ASK, 'bash', str(script), str(folder), line]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ''
    return done.stdout.splitlines() if done.stdout.strip() else []


ASKED = {
    'areal-train --w': ['--workdir='],
    'areal-train --res': ['--resume '],
    'areal-train --config': ['--config='],
    'areal-train --config.ru': ['--config.run.'],
    'areal-train --config.run.st': ['--config.run.stall_timeout_s=', '--config.run.steps='],
    'areal-train --config.run.clock=': ['real ', 'virtual '],
    'areal-train --config.run.clock=v': ['virtual '],
    'areal-train --config.telemetry.plots=': ['True ', 'False '],
    'areal-train --config=c': ['configs/'],
    'areal-train --config=configs/': ['configs/mine.py '],
    'areal-train --workdir=runs/': ['runs/tiny/'],
    'areal-train --workdir ru': ['runs/'],
    '/opt/bin/areal-export --dtype=b': ['bfloat16 '],
    'areal-export --config.run': [],
    'areal-role --role ': ['controller ', 'learner ', 'engine ', 'exporter '],
    'areal-check-log run': ['runs/'],
    'areal-train --config=configs/mine.py --proc': ['--process_id='],
    'areal-train --help': ['--help '],
    'areal-train --frob': [],
}


@pytest.mark.parametrize('line', ASKED)
def test_bash_completes(script, folder, line):
    assert sorted(complete(script, folder, line)) == sorted(ASKED[line])


def test_bash_replaces_the_whole_word_where_equals_breaks_no_words(script, folder):
    words = complete(script, folder, 'areal-train --config.run.clock=v', before='COMP_WORDBREAKS=" "\n')
    assert words == ['--config.run.clock=virtual ']


def test_bash_offers_every_flag_of_every_command(script, folder):
    for command in find_commands():
        if command.program.startswith('areal-'):
            offered = {word.strip(' =') for word in complete(script, folder, f'{command.program} --')}
            assert {'--help', '--version'} <= offered
            assert set(re.findall(r'--[a-z_-]+', ' '.join(command.usage))) <= offered


def test_fish_and_zsh_name_every_field_and_choice():
    fish, zsh = render('fish'), render('zsh')
    for path in FIELDS:
        assert f"-l 'config.{path}'" in fish
        assert f'--config.{path}=' in zsh
    assert "complete -c $command -l 'config.run.clock' -x -a 'real virtual' -d " in fish
    assert "complete -c areal-export -l 'dtype' -x -a 'float32 bfloat16 float16' -d 'Of the weights.'" in fish
    assert "*' --config.run.clock') echo 'real virtual' ;;" in zsh
    for line in fish.splitlines():  # quotes are closed: fish escapes ' inside '...' with a backslash
        assert len(re.findall(r"(?<!\\)'", line)) % 2 == 0, line


@pytest.mark.parametrize('shell', ['bash', 'zsh', 'fish'])
def test_a_shell_reads_its_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f'{shell} is not installed')
    (tmp_path / 'script').write_text(render(shell))
    done = subprocess.run([shell, '-n', tmp_path / 'script'], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, '')
