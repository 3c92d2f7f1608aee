"""Exceptions of an answer that no code of a test catches: the interpreter swallows them, and the test does not pass."""

from __future__ import annotations

import pytest

from areal_jax.tasks.code.judge import Judge
from areal_jax.workers.sandbox.confinement import find_abi
from tests.tasks.code.test_judge import SORTED, ask, make_problem

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
IMPORTED = ('asyncio', 'concurrent.futures', 'unittest')  # by tests, and not by the server of the children
SEQUENCE = 'class Sequence:\n    def __getitem__(self, i):\n        return f(i) == i + 1 if i < 3 else [][i]\n'
TWICE_PASSES = 'def f(x):\n    return x + 1\n'

# by name: what the answer raises, and a test of `x + 1` that passes where it is swallowed
SWALLOWED = {
    'all of a map': ('StopIteration', 'assert all(map(lambda x: f(x) == x + 1, range(3)))'),
    'any of a map': ('StopIteration', 'assert not any(map(lambda x: f(x) != x + 1, range(3)))'),
    'a zip': ('StopIteration', 'for got, x in zip(map(f, range(3)), range(3)): assert got == x + 1'),
    'the function itself in a map': (
        'StopIteration', 'assert all(got == x + 1 for x, got in enumerate(map(f, range(3))))',
    ),
    'a loop over __getitem__': ('IndexError', f'{SEQUENCE}for passes in Sequence(): assert passes'),
    'all of __getitem__': ('IndexError', f'{SEQUENCE}assert all(Sequence())'),
    'a default of next': ('StopIteration', 'assert next(map(f, [1]), 2) == 2'),
    'a filter': ('StopIteration', 'assert list(filter(lambda x: f(x) != x + 1, range(3))) == []'),
    'a set of a map': ('StopIteration', 'assert {*map(lambda x: f(x) == x + 1, range(3))} <= {True}'),
    'a sum': ('StopIteration', 'assert sum(map(lambda x: f(x) != x + 1, range(3))) == 0'),
    'a default of max': ('StopIteration', 'assert max(map(lambda x: abs(f(x) - x - 1), range(3)), default=0) == 0'),
    'an iterator with a sentinel': ('StopIteration', 'assert all(got == 2 for got in iter(lambda: f(1), 2))'),
    'an iterator of the test': (
        'StopIteration',
        'class Tries:\n    left = 3\n    def __iter__(self): return self\n    def __next__(self):\n'
        '        self.left -= 1\n        got = f(self.left)\n        if self.left < 0: raise StopIteration\n'
        '        return got == self.left + 1\nassert all(Tries())',
    ),
    'an asynchronous iterator': (
        'StopAsyncIteration',
        'import asyncio\nclass Tries:\n    left = 3\n    def __aiter__(self): return self\n'
        '    async def __anext__(self):\n        self.left -= 1\n        got = f(self.left)\n'
        '        if self.left < 0: raise StopAsyncIteration\n        return got == self.left + 1\n'
        'async def check():\n    async for passes in Tries(): assert passes\nasyncio.run(check())',
    ),
    'hasattr': (
        'AttributeError',
        'class Tried:\n    @property\n    def failed(self):\n        if f(1) != 2: return True\n'
        '        return [].none\nassert not hasattr(Tried(), "failed")',
    ),
    'a default of getattr': (
        'AttributeError', 'class Tried:\n    passed = property(lambda self: f(1) == 2)\n'
        'assert getattr(Tried(), "passed", True)',
    ),
    'get of a mapping': (
        'KeyError',
        'import collections.abc\nclass Tried(collections.abc.Mapping):\n'
        '    def __getitem__(self, x): return f(x) == x + 1\n'
        '    def __iter__(self): return iter(())\n    def __len__(self): return 0\nassert Tried().get(1, True)',
    ),
    'a sequence of collections': (
        'IndexError',
        'import collections.abc\nclass Tried(collections.abc.Sequence):\n'
        '    def __getitem__(self, i): return f(i) == i + 1 if i < 3 else [][i]\n    def __len__(self): return 3\n'
        'assert all(Tried())',
    ),
    'a merge of heaps': ('StopIteration', 'import heapq\nassert all(got > 0 for got in heapq.merge(map(f, range(3))))'),
    'a hint of a length': (
        'TypeError', 'class Tried:\n    def __len__(self): return f(2)\n    def __iter__(self): return iter(())\n'
        'assert list(Tried()) == []',
    ),
    'a thread': (
        'ValueError', 'import threading\nwrong = []\n'
        'thread = threading.Thread(target=lambda: wrong.append(0) if f(1) != 2 else None)\n'
        'thread.start()\nthread.join()\nassert not wrong',
    ),
    'a future that nobody asks': (
        'ValueError', 'import concurrent.futures\nwrong = []\n'
        'with concurrent.futures.ThreadPoolExecutor(1) as pool:\n'
        '    pool.submit(lambda: wrong.append(0) if f(1) != 2 else None)\nassert not wrong',
    ),
    'a finaliser': (
        'ValueError', 'wrong = []\nclass Tried:\n    def __del__(self):\n        if f(1) != 2: wrong.append(0)\n'
        'Tried()\nassert not wrong',
    ),
    'a finally on the way': (
        'StopIteration',
        'def passes(x):\n    try: return f(x) == x + 1\n    finally: len([])\nassert all(map(passes, range(3)))',
    ),
    'another handler on the way': (
        'StopIteration',
        'def passes(x):\n    try: return f(x) == x + 1\n    except KeyError: return False\n'
        'assert all(map(passes, range(3)))',
    ),
    'a handler that raises it again': (
        'StopIteration',
        'def passes(x):\n    try: return f(x) == x + 1\n    except Exception: raise\nassert all(map(passes, range(3)))',
    ),
    'a with on the way': (
        'StopIteration',
        'import contextlib\ndef passes(x):\n    with contextlib.nullcontext(): return f(x) == x + 1\n'
        'assert all(map(passes, range(3)))',
    ),
    'expected before': (
        'StopIteration',
        'try: f(-1)\nexcept StopIteration: pass\nassert all(map(lambda x: f(x) == x + 1, range(3)))',
    ),
}  # fmt: skip

# a test that expects an exception, and an answer that raises it there and nowhere else
EXPECTED = {
    'try': ('IndexError', 'try: f(-1)\nexcept IndexError: pass\nelse: raise AssertionError\nassert f(1) == 2'),
    'try of StopIteration': ('StopIteration', 'try: f(-1)\nexcept StopIteration: pass\nelse: raise AssertionError'),
    'its base': ('KeyError', 'try: f(-1)\nexcept LookupError as error: assert "below" in str(error)\nassert f(1) == 2'),
    'any': ('AttributeError', 'got = []\ntry: f(-1)\nexcept: got.append(1)\nassert got == [1]'),
    'in a loop': (
        'TypeError', 'got = []\nfor x in (-1, 1, -2):\n    try: got.append(f(x))\n    except TypeError: got.append(0)\n'
        'assert got == [0, 2, 0]',
    ),
    'in a function that a map calls': (
        'StopIteration',
        'def raises(x):\n    try: f(x)\n    except StopIteration: return True\nassert all(map(raises, [-1, -2]))',
    ),
    'suppress': ('ValueError', 'import contextlib\nwith contextlib.suppress(ValueError): f(-1)\nassert f(1) == 2'),
    'a manager of the test': (
        'StopIteration',
        'import contextlib\n@contextlib.contextmanager\ndef raises(kind):\n    try: yield\n    except kind: return\n'
        '    raise AssertionError\nwith raises(StopIteration): f(-1)\nwith raises(StopIteration): f(-2)',
    ),
    'a class of the test': (
        'IndexError',
        'class raises:\n    def __enter__(self): pass\n    def __exit__(self, kind, *rest): return kind is IndexError\n'
        'with raises(): f(-1)',
    ),
    'assertRaises': (
        'IndexError', 'import unittest\ncase = unittest.TestCase()\ncase.assertRaises(IndexError, f, -1)\n'
        'with case.assertRaisesRegex(IndexError, "below"): f(-2)\ncase.assertEqual(f(1), 2)',
    ),
    'another one from it': (
        'KeyError',
        'def g(x):\n    try: return f(x)\n    except KeyError as error: raise ValueError("no") from error\n'
        'try: g(-1)\nexcept ValueError as error: assert isinstance(error.__cause__, KeyError)',
    ),
    'raised again to one that expects it': (
        'KeyError',
        'def g(x):\n    try: return f(x)\n    except KeyError: raise\n    finally: len([])\n'
        'try: g(-1)\nexcept KeyError: pass',
    ),
    'asked of a future': (
        'ValueError', 'import concurrent.futures\nwith concurrent.futures.ThreadPoolExecutor(1) as pool:\n'
        '    failing = pool.submit(f, -1)\n    try: failing.result()\n    except ValueError: pass\n'
        '    assert pool.submit(f, 1).result() == 2',
    ),
    'of a coroutine': (
        'StopAsyncIteration',
        'import asyncio\nasync def call(x): return f(x)\nasync def check():\n    try: await call(-1)\n'
        '    except StopAsyncIteration: return await call(1)\nassert asyncio.run(check()) == 2',
    ),
    'a try that tries again': (
        'ValueError',
        'def g(xs):\n    for x in xs:\n        try: return f(x)\n        except ValueError:\n'
        '            if x == -2: raise\nassert g([-1, 1]) == 2\ntry: g([-1, -2])\nexcept ValueError: pass',
    ),
    'a generator of the test': (
        'IndexError',
        'def tries():\n    for x in (-1, 1):\n        try: yield f(x)\n        except IndexError: yield 0\n'
        'assert list(tries()) == [0, 2]\nassert next(tries()) == 0',
    ),
}  # fmt: skip


@pytest.fixture(scope='module')
def judge():
    judge = Judge('landlock')
    yield judge
    judge.close()


@pytest.fixture(scope='module')
def imports(judge):
    """Whether the tests can import what the server has not; False where root's interpreter is closed to others."""
    return ask(judge, SORTED['solution'], make_problem(**{**SORTED, 'tests': ['import csv']})).label == 'ok'


def require(imports, test):
    if any(f'import {name}' in test for name in IMPORTED) and not imports:
        pytest.skip('the user that root becomes cannot read this interpreter')


def of_test(test):
    return make_problem(question='?', entry_point='f', tests=[test])


@pytest.mark.parametrize('name', SWALLOWED)
def test_what_the_interpreter_swallows_does_not_pass_and_a_solution_does(judge, imports, name):
    kind, test = SWALLOWED[name]
    require(imports, test)
    assert ask(judge, TWICE_PASSES, of_test(test)).label == 'ok' or name == 'expected before'
    found = ask(judge, f'def f(x):\n    raise {kind}("no")\n', of_test(test))
    assert (found.label, found.share) == ('exception', 0), found
    assert found.reason.startswith(f'{kind}: '), found
    asked = {'test': 'def check(f):\n    exec(TEST, {"f": f})\n', 'setup': f'TEST = {test!r}'}
    by_check = make_problem(question='?', entry_point='f', **asked)
    assert ask(judge, f'def f(x):\n    raise {kind}("no")\n', by_check).label == 'exception'


@pytest.mark.parametrize('name', EXPECTED)
def test_what_a_test_expects_passes(judge, imports, name):
    kind, test = EXPECTED[name]
    require(imports, test)
    code = f'def f(x):\n    if x < 0:\n        raise {kind}("below")\n    return x + 1\n'
    found = ask(judge, code, of_test(test))
    assert found.label == 'ok', found
    if 'else: raise' in test or 'asserts' in test:  # it demands the exception
        assert ask(judge, TWICE_PASSES, of_test(test)).label == 'wrong'


def test_a_call_that_raises_between_two_tests_fails_its_own_alone(judge):
    tests = [SWALLOWED['all of a map'][1].replace('3', '4'), 'assert f(1) == 2']
    problem = make_problem(question='?', entry_point='f', tests=tests)
    code = 'def f(x):\n    if x == 3: raise StopIteration\n    return x + 1\n'
    found = ask(judge, code, problem, is_partial=True)
    assert (found.label, found.share) == ('exception', 0.5)
