"""BPE of the library tokenizers from the vocabulary of a GGUF file: byte-level with merges, or pieces with scores."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from areal_jax.files import JsonObject
from areal_jax.text.chat_template import TokenizerError

if TYPE_CHECKING:
    import tokenizers

# GGUF token types
_ORDINARY, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL, _JOINED = (_UNKNOWN, _CONTROL), (_ORDINARY, _UNUSED)
_BLANK = '▁'  # how SentencePiece writes a blank


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Turns every exception of the library tokenizers into a TokenizerError."""
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f'{what}: {_one_line(error)}') from error
    except BaseException as error:
        if type(error).__name__ != 'PanicException':  # of Rust; no Exception, and its class cannot be imported
            raise
        raise TokenizerError(f'{what}: {_one_line(error)}') from error


def _one_line(error: BaseException) -> str:
    text = ' '.join(str(error).split())
    return f'{text[:200]}...' if len(text) > 200 else text


def require_tokens(fields: JsonObject, source: str) -> list[str]:
    """Returns the tokens; checks that each occurs once and has a type. Raises TokenizerError."""
    tokens, types = _require_texts(fields, 'tokens', source), fields['token_types']
    if not isinstance(types, list) or not all(isinstance(value, int) for value in types):
        raise TokenizerError(f'{source}: token_types must be a list of integers')
    if len(types) != len(tokens):
        raise TokenizerError(f'{source}: it has {len(tokens)} tokens and {len(types)} token_types; each has one')
    if len(set(tokens)) < len(tokens):
        (twice, count) = collections.Counter(tokens).most_common(1)[0]
        raise TokenizerError(f'{source}: the token {twice!r} has {count} ids')
    return tokens


def _require_texts(fields: JsonObject, name: str, source: str) -> list[str]:
    values = fields[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(f'{source}: {name} must be a list of texts')
    return values


def require_id(name: str, value: object, tokens: Sequence[str], source: str) -> int:
    """The id of one of the tokens; raises TokenizerError."""
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise TokenizerError(f'{source}: {name}={value!r} is not an id of the {len(tokens)} tokens')
    return value


def build_byte_level(fields: JsonObject, source: str) -> tokenizers.Tokenizer:
    """Builds the BPE of GPT-2 from tokens that `require_tokens` has checked, merges and pre; raises TokenizerError."""
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # the regular expression of GPT-2
    known = {
        'gpt-2': words,
        'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    tokens, pre = fields['tokens'], fields['pre']
    pairs = _read_merges(fields, source)
    if not isinstance(pre, str):
        raise TokenizerError(f'{source}: pre={pre!r} must be the name of a pre-tokenizer')
    if pre not in known:
        raise TokenizerError(
            f'{source}: pre-tokenizer pre={pre!r} is not known, so texts would be cut in the wrong places; known: '
            f'{sorted(known)}'
        )
    with naming(f'{source}: the vocabulary cannot be used'):
        bpe = Bpe(models.BPE(vocab=_ids(tokens), merges=pairs))
    bpe.pre_tokenizer = known[pre]
    bpe.decoder = decoders.ByteLevel()
    return _add_tokens(bpe, fields)


def _read_merges(fields: JsonObject, source: str) -> list[tuple[str, str]]:
    """The pairs of merges, 'left right' of the file; raises TokenizerError."""
    known, pairs = set(fields['tokens']), []
    for index, merge in enumerate(_require_texts(fields, 'merges', source)):
        left, _, right = merge.partition(' ')
        if not {left, right, left + right} <= known:
            raise TokenizerError(
                f'{source}: merges[{index}]={merge!r} must be two tokens with a blank between, which make a third'
            )
        pairs.append((left, right))
    return pairs


def build_scored(fields: JsonObject, source: str) -> tokenizers.Tokenizer:
    """Builds the BPE of SentencePiece from tokens that `require_tokens` has checked, and scores.

    Of all neighbours that make an ordinary token, those with the highest score are joined first; a character without a
    token becomes the tokens of its bytes. Raises TokenizerError for scores that do not fit, and for a vocabulary that
    cannot spell every text.
    """
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, normalizers

    tokens, unknown = fields['tokens'], fields.get('unk_id')
    scores, ids = _require_scores(fields, source), _ids(tokens)
    spells_bytes = all(f'<0x{byte:02X}>' in ids for byte in range(256))
    if not spells_bytes and unknown is None:
        raise TokenizerError(f'{source}: it has neither tokens of all bytes nor unk_id, so some texts have no tokens')
    pairs = _find_merges(tokens, scores, fields['token_types'])
    unknown = None if unknown is None else tokens[unknown]
    with naming(f'{source}: the vocabulary cannot be used'):
        bpe = Bpe(models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=spells_bytes))
    before, after = ([normalizers.Prepend(_BLANK)], [decoders.Strip(' ', 1, 0)]) if fields['space_prefix'] else ([], [])
    bpe.normalizer = normalizers.Sequence([*before, normalizers.Replace(' ', _BLANK)])
    bpe.decoder = decoders.Sequence([decoders.Replace(_BLANK, ' '), decoders.ByteFallback(), decoders.Fuse(), *after])
    # Tokens of several blanks are matched after the normalizer, so a text may write ▁ for a blank too. That is not
    # possible with Prepend, which the library would apply to the tokens themselves.
    return _add_tokens(bpe, fields, normalized=not fields['space_prefix'])


def _require_scores(fields: JsonObject, source: str) -> list[float]:
    tokens, scores = fields['tokens'], fields['scores']
    if not isinstance(scores, list) or not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise TokenizerError(f'{source}: scores must be a list of finite numbers')
    if len(scores) != len(tokens):
        raise TokenizerError(f'{source}: it has {len(tokens)} tokens and {len(scores)} scores; each has one')
    return scores


def _find_merges(tokens: list[str], scores: list[float], token_types: list[int]) -> list[tuple[str, str]]:
    """Every pair of ordinary tokens that makes an ordinary token, the pairs of the highest score first."""
    kinds = zip(tokens, scores, token_types, strict=True)
    scored = {token: score for token, score, kind in kinds if kind in _JOINED}
    ordered = sorted(scored, key=lambda token: -scored[token])  # stable: of equal scores the lower id first
    cuts = ((token[:cut], token[cut:]) for token in ordered for cut in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in scored and right in scored]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_tokens(bpe: tokenizers.Tokenizer, fields: JsonObject, *, normalized: bool = False) -> tokenizers.Tokenizer:
    """Makes the tokenizer find control tokens and those of a user, the latter in the normalized text; returns it."""
    from tokenizers import AddedToken

    kinds = list(zip(fields['tokens'], fields['token_types'], strict=True))
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind in _SPECIAL])
    bpe.add_tokens([AddedToken(t, normalized=normalized) for t, kind in kinds if kind == _USER_DEFINED])
    return bpe
