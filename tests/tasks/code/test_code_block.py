"""Where the code of an answer is, by its text alone."""

from __future__ import annotations

import pytest

from areal_jax.tasks.code.code_block import find_code

CODE = 'def f(x):\n    return x\n'


@pytest.mark.parametrize(
    ('text', 'code'),
    [
        (CODE, CODE),
        (f'Sure:\n```python\n{CODE}```\nThat is it.', CODE),
        (f'```\n{CODE}```', CODE),
        (f'~~~py\n{CODE}~~~', CODE),
        (f'```python\ndef f(x): return 0\n```\nBetter:\n```python\n{CODE}```', CODE),
        (f'It ends early:\n```python\n{CODE}', CODE),
        (f'```python\n{CODE}```\n```', CODE),
        ('I do not know.', ''),
        ('', ''),
        ('```python\n```', ''),
        ('```python\nx = 1\n```', 'x = 1\n'),
        ('f = lambda x: x', 'f = lambda x: x'),
        ('from operator import neg as f', 'from operator import neg as f'),
        ('print("def f")', ''),
        ('    def f(x): pass', ''),
    ],
)
def test_the_last_block_or_the_whole_text(text, code):
    assert find_code(text, 'f') == code


def test_a_completion_goes_on_from_the_prompt():
    prompt = 'def f(x):\n    """Itself."""\n'
    assert find_code('    return x\n', 'f', prompt) == f'{prompt}    return x\n'
    assert find_code(f'```python\n{CODE}```', 'f', prompt) == CODE
    assert find_code('```python\n    return x\n```', 'f', prompt) == f'{prompt}    return x\n'


def test_a_program_has_no_function():
    assert find_code('print(input())') == 'print(input())'


def test_long_texts_take_no_time():
    text = '```' * 100_000 + '\n' * 100_000 + '`' * 100_000
    assert find_code(text, 'f') == ''
    assert find_code('(' * 10_000_000, 'f') == ''
