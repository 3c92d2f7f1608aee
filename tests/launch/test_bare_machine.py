"""README's two commands where there is no compiler, no cache and no git history. Slow: each makes its environment."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.launch.test_local import ROOT

_COMPILERS = re.compile(r'(.*-)?(c\+\+|cc|c89|c99|gcc|g\+\+|clang|clang\+\+|cpp|tcc|icx|ld|as)([.-].*)?')
_LEFT_OUT = ('.git', '.venv*', 'runs', '__pycache__', '*.egg-info', '.*_cache', '.hypothesis', 'build', 'dist')


def link_programs(folder: pathlib.Path) -> str:
    """A PATH with all programs of the usual one but compilers."""
    folder.mkdir()
    (folder / 'python3').symlink_to(pathlib.Path(sys.base_prefix, 'bin', 'python3'))
    for directory in os.environ['PATH'].split(os.pathsep):
        for program in pathlib.Path(directory).glob('*'):
            link = folder / program.name
            if not (_COMPILERS.fullmatch(program.name) or program.name.startswith('python') or link.is_symlink()):
                link.symlink_to(program)
    return str(folder)


def test_programs_are_there_and_compilers_are_not(tmp_path):
    found = link_programs(tmp_path / 'bin')
    assert all(shutil.which(name, path=found) for name in ('bash', 'python3', 'cat', 'grep', 'ls'))
    assert not any(shutil.which(name, path=found) for name in ('cc', 'gcc', 'c++', 'g++', 'clang', 'clang++'))


@pytest.mark.slow
@pytest.mark.parametrize('command', ['launch/quickstart.sh', 'launch/test.sh'])
def test_a_command_of_the_readme_ends_well_on_a_bare_machine(tmp_path, command):
    """Half an hour for the tests."""
    readme = (ROOT / 'README.md').read_text()
    assert f'\nbash {command} ' in readme
    archive = tmp_path / 'areal_jax'
    shutil.copytree(ROOT, archive, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ('CC', 'CXX', 'PYTHONPATH', 'VIRTUAL_ENV', 'AREAL_JAX_PYTHON', 'JAX_COMPILATION_CACHE_DIR')
    }
    environment |= {
        'PATH': link_programs(tmp_path / 'bin'), 'XDG_CACHE_HOME': str(tmp_path / 'cache'), 'PIP_NO_CACHE_DIR': '1',
    }  # fmt: skip
    done = subprocess.run(['bash', command], cwd=archive, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
