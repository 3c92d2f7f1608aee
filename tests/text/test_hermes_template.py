"""The template with Hermes notation that comes with the package."""

from __future__ import annotations

import json
import re

import pytest

from areal_jax.installation import locate_file
from areal_jax.text.chat_template import ChatTemplate

TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
SYSTEM, USER = {'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'q'}


@pytest.fixture(scope='module')
def template():
    return ChatTemplate(locate_file('package:configs/templates/hermes.jinja').read_text(), {}, 'hermes.jinja')


def call(name, arguments):
    return {'id': 'c', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def turns(text):
    return re.findall(r'<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)', text, re.DOTALL)


def test_a_chat_without_tools_is_plain_chatml(template):
    assert template.takes_tools
    assert template.render([[SYSTEM, USER]]) == [
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'
    ]


def test_tools_stand_in_the_one_system_turn(template):
    for messages, begins in (([USER], 'These functions'), ([SYSTEM, USER], 'Be brief.\n\nThese functions')):
        (role, text), *others = turns(template.render([messages], [TOOL, TOOL])[0])
        assert (role, text[: len(begins)]) == ('system', begins)
        shown = re.search(r'<tools>\n(.*)\n</tools>', text, re.DOTALL)[1].split('\n')
        assert [json.loads(line) for line in shown] == [TOOL, TOOL]
        assert others == [('user', 'q'), ('assistant', '')]


def read_calls(text):
    """(content, calls) of a turn: what a reader of Hermes notation finds."""
    content, *blocks = re.split(r'\n?<tool_call>\n', text)
    return content, [json.loads(block.removesuffix('\n</tool_call>')) for block in blocks]


@pytest.mark.parametrize('content', ['', 'Let me see.\n\nNow:'])
@pytest.mark.parametrize('arguments', [[{'a': 1, 'b': 'é"\n'}], [{}, {'c': [None, {'d': 1.5}]}]])
def test_text_and_calls_of_an_answer_come_back(template, content, arguments):
    answer = {'role': 'assistant', 'content': content, 'tool_calls': [call('add', value) for value in arguments]}
    found = turns(template.render([[USER, answer]], [TOOL])[0])[2]
    assert found[0] == 'assistant'
    assert read_calls(found[1]) == (content, [{'name': 'add', 'arguments': value} for value in arguments])


def test_arguments_in_a_text_stay_as_the_model_wrote_them(template):
    answer = {'role': 'assistant', 'content': None, 'tool_calls': [call('add', '{"a":  1}'), call('add', '{broken')]}
    text = turns(template.render([[USER, answer]], [TOOL])[0])[2][1]
    first = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    assert text == f'{first}\n<tool_call>\n{{"name": "add", "arguments": {{broken}}\n</tool_call>'


def test_results_that_follow_each_other_are_one_turn(template):
    results = [{'role': 'tool', 'content': text} for text in ('3', '4')]
    answer = {'role': 'assistant', 'content': 'a'}
    found = turns(template.render([[USER, answer, *results, USER, answer, results[0]]])[0])
    blocks = ['\n'.join(f'<tool_response>\n{text}\n</tool_response>' for text in given) for given in ('34', '3')]
    roles = ['user', 'assistant', 'user', 'user', 'assistant', 'user', 'assistant']
    assert found == list(zip(roles, ['q', 'a', blocks[0], 'q', 'a', blocks[1], ''], strict=True))
