from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from areal_jax.text import file_tokenizers as module
from areal_jax.text.chat_template import ConversationError
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer, TokenizerError, chat_messages
from tests.tasks.texts import CHATS, TEXTS

# 'What is 12 + 7?' as the user's message under the model's own system message, as other programs encode it.
CHECK_IDS = (
    '1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 1780 314 '
    '216 33 34 1232 216 39 47 2 198 1 520 9531 198'
)
MINIMAL: dict[str, Any] = {
    'model': 'gpt2',
    'tokens': ['a', 'b', 'ab', '<s>', '<|x|>', 'Ċ', 'Ġ', '1', '2', '12'],  # Ċ is a line end, Ġ a blank
    'merges': ['a b', '1 2'],
    'token_types': [1, 1, 1, 3, 4, 1, 1, 1, 1, 1],
    'pre': 'gpt-2',
    'eos_id': 3,
    'bos_id': None,
    'chat_template': "  {% for m in messages %}\n{{ m['content'] }}{% endfor %}{{ bos_token }}",
}


@pytest.fixture(scope='module')
def smollm2(smollm2_fields: dict[str, Any]) -> GgufTokenizer:
    return GgufTokenizer(smollm2_fields)


def test_chat_prompt_has_the_39_ids_of_other_implementations(smollm2):
    tokens = smollm2.encode_chat(chat_messages('What is 12 + 7?'))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [int(token) for token in CHECK_IDS.split()]


def test_system_prompt_replaces_the_templates_own(smollm2):
    tokens = smollm2.encode_chat(chat_messages('Calculate 7 + 8.', 'Answer with the number only.'))
    # one special token opens and one closes a turn: system, user, and the opened turn of the answer
    assert (tokens.tolist().count(1), tokens.tolist().count(2)) == (3, 2)
    assert smollm2.decode(tokens) == (
        '<|im_start|>system\nAnswer with the number only.<|im_end|>\n'
        '<|im_start|>user\nCalculate 7 + 8.<|im_end|>\n<|im_start|>assistant\n'
    )


@pytest.mark.parametrize(
    'text',
    [
        '',
        'def f(x):\n    return x  # comment',
        'Grüße, naïve café',
        '数学は楽しい',
        '😀 emoji 👩‍👩‍👧',
        '3.14159 2024',
        '  a\t\n ',
    ],
)
def test_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_each_digit_is_one_token(smollm2):
    # the id of digit d is 32 + d
    assert smollm2.encode('9072').tolist() == [41, 32, 39, 34]


def test_decode_leaves_out_only_an_eos_at_the_end(smollm2):
    six = smollm2.encode('6')[0]
    assert smollm2.eos_id == 2
    assert smollm2.decode(np.array([six, 2])) == '6'
    # A special token inside keeps its neighbours apart: '66' would be another number.
    assert smollm2.decode(np.array([six, 1, six])) == '6<|im_start|>6'
    assert smollm2.decode(np.array([2, six])) == '<|im_end|>6'


def test_the_ends_of_turns_and_of_calls_end_an_answer_too():
    fields = MINIMAL | {'eot_id': 4, 'eom_id': 3}
    tokenizer = GgufTokenizer(fields)
    assert (tokenizer.eos_id, tokenizer.end_ids) == (3, (3, 4))
    assert tokenizer.decode(np.array([0, 4, 3])) == 'a<|x|>'
    assert tokenizer.decode(np.array([0, 3, 4])) == 'a<s>'
    assert GgufTokenizer(fields, all_ends=False).end_ids == GgufTokenizer(MINIMAL).end_ids == (3,)
    with pytest.raises(TokenizerError, match='eot_id=10 is not an id of the 10 tokens'):
        GgufTokenizer(MINIMAL | {'eot_id': 10})


def test_conversations_with_tools_have_a_template_of_their_own():
    tokenizer = GgufTokenizer(MINIMAL | {'tool_template': '{{ tools[0].name }}12'})
    [plain], [shown] = (tokenizer.encode_chats([chat_messages('a')], tools) for tools in ((), [{'name': 'b'}]))
    assert (plain.tolist(), shown.tolist(), tokenizer.takes_tools) == ([0], [1, 9], True)


def test_model_with_too_few_embeddings_is_refused(smollm2):
    assert smollm2.vocab_size == 49152
    smollm2.fits(49152)
    smollm2.fits(50000)
    with pytest.raises(TokenizerError, match='49151 embeddings, the tokenizer 49152'):
        smollm2.fits(49151)


def test_minimal_fields_by_hand():
    tokenizer = GgufTokenizer(MINIMAL)
    assert tokenizer.encode('abba').tolist() == [2, 1, 0]  # 'ab' is merged, 'b' and 'a' are not
    assert tokenizer.encode('b<|x|>').tolist() == [1, 4]  # a user-defined token is never cut
    # the blanks before a block and the line end after it belong to the block
    assert tokenizer.encode_chat(chat_messages('ab')).tolist() == [2]


def test_digits_stay_single_only_where_the_model_was_trained_so():
    assert GgufTokenizer({**MINIMAL, 'pre': 'gpt-2'}).encode('12').tolist() == [9]
    assert GgufTokenizer({**MINIMAL, 'pre': 'smollm'}).encode('12').tolist() == [7, 8]


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'token_types': [1] * 9}, 'it has 10 tokens and 9 token_types'),
        ({'token_types': ['1'] * 10}, 'token_types must be a list of integers'),
        ({'tokens': 'abc'}, 'tokens must be a list of texts'),
        ({'tokens': [*MINIMAL['tokens'][:9], 'a']}, "the token 'a' has 2 ids"),
        ({'merges': ['a b', '1 3']}, r"merges\[1\]='1 3' must be two tokens with a blank between"),
        ({'merges': ['a b', '12']}, r"merges\[1\]='12' must be two tokens"),
        ({'merges': [['a', 'b']]}, 'merges must be a list of texts'),
        ({'eos_id': 10}, 'eos_id=10 is not an id of the 10 tokens'),
        ({'eos_id': -1}, 'eos_id=-1 is not an id of the 10 tokens'),
        ({'bos_id': 10}, 'bos_id=10 is not an id of the 10 tokens'),
        ({'bos_id': 'a'}, "bos_id='a' is not an id of the 10 tokens"),
        ({'pre': 7}, 'pre=7 must be the name of a pre-tokenizer'),
        ({'chat_template': '{% if %}'}, 'the chat template cannot be read: line 1'),
        ({'chat_template': ['a']}, 'the chat template is a list, not a text'),
    ],
)
def test_fields_that_do_not_fit_together_are_named(change, message):
    with pytest.raises(TokenizerError, match=rf'^small\.gguf: {message}'):
        GgufTokenizer(MINIMAL | change, 'small.gguf')


def test_text_that_cannot_be_encoded_is_named():
    tokenizer = GgufTokenizer(MINIMAL)
    with pytest.raises(TokenizerError, match=r"^the GGUF file: 'a\\ud800' cannot be encoded: "):
        tokenizer.encode('a\ud800')
    with pytest.raises(ConversationError, match='its prompt has half of a surrogate pair') as error:
        tokenizer.encode_chats([chat_messages('a'), chat_messages('\ud800')])
    assert error.value.index == 1


def test_a_prompt_without_a_token_is_refused():
    tokenizer = GgufTokenizer(MINIMAL | {'chat_template': "{{ messages[0]['content'] if messages[1:] }}"})
    with pytest.raises(ConversationError, match=r"its prompt '' has no token") as error:
        tokenizer.encode_chats([chat_messages('b', 'a'), chat_messages('b')])
    assert error.value.index == 1


def test_a_panic_inside_the_library_is_an_error_of_the_tokenizer(monkeypatch):
    # what pyo3 raises: no Exception, of a class that cannot be imported
    panic = type('PanicException', (BaseException,), {})

    class Panicking:
        def encode_batch_fast(self, text, add_special_tokens):
            raise panic('index out of bounds')

    required, _ = module.GGUF_KINDS['gpt2']
    monkeypatch.setitem(module.GGUF_KINDS, 'gpt2', (required, lambda *fields: Panicking()))
    with pytest.raises(TokenizerError, match='index out of bounds'):
        GgufTokenizer(MINIMAL).encode('a')


def test_ids_beyond_the_vocabulary_have_no_text():
    # a model may have more embeddings than its tokenizer has tokens
    assert GgufTokenizer(MINIMAL).decode(np.array([0, 10, 99, 1])) == 'ab'


@pytest.mark.parametrize('pre', ['default', 'llama-bpe'])
def test_unknown_pre_tokenizer_is_refused(pre):
    with pytest.raises(TokenizerError, match=rf"pre='{pre}'.*known: \['gpt-2', 'smollm'\]"):
        GgufTokenizer({**MINIMAL, 'pre': pre})


@pytest.mark.parametrize('field', ['tokens', 'merges', 'token_types', 'pre', 'eos_id'])
def test_missing_field_is_named(field):
    with pytest.raises(TokenizerError, match=rf"lacks \['{field}'\]"):
        GgufTokenizer({name: value for name, value in MINIMAL.items() if name != field})


def test_template_runs_in_a_sandbox_and_can_refuse():
    for template, reason in (
        ("{{ raise_exception('no system') }}", 'no system'),
        ("{{ ''.__class__.__mro__ }}", 'SecurityError'),
    ):
        with pytest.raises(TokenizerError, match=f'^small.gguf: the chat template gives no prompt: .*{reason}'):
            GgufTokenizer({**MINIMAL, 'chat_template': template}, 'small.gguf').encode_chat(chat_messages('a'))


def test_characters_by_hand():
    tokenizer = CharacterTokenizer('ab=')
    # 0 is EOS, then a, b, =
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 4)
    assert tokenizer.encode_chat(chat_messages('ba=')).tolist() == [2, 1, 3]
    assert tokenizer.encode_chat(chat_messages('=', 'ab')).tolist() == [1, 2, 3]  # contents in a row
    assert tokenizer.decode(np.array([2, 1, 0])) == 'ba'
    assert tokenizer.decode(np.array([2, 0, 1])) == 'b<eos>a'
    with pytest.raises(TokenizerError, match='3 embeddings, the tokenizer 4'):
        tokenizer.fits(3)


def test_characters_without_an_id_are_named():
    with pytest.raises(TokenizerError, match=r"\['c', 'd'\] that are not among 'ab'"):
        CharacterTokenizer('ab').encode('adc')
    with pytest.raises(TokenizerError, match='each once'):
        CharacterTokenizer('aa')


def test_characters_without_an_eos_have_the_first_ids_and_none_ends_a_text():
    tokenizer = CharacterTokenizer('ab=', has_eos=False)
    assert tokenizer.encode('ba=').tolist() == [1, 0, 2]
    assert tokenizer.decode(np.array([1, 0, 2])) == 'ba='
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (3, 3)
    assert tokenizer.special_token_ids() == frozenset()


# Tokenizers of GGUF files as transformers reads them.


def write(directory, tokenizer):
    directory.mkdir(exist_ok=True)
    for name, text in tokenizer.hf_files().items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope='module')
def read_again(smollm2, tmp_path_factory):
    return HfTokenizer(write(tmp_path_factory.mktemp('smollm2'), smollm2))


def test_texts_and_chats_have_the_same_ids(smollm2, read_again):
    assert (read_again.eos_id, read_again.vocab_size) == (smollm2.eos_id, smollm2.vocab_size)
    for text in TEXTS:
        assert read_again.encode(text).tolist() == smollm2.encode(text).tolist()
        assert read_again.decode(smollm2.encode(text)) == smollm2.decode(smollm2.encode(text))
    pairs = zip(smollm2.encode_chats(CHATS), read_again.encode_chats(CHATS), strict=True)
    assert all(ours.tolist() == theirs.tolist() for ours, theirs in pairs)


def roles(tmp_path, **fields):
    """(tokenizer_config.json, ids that the file gives plain text 'ab')."""
    directory = write(tmp_path, GgufTokenizer(MINIMAL | fields))
    config = json.loads((directory / 'tokenizer_config.json').read_text())
    return config, Tokenizer.from_file(str(directory / 'tokenizer.json')).encode('ab').ids


def test_roles_of_tokens_by_hand(tmp_path):
    # tokens: 0 a, 1 b, 2 ab, 3 <s> (special), 4 <|x|> (added, not special)
    config, ids = roles(tmp_path)
    assert ({name: text for name, text in config.items() if name.endswith('_token')}, ids) == (
        {'eos_token': '<s>', 'add_bos_token': False, 'add_eos_token': False},
        [2],
    )
    config, ids = roles(tmp_path, bos_id=4, pad_id=3, unk_id=0, add_bos=True)
    assert (config['bos_token'], config['pad_token'], config['add_bos_token']) == ('<|x|>', '<s>', True)
    assert 'unk_token' not in config  # 'a' as a special token would cut 'ab' in two
    assert ids == [4, 2]
    assert roles(tmp_path, bos_id=4, add_bos=True, add_eos=True)[1] == [4, 2, 3]
    assert roles(tmp_path, add_bos=True, add_eos=True)[1] == [2, 3]  # there is no token to begin with
    special = {int(number): fields['special'] for number, fields in config['added_tokens_decoder'].items()}
    assert special == {3: True, 4: False}


def test_our_own_encoding_adds_nothing(tmp_path):
    tokenizer = GgufTokenizer(MINIMAL | {'bos_id': 3, 'add_bos': True})
    assert tokenizer.encode('ab').tolist() == [2]
    again = HfTokenizer(write(tmp_path, tokenizer))
    assert again.encode('ab').tolist() == [2]
    assert again.encode_prompt('ab').tolist() == tokenizer.encode_prompt('ab').tolist() == [3, 2]
    chat = chat_messages('ab')  # 'ab' and what the template puts after it, bos
    assert again.encode_chat(chat).tolist() == tokenizer.encode_chat(chat).tolist() == [2, 3]
