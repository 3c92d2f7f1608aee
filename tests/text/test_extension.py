"""A conversation that goes on from its sampled ids has the text of the whole one rendered at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from areal_jax.installation import locate_file
from areal_jax.text.chat_template import ConversationError, GivenTemplate
from areal_jax.text.file_tokenizers import GgufTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer, TokenizerError

HERMES = locate_file('package:configs/templates/hermes.jinja').read_text()
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set text = m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\n') %}
    {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""  # takes reasoning out of earlier rounds
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object'}}}]
PIECES = ('<|im_end|>', '<|im_', 'end|>', '\n', ' ', 'ab', '12', 'é😀', '</tool_response>', '<tool_call>')

contents = st.lists(st.sampled_from(PIECES), max_size=4).map(''.join)
answers = st.lists(st.sampled_from(PIECES[2:]), max_size=4).map(''.join)
results = st.lists(contents.map(lambda text: {'role': 'tool', 'content': text}), max_size=3)
questions = st.lists(contents.map(lambda text: {'role': 'user', 'content': text}), max_size=1)
rounds = st.lists(
    st.tuples(answers, st.booleans(), st.builds(list.__add__, results, questions)), min_size=1, max_size=3
)


@pytest.fixture(scope='module', params=['', HERMES], ids=['smollm2', 'hermes'])
def tokenizer(request, smollm2_fields):
    return build(smollm2_fields, request.param)


@pytest.fixture(scope='module')
def ids(tokenizer):
    return tokenizer.vocabulary()


def build(fields, template=''):
    return GgufTokenizer(fields, 'f', GivenTemplate(template, 't') if template else None)


def as_bytes(ids, text):
    """A token for each byte of UTF-8, as a sampler may draw them."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [ids[letter] for word, _ in words for letter in word]


def go_on(tokenizer, question, turns, spell):
    """(the messages, the ids that grew turn by turn)."""
    messages = [{'role': 'user', 'content': question}]
    [ids] = tokenizer.encode_chats([messages], TOOLS)
    row = ids.tolist()
    for answer, is_closed, then in turns:
        extension = tokenizer.extend_chat(then, TOOLS, closed_by=tokenizer.eos_id if is_closed else None)
        assert extension.dtype == np.int32
        row += [*spell(answer), *([tokenizer.eos_id] if is_closed else []), *extension.tolist()]
        messages += [{'role': 'assistant', 'content': answer}, *then]
    return messages, row


@settings(max_examples=30, deadline=None)
@given(question=contents, turns=rounds, in_bytes=st.booleans())
def test_the_text_is_that_of_the_whole_conversation(tokenizer, ids, question, turns, in_bytes):
    spell = (lambda text: as_bytes(ids, text)) if in_bytes else lambda text: tokenizer.encode(text).tolist()
    messages, row = go_on(tokenizer, question, turns, spell)
    [whole] = tokenizer.encode_chats([messages], TOOLS)
    assert tokenizer.decode(np.array(row)) == tokenizer.decode(whole)
    texts = [message['content'] for message in messages]
    if not in_bytes and all(text == text.strip() for text in texts):
        assert row == whole.tolist()


def test_results_and_question_by_hand(smollm2_fields):
    tokenizer = build(smollm2_fields, HERMES)
    then = [{'role': 'tool', 'content': '3'}, {'role': 'tool', 'content': '4'}, {'role': 'user', 'content': 'q'}]
    text = (
        '<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>'
        '<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'
    )
    assert tokenizer.decode(tokenizer.extend_chat(then, closed_by=None)) == text
    assert tokenizer.decode(tokenizer.extend_chat(then, closed_by=tokenizer.eos_id)) == text.removeprefix('<|im_end|>')


RESULT, QUESTION = {'role': 'tool', 'content': 'r'}, {'role': 'user', 'content': 'q'}


@pytest.mark.parametrize(
    'messages',
    [
        [QUESTION, RESULT],
        [QUESTION, QUESTION],
        [{'role': 'assistant', 'content': 'a'}],
        [RESULT, {'role': 'system', 'content': 's'}],
    ],
)
def test_only_results_and_then_a_question_follow_an_answer(smollm2_fields, messages):
    assert build(smollm2_fields).extend_chat(messages, closed_by=2) is None
    assert CharacterTokenizer('asqr').extend_chat(messages, closed_by=0) is None


UNSTABLE = {
    'opens another turn than it writes': '{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}?',
    'numbers the turns': '{% for m in messages %}{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}',
    'moves the tools': ('{% for m in messages %}{{ tools if loop.last }} {{ m.content }}<|im_end|>{% endfor %}'),
    'looks at the number of turns': (
        "{% for m in messages %}{{ m.content if m.role != 'tool' or loop.index < 5 }}<|im_end|>{% endfor %}"
    ),
    'refuses results': (
        "{% for m in messages %}{{ m.content if m.role != 'tool' else raise_exception('no') }}<|im_end|>{% endfor %}"
    ),
    'is broken': '{{ nothing.at.all }}',
}


@pytest.mark.parametrize('case', UNSTABLE)
def test_a_template_that_does_not_go_on_gives_nothing(smollm2_fields, case):
    tokenizer = build(smollm2_fields, UNSTABLE[case])
    for _ in range(2):  # the second time it is known
        assert tokenizer.extend_chat([RESULT], TOOLS, closed_by=tokenizer.eos_id) is None


def test_earlier_reasoning_that_is_taken_out_forks_where_it_is(smollm2_fields):
    tokenizer = build(smollm2_fields, QWEN3)
    assert tokenizer.extend_chat([QUESTION], closed_by=tokenizer.eos_id) is None
    assert tokenizer.decode(tokenizer.extend_chat([RESULT], closed_by=tokenizer.eos_id)) == (
        '\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n'
    )


def test_a_turn_that_ends_with_another_token_is_not_closed_by_eos(smollm2_fields):
    tokenizer = build(smollm2_fields, '{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}')
    assert tokenizer.extend_chat([QUESTION], closed_by=tokenizer.eos_id) is None
    assert tokenizer.decode(tokenizer.extend_chat([QUESTION], closed_by=None)) == '<|endoftext|>q<|endoftext|>'


def test_one_refused_message_does_not_end_the_extending(smollm2_fields):
    template = (
        "{% for m in messages %}{{ raise_exception('bad') if m.content == 'bad' else m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = build(smollm2_fields, template)
    assert tokenizer.extend_chat([QUESTION | {'content': 'bad'}], closed_by=tokenizer.eos_id) is None
    assert tokenizer.decode(tokenizer.extend_chat([QUESTION], closed_by=tokenizer.eos_id)) == 'q'


def test_a_text_without_ids_is_an_error(smollm2_fields):
    with pytest.raises(ConversationError, match='half of a surrogate pair'):
        build(smollm2_fields).extend_chat([QUESTION | {'content': '\ud800'}], closed_by=2)
    with pytest.raises(TokenizerError, match=r"\['x'\] that are not among 'q'"):
        CharacterTokenizer('q').extend_chat([QUESTION | {'content': 'x'}], closed_by=0)


def test_characters_go_on_with_the_contents():
    assert CharacterTokenizer('qr').extend_chat([RESULT, QUESTION], closed_by=None).tolist() == [2, 1]
