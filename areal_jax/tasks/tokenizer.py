"""Text to tokens on the way into the loop, tokens to text on the way to the verifier."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.errors import UserError

Messages = Sequence[Mapping[str, str]]  # {'role': 'system' | 'user' | 'assistant', 'content': text}

# GGUF token types
_CONTROL = 3
_USER_DEFINED = 4

_HF_TOKENIZER, _HF_CONFIG, _HF_TEMPLATE = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'
_HF_SPECIALS = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be built, or that does not fit its text or its model."""


class Tokenizer(Protocol):
    """Text <-> token ids; `eos_id` ends an answer and is a token like any other."""

    eos_id: int
    vocab_size: int  # ids are below it

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added."""
        ...

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """int32 [P]: the messages in the model's chat form, up to where the answer begins."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones spelled out, except for an EOS at the very end."""
        ...

    def fits(self, vocab_size: int) -> None:
        """Raises TokenizerError when a model with `vocab_size` embeddings lacks some of the ids."""
        ...


def chat_messages(question: str, system_prompt: str = '') -> list[dict[str, str]]:
    """One user turn; an empty system prompt leaves the choice to the chat template."""
    system = [{'role': 'system', 'content': system_prompt}] if system_prompt else []
    return [*system, {'role': 'user', 'content': question}]


class _SizedTokenizer:
    eos_id: int
    vocab_size: int

    def fits(self, vocab_size: int) -> None:
        """Raises TokenizerError when a model with `vocab_size` embeddings lacks some of the ids."""
        if vocab_size < self.vocab_size:
            raise TokenizerError(
                f'the model has {vocab_size} embeddings, the tokenizer {self.vocab_size} ids: '
                'tokens beyond the model would read garbage. Use the tokenizer that belongs to the model'
            )

    def _without_final_eos(self, tokens: np.ndarray) -> list[int]:
        ids = [int(token) for token in tokens]
        return ids[:-1] if ids and ids[-1] == self.eos_id else ids


class GgufTokenizer(_SizedTokenizer):
    """Byte-level BPE and chat template as a GGUF file describes them.

    `fields`: tokens (list of str), merges (list of 'left right'), token_types (list of int), pre (name of the
    pre-tokenizer), eos_id, bos_id (None if there is none), chat_template (jinja2 source). Raises TokenizerError for a
    missing field, an unknown `pre` or an unknown id.
    """

    def __init__(self, fields: Mapping[str, Any]):
        required = ('tokens', 'merges', 'token_types', 'pre', 'eos_id', 'chat_template')
        if missing := [name for name in required if fields.get(name) in (None, '', [])]:
            raise TokenizerError(f'the GGUF metadata lacks {missing}; a chat model with a byte-level BPE has them all')
        tokens = list(fields['tokens'])
        self.vocab_size = len(tokens)
        self.eos_id = int(fields['eos_id'])
        if not 0 <= self.eos_id < self.vocab_size:
            raise TokenizerError(f'eos_id={self.eos_id} is not an id of the {self.vocab_size} tokens')
        self._bpe = _build_bpe(tokens, fields['merges'], fields['token_types'], str(fields['pre']))
        self._template = _compile_template(fields['chat_template'])
        bos_id = fields.get('bos_id')
        self._template_values = {
            'bos_token': '' if bos_id is None else tokens[int(bos_id)],
            'eos_token': tokens[self.eos_id],
        }

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added; the text of a special token becomes that token."""
        return np.asarray(self._bpe.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """int32 [P]: the rendered chat template, generation prompt included."""
        values = dict(self._template_values, messages=[dict(message) for message in messages])
        return self.encode(self._template.render(values, add_generation_prompt=True))

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones spelled out, except for an EOS at the very end."""
        return self._bpe.decode(self._without_final_eos(tokens), skip_special_tokens=False)


class HfTokenizer(_SizedTokenizer):
    """Tokenizer and chat template of a local Hugging Face checkpoint directory.

    Read are tokenizer.json, tokenizer_config.json (special tokens, tokens added to the vocabulary, chat template) and
    chat_template.jinja, which goes before the template in tokenizer_config.json as it does in transformers. Without any
    template `encode_chat` raises; everything else works. Templates see no clock: those that ask whether `strftime_now`
    exists fall back to their fixed date, and prompts do not change overnight.

    Raises TokenizerError for a file that is missing or cannot be read, a model without an EOS token, and a token whose
    id the two files disagree about.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        path = self._directory / _HF_CONFIG
        fields = _read_object(path)
        self._tokenizer = _read_hf_tokenizer(self._directory / _HF_TOKENIZER)
        _add_tokens(self._tokenizer, fields.get('added_tokens_decoder') or {}, path)
        specials = {name: _token_text(fields[name], path, name) for name in _HF_SPECIALS if fields.get(name)}
        if 'eos_token' not in specials:
            raise TokenizerError(f'{path} has no eos_token; name the token that ends an answer')
        eos_id = self._tokenizer.token_to_id(specials['eos_token'])
        if eos_id is None:
            raise TokenizerError(f'{path}: eos_token={specials["eos_token"]!r} is not in the vocabulary')
        self.eos_id = int(eos_id)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._template = _hf_template(self._directory, fields)
        self._template_values = {**specials, 'tools': None, 'documents': None}

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added; the text of a special token becomes that token."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """int32 [P]: the rendered chat template, generation prompt included; raises TokenizerError without one."""
        if self._template is None:
            raise TokenizerError(
                f'{self._directory} has a chat template neither in {_HF_TEMPLATE} nor in {_HF_CONFIG}: its model was '
                f'not trained to chat, or the file was not copied'
            )
        values = dict(self._template_values, messages=[dict(message) for message in messages])
        return self.encode(self._template.render(values, add_generation_prompt=True))

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones spelled out, except for an EOS at the very end."""
        return self._tokenizer.decode(self._without_final_eos(tokens), skip_special_tokens=False)


class CharacterTokenizer(_SizedTokenizer):
    """One id per character, for models that are trained from nothing: id 0 is EOS, `characters[i]` has id i + 1."""

    eos_id = 0
    eos_text = '<eos>'  # how an EOS inside a text is shown

    def __init__(self, characters: str):
        if not characters or len(set(characters)) != len(characters):
            raise TokenizerError(f'characters={characters!r} must be at least one, each once')
        self.characters = characters
        self.vocab_size = len(characters) + 1
        self._ids = {character: index + 1 for index, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]; raises TokenizerError for a character without an id."""
        if unknown := sorted(set(text) - set(self._ids)):
            raise TokenizerError(f'{text!r} has characters {unknown} that are not among {self.characters!r}')
        return np.asarray([self._ids[character] for character in text], np.int32)

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """int32 [P]: the contents one after the other; such a model has no chat form."""
        return self.encode(''.join(message['content'] for message in messages))

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, `eos_text` for an EOS that is not the last token."""
        texts = (self.eos_text, *self.characters)
        return ''.join(texts[token] for token in self._without_final_eos(tokens))


def _build_bpe(tokens: list[str], merges: Sequence[str], token_types: Sequence[int], pre: str) -> Any:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Bpe

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # the regular expression of GPT-2
    known = {
        'gpt-2': words,
        'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    if pre not in known:
        raise TokenizerError(
            f'pre-tokenizer pre={pre!r} is not known, so texts would be cut in the wrong places; known: {sorted(known)}'
        )
    pairs = [(left, right) for left, _, right in (merge.partition(' ') for merge in merges)]
    bpe = Bpe(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    bpe.pre_tokenizer = known[pre]
    bpe.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, token_types, strict=True))
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL])
    bpe.add_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == _USER_DEFINED])
    return bpe


def _read_hf_tokenizer(path: pathlib.Path) -> Any:
    from tokenizers import Tokenizer as Reader

    text = _read_text(path)
    try:
        return Reader.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f'{path} describes no tokenizer: {error}') from error


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f'{path} cannot be read ({error}); a directory with a tokenizer has it') from error


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        fields = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TokenizerError(f'{path} is no JSON: {error}') from error
    if not isinstance(fields, dict):
        raise TokenizerError(f'{path} holds a {type(fields).__name__}, not an object')
    return fields


def _token_text(value: Any, path: pathlib.Path, name: str) -> str:
    """A token is its text, or an object with its text and how it is matched."""
    text = value.get('content') if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(f'{path}: {name}={value!r} is no token')
    return text


def _add_tokens(tokenizer: Any, added: Mapping[str, Any], path: pathlib.Path) -> None:
    """Tokens that tokenizer_config.json adds to tokenizer.json, by id."""
    from tokenizers import AddedToken

    flags = ('special', 'normalized', 'lstrip', 'rstrip', 'single_word')
    for number, fields in sorted(added.items(), key=lambda item: int(item[0])):
        text = _token_text(fields, path, f'added_tokens_decoder.{number}')
        if tokenizer.token_to_id(text) is None:
            chosen = {flag: fields[flag] for flag in flags if flag in fields}
            add = tokenizer.add_special_tokens if fields.get('special') else tokenizer.add_tokens
            add([AddedToken(text, **chosen)])
        if tokenizer.token_to_id(text) != int(number):
            raise TokenizerError(
                f'{path}: added_tokens_decoder gives {text!r} the id {number}, {_HF_TOKENIZER} the id '
                f'{tokenizer.token_to_id(text)}: take both files from the same checkpoint'
            )


def _hf_template(directory: pathlib.Path, fields: Mapping[str, Any]) -> Any:
    """The compiled chat template, or None; of several that have names the one called default."""
    from jinja2 import TemplateSyntaxError

    path, source = directory / _HF_CONFIG, fields.get('chat_template')
    if (directory / _HF_TEMPLATE).is_file():
        path = directory / _HF_TEMPLATE
        source = _read_text(path)
    elif isinstance(source, list):
        source = next((entry['template'] for entry in source if entry.get('name') == 'default'), None)
    if source is None:
        return None
    try:
        return _compile_template(source)
    except (TemplateSyntaxError, TypeError) as error:
        raise TokenizerError(f'{path}: the chat template cannot be read: {error}') from error


def _compile_template(source: str) -> Any:
    # The template comes with the weights, from outside: it runs in the sandbox. The block settings are those under
    # which chat templates are written.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
    )
    environment.filters['tojson'] = _to_json  # jinja's own escapes for HTML
    environment.globals['raise_exception'] = _refuse_messages
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse_messages(reason: str) -> None:
    raise TokenizerError(f'the chat template refuses the messages: {reason}')
