"""launch/Dockerfile: its COPY and pip lines, done in a folder and in an environment of their own."""

import os
import re
import shutil
import subprocess
import sys
import venv

import pytest

from tests.launch.test_local import ROOT


def instructions():
    """(instruction, rest of the line)."""
    lines = (ROOT / 'launch' / 'Dockerfile').read_text().splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith('#')]


def copy_files(folder):
    for name, words in instructions():
        if name == 'COPY':
            *sources, target = words.split()
            for source in sources:
                path = folder / (target if len(sources) == 1 else source)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns('__pycache__'))
                else:
                    shutil.copy(ROOT / source, path)


def test_it_names_files_and_extras_that_exist(tmp_path):
    copy_files(tmp_path)
    setup = (ROOT / 'setup.py').read_text()
    [extras] = [words.removeprefix('EXTRAS=') for name, words in instructions() if words.startswith('EXTRAS=')]
    assert [extra for extra in extras.split(',') if f"'{extra}': " not in setup] == []


@pytest.mark.slow
def test_its_pip_lines_make_an_environment_in_which_roles_start(tmp_path):
    folder = tmp_path / 'areal_jax'
    folder.mkdir()
    copy_files(folder)
    venv.create(tmp_path / 'venv', with_pip=True)
    path = f'{tmp_path}/venv/bin:{os.environ["PATH"]}'
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'VIRTUAL'))}
    environment |= {'PATH': path}
    for name, words in instructions():
        if name == 'ARG':
            key, _, value = words.partition('=')
            environment[key] = value
        elif name == 'RUN' and 'pip install' in words:
            subprocess.run(words, shell=True, cwd=folder, env=environment, check=True)
    flags = [
        '--config=configs/tiny_cpu.py',
        f'--workdir={tmp_path}/run',
        '--config.run.steps=2',
        '--config.run.export=False',
    ]
    done = subprocess.run(
        ['python', '-m', 'areal_jax.main_train', *flags], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    assert re.search(r'\d', (tmp_path / 'run' / 'report.md').read_text())
    # from a folder that has no folder areal_jax, which Python would take for the package
    done = subprocess.run(
        ['python', '-c', 'import areal_jax, areal_jax.launch.jobset; print(areal_jax.__file__)'], cwd=tmp_path / 'run',
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(str(folder))
    assert sys.prefix not in done.stdout
