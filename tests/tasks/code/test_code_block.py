"""Where the code of an answer is, by its text alone."""

from __future__ import annotations

import time

import pytest

from areal_jax.tasks.code.judge import find_code

CODE = 'def f(x):\n    return x\n'
OTHER = 'def f(x):\n    return 0\n'
INDENTED = CODE.replace('\n', '\n   ')


@pytest.mark.parametrize(
    ('text', 'code'),
    [
        (CODE, CODE),
        (f'Sure:\n```python\n{CODE}```\nThat is it.', CODE),
        (f'```\n{CODE}```', CODE),
        (f'~~~py\n{CODE}~~~', CODE),
        (f'```python\n{OTHER}```\nBetter:\n```python\n{CODE}```', CODE),
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


@pytest.mark.parametrize(
    'info',
    [
        '', 'python', 'Python', 'PYTHON', 'py', 'python3', 'Python 3', 'python3.11', 'ipython', 'pypy3', ' python ',
        'python title="x"', 'py linenos hl_lines="1 2"', '{.python}', ' {.python .numberLines}', '{#f .python}',
        '{python}',
        'python{1,2}', 'python:main.py', 'main.py', 'python,editable', 'python title=def',
    ],
)  # fmt: skip
def test_what_a_fence_says_of_python(info):
    for fence in ('```', '````', '~~~'):
        assert find_code(f'Use it:\n{fence}{info}\n{CODE}{fence}\nwith\n```bash\npython f.py\n```\n', 'f') == CODE


@pytest.mark.parametrize(
    'info', ['text', 'bash', 'output', 'json', 'pycon', 'python-repl', 'pytb', 'c++', 'plaintext', '{.text}', 'pyx']
)
def test_a_block_of_another_language_is_not_the_answer(info):
    assert find_code(f'```python\n{CODE}```\nIt prints\n```{info}\n3\n```', 'f') == CODE
    assert find_code(f'```python\n{CODE}```\nIt prints\n```{info}\n3\n') == CODE
    assert find_code(f'```{info}\n{CODE}```', 'f') == ''
    assert find_code(f'```{info}\n{CODE}') == ''


@pytest.mark.parametrize(
    ('text', 'code'),
    [
        (f'```python\n{CODE}```'.replace('\n', '\r\n'), CODE),
        (f'```python\n{CODE}```'.replace('\n', '\r'), CODE),
        (CODE.replace('\n', '\r\n'), CODE),
        (f'1. So:\n   ```python\n   {INDENTED}```\n2. Done.', CODE),
        ('- ~~~python\n  def f(x):\n      return x\n  ~~~', CODE),
        (f'2) ```python\n   {INDENTED}```', CODE),
        ('\t```python\n\tdef f(x):\n\t    return x\n\t```', CODE),
        (f'````python\n{CODE}````', CODE),
        (f'``````python\n{CODE}``````', CODE),
        (f'````python\n{CODE}s = """\n```\n"""\n````', f'{CODE}s = """\n```\n"""\n'),
        (f'~~~~python\n{CODE}s = """\n```\n~~~\n"""\n~~~~~', f'{CODE}s = """\n```\n~~~\n"""\n'),
        (f'~~~python\n{CODE}```\n~~~', f'{CODE}```\n'),
        (f'```python\n{CODE}    r = """\n    ```\n    """\n```', f'{CODE}    r = """\n    ```\n    """\n'),
        (f'```python\n{OTHER}\n```python\n{CODE}```', CODE),
        (f'```python\n{CODE}``` and so on', CODE),
        (f'```markdown\n```python\n{CODE}```\n```', CODE),
        (f'```print(f(1))```\n```python\n{CODE}```', CODE),
        (f'{"`" * 40}\n```python\n{CODE}```', CODE),
        (f'```python\n{CODE}```\n```python\n\n```\n', CODE),
    ],
)  # fmt: skip
def test_ends_of_lines_indents_and_long_fences(text, code):
    assert find_code(text, 'f') == code


def test_the_last_block_that_defines_the_function_goes_before_what_uses_it():
    answer = f'```python\n{OTHER}```\n```python\n{CODE}```\nFor example:\n```python\nprint(f(3))\n```\n```\n3\n```'
    assert find_code(answer, 'f') == CODE
    assert find_code(answer) == '3\n'


def test_a_completion_goes_on_from_the_prompt():
    prompt = 'def f(x):\n    """Itself."""\n'
    assert find_code('    return x\n', 'f', prompt) == f'{prompt}    return x\n'
    assert find_code(f'```python\n{CODE}```', 'f', prompt) == CODE
    assert find_code('```python\n    return x\n```', 'f', prompt) == f'{prompt}    return x\n'
    assert find_code('```text\n    return x\n```', 'f', prompt) == ''


def test_a_program_has_no_function():
    assert find_code('print(input())') == 'print(input())'


@pytest.mark.parametrize(
    'text',
    [
        '```' * 100_000 + '\n' * 100_000 + '`' * 100_000, '(' * 10_000_000, ('``` ' + 'a' * 50_000 + '`\n') * 20,
        ('~' * 16 + '\n') * 50_000, ' ' * 1_000_000 + '`', '1' * 1_000_000 + '```',
    ],
)  # fmt: skip
def test_long_texts_take_no_time(text):
    began = time.process_time()
    assert find_code(text, 'f') == ''
    assert time.process_time() - began < 2
