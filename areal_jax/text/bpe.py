"""Byte-level BPE of the library tokenizers, from the vocabulary of a GGUF file."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from areal_jax.files import JsonObject
from areal_jax.text.chat_template import TokenizerError

if TYPE_CHECKING:
    import tokenizers

# GGUF token types
_CONTROL = 3
_USER_DEFINED = 4


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
    """Returns the tokens; checks that each occurs once and has a type, and merges and pre. Raises TokenizerError."""
    tokens, types, merges, pre = (fields[name] for name in ('tokens', 'token_types', 'merges', 'pre'))
    for name, values in (('tokens', tokens), ('merges', merges)):
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise TokenizerError(f'{source}: {name} must be a list of texts')
    if not isinstance(types, list) or not all(isinstance(value, int) for value in types):
        raise TokenizerError(f'{source}: token_types must be a list of integers')
    if len(types) != len(tokens):
        raise TokenizerError(f'{source}: it has {len(tokens)} tokens and {len(types)} token_types; each has one')
    if len(known := set(tokens)) < len(tokens):
        (twice, count) = collections.Counter(tokens).most_common(1)[0]
        raise TokenizerError(f'{source}: the token {twice!r} has {count} ids')
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(' ')
        if not {left, right, left + right} <= known:
            raise TokenizerError(
                f'{source}: merges[{index}]={merge!r} must be two tokens with a blank between, which make a third'
            )
    if not isinstance(pre, str):
        raise TokenizerError(f'{source}: pre={pre!r} must be the name of a pre-tokenizer')
    return tokens


def require_id(name: str, value: object, tokens: Sequence[str], source: str) -> int:
    """The id of one of the tokens; raises TokenizerError."""
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise TokenizerError(f'{source}: {name}={value!r} is not an id of the {len(tokens)} tokens')
    return value


def build_bpe(
    tokens: list[str], merges: list[str], token_types: list[int], pre: str, source: str
) -> tokenizers.Tokenizer:
    """Builds the BPE from fields that `require_tokens` has checked; raises TokenizerError for an unknown `pre`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Bpe

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # the regular expression of GPT-2
    known = {
        'gpt-2': words,
        'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    if pre not in known:
        raise TokenizerError(
            f'{source}: pre-tokenizer pre={pre!r} is not known, so texts would be cut in the wrong places; known: '
            f'{sorted(known)}'
        )
    pairs = [(left, right) for left, _, right in (merge.partition(' ') for merge in merges)]
    with naming(f'{source}: the vocabulary cannot be used'):
        bpe = Bpe(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    bpe.pre_tokenizer = known[pre]
    bpe.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, token_types, strict=True))
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL])
    bpe.add_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == _USER_DEFINED])
    return bpe
