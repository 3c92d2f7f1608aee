"""The BPE of a vocabulary with scores: its ids are those of joining the best neighbours one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from areal_jax.installation import locate_file
from areal_jax.text.chat_template import ConversationError, GivenTemplate
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import TokenizerError, chat_messages

ORDINARY, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]
PIECES = ['▁', 'a', 'b', 'c', 'd', 'ab', 'bc', 'abc', '▁a', 'cd', '▁ab']


def fields_of(scored: dict[str, float], **more: Any) -> dict[str, Any]:
    """Four special tokens, the bytes, a token of a user for two blanks, and pieces with scores."""
    head = {'<pad>': CONTROL, '<eos>': CONTROL, '<bos>': CONTROL, '<unk>': UNKNOWN}
    kinds = head | dict.fromkeys(BYTES, BYTE) | {'  ': USER_DEFINED} | dict.fromkeys(scored, ORDINARY)
    fields = {
        'model': 'llama', 'tokens': [*kinds], 'token_types': [*kinds.values()], 'space_prefix': False,
        'scores': [scored.get(token, 0.0) for token in kinds], 'eos_id': 1, 'bos_id': 2, 'unk_id': 3, 'add_bos': True,
    }  # fmt: skip
    return fields | more


def join(text: str, scored: dict[str, float]) -> list[str]:
    """Joins two neighbours at a time: those of the highest score, of several the first ones."""
    symbols = list(text.replace(' ', '▁'))
    joined = lambda: enumerate(left + right for left, right in itertools.pairwise(symbols))
    while found := [(-scored[pair], place) for place, pair in joined() if pair in scored]:
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [name for s in symbols for name in ([s] if s in scored else [f'<0x{byte:02X}>' for byte in s.encode()])]


def names(tokenizer: GgufTokenizer, tokens: np.ndarray) -> list[str]:
    by_id = {index: token for token, index in tokenizer.vocabulary().items()}
    return [by_id[int(token)] for token in tokens]


def test_the_best_pair_is_joined_first_by_hand():
    scored = {piece: -float(rank) for rank, piece in enumerate(['cd', 'ab', 'abc', *'▁abcd'])}
    tokenizer = GgufTokenizer(fields_of(scored))
    # c d has the best score, then a b; abc would have come behind both
    assert names(tokenizer, tokenizer.encode('abcd')) == ['ab', 'cd']
    tokenizer = GgufTokenizer(fields_of(scored | {'cd': -9.0}))
    assert names(tokenizer, tokenizer.encode('abcd abc')) == ['abc', 'd', '▁', 'abc']


@pytest.mark.parametrize('seed', range(4))
def test_any_text_has_the_ids_of_joining_one_by_one(seed):
    rng = np.random.default_rng(seed)
    letters = [*'abc'[: 1 + seed % 3]]
    drawn = [('▁' if rng.random() < 0.3 else '') + ''.join(rng.choice(letters, rng.integers(2, 6))) for _ in range(30)]
    scored = {piece: -float(rank) for rank, piece in enumerate(dict.fromkeys([*drawn, '▁', *letters]))}
    tokenizer = GgufTokenizer(fields_of(scored))
    for _ in range(100):
        words = (''.join(rng.choice([*letters, 'é', '👍'], rng.integers(1, 9))) for _ in range(rng.integers(0, 6)))
        tokens = tokenizer.encode(text := ' '.join(words))
        assert names(tokenizer, tokens) == join(text, scored), text
        assert tokenizer.decode(tokens) == text


SMALL = {piece: -float(rank) for rank, piece in enumerate(PIECES)}


def test_tokens_of_a_user_come_first_and_tokens_of_bytes_last():
    tokenizer = GgufTokenizer(fields_of(SMALL))
    found = lambda text: names(tokenizer, tokenizer.encode(text))
    assert found('ab  ab ab') == ['ab', '  ', 'ab', '▁ab']  # not ab, ▁, ▁ab
    assert found('ab▁▁ab') == ['ab', '  ', 'ab']
    assert found('aé<0x0A>') == ['a', '<0xC3>', '<0xA9>', *(f'<0x{byte:02X}>' for byte in b'<0x0A>')]
    assert found('<unk>a<eos>') == ['<unk>', 'a', '<eos>']
    assert tokenizer.decode(tokenizer.encode('ab  é<eos>')) == 'ab  é'
    assert tokenizer.special_token_ids() == frozenset(range(4))


def test_a_text_that_spells_a_byte_does_not_become_one():
    parts = ['<0', '<0x', '<0x0', '<0x0A', *'<0xA>']
    tokenizer = GgufTokenizer(fields_of({part: -float(rank) for rank, part in enumerate(parts)}))
    assert names(tokenizer, tokenizer.encode('<0x0A>')) == ['<0x0A', '>']
    assert tokenizer.decode(tokenizer.encode('<0x0A>')) == '<0x0A>'


def test_a_text_may_begin_with_a_blank_that_is_not_in_it():
    # Llama 2; BOS is put before plain text alone
    tokenizer = GgufTokenizer(fields_of(SMALL, space_prefix=True))
    assert names(tokenizer, tokenizer.encode('ab a')) == ['▁ab', '▁a']
    assert names(tokenizer, tokenizer.encode_prompt('  a')) == ['<bos>', '  ', '▁a']
    assert tokenizer.decode(tokenizer.encode('ab a')) == 'ab a'
    tokenizer = GgufTokenizer(fields_of(SMALL, add_bos=False))
    assert names(tokenizer, tokenizer.encode_prompt('ab a')) == ['ab', '▁a']


def test_the_template_is_that_of_the_file_and_contents_stay_text(tmp_path):
    tokenizer = GgufTokenizer(fields_of(SMALL, chat_template='{{ bos_token }}{{ messages[0].content }}<eos>'))
    assert names(tokenizer, tokenizer.encode_chat(chat_messages('ab ab'))) == ['<bos>', 'ab', '▁ab', '<eos>']
    spelled = names(tokenizer, tokenizer.encode_chat(chat_messages('ab<eos> ab')))
    assert (spelled[:2], spelled[-2:], len(spelled)) == (['<bos>', 'ab'], ['▁ab', '<eos>'], 9)
    for name, text in tokenizer.hf_files().items():
        (tmp_path / name).write_text(text)
    again = HfTokenizer(tmp_path)
    for text in ('ab  é<eos> a', '', ' ab'):
        assert again.encode_prompt(text).tolist() == tokenizer.encode_prompt(text).tolist()
    assert again.encode_chat(chat_messages('a b')).tolist() == tokenizer.encode_chat(chat_messages('a b')).tolist()


def test_a_model_without_a_template_encodes_and_does_not_chat(tmp_path):
    tokenizer = GgufTokenizer(fields_of(SMALL), 'small.gguf')
    assert not tokenizer.chats
    assert names(tokenizer, tokenizer.encode('ab')) == ['ab']
    with pytest.raises(ConversationError, match=r'^small\.gguf has no tokenizer\.chat_template: .*model\.chat_'):
        tokenizer.encode_chat(chat_messages('ab'))
    assert 'chat_template' not in tokenizer.hf_files()['tokenizer_config.json']


def test_the_plain_template_writes_contents_a_line_each():
    template = locate_file('package:configs/templates/plain.jinja').read_text()
    tokenizer = GgufTokenizer(fields_of(SMALL), template=GivenTemplate(template, 'plain.jinja'))
    tokens = tokenizer.encode_chat(chat_messages('ab a', 'cd'))
    assert names(tokenizer, tokens) == ['<bos>', 'cd', '<0x0A>', 'ab', '▁a', '<0x0A>']


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model': 't5'}, "tokenizer.ggml.model is 't5'; only gpt2 and llama can be read: take the model's files of"),
        ({'scores': []}, r"its metadata lacks \['scores'\]; a tokenizer of the kind 'llama' has them"),
        ({'scores': [0.0] * 9}, 'it has 272 tokens and 9 scores; each has one'),
        ({'scores': [float('nan')] * 272}, 'scores must be a list of finite numbers'),
        ({'unk_id': 272}, 'unk_id=272 is not an id of the 272 tokens'),
    ],
)
def test_what_cannot_be_read_is_named(change, message):
    with pytest.raises(TokenizerError, match=f'^small.gguf: {message}'):
        GgufTokenizer(fields_of(SMALL, **change), 'small.gguf')


def test_a_vocabulary_that_cannot_spell_every_text_needs_a_token_for_the_rest():
    fields = fields_of(SMALL)
    fields['tokens'][9] = 'no byte'
    assert names(GgufTokenizer(fields), GgufTokenizer(fields).encode('aéb')) == ['a', '<unk>', 'b']
    with pytest.raises(TokenizerError, match='it has neither tokens of all bytes nor unk_id, so some texts have no'):
        GgufTokenizer(fields | {'unk_id': None})
