"""Where the package runs from: the files that come with it, and pip commands that work from where the user is."""

import importlib.metadata
import os
import pathlib
import sys

import pytest

from areal_jax import installation
from areal_jax.installation import (
    build_python_path,
    describe_install,
    find_clone,
    list_configs,
    locate_file,
    name_launcher,
)
from areal_jax.plugins import absolute_spec, load_function, source_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIRES = [
    'jax>=0.10.2', "aiohttp>=3.11; extra == 'serve'", "gguf>=0.19; extra == 'gguf'", 'yarl>=1 ; extra == "serve"',
]  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as pip installs it, at another place."""
    folder = tmp_path / 'site-packages' / 'areal_jax'
    for name in ('configs/tiny_cpu.py', 'configs/sweeps/tiny.py', 'launch/__init__.py'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.setattr(installation, 'FOLDER', folder)
    monkeypatch.setattr(importlib.metadata, 'requires', {'areal_jax': REQUIRES}.get)
    return folder


def test_a_clone_has_configs_and_launchers_beside_the_package():
    assert find_clone() == ROOT
    assert locate_file('package:configs/tiny_cpu.py') == ROOT / 'configs' / 'tiny_cpu.py'
    assert {'tiny_cpu', 'sweeps/tiny', 'templates/two_turns'} <= set(list_configs())
    assert name_launcher('local') == 'launch.local'


def test_an_installation_has_them_inside(installed):
    assert find_clone() is None
    assert locate_file('package:configs/tiny_cpu.py') == installed / 'configs' / 'tiny_cpu.py'
    assert list_configs() == ['sweeps/tiny', 'tiny_cpu']
    assert name_launcher('local') == 'areal_jax.launch.local'


def test_in_a_clone_the_hint_installs_the_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'executable', str(ROOT / '.venv' / 'bin' / 'python'))
    monkeypatch.chdir(ROOT)
    assert describe_install('serve') == ".venv/bin/python -m pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert describe_install('serve') == f"{ROOT}/.venv/bin/python -m pip install -e '{ROOT}[serve]'"


def test_installed_the_hint_names_the_packages_of_the_extra_alone(installed, monkeypatch):
    monkeypatch.setattr(sys, 'executable', '/opt/my envs/bin/python')
    assert describe_install('serve') == "'/opt/my envs/bin/python' -m pip install 'aiohttp>=3.11' 'yarl>=1'"


@pytest.mark.parametrize('given', [None, '/mine'])
def test_other_processes_of_a_clone_import_the_same_copy(given, monkeypatch):
    monkeypatch.delenv('PYTHONPATH', raising=False)
    if given:
        monkeypatch.setenv('PYTHONPATH', given)
    assert build_python_path().split(os.pathsep) == [str(ROOT), *([given] if given else [])]


def test_an_installed_package_is_on_no_path_before_the_standard_library(installed, monkeypatch):
    """Entries of PYTHONPATH come before it, and site-packages may have modules of the same names."""
    monkeypatch.setenv('PYTHONPATH', '/mine')
    assert build_python_path() == '/mine'


def test_a_function_of_a_file_of_the_package_is_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = 'package:configs/templates/two_turns.py:build'
    assert load_function(spec, 'rollout.workflow').__name__ == 'build'
    assert absolute_spec(spec) == spec  # the path is another one on another machine
    assert source_file(spec, 'rollout.workflow') == ROOT / 'configs' / 'templates' / 'two_turns.py'
