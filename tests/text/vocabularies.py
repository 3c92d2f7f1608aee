"""Small vocabularies of the two kinds that spell any text: bytes beside words (Llama 2), and bytes alone (GPT-2)."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ('▁Hello', '▁world', '▁', 'a', 'b', 'STOP', 'ST', 'OP', '▁▁', 'é', '数', '\n', '▁a', '👍', ',')
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
# how GPT-2 writes each byte
BYTE_CHARACTERS = ''.join(chr(byte if byte in _SHOWN else 256 + _HIDDEN.index(byte)) for byte in range(256))
EMOJI = '😀🎉👩‍👩‍👧🇩🇪🦜👍🏽'  # six of them, of 1, 1, 5, 2, 1 and 2 characters
TEXTS = (EMOJI, f'Hello {EMOJI} world', 'a\tnaïve café 数学', ' leading', '  two', 'STOP it\nSTOP', '', 'a ' * 40)


def llama2(kind: str = 'bpe') -> Tokenizer:
    """With three special tokens before its 256 bytes, and the decoder of Llama 2; 'bpe', 'unigram' or 'merged'."""
    specials = ['<unk>', '<s>', '</s>']
    tokens = [*specials, *BYTES, *WORDS]
    if kind == 'unigram':
        scored = [(token, 0.0 if token in specials else -10.0 - (token in BYTES)) for token in tokens]
        found = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    else:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merges = [('S', 'T'), ('O', 'P'), ('ST', 'OP'), ('▁', '▁'), ('▁', 'a')]
        for letter in 'STOP':
            vocabulary[letter] = len(vocabulary)
        found = Tokenizer(models.BPE(vocabulary, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    found.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    found.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    return found


def gpt2() -> Tokenizer:
    """Bytes, some words of whole and of broken characters, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spell = lambda text: byte_level.pre_tokenize_str(text)[0][0]
    smile = spell('😀')
    pairs = [('S', 'T'), ('O', 'P'), ('ST', 'OP'), (smile[0], smile[1]), (smile[:2], smile[2]), (spell(' '), 'a')]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in pairs)])}
    found = Tokenizer(models.BPE(vocabulary, pairs))
    found.pre_tokenizer, found.decoder = byte_level, decoders.ByteLevel()
    found.add_special_tokens([AddedToken('</s>', special=True, normalized=False)])
    found.add_tokens([AddedToken('数 word', normalized=False)])  # a character that stands for no byte
    return found


def write(directory: pathlib.Path, tokenizer: Tokenizer, **config: object) -> pathlib.Path:
    """As a directory of Hugging Face, which ends its answers with </s>."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / 'tokenizer.json'))
    fields = {'eos_token': '</s>', **config}
    (directory / 'tokenizer_config.json').write_text(json.dumps(fields))
    return directory


def draw_ids(rng: np.random.Generator, tokenizer: Tokenizer, length: int) -> np.ndarray:
    """int32 [length]: tokens of all kinds, beside characters in bytes, whole, cut or with a wrong byte."""
    size = tokenizer.get_vocab_size()
    ids: list[int] = []
    while len(ids) < length:
        if rng.random() < 0.5:
            ids.append(int(rng.integers(0, size + 3)))  # ids beyond the vocabulary too
            continue
        written = EMOJI[int(rng.integers(len(EMOJI)))].encode()
        written = written[int(rng.random() < 0.2) : len(written) - int(rng.random() < 0.3)]
        ids += [byte_id(tokenizer, byte) for byte in written]
    return np.array(ids[:length], np.int32)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte."""
    found = tokenizer.token_to_id(BYTES[byte])
    if found is None:
        found = tokenizer.token_to_id(BYTE_CHARACTERS[byte])
    return int(found)
