"""What `pip install` makes of a clone: the files it installs, and, slow, the commands outside the clone."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile

import pytest

from tests.launch.test_dockerfile import ROOT, copy_files

SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'areal_jax').rglob('*') if path.is_file()}
BESIDE = ['launch', 'configs']


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
    """A copy to build from, since a build leaves folders behind."""
    folder = tmp_path_factory.mktemp('build') / 'clone'
    folder.mkdir()
    copy_files(folder)
    others = ('tests/toys.py', 'docs/config.md', 'benchmarks/report.py', 'checks/README.md', 'third_party/README.md')
    files = (path.name for path in ROOT.iterdir() if path.suffix in ('.md', '.cff', '.in'))
    for name in (*files, *others, '.ci/run', '.github/workflows/tests.yml'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in BESIDE:  # as after a run
        (folder / name / '__pycache__').mkdir(exist_ok=True)
        (folder / name / '__pycache__' / 'left.cpython-311.pyc').touch()
    return folder


def build(clone, *words):
    done = subprocess.run([sys.executable, 'setup.py', '-q', *words], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def list_files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


def expected_files():
    """Every source of the package, and those of launch/ and configs/ below it."""
    inside = {name for name in SOURCES if not name.endswith('.pyc')}
    beside = {
        f'areal_jax/{path.relative_to(ROOT).as_posix()}'
        for name in BESIDE
        for path in (ROOT / name).rglob('*')
        if path.suffix in ('.py', '.j2', '.jinja')
    }
    return inside | beside


def test_one_package_is_installed_with_all_its_files(clone, tmp_path):
    build(clone, 'build_py', f'--build-lib={tmp_path}')
    assert {path.name for path in tmp_path.iterdir()} == {'areal_jax'}
    assert list_files(tmp_path) == expected_files()
    needed = ('py.typed', 'configs/templates/hermes.jinja', 'launch/slurm.sbatch.j2', 'native/kernels.cc')
    assert all((tmp_path / 'areal_jax' / name).is_file() for name in needed)


def test_a_source_archive_has_all_that_the_clone_has(clone, tmp_path):
    build(clone, 'sdist', f'--dist-dir={tmp_path}')
    [archive] = tmp_path.glob('*.tar.gz')
    with tarfile.open(archive) as tar:
        names = {member.name.partition('/')[2] for member in tar if member.isfile()}
    missing = {name for name in list_files(clone) if '__pycache__' not in name} - names
    assert {name for name in missing if not name.startswith(('areal_jax.egg-info/', 'build/'))} == set()
    assert not [name for name in names if name.endswith('.pyc')]


def test_the_quickstart_brings_what_its_servers_need():
    extras = re.search(r"'quickstart': \[(.*)\]", (ROOT / 'setup.py').read_text())[1].split(', ')
    assert {'*SERVE', '*GGUF', '*PLOTS', '*TENSORBOARD'} <= set(extras)


@pytest.fixture(scope='module')
def programs(clone, tmp_path_factory):
    """The folder of commands of an environment in which pip has installed a wheel of the clone, and nothing else."""
    folder = tmp_path_factory.mktemp('installed')
    venv.create(folder / 'venv', with_pip=True)
    pip = [folder / 'venv' / 'bin' / 'python', '-m', 'pip', '--disable-pip-version-check']
    run([*pip, 'wheel', '--quiet', '--no-deps', f'--wheel-dir={folder}', clone], folder)
    [wheel] = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition('/')[0] for name in names} == {'areal_jax', f'{wheel.name.rpartition("-py3")[0]}.dist-info'}
    assert [name for name in names if name.endswith('/LICENSE')]
    run([*pip, 'install', '--quiet', f'{wheel}[quickstart]'], folder)
    return folder / 'venv' / 'bin'


def environment():
    """Without a trace of the clone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'VIRTUAL'))}


def run(command, cwd, code=0):
    """What the command printed on stdout, or, where it is to fail, on stderr."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == code, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stderr if code else done.stdout


@contextlib.contextmanager
def serving(programs, cwd, *flags):
    """The URL of areal-serve, which is killed at the end."""
    process = subprocess.Popen(
        [programs / 'areal-serve', '--port=0', *flags], cwd=cwd, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        while (line := process.stdout.readline()) and not line.startswith('serving '):
            lines.append(line)
        assert line, ''.join(lines)
        yield re.search(r'http://\S+', line)[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_outside_the_clone_a_model_is_trained_reported_evaluated_and_served(programs, tmp_path):
    where = run([programs / 'python', '-c', 'import areal_jax; print(areal_jax.__file__)'], tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(programs.parent)
    assert 'bound of Eq. 3' in run([programs / 'areal-config', 'staleness.eta'], tmp_path)

    run([programs / 'areal-train', '--config=tiny_cpu', '--workdir=runs/tiny', '--config.run.steps=4'], tmp_path)
    facts = json.loads((tmp_path / 'runs/tiny/facts.json').read_text())
    assert (facts['config'], facts['git_commit']) == ('package:configs/tiny_cpu.py', None)
    (tmp_path / 'runs/tiny/report.md').unlink()
    run([programs / 'areal-report', '--workdir=runs/tiny'], tmp_path)
    assert (tmp_path / 'runs/tiny/report.md').is_file()
    assert (tmp_path / 'runs/tiny/report.html').is_file()

    # the same run again, with one update more: the config is found again
    again = ['--config=package:configs/tiny_cpu.py', '--workdir=runs/tiny', '--config.run.steps=5', '--resume']
    run([programs / 'areal-train', *again], tmp_path)
    assert len((tmp_path / 'runs/tiny/metrics.jsonl').read_text().splitlines()) == 5

    run([programs / 'areal-eval', '--config=tiny_cpu', '--model=runs/tiny', '--workdir=runs/eval'], tmp_path)
    assert json.loads((tmp_path / 'runs/eval/results.json').read_text())['config_file'] == 'package:configs/tiny_cpu.py'
    with (
        serving(programs, tmp_path, '--config=tiny_cpu', '--model=runs/tiny') as url,
        urllib.request.urlopen(f'{url}/v1/models', timeout=60) as reply,
    ):
        assert json.loads(reply.read())['data']


@pytest.mark.slow
def test_outside_the_clone_processes_sweeps_and_own_functions_are_found(programs, tmp_path):
    flags = ['--config.run.steps=2', '--config.evaluation.problems=0']
    servers = ['--config.rollout.server=own', '--config.publication.channel=files']
    local = [programs / 'python', '-m', 'areal_jax.launch.local', '--config=tiny_cpu', '--workdir=runs/local']
    run([*local, *servers, *flags], tmp_path)
    assert (tmp_path / 'runs/local/report.md').is_file()

    sweep = [programs / 'areal-sweep', '--config=sweeps/tiny', '--workdir=runs/sweep', '--only=eta4_seed1', *flags]
    run(sweep, tmp_path)
    assert (tmp_path / 'runs/sweep/eta4_seed1/report.md').is_file()

    # a task of the package that a config names, scored in processes of their own
    own = ['--config=sft_arithmetic', '--workdir=runs/sft', '--config.run.steps=6']
    run([programs / 'areal-train', *own], tmp_path)
    noted = json.loads((tmp_path / 'runs/sft/own_code.json').read_text())
    assert noted['task.name']['function'] == 'package:configs/sweeps/arithmetic.py:build'

    slurm = ['areal_jax.launch.slurm', '--config=tiny_cpu', f'--workdir={tmp_path}/a', '--dry_run', '--local_nodes']
    roles = ['--config.cluster.learner=hosts=1 x data=1', *servers]
    text = run([programs / 'python', '-m', *slurm, *roles], tmp_path)
    assert f'role=({programs}/python -m areal_jax.main_role --config=package:configs/tiny_cpu.py' in text


@pytest.mark.slow
def test_outside_the_clone_a_missing_package_is_named_by_its_requirement(programs, tmp_path):
    said = run(
        [programs / 'areal-train', '--config=tiny_cpu', '--workdir=a', '--config.task.name=jsonl',
         '--config.task.path=x.jsonl', '--config.task.answer=math', '--config.task.verifier=process'],
        tmp_path, code=2,
    )  # fmt: skip
    assert re.search(r"pip install 'reasoning-gym>=[\d.]+' 'math-verify>=[\d.]+'$", said.strip())
    said = run([programs / 'areal-train', '--config=configs/tiny_cpu.py', '--workdir=a'], tmp_path, code=2)
    assert 'did you mean tiny_cpu?' in said
