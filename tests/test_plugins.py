"""Own functions are loaded from files and modules; what cannot be loaded is one sentence with field, file and line."""

import json
import pickle
import subprocess
import sys

import pytest

from areal_jax.errors import UserError
from areal_jax.plugins import absolute_spec, load_function, raising_user_error, source_file, spec_of

GOOD = """import dataclasses

@dataclasses.dataclass
class Pair:
    left: int

def double(number):
    return 2 * number
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'own.py').write_text(GOOD)
    return tmp_path


def test_a_function_of_a_file_is_found_by_a_relative_and_an_absolute_path(directory):
    relative, absolute = load_function('own.py:double', 'x.y'), load_function(f'{directory}/own.py:double', 'x.y')
    assert relative(21) == 42
    assert relative is absolute  # the file was run once
    assert not (directory / '__pycache__').exists()


def test_a_function_of_a_module_is_found_by_its_name():
    assert load_function('json:dumps', 'x.y') is json.dumps


def test_what_a_file_declares_can_be_pickled(directory):
    double, pair = load_function('own.py:double', 'x.y'), load_function('own.py:Pair', 'x.y')
    assert pickle.loads(pickle.dumps(double)) is double
    assert pickle.loads(pickle.dumps(pair(3))) == pair(3)


def test_another_process_in_another_directory_finds_the_function_by_its_spec(directory):
    spec = spec_of(load_function('own.py:double', 'x.y'))
    assert spec == absolute_spec('own.py:double') == f'{directory}/own.py:double'
    program = f'from areal_jax.plugins import load_function; print(load_function({spec!r}, "x.y")(4))'
    environment = {'PYTHONPATH': str(source_file('areal_jax.plugins:spec_of', 'x').parents[1])}
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd='/', env=environment, check=True
    )
    assert done.stdout == '8\n'
    assert spec_of(json.dumps) == absolute_spec('json:dumps') == 'json:dumps'


def test_a_changed_file_is_loaded_again(directory):
    before = load_function('own.py:double', 'x.y')
    (directory / 'own.py').write_text(GOOD.replace('2 *', '3 *'))  # in the same second, with the same size
    assert (before(1), load_function('own.py:double', 'x.y')(1)) == (2, 3)


BAD_FILES = {
    'syntax': ('def build(:\n', r'line 1 of .*own\.py is not Python: '),
    'no text': (b'\xff\xfe\n', r'own\.py is not Python: '),
    'import': ('x = 1\nimport nothing_here\n', r'line 2 of own\.py raises ModuleNotFoundError: No module named'),
    'raises': (
        'def f():\n    raise ValueError("no\\ndigits")\nf()\n',
        r'line 2 of own\.py raises ValueError: no digits',
    ),
    'exits': ('import sys\nsys.exit(3)\n', r'line 2 of own\.py raises SystemExit: 3'),
    'library': ('import json\njson.loads("{")\n', r'line 2 of own\.py raises JSONDecodeError: Expecting'),
    'number': ('double = 3\n', r'double is no function in own\.py'),
}


@pytest.mark.parametrize('case', BAD_FILES)
def test_a_file_that_cannot_be_used_is_one_sentence_with_the_line(directory, case):
    content, message = BAD_FILES[case]
    (directory / 'own.py').write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf'^task\.name=own\.py:double: ({message})') as caught:
        load_function('own.py:double', 'task.name')
    assert '\n' not in str(caught.value)
    (directory / 'own.py').write_text(GOOD)
    assert load_function('own.py:double', 'task.name')(1) == 2


WRONG_SPECS = {
    'other.py:double': r"there is no file 'other.py'; a path is relative to the working directory /",
    'ownn.py:double': r"there is no file 'ownn.py'; did you mean own.py\?",
    'own.py:doubel': r"there is no function 'doubel' in own.py; did you mean double\?",
    'json:dumpz': r"there is no function 'dumpz' in json; did you mean dumps\?",
    'json:__name__': r'__name__ is no function in json',
    'jsonn.nothing:f': r"there is no module 'jsonn'; install its package, add its directory to PYTHONPATH",
    'json.nothing:f': r"there is no module 'json.nothing'",
    'own.py:': r'must name a function: path/to/file.py:name or package.module:name',
    ':double': r'must name a function',
    'own.py:a b': r'must name a function',
    'two words:f': r'must name a function',
    './:f': r'\./ is not a file',
}


@pytest.mark.parametrize('spec', WRONG_SPECS)
def test_a_wrong_name_is_one_sentence_with_the_nearest_one(directory, spec):
    with pytest.raises(UserError, match=WRONG_SPECS[spec]) as caught:
        load_function(spec, 'task.name')
    assert str(caught.value).startswith('task.name=')


def test_what_an_own_function_raises_when_called_names_its_line(directory):
    (directory / 'own.py').write_text('def divide(a, b):\n    return a / b\n')
    divide = load_function('own.py:divide', 'x.y')
    message = r'^x\.y=own\.py:divide: line 2 of own\.py raises ZeroDivisionError: division by zero$'
    with pytest.raises(UserError, match=message), raising_user_error('own.py:divide', 'x.y'):
        divide(1, 0)
