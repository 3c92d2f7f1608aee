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
GENERATION, MODEL = 'generation_config.json', 'config.json'  # which also say what ends an answer
MORE_TEMPLATES, DEFAULT, WITH_TOOLS = 'additional_chat_templates', 'default', 'tool_use'  # a folder, and names in it


def describe_tokenizer(
    bpe: tokenizers.Tokenizer, special_ids: Mapping[str, int], add_bos: bool, add_eos: bool, *, template: object
) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by name.

    Args:
      special_ids: ids by role: 'eos', and 'bos', 'pad' and 'unk' where the model has them. 'pad' and 'unk' are left out
        if they name an ordinary token: transformers makes every named one special, and would cut texts differently.
      add_bos, add_eos: whether transformers puts them around plain text. It never does so around a rendered chat.
      template: the chat template in jinja2, or a list of templates with names.
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
    described = bpe.to_str(pretty=True)
    return {TOKENIZER: described, CONFIG: json.dumps(config, indent=1, ensure_ascii=False) + '\n'}


def with_ends(bpe: tokenizers.Tokenizer, added: tuple[bool, bool], ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The tokenizer, which from now on puts BOS before plain text and EOS behind it, as far as it has them.

    Args:
      added: whether BOS, and EOS.
      ids: by role: 'bos', 'eos'.
    """
    from tokenizers import processors

    before, after = (role if adds and role in ids else None for role, adds in zip(('bos', 'eos'), added, strict=True))
    used = [role for role in (before, after) if role]
    if used:
        around = lambda text: [*filter(None, (before, text, after))]
        bpe.post_processor = processors.TemplateProcessing(
            single=around('$A'),
            pair=[*around('$A'), *around('$B')],
            special_tokens=[{'id': role, 'ids': [ids[role]], 'tokens': [bpe.id_to_token(ids[role])]} for role in used],
        )
    return bpe


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


def read_end_ids(directory: pathlib.Path) -> list[int]:
    """eos_token_id of generation_config.json and of config.json, as far as these are there; raises TokenizerError."""
    found: list[int] = []
    for path in (directory / name for name in (GENERATION, MODEL) if (directory / name).is_file()):
        value = read_object(path).get('eos_token_id')
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
            raise TokenizerError(f'{path}: eos_token_id={value!r} must be the id of a token, or a list of such ids')
        found += listed
    return found


def read_hf_template(
    directory: pathlib.Path, fields: JsonObject, values: JsonObject, given: GivenTemplate | None, day: str
) -> ChatTemplate | None:
    """The chat template of a directory, or the one that is given in its place, or None where there is neither.

    Files go before tokenizer_config.json. Of several that have names it is the one called default, and for
    conversations with tools the one called tool_use. Raises TokenizerError.
    """
    if given is not None:
        return ChatTemplate(given.source, values, given.place, day=day)
    found = _read_template_files(directory) or _list_templates(fields.get('chat_template'), directory / CONFIG)
    if DEFAULT not in found:
        return None
    (source, place), with_tools = found[DEFAULT], found.get(WITH_TOOLS)
    other = None if with_tools is None else ChatTemplate(with_tools[0], values, str(with_tools[1]), day=day)
    return ChatTemplate(source, values, str(place), day=day, with_tools=other)


def _read_template_files(directory: pathlib.Path) -> dict[str, tuple[object, pathlib.Path]]:
    """By name: (source, file)."""
    paths = {path.stem: path for path in sorted((directory / MORE_TEMPLATES).glob('*.jinja'))}
    if (directory / TEMPLATE).is_file():
        paths[DEFAULT] = directory / TEMPLATE
    return {name: (_read_text(path), path) for name, path in paths.items()}


def _list_templates(value: object, path: pathlib.Path) -> dict[str, tuple[object, pathlib.Path]]:
    """The same of tokenizer_config.json: one template, a list of them, or an object, by name."""
    if isinstance(value, list):
        value = {str(entry.get('name')): entry.get('template') for entry in value if isinstance(entry, dict)}
    if not isinstance(value, dict):
        value = {} if value is None else {DEFAULT: value}
    return {name: (source, path) for name, source in value.items() if source is not None}


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f'{path} cannot be read ({error}); a directory with a tokenizer has it') from error
