"""Tokenizers of GGUF files as transformers reads them: the same ids, by our reader of the same files."""

import json

import pytest
from tokenizers import Tokenizer

from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import chat_messages
from tests.tasks.texts import CHATS, TEXTS
from tests.text.test_tokenizer import MINIMAL


def write(directory, tokenizer):
    directory.mkdir(exist_ok=True)
    for name, text in tokenizer.hf_files().items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope='module')
def smollm2(smollm2_fields):
    return GgufTokenizer(smollm2_fields)


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
