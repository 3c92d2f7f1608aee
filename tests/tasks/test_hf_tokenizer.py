"""Tokenizers of Hugging Face directories against what transformers makes of the same files."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from areal_jax.tasks.demonstrations import encode_answer
from areal_jax.tasks.task import TaskError
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import TokenizerError, chat_messages
from tests.tasks import hf_directory


@pytest.fixture
def directory(tmp_path):
    hf_directory.write(tmp_path)
    return tmp_path


def test_chats_are_those_of_transformers(directory):
    recorded = json.loads(hf_directory.RECORDED.read_text())
    tokenizer = HfTokenizer(directory)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (recorded['eos_id'], recorded['size'])
    for chat, expected in zip(hf_directory.CHATS, recorded['chats'], strict=True):
        tokens = tokenizer.encode_chat(chat)
        assert tokens.dtype == np.int32
        # of the content 'two<|end|>' transformers makes the token that ends a turn
        is_spelled = any('<|end|>' in message['content'] for message in chat)
        assert (tokens.tolist() == expected['tokens']) is not is_spelled
        assert tokenizer.decode(np.append(tokens, tokenizer.eos_id)) == expected['text']


def test_ids_by_hand(directory):
    # 256 bytes, 'on' is 256, ' 1' is 257, then <|bos|>, <|end|> and <|turn|>, which the other file adds
    tokenizer = HfTokenizer(directory)
    assert tokenizer.encode('on 1<|turn|><|end|>').tolist() == [256, 257, 260, 259]
    assert tokenizer.decode(np.array([256, 259, 257, 259])) == 'on<|end|> 1'
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (259, 261)
    tokenizer.fits(261)
    with pytest.raises(TokenizerError, match='260 embeddings, the tokenizer 261'):
        tokenizer.fits(260)


def test_a_template_file_goes_before_the_one_in_the_config(directory):
    (directory / 'chat_template.jinja').write_text('{{ messages[0].content }}<|turn|>')
    assert HfTokenizer(directory).encode_chat(chat_messages('on')).tolist() == [256, 260]


def test_the_template_named_default_is_taken(tmp_path):
    templates = [{'name': 'tool_use', 'template': 'x'}, {'name': 'default', 'template': '{{ eos_token }}'}]
    hf_directory.write(tmp_path, chat_template=templates)
    assert HfTokenizer(tmp_path).encode_chat(chat_messages('on')).tolist() == [259]


def test_padding_and_truncation_of_the_file_leave_prompts_as_they_are(directory):
    path, chats = directory / 'tokenizer.json', [chat_messages('on'), chat_messages('on on on 1')]
    plain = [HfTokenizer(directory).encode_chat(chat).tolist() for chat in chats]
    reader = Tokenizer.from_file(str(path))
    reader.enable_padding(pad_id=0, pad_token='<|bos|>')
    reader.enable_truncation(max_length=3)
    reader.save(str(path))
    assert [tokens.tolist() for tokens in HfTokenizer(directory).encode_chats(chats)] == plain


TOOLS = [{'type': 'function', 'function': {'name': 'on'}}]


@pytest.mark.parametrize('place', ['list', 'object', 'files'])
def test_conversations_with_tools_have_the_template_of_that_name(tmp_path, place):
    texts = {'tool_use': 'on{{ tools[0].function.name }}', 'default': '{{ eos_token }}', 'rag': '{% broken'}
    listed = [{'name': name, 'template': text} for name, text in texts.items()]
    hf_directory.write(tmp_path, chat_template={'list': listed, 'object': texts, 'files': 'replaced'}[place])
    if place == 'files':
        (tmp_path / 'additional_chat_templates').mkdir()
        (tmp_path / 'additional_chat_templates' / 'tool_use.jinja').write_text(texts['tool_use'])
        (tmp_path / 'chat_template.jinja').write_text(texts['default'])
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.takes_tools
    [plain], [shown] = (tokenizer.encode_chats([chat_messages('a')], tools) for tools in ((), TOOLS))
    assert (plain.tolist(), shown.tolist()) == ([259], [256, 256])


def test_templates_see_the_day_that_is_given(tmp_path):
    hf_directory.write(tmp_path, chat_template="{{ strftime_now('%d on %Y') if strftime_now is defined else 'on' }}")
    of = lambda day: HfTokenizer(tmp_path, day=day).encode_chat(chat_messages('?'))
    spell = HfTokenizer(tmp_path).decode
    assert spell(of('2026-11-30')) == '30 on 2026'
    assert spell(of('off')) == 'on'
    before = datetime.datetime.now()
    assert spell(of('')) in {f'{day:%d on %Y}' for day in (before, datetime.datetime.now())}


def test_all_end_ids_of_the_files_end_an_answer(directory):
    assert HfTokenizer(directory).end_ids == (259,)
    (directory / 'config.json').write_text(json.dumps({'eos_token_id': 260}))
    (directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': [258, 259, 260]}))
    tokenizer = HfTokenizer(directory)
    assert (tokenizer.eos_id, tokenizer.end_ids) == (259, (259, 258, 260))
    assert HfTokenizer(directory, all_ends=False).end_ids == (259,)
    for end in tokenizer.end_ids:
        assert tokenizer.decode(np.array([256, end])) == 'on'
        assert tokenizer.decode(np.array([256, 260, end])) == 'on<|turn|>'
    assert {258, 259, 260} <= tokenizer.special_token_ids()
    answer = encode_answer(tokenizer, 'on', 'x')
    assert answer.tolist() == [256, 259]
    with pytest.raises(TaskError, match='an end token'):
        encode_answer(tokenizer, 'on<|turn|>on', 'x')


@pytest.mark.parametrize('value', ['2', True, -1, [259, None], [[1]], 1.0, {}])
def test_end_ids_that_are_none_are_named(directory, value):
    (directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': value}))
    with pytest.raises(TokenizerError, match=r'generation_config\.json: eos_token_id=.* must be the id of a token'):
        HfTokenizer(directory)


def test_a_text_gets_what_transformers_adds_and_a_chat_what_its_template_writes(directory):
    recorded = json.loads(hf_directory.RECORDED.read_text())
    tokenizer = HfTokenizer(directory)
    for text, expected in recorded['texts'].items():
        assert tokenizer.encode_prompt(text).tolist() == expected['with']
        assert tokenizer.encode(text).tolist() == expected['without']
    for chat in hf_directory.CHATS[:2]:
        assert tokenizer.encode_chat(chat).tolist().count(258) == 1


def test_without_a_template_only_chats_are_refused(tmp_path):
    hf_directory.write(tmp_path, chat_template=None)
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.encode('on').tolist() == [256]
    with pytest.raises(TokenizerError, match=rf'{tmp_path} has a chat template neither in chat_template\.jinja nor in'):
        tokenizer.encode_chat(chat_messages('on'))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'eos_token': None}, r'tokenizer_config\.json has no eos_token'),
        ({'eos_token': '<|stop|>'}, r"tokenizer_config\.json: eos_token='<\|stop\|>' is not in the vocabulary"),
        ({'eos_token': 7}, r'tokenizer_config\.json: eos_token=7 is no token'),
        (
            {'added_tokens_decoder': {'300': {'content': '<|bos|>'}}},
            r"tokenizer_config\.json: .*'<\|bos\|>' the id 300, tokenizer\.json the id 258",
        ),
        ({'chat_template': '{% if %}'}, r'tokenizer_config\.json: the chat template cannot be read'),
    ],
)
def test_faults_of_the_config_are_named(tmp_path, changes, message):
    hf_directory.write(tmp_path, **changes)
    with pytest.raises(TokenizerError, match=f'{tmp_path}/{message}'):
        HfTokenizer(tmp_path)


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
def test_files_that_cannot_be_read_are_named(directory, name):
    path = directory / name
    for content, message in (('{"a"', 'is no JSON|describes no'), ('[]', 'holds a list|describes no')):
        path.write_text(content)
        with pytest.raises(TokenizerError, match=rf'{path} ({message})'):
            HfTokenizer(directory)
    path.unlink()
    with pytest.raises(TokenizerError, match=rf'{path} cannot be read'):
        HfTokenizer(directory)
