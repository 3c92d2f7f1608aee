"""Texts of drawn ids, cut anywhere, of byte-fallback and byte-level vocabularies: python -m tests.text.any_ids.

--sequences=2000 --cuttings=50 --seed=0 --json=FILE. Of each sequence of each vocabulary the text is compared, whole and
in pieces, with one that is decoded run by run here, and with the library's: for any ids of a byte-level vocabulary, and
for ids that encode a text. Stop strings are drawn from the text; whole and in pieces they end the answer at the first
token with which the text has one, and the text in pieces is that before the string. Exit code 0 only if every check
held and each kind of case was there.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from areal_jax import files
from areal_jax.rollout.http.wire.answer_reader import AnswerText
from areal_jax.rollout.http.wire.exchange import Finish
from areal_jax.rollout.running_request import StopSearch
from areal_jax.text.decoding import TextDecoder, TokenBytes, read_token_bytes
from tests.text import vocabularies

VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    'byte-fallback BPE': vocabularies.llama2,
    'byte-fallback Unigram': lambda: vocabularies.llama2('unigram'),
    'byte-level BPE': vocabularies.gpt2,
}
KINDS = ('sequences', 'cuttings', 'broken characters', 'texts', 'stops', 'stops with an emoji', 'no stop')
_LENGTH = 40  # tokens at most
_CHARACTERS = [*'aSTOP \n', *vocabularies.EMOJI, 'é', '数', 'ß', '\u0000', '\ufffd', '\U0010ffff', '▁']


def check_vocabulary(name: str, sequences: int, cuttings: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """(cases by kind, what did not hold)."""
    library = VOCABULARIES[name]()
    token_bytes, rng = read_token_bytes(library), np.random.default_rng(seed)
    counts: dict[str, int] = collections.Counter()
    faults: list[str] = []
    for _ in range(sequences):
        ids = vocabularies.draw_ids(rng, library, int(rng.integers(1, _LENGTH))).tolist()
        whole = decode_by_runs(library, ids)
        counts['broken characters'] += '\ufffd' in whole
        texts = {'whole': token_bytes.decode(ids), 'by token': ''.join(token_bytes.split(ids))}
        if library.token_to_id('<0x00>') is None:
            texts['library'] = library.decode(ids, skip_special_tokens=False)
        faults += [f'{name}: {how} of {ids}: {text!r}, not {whole!r}' for how, text in texts.items() if text != whole]
        faults += _check_encoded(library, token_bytes, rng, counts)
        string = draw_stop(whole, rng)
        end = first_with(library, ids, string)
        counts['sequences'] += 1
        counts['no stop' if end is None else 'stops'] += 1
        counts['stops with an emoji'] += end is not None and max(map(ord, string)) > 0xFFFF
        for _ in range(cuttings):
            parts = cut(ids, rng)
            counts['cuttings'] += 1
            text = TextDecoder(token_bytes)
            pieces = [text.extend(part, is_last=i == len(parts) - 1) for i, part in enumerate(parts)]
            if ''.join(pieces) != whole:
                faults.append(f'{name}: {parts} gives {pieces}, not {whole!r}')
            if (found := _stream_until(token_bytes, parts, string)) != (end, _text_before(library, ids, string, end)):
                faults.append(f'{name}: {string!r} in {parts}: {found}, not at token {end}')
    return dict(counts), faults


def _check_encoded(
    library: Tokenizer, token_bytes: TokenBytes, rng: np.random.Generator, counts: dict[str, int]
) -> list[str]:
    """Ids that encode a text have the library's text."""
    text = ''.join(_CHARACTERS[i] for i in rng.integers(0, len(_CHARACTERS), int(rng.integers(1, 30))))
    ids = library.encode(text, add_special_tokens=False).ids
    counts['texts'] += 1
    expected = library.decode(ids, skip_special_tokens=False)
    return [] if token_bytes.decode(ids) == expected else [f'{text!r}: {token_bytes.decode(ids)!r}, not {expected!r}']


def cut(ids: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Into pieces, of which some are empty; the last one is not, because an end comes with its token."""
    ends = np.sort(rng.integers(0, len(ids), int(rng.integers(0, len(ids) + 1))))
    return [part.tolist() for part in np.split(np.array(ids, np.int32), ends)]


def decode_by_runs(library: Tokenizer, ids: Sequence[int]) -> str:
    """The text as the contract has it, token by token: no byte of a run is read twice, and each is tried alone."""
    level = library.token_to_id('<0x00>') is None
    text, run = '', b''
    for token in [*ids, None]:
        name = None if token is None else library.id_to_token(token)
        if token is not None and name is None:
            continue
        byte = None if name is None else _bytes_of(name, level)
        if byte is None:
            text, run = text + _read_run(run, level), b''
            text += '' if name is None else name if level else name.replace('▁', ' ')
        else:
            run += byte
    return text.removeprefix(' ') if not level else text


def _bytes_of(name: str, level: bool) -> bytes | None:
    """Of a token that stands for bytes."""
    if not level:
        return bytes([int(name[3:5], 16)]) if name in vocabularies.BYTES else None
    found = [vocabularies.BYTE_CHARACTERS.find(character) for character in name]
    return None if -1 in found else bytes(found)


def _read_run(run: bytes, level: bool) -> str:
    """Complete characters, and one U+FFFD for each other byte or for each longest part of a character."""
    text, at = '', 0
    while at < len(run):
        lengths = [n for n in (1, 2, 3, 4) if at + n <= len(run) and _is_character(run[at : at + n])]
        text += run[at : at + lengths[0]].decode() if lengths else '\ufffd'
        at += lengths[0] if lengths else _longest_part(run[at:]) if level else 1
    return text


def _is_character(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


def _longest_part(run: bytes) -> int:
    """Bytes at the start that some character begins with; at least 1."""
    tails = [bytes(tail) for tail in ([], [0x80], [0x80] * 2, [0xA0], [0xA0, 0x80], [0x90, 0x80, 0x80], [0x80] * 3)]
    fits = lambda n: any(_is_character(run[:n] + tail) for tail in tails)
    return max([1, *(n for n in (2, 3) if n <= len(run) and fits(n))])


def draw_stop(text: str, rng: np.random.Generator) -> str:
    """A part of the text, or what is not in it."""
    clean = [i for i, character in enumerate(text) if character != '\ufffd']
    if not clean or rng.random() < 0.2:
        return '☃☃'
    begin = clean[int(rng.integers(len(clean)))]
    return text[begin : begin + int(rng.integers(1, 5))].split('\ufffd')[0]


def first_with(library: Tokenizer, ids: Sequence[int], string: str) -> int | None:
    """Tokens of the shortest beginning whose text has the string."""
    return next((n for n in range(1, len(ids) + 1) if string in decode_by_runs(library, ids[:n])), None)


def _text_before(library: Tokenizer, ids: Sequence[int], string: str, end: int | None) -> str:
    """What a reader of the answer gets."""
    text = decode_by_runs(library, ids[:end])
    return text if end is None else text[: text.find(string)]


def _stream_until(token_bytes: TokenBytes, parts: Sequence[Sequence[int]], string: str) -> tuple[int | None, str]:
    """(tokens up to the string, the text before it), of ids that come in these pieces."""
    search, text = StopSearch([string], token_bytes), AnswerText(TextDecoder(token_bytes), [string])
    before, given = 0, ''
    for index, part in enumerate(parts):
        found = search.find(part)
        tokens = np.array(part if found is None else part[: found[0]], np.int32)
        finish = Finish('stop', string) if found else Finish('length') if index == len(parts) - 1 else None
        given += text.extend(tokens, finish)
        if found is not None:
            return before + found[0], given
        before += len(part)
    return None, given


def main() -> None:
    """Checks every vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sequences', type=int, default=2000)
    parser.add_argument('--cuttings', type=int, default=50)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=pathlib.Path)
    options = parser.parse_args()
    found, faults = {}, []
    for name in VOCABULARIES:
        began = time.monotonic()
        found[name], wrong = check_vocabulary(name, options.sequences, options.cuttings, options.seed)
        faults += wrong
        print(f'{name}: {found[name]}, {len(wrong)} faults, {time.monotonic() - began:.0f} s', flush=True)
    missing = [f'{name}: no {kind}' for name, counts in found.items() for kind in KINDS if not counts.get(kind)]
    print('\n'.join([*faults[:20], *missing]))
    if options.json is not None:
        files.write_json(options.json, {'cases': found, 'faults': faults, 'missing': missing})
    sys.exit(1 if faults or missing else 0)


if __name__ == '__main__':
    main()
