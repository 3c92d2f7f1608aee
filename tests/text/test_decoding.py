"""From tokens to text: what each token adds, complete characters of byte tokens, and the start of a text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from areal_jax.text.bpe import build_byte_level
from areal_jax.text.decoding import TextDecoder, TokenBytes, read_token_bytes
from areal_jax.text.file_tokenizers import GgufTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.text import any_ids, vocabularies


@pytest.mark.parametrize('name', any_ids.VOCABULARIES)
def test_drawn_ids_and_texts_are_read_alike_whole_and_in_pieces(name):
    counts, faults = any_ids.check_vocabulary(name, sequences=60, cuttings=5, seed=1)
    assert not faults, faults[0]
    assert all(counts[kind] for kind in any_ids.KINDS), counts


@pytest.mark.parametrize(('written', 'text'), [
    (b'\xf0\x9f\x98\x80', '😀'), (b'\xf0\x9f\x98', '\ufffd' * 3), (b'\xf0\x9f\x98\x80\xf0\x9f', '😀\ufffd\ufffd'),
    (b'\x80\xc3\xa9\xff', '\ufffdé\ufffd'), (b'\xed\xa0\x80', '\ufffd' * 3), (b'\xc3a', '\ufffda'), (b' a', 'a'),
    (b'  a', ' a'), (b'\xc3 a', '\ufffd a'), (b'', ''),
])  # fmt: skip
def test_runs_of_byte_tokens_by_hand(written, text):
    library = vocabularies.llama2()
    ids = [library.token_to_id(f'<0x{byte:02X}>') for byte in written]
    assert read_token_bytes(library).decode(ids) == text


def test_a_blank_is_stripped_at_the_start_alone_and_once():
    library = vocabularies.llama2()
    token_bytes, word, blank = read_token_bytes(library), library.token_to_id('▁Hello'), library.token_to_id('▁')
    begin = library.token_to_id('<s>')
    for ids, text in (
        ([word, word], 'Hello Hello'), ([blank, word], ' Hello'), ([begin, word], '<s> Hello'), ([9999, word], 'Hello'),
    ):  # fmt: skip
        assert token_bytes.decode(ids) == library.decode(ids, skip_special_tokens=False) == text
    assert TextDecoder(token_bytes, hidden={begin}).extend([begin, word]) == library.decode([begin, word]) == 'Hello'
    assert TextDecoder(token_bytes, marks={begin: '|'}).extend([begin, word]) == '| Hello'


WORDS = ['▁Hello', '▁▁', 'wor', '##ld', '.', "n't", '[UNK]', '<0x41>', 'ĠA', '']
DECODERS = {
    'none': None, 'Metaspace': decoders.Metaspace(), 'Metaspace, never': decoders.Metaspace(prepend_scheme='never'),
    'WordPiece': decoders.WordPiece(), 'Fuse': decoders.Fuse(), 'Gemma': decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]),
    'strips two': decoders.Sequence([decoders.Replace('▁', ' '), decoders.Fuse(), decoders.Strip(' ', 2, 0)]),
    'strips each': decoders.Sequence([decoders.Replace('▁', ' '), decoders.Strip(' ', 1, 0)]),
    'nested': decoders.Sequence([decoders.Sequence([decoders.Replace('▁', ' ')]), decoders.ByteLevel()]),
}  # fmt: skip


@pytest.mark.parametrize('name', DECODERS)
def test_other_decoders_are_those_of_the_library_for_any_ids(name):
    library = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token='[UNK]'))
    if DECODERS[name] is not None:
        library.decoder = DECODERS[name]
    token_bytes, rng = read_token_bytes(library), np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, len(WORDS) + 1, int(rng.integers(0, 6))).tolist()
        assert token_bytes.decode(ids) == library.decode(ids), ids


def test_any_ids_of_smollm2_have_the_text_of_the_library(smollm2_fields):
    tokenizer, rng = GgufTokenizer(smollm2_fields), np.random.default_rng(0)
    library = build_byte_level(smollm2_fields, 'SmolLM2')
    for _ in range(100):
        ids = rng.integers(0, 49_152 + 9, int(rng.integers(1, 50)))
        expected = library.decode(ids[: len(ids) - (ids[-1] == tokenizer.eos_id)].tolist(), False)
        assert tokenizer.decode(ids) == expected


def test_the_end_of_an_answer_is_left_out_at_the_very_end_alone_however_it_comes():
    token_bytes = CharacterTokenizer('ab').token_bytes
    for cuts in ([1, 0, 2, 0], [1], [0], [2, 0], [0, 0, 1]):
        text = TextDecoder(token_bytes, ends={0})
        written = ''.join(text.extend([token]) for token in cuts) + text.extend([], is_last=True)
        left = cuts[:-1] if cuts[-1] == 0 else cuts
        assert written == token_bytes.decode(left) == ''.join(('<eos>', 'a', 'b')[token] for token in left)


def test_a_token_is_spelled_once():
    spelled = []
    text = TextDecoder(TokenBytes(lambda token: spelled.append(token) or b'x'))
    assert text.extend([1, 2, 1]) + text.extend([1, 2]) == 'xxxxx'
    assert spelled == [1, 2]


def test_each_token_has_the_characters_that_it_completes():
    """The four bytes of an emoji in three tokens, a byte that is no character, and an end that has no text."""
    spelled = {1: b'a\xf0\x9f', 2: b'\x98', 3: b'\x80b', 4: b'\xff', 5: b'\xf0\x9f'}
    assert TokenBytes(spelled.get).split([1, 2, 3, 9, 4]) == ['a', '', '😀b', '', '�']
    assert TokenBytes(spelled.get).split([1, 2, 5]) == ['a', '', '��']  # never completed
    assert TokenBytes(spelled.get, each_byte=True).split([1, 5]) == ['a', '����']
    assert TokenBytes(spelled.get).split([]) == []
    tokenizer = CharacterTokenizer('ab')
    assert tokenizer.split(np.array([1, 0, 2, 0])) == ['a', '<eos>', 'b', '']
