"""Whatever messages and tools spell, the special tokens of a prompt are those that the template writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.spellings import Spellings
from areal_jax.text.tokenizer import CharacterTokenizer, TokenizerError, chat_messages
from tests.tasks import hf_directory
from tests.text.test_tokenizer import MINIMAL

ROLES = ('system', 'user', 'assistant', 'user')
PIECES = (
    *('<|im_end|>', '<|im_start|>', '<|endoftext|>', '<file_sep>', '<|im_', 'end|>', '<', '|'),
    *('\n', ' ', 'user', 'é😀', '\ue000'),
)
contents = st.lists(st.sampled_from(PIECES), max_size=6).map(''.join)
plain = st.lists(st.sampled_from(PIECES[4:]) | st.text(st.characters(exclude_categories=['Cs'])), max_size=4).map(
    ''.join
)
unspelled = plain.filter(lambda text: '<|im_end|>' not in text)


@pytest.fixture(scope='module')
def smollm2(smollm2_fields):
    return GgufTokenizer(smollm2_fields)


def conversation(*said):
    return [{'role': role, 'content': text} for role, text in zip(ROLES, said, strict=False)]


def chat_text(*said):
    turns = zip(ROLES, said, strict=False)
    text = ''.join(f'<|im_start|>{role}\n{text}<|im_end|>\n' for role, text in turns)
    return f'{text}<|im_start|>assistant\n'


@settings(max_examples=40, deadline=None)
@given(said=st.lists(contents, min_size=2, max_size=4))
def test_the_special_tokens_are_those_of_the_template_and_the_text_is_whole(smollm2, said):
    tokens = smollm2.encode_chat(conversation(*said))
    special = [token for token in tokens.tolist() if token in smollm2.special_token_ids()]
    assert special == [1, 2] * len(said) + [1]  # each turn opened and closed, that of the answer opened
    assert smollm2.decode(tokens) == chat_text(*said)


@settings(max_examples=40, deadline=None)
@given(said=st.lists(unspelled, min_size=2, max_size=4))
def test_texts_without_a_spelling_have_the_ids_of_the_text_as_a_whole(smollm2, said):
    expected = smollm2.encode(chat_text(*said)).tolist()
    assert smollm2.encode_chat(conversation(*said)).tolist() == expected
    # a spelling elsewhere in the same call changes nothing
    chats = [conversation(*said), conversation('a', '<|im_end|>')]
    assert smollm2.encode_chats(chats)[0].tolist() == expected


def test_the_other_tokenizer_does_the_same(tmp_path):
    template = '{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}{{ (tools or []) | tojson }}'
    hf_directory.write(tmp_path, chat_template=template)
    tokenizer = HfTokenizer(tmp_path)
    tools = [{'type': 'function', 'function': {'name': '<|end|>', '<|turn|>': ['<|bos|>', 1]}}]
    [tokens] = tokenizer.encode_chats(
        [[{'content': 'a<|end|><|turn|>'}, {'content': '<|'}, {'content': 'end|>'}]], tools
    )
    assert [token for token in tokens.tolist() if token > 257] == [260, 259] * 3
    text = '<|turn|>a<|end|><|turn|><|end|><|turn|><|<|end|><|turn|>end|><|end|>'
    assert tokenizer.decode(tokens) == text + str(tools).replace("'", '"')


def test_contents_that_follow_each_other_do_not_complete_a_spelling(smollm2_fields):
    tokenizer = GgufTokenizer(smollm2_fields | {'chat_template': '{% for m in messages %}{{ m.content }}{% endfor %}'})
    [tokens] = tokenizer.encode_chats([conversation('<|im_end|>a<|im', '_end|><|', 'im_end|>')])
    assert tokenizer.decode(tokens) == '<|im_end|>a<|im_end|><|im_end|>'
    assert not set(tokens.tolist()) & tokenizer.special_token_ids()


def test_tokens_that_are_no_special_ones_stay_tokens_of_the_text():
    tokens = GgufTokenizer(MINIMAL | {'chat_template': '{{ messages[0].content }}<s>'})
    assert tokens.encode_chat(chat_messages('ab<|x|>')).tolist() == [2, 4, 3]


def test_characters_have_no_special_spelling():
    tokens = CharacterTokenizer('<eos>').encode_chat(chat_messages('<eos>'))
    assert tokens.tolist() == [1, 2, 3, 4, 5]  # 0 is EOS


def encode(bpe, text, special):
    spellings = Spellings(bpe, frozenset(special), 'f')
    marked, mark = spellings.mark(text, '')
    tokenizer, [renamed] = spellings.separate([f'<s>{marked}</s>'], mark)
    return tokenizer.encode(renamed).ids


def test_a_word_of_the_vocabulary_is_not_its_special_token():
    # The words <s> and </s> are in the vocabulary itself, where a model would find them without being told to.
    words = {'<s>': 0, '</s>': 1, 'a': 2, '?': 3}
    bpe = Tokenizer(models.WordLevel(words, unk_token='?'))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bpe.add_special_tokens([AddedToken('<s>', special=True), AddedToken('</s>', special=True)])
    assert bpe.encode('<s>a </s> a</s>').ids == [0, 2, 1, 2, 1]
    assert encode(bpe, 'a </s> a', {0, 1}) == [0, 2, 3, 2, 1]


def test_a_vocabulary_that_needs_the_spelling_as_text_is_refused():
    tokenizer = GgufTokenizer(MINIMAL | {'token_types': [1, 1, 3, *MINIMAL['token_types'][3:]]}, 'small.gguf')
    assert tokenizer.encode_chat(chat_messages('b')).tolist() == [1]
    with pytest.raises(
        TokenizerError, match=r'^small\.gguf: the special tokens of this vocabulary cannot be told from'
    ):
        tokenizer.encode_chat(chat_messages('ab'))  # 'ab' is special, and what merging 'a' and 'b' gives


def test_texts_that_use_every_private_character_are_refused(smollm2):
    everything = ''.join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(TokenizerError, match='use every private character'):
        smollm2.encode_chat(chat_messages(f'{everything}<|im_end|>'))


def test_values_that_are_nested_too_deep_are_refused(smollm2):
    for text in ('a', '<|im_end|>'):
        nested = {'a': text}
        for _ in range(5000):
            nested = {'a': nested}
        with pytest.raises(TokenizerError, match=r'^the messages or tools are nested too deep'):
            smollm2.encode_chats([chat_messages('a')], [nested])


def test_plain_prompts_spell_special_tokens_on_purpose(smollm2):
    np.testing.assert_array_equal(smollm2.encode('<|im_start|>'), [1])


@pytest.mark.parametrize('place', [0, 1, 2**18 - 10, 2**18 - 9, 2**18 - 3, 2**18 - 1, 2**18, 2**18 + 1, 2**19 - 5])
def test_a_spelling_anywhere_in_a_long_text_is_marked_once(place):
    bpe = Tokenizer(models.WordLevel({'<|end|>': 0, '?': 1}, unk_token='?'))
    bpe.add_special_tokens([AddedToken('<|end|>', special=True)])
    text = 'x' * place + '<|end|>' + '<y' * 2**17 + '<|e'
    marked, mark = Spellings(bpe, frozenset({0}), 'f').mark(text, '')
    assert marked == 'x' * place + f'{mark}<|end|>' + '<y' * 2**17 + f'{mark}<|e'
