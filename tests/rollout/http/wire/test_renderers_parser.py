"""Calls and reasoning as a renderer of the package renderers finds them in ids; broken calls stay text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from areal_jax.errors import UserError
from areal_jax.rollout.http.wire.answer_reader import ParsedAnswer
from areal_jax.rollout.http.wire.encoding import MOST_LEVELS
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.tasks.hf_directory import write

pytest.importorskip('renderers', reason="the package renderers is not installed: pip install -e '.[agents]'")
from areal_jax.rollout.http.wire.renderers_parser import RenderersParser

FIELD = 'agent.notation'
MARKS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>', '<tool_call>', '</tool_call>')
OTHERS = ('<tool_response>', '</tool_response>', '</think>')
TOOLS = ({'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}},)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp('qwen3')
    write(directory, eos_token='<|im_end|>', added_tokens_decoder={})
    library = Library.from_file(str(directory / 'tokenizer.json'))
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*MARKS, *OTHERS)])
    library.save(str(directory / 'tokenizer.json'))
    return HfTokenizer(directory)


@pytest.fixture(scope='module')
def parse(tokenizer):
    parser = RenderersParser(tokenizer, 'qwen3', FIELD)
    return lambda text, tools=TOOLS, prompt=None: parser.parse(
        np.array([*tokenizer.encode(text), tokenizer.eos_id], np.int32), tools, prompt
    )


def test_calls_and_reasoning_are_read_from_ids(parse):
    found = parse(f'<think>\nLet me see.\n</think>\n\nI add.\n{CALL}\n{CALL}')
    assert found == ParsedAnswer('I add.', (('add', '{"a": 1}'),) * 2, 'Let me see.')


def test_reasoning_may_begin_in_the_prompt(parse, tokenizer):
    prompt = tokenizer.encode('<|im_start|>assistant\n<think>\n')
    answer = f'Let me see.\n</think>\n\nI add.\n{CALL}'
    assert parse(answer, prompt=prompt) == ParsedAnswer('I add.', (('add', '{"a": 1}'),), 'Let me see.')
    assert parse('Let me', prompt=prompt) == ParsedAnswer('', reasoning='Let me')


def test_an_answer_without_calls_is_its_text(parse):
    assert parse('It is 3.') == ParsedAnswer('It is 3.')


def test_broken_calls_stay_text_and_are_counted(parse):
    found = parse(f'{CALL}<tool_call>{{"name": </tool_call><tool_call>{{"name": "add"')
    assert found == ParsedAnswer('{"name":\n{"name": "add"', (('add', '{"a": 1}'),), unparsed=2)


@pytest.mark.parametrize('body', [
    '{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": "3"}', '{"name": "add", "arguments": null}',
    '{"name": "add", "arguments": {"a": NaN}}', '{"name": ["add"], "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    f'{{"name": "add", "arguments": {{"a": {"[" * MOST_LEVELS}{"]" * MOST_LEVELS}}}}}',
])  # fmt: skip
def test_a_call_that_no_client_could_send_back_stays_text(parse, body):
    assert parse(f'I add. <tool_call>{body}</tool_call>') == ParsedAnswer(f'I add.\n{body}', unparsed=1)


def test_an_answer_on_which_the_package_fails_stays_text(parse):
    answer = f'<tool_call>{"[" * 50_000}</tool_call>'
    assert parse(answer) == ParsedAnswer(answer, unparsed=1)


def test_without_tools_there_are_no_calls(parse):
    found = parse(f'I add. {CALL}', ())
    assert (found.calls, found.unparsed) == ((), 0)
    assert '"arguments": {"a": 1}' in found.text


def test_a_mark_that_is_spelled_is_no_call(parse, tokenizer):
    spelled = np.concatenate([tokenizer.encode(character) for character in CALL])
    parser = RenderersParser(tokenizer, 'qwen3', FIELD)
    assert parser.parse(np.append(spelled, tokenizer.eos_id).astype(np.int32), TOOLS) == ParsedAnswer(CALL)


@pytest.mark.parametrize('name', ['qwen', '', 'auto', 'custom'])
def test_an_unknown_renderer_is_refused_with_those_that_there_are(tokenizer, name):
    with pytest.raises(
        UserError,
        match=rf"^agent.notation='{name}' is neither hermes nor a renderer .*: use hermes or one of .*, qwen3, ",
    ):
        RenderersParser(tokenizer, name, FIELD)


def test_another_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"agent.notation='qwen3' does not fit the tokenizer of the model: .*im_start"):
        RenderersParser(CharacterTokenizer('<|>_imstar'), 'qwen3', FIELD)
