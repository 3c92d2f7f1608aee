"""Calls and reasoning as a renderer of the package renderers finds them in ids; broken calls stay text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from areal_jax.errors import UserError
from areal_jax.text.tokenizer import CharacterTokenizer, HfTokenizer
from tests.tasks.hf_directory import write

pytest.importorskip('renderers', reason="the package renderers is not installed: pip install -e '.[agents]'")
from areal_jax.agents.renderers_parser import RenderersParser

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
    parser = RenderersParser(tokenizer, 'qwen3')
    return lambda text, tools=TOOLS: parser.parse(
        np.array([*tokenizer.encode(text), tokenizer.eos_id], np.int32), tools, 'call_2'
    )


def test_calls_and_reasoning_are_read_from_ids(parse):
    message, unparsed = parse(f'<think>\nLet me see.\n</think>\n\nI add.\n{CALL}\n{CALL}')
    assert (message['content'], message['reasoning_content'], unparsed) == ('I add.', 'Let me see.', 0)
    assert [call['id'] for call in message['tool_calls']] == ['call_2_0', 'call_2_1']
    assert message['tool_calls'][0]['function'] == {'name': 'add', 'arguments': '{"a": 1}'}


def test_an_answer_without_calls_is_its_text(parse):
    assert parse('It is 3.') == ({'role': 'assistant', 'content': 'It is 3.'}, 0)


def test_broken_calls_stay_text_and_are_counted(parse):
    message, unparsed = parse(f'{CALL}<tool_call>{{"name": </tool_call><tool_call>{{"name": "add"')
    assert (message['content'], len(message['tool_calls']), unparsed) == ('{"name":\n{"name": "add"', 1, 2)


def test_without_tools_there_are_no_calls(parse):
    message, unparsed = parse(f'I add. {CALL}', ())
    assert ('tool_calls' in message, unparsed) == (False, 0)
    assert '"arguments": {"a": 1}' in message['content']


def test_a_mark_that_is_spelled_is_no_call(parse, tokenizer):
    spelled = np.concatenate([tokenizer.encode(character) for character in CALL])
    parser = RenderersParser(tokenizer, 'qwen3')
    message, _ = parser.parse(np.append(spelled, tokenizer.eos_id).astype(np.int32), TOOLS, 'c')
    assert message == {'role': 'assistant', 'content': CALL}


def test_an_unknown_renderer_and_another_tokenizer_are_refused(tokenizer):
    with pytest.raises(UserError, match=r"agent.notation='qwen' is neither hermes nor a renderer"):
        RenderersParser(tokenizer, 'qwen')
    with pytest.raises(UserError, match=r"agent.notation='qwen3' does not fit the tokenizer of the model: .*im_start"):
        RenderersParser(CharacterTokenizer('<|>_imstar'), 'qwen3')
