"""Tokenizers: text to tokens for the prompts of the tasks, tokens to text for the verifier."""

from __future__ import annotations

import abc
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax import files
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.text.bpe import naming
from areal_jax.text.chat_template import (
    ChatTemplate,
    ConversationError,
    GivenTemplate,
    Messages,
    TokenizerError,
    Tools,
    can_extend,
)
from areal_jax.text.decoding import TokenBytes

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(abc.ABC):
    """Text <-> token ids; `eos_id` ends an answer and is a token like any other."""

    eos_id: int
    end_ids: tuple[int, ...]  # all that end an answer; `eos_id` is the first
    vocab_size: int  # ids are below it
    source: str  # the place that describes the vocabulary, for errors

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [n], nothing added. If the text spells a special token, it becomes that token."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """int32 [n] of a text that the model continues, with the tokens that the tokenizer adds, most often BOS."""
        return self.encode(text)

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat form shows tools."""
        return False

    @property
    def shows_results(self) -> bool:
        """Whether it shows results of tools, turns of the role 'tool', even if it shows no tools."""
        return True  # it writes the content of any turn

    def reads(self, key: str) -> bool:
        """Whether the model's chat form looks at this name, e.g. at a key of a message."""
        return key == 'content'

    @abc.abstractmethod
    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        """Returns int32 [P] of each: the messages in the model's chat form, up to where the answer begins.

        Messages and tools are ordinary text, whatever they spell: only the form itself has special tokens. `tools` are
        for forms that show them: a caller that takes them from outside calls chat_template.require_shown first. Raises
        ConversationError for the first conversation that has no such form, or whose form leaves out the name of a tool.
        """

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """Returns int32 [P] of one conversation; many in one call of `encode_chats` cost little more."""
        return self.encode_chats([messages])[0]

    @abc.abstractmethod
    def extend_chat(self, messages: Messages, tools: Tools = (), *, closed_by: int | None) -> np.ndarray | None:
        """Returns int32 [n] that follow a sampled answer in the model's chat form, up to where the next answer begins.

        The row of a conversation is then prompt + sampled ids + these ids; the sampled ids are never encoded again.

        Args:
          messages: all messages after the answer: results of tools, then at most one message of the user.
          tools: the tools of the prompt.
          closed_by: the last of the sampled ids, one of `end_ids`; None = the answer was cut, and the result begins
            with the close of the turn.

        None if the form cannot continue like that: for other messages, or a form that refuses them, changes earlier
        turns (e.g. removes their reasoning), or closes a turn with another token than `closed_by`. The whole
        conversation must then be encoded anew. Raises TokenizerError for texts that have no ids.
        """

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones spelled out, except for one of `end_ids` at the very end.

        Ids beyond the vocabulary, which a model with more embeddings may sample, have no text.
        """
        return self.token_bytes.decode(self._without_end(tokens))

    def split(self, tokens: np.ndarray) -> list[str]:
        """The text of `decode`, in one piece per token (TokenBytes.split); '' for an end that `decode` leaves out."""
        ids = self._without_end(tokens)
        return self.token_bytes.split(ids) + [''] * (len(tokens) - len(ids))

    def _without_end(self, tokens: np.ndarray) -> list[int]:
        ids = [int(token) for token in tokens]
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids

    @property
    @abc.abstractmethod
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds to a text."""

    @abc.abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Ids that control the model and are left out of a text for readers."""

    @abc.abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, also of special ones; in a byte-level vocabulary a character stands for each byte."""

    def fits(self, vocab_size: int) -> None:
        """Raises TokenizerError when a model with `vocab_size` embeddings lacks some of the ids."""
        if vocab_size < self.vocab_size:
            raise TokenizerError(
                f'the model has {vocab_size} embeddings, the tokenizer {self.vocab_size} ids ({self.source}): '
                'tokens beyond the model would read garbage. Use the tokenizer that belongs to the model'
            )


def chat_messages(question: str, system_prompt: str = '') -> list[dict[str, str]]:
    """One user turn; an empty system prompt leaves the choice to the chat template."""
    system = [{'role': 'system', 'content': system_prompt}] if system_prompt else []
    return [*system, {'role': 'user', 'content': question}]


class CharacterTokenizer(Tokenizer):
    """One id per character, for models that are trained from nothing: id 0 is EOS, `characters[i]` has id i + 1.

    Without an EOS `characters[i]` has id i, and `eos_id` is an id that no model with this vocabulary samples.
    """

    source = 'one id per character'
    eos_text = '<eos>'  # how an EOS inside a text is shown

    def __init__(self, characters: str, has_eos: bool = True):
        if not characters or len(set(characters)) != len(characters):
            raise TokenizerError(f'characters={characters!r} must be at least one, each once')
        self.characters = characters
        self._texts = (self.eos_text, *characters) if has_eos else tuple(characters)
        self.vocab_size = len(self._texts)
        self.eos_id = 0 if has_eos else self.vocab_size
        self.end_ids = (self.eos_id,)
        self._ids = {character: index for index, character in enumerate(characters, start=int(has_eos))}

    def vocabulary(self) -> dict[str, int]:
        """The id of every character."""
        return dict(self._ids)

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [n]; raises TokenizerError for a character without an id."""
        if unknown := sorted({character for character in text if character not in self._ids}):
            raise TokenizerError(f'{show(text)} has characters {show(unknown)} that are not among {self.characters!r}')
        return np.asarray([self._ids[character] for character in text], np.int32)

    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        """Returns int32 [P] of each: the contents one after the other, since such a model has no chat form."""
        found = []
        for index, messages in enumerate(conversations):
            try:
                found.append(self.encode(''.join(str(message['content']) for message in messages)))
            except TokenizerError as error:
                raise ConversationError(index, str(error)) from error
        return found

    def extend_chat(self, messages: Messages, tools: Tools = (), *, closed_by: int | None) -> np.ndarray | None:
        """Returns int32 [n]: the contents one after the other. Nothing closes a turn here."""
        return self.encode_chats([messages])[0] if can_extend(messages) else None

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:  # type: ignore[override]  # made once
        """The bytes of each character; `eos_text` for an EOS that does not end the text."""
        return TokenBytes(lambda token: self._texts[token].encode() if token < len(self._texts) else None)

    def special_token_ids(self) -> frozenset[int]:
        return frozenset({self.eos_id} if self.eos_id < self.vocab_size else ())


# The files of Hugging Face that describe a tokenizer: writes the files of a byte-level BPE, and reads such files.


TOKENIZER, CONFIG, TEMPLATE = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'
GENERATION, MODEL = 'generation_config.json', 'config.json'  # they also name tokens that end an answer
MORE_TEMPLATES, DEFAULT, WITH_TOOLS = 'additional_chat_templates', 'default', 'tool_use'  # a folder, and names in it


def describe_tokenizer(
    bpe: tokenizers.Tokenizer, special_ids: Mapping[str, int], add_bos: bool, add_eos: bool, *, template: object
) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by name.

    Args:
      special_ids: ids by role: 'eos', and 'bos', 'pad' and 'unk' if the model has them. 'pad' and 'unk' are left out if
        they name an ordinary token: transformers makes every named one special, and would cut texts differently.
      add_bos, add_eos: whether transformers puts them around plain text. It never does so around a rendered chat.
      template: the chat template in jinja2, or a list of templates with names; None = the model has none.
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
        **({'chat_template': template} if template else {}),
    }
    described = bpe.to_str(pretty=True)
    return {TOKENIZER: described, CONFIG: json.dumps(config, indent=1, ensure_ascii=False) + '\n'}


def with_ends(bpe: tokenizers.Tokenizer, added: tuple[bool, bool], ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Makes the tokenizer put BOS before plain text and EOS after it, as far as it has them; returns it.

    Args:
      added: whether BOS is put, whether EOS is.
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
    try:
        return files.read_json(path, 'a directory with a tokenizer has it: copy it again')
    except files.FileError as error:
        raise TokenizerError(str(error)) from error


def token_text(value: object, path: pathlib.Path, name: str) -> str:
    """The text of a token, which is given as a text, or as an object that also says how it is matched.

    Raises TokenizerError that names the file and the field.
    """
    text = value.get('content') if isinstance(value, dict) else value
    if not isinstance(text, str) or any('\ud800' <= character <= '\udfff' for character in text):
        raise TokenizerError(f'{path}: {name}={value!r} is no token')
    return text


def add_tokens(tokenizer: tokenizers.Tokenizer, added: object, path: pathlib.Path) -> None:
    """Adds the tokens that tokenizer_config.json has beyond tokenizer.json, by id; raises TokenizerError."""
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
    """Reads eos_token_id from generation_config.json and config.json, if they exist; raises TokenizerError."""
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
    """The chat template of a directory, or the given one in its place; None without both.

    Files override tokenizer_config.json. Of several named templates, the one called default is used, and for
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
    """Reads the template files; by name: (source, file)."""
    paths = {path.stem: path for path in sorted((directory / MORE_TEMPLATES).glob('*.jinja'))}
    if (directory / TEMPLATE).is_file():
        paths[DEFAULT] = directory / TEMPLATE
    return {name: (_read_text(path), path) for name, path in paths.items()}


def _list_templates(value: object, path: pathlib.Path) -> dict[str, tuple[object, pathlib.Path]]:
    """Lists the templates of tokenizer_config.json (one template, a list or an object); by name: (source, file)."""
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
