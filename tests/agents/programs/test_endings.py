"""The sentence of an end: what it tells, how long it is, and that no part of a key is in it."""

import pytest

from areal_jax.agents.programs.job_process import describe_exit, find_secrets, hide_secrets
from areal_jax.agents.programs.program_supervisor import TAIL_BYTES

KEY = 'sk-0123456789abcdef'
TRACEBACK = b"""Traceback (most recent call last):
  File "/a/agent.py", line 7, in <module>
    answer()
  File "/a/tools.py", line 3, in answer
    raise ValueError('no digits')
ValueError: no digits

"""


@pytest.mark.parametrize(
    ('exit_code', 'output', 'said'),
    [
        (3, b'', 'it ended with exit code 3'),
        (3, b'one\ntwo  words\n\n', 'it ended with exit code 3; its last line: two words'),
        (1, TRACEBACK, 'it ended with exit code 1; its last line: ValueError: no digits (line 3 of /a/tools.py)'),
        (-11, b'\xff', 'it was killed by SIGSEGV; its last line: \ufffd'),
        (-50, b'', 'it was killed by signal 50'),
    ],
)
def test_an_exit_is_told_with_the_last_line(exit_code, output, said):
    assert describe_exit(exit_code, output, []) == said


@pytest.mark.parametrize('cut', range(1, len(KEY)))
def test_no_part_of_a_key_is_told(cut):
    output = (KEY * TAIL_BYTES)[cut:][: TAIL_BYTES - 1] + '\n'
    said = describe_exit(3, output.encode(), [KEY]).rpartition(': ')[2]
    assert said.removesuffix('...').rstrip('*') in ('', KEY[: (TAIL_BYTES - 1 + cut) % len(KEY)])


def test_secrets_are_the_values_of_keys_and_tokens():
    environment = {'OPENAI_API_KEY': 'a', 'HF_TOKEN': 'ab', 'OPENAI_BASE_URL': 'http', 'KEYS': 'b', 'EMPTY_KEY': ''}
    assert find_secrets(environment) == ['a', 'ab']
    assert hide_secrets('cab a', ['a', 'ab']) == 'c*** ***'


def test_a_long_line_is_cut():
    assert len(describe_exit(3, b'x' * 1000, [])) < 400
