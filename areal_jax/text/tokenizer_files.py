"""The files of Hugging Face that describe a tokenizer: writes those of a byte-level BPE, and reads them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from areal_jax.files import JsonObject
from areal_jax.text.bpe import naming
from areal_jax.text.chat_template import ChatTemplate, GivenTemplate, TokenizerError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, CONFIG, TEMPLATE = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'


def describe_tokenizer(
    bpe: tokenizers.Tokenizer, special_ids: Mapping[str, int], *, add_bos: bool, add_eos: bool, template: str
) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by name.

    Args:
      special_ids: ids by role: 'eos', and 'bos', 'pad' and 'unk' where the model has them. 'pad' and 'unk' are left out
        if they name an ordinary token: transformers makes every named one special, and would cut texts differently.
      add_bos, add_eos: whether transformers puts them around plain text. It never does so around a rendered chat.
      template: the chat template, in jinja2.
    """
    added = bpe.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    named = {role: index for role, index in special_ids.items() if role in ('bos', 'eos') or index in special}
    flags = ('content', 'lstrip', 'normalized', 'rstrip', 'single_word', 'special')
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **{f'{role}_token': bpe.id_to_token(index) for role, index in named.items()},
        'add_bos_token': add_bos,
        'add_eos_token': add_eos,
        'added_tokens_decoder': {str(i): {f: getattr(token, f) for f in flags} for i, token in sorted(added.items())},
        'clean_up_tokenization_spaces': False,  # decoded text stays as it is
        'chat_template': template,
    }
    ends = tuple(role if adds and role in named else None for role, adds in (('bos', add_bos), ('eos', add_eos)))
    described = _with_ends(bpe, ends, named).to_str(pretty=True)
    return {TOKENIZER: described, CONFIG: json.dumps(config, indent=1, ensure_ascii=False) + '\n'}


def read_hf_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    """The tokenizer of tokenizer.json, without padding and truncation; raises TokenizerError."""
    from tokenizers import Tokenizer as Reader

    text = _read_text(path)
    with naming(f'{path} describes no tokenizer'):
        tokenizer = Reader.from_str(text)
        if not tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError('it has no tokens')
        tokenizer.no_padding()  # the file may ask for both, meant for other models: prompts stay as they are
        tokenizer.no_truncation()
        return tokenizer


def read_object(path: pathlib.Path) -> JsonObject:
    """The JSON object in a file; raises TokenizerError."""
    text = _read_text(path)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f'{path} is no JSON: {error}') from error
    if not isinstance(fields, dict):
        raise TokenizerError(f'{path} holds a {type(fields).__name__}, not an object')
    return fields


def token_text(value: object, path: pathlib.Path, name: str) -> str:
    """The text of a token, which is given as such, or as an object that also says how it is matched.

    Raises TokenizerError that names the file and the field.
    """
    text = value.get('content') if isinstance(value, dict) else value
    if not isinstance(text, str) or any('\ud800' <= character <= '\udfff' for character in text):
        raise TokenizerError(f'{path}: {name}={value!r} is no token')
    return text


def add_tokens(tokenizer: tokenizers.Tokenizer, added: object, path: pathlib.Path) -> None:
    """Add the tokens that tokenizer_config.json has beyond tokenizer.json, by id; raises TokenizerError."""
    from tokenizers import AddedToken

    flags = ('special', 'normalized', 'lstrip', 'rstrip', 'single_word')
    if not isinstance(added, dict) or not all(number.isdecimal() and len(number) < 10 for number in added):
        raise TokenizerError(f'{path}: added_tokens_decoder={str(added)[:80]} must have the ids of tokens as its keys')
    for number, fields in sorted(added.items(), key=lambda item: int(item[0])):
        text = token_text(fields, path, f'added_tokens_decoder.{number}')
        if tokenizer.token_to_id(text) is None:
            chosen = {flag: fields[flag] for flag in flags if flag in fields} if isinstance(fields, dict) else {}
            add = tokenizer.add_special_tokens if chosen.get('special') else tokenizer.add_tokens
            with naming(f'{path}: added_tokens_decoder.{number} cannot be added'):
                add([AddedToken(text, **chosen)])
        if tokenizer.token_to_id(text) != int(number):
            raise TokenizerError(
                f'{path}: added_tokens_decoder gives {text!r} the id {number}, {TOKENIZER} the id '
                f'{tokenizer.token_to_id(text)}: take both files from the same checkpoint'
            )


def read_hf_template(
    directory: pathlib.Path, fields: JsonObject, values: JsonObject, given: GivenTemplate | None
) -> ChatTemplate | None:
    """The chat template of a directory, or the one that is given in its place, or None where there is neither.

    Of several that have names it is the one called default. Raises TokenizerError.
    """
    if given is not None:
        return ChatTemplate(given.source, values, given.place)
    path, source = directory / CONFIG, fields.get('chat_template')
    if (directory / TEMPLATE).is_file():
        path = directory / TEMPLATE
        source = _read_text(path)
    elif isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get('name') == 'default']
        source = named[0].get('template') if named else None
    return None if source is None else ChatTemplate(source, values, str(path))


def _with_ends(bpe: tokenizers.Tokenizer, ends: tuple[str | None, ...], ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """A copy that adds the tokens of these roles before and after plain text."""
    from tokenizers import Tokenizer, processors

    copy = Tokenizer.from_str(bpe.to_str())
    before, after = ends
    used = [role for role in (before, after) if role]
    if used:
        around = lambda text: [*filter(None, (before, text, after))]
        copy.post_processor = processors.TemplateProcessing(
            single=around('$A'),
            pair=[*around('$A'), *around('$B')],
            special_tokens=[{'id': role, 'ids': [ids[role]], 'tokens': [bpe.id_to_token(ids[role])]} for role in used],
        )
    return copy


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f'{path} cannot be read ({error}); a directory with a tokenizer has it') from error
