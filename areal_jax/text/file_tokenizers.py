"""Tokenizers that come with a model: BPE of a GGUF file, and the files of a Hugging Face directory."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.text.bpe import build_byte_level, build_scored, naming, require_id, require_tokens
from areal_jax.text.chat_template import (
    ChatTemplate,
    ConversationError,
    Extension,
    GivenTemplate,
    Messages,
    TokenizerError,
    Tools,
    require_names,
    shows_results,
)
from areal_jax.text.decoding import TokenBytes, read_token_bytes
from areal_jax.text.spellings import Spellings
from areal_jax.text.tokenizer import (
    CONFIG,
    DEFAULT,
    TEMPLATE,
    TOKENIZER,
    WITH_TOOLS,
    Tokenizer,
    add_tokens,
    describe_tokenizer,
    read_end_ids,
    read_hf_template,
    read_hf_tokenizer,
    read_object,
    token_text,
    with_ends,
)

if TYPE_CHECKING:
    import tokenizers

_BATCH = 1024  # texts encoded at once: bounds memory
_GGUF_ENDS = ('eot_id', 'eom_id')
# by tokenizer.ggml.model: the fields that it needs, and what builds it of them
GGUF_KINDS = {
    'gpt2': (('tokens', 'token_types', 'eos_id', 'merges', 'pre'), build_byte_level),
    'llama': (('tokens', 'token_types', 'eos_id', 'scores'), build_scored),
}
_HF_SPECIALS = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


class _BpeTokenizer(Tokenizer):
    """Encodes text with a tokenizer of the library tokenizers, and chats with a template."""

    _bpe: tokenizers.Tokenizer
    _template: ChatTemplate | None
    _without_template: str  # the beginning of an error

    @property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        return self._template is not None

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._bpe.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str) -> np.ndarray:
        return self._encode(text, adds=False)

    def encode_prompt(self, text: str) -> np.ndarray:
        return self._encode(text, adds=True)

    def _encode(self, text: str, *, adds: bool) -> np.ndarray:
        with naming(f'{self.source}: {text[:80]!r} cannot be encoded'):
            # a batch, because for a single text the library holds the GIL, for seconds if the text has some MB
            (encoding,) = self._bpe.encode_batch_fast([text], add_special_tokens=adds)
            return np.asarray(encoding.ids, np.int32)

    @property
    def takes_tools(self) -> bool:
        return self._template is not None and self._template.takes_tools

    @functools.cached_property
    def shows_results(self) -> bool:  # type: ignore[override]  # tried out once
        return self._template is not None and shows_results(self._template)

    def reads(self, key: str) -> bool:
        return self._template is not None and key in self._template.names

    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        """Returns int32 [P] of each: the rendered template with the generation prompt; raises ConversationError.

        Text that the template writes may become a special token. Its spelling in the messages or tools stays text.
        """
        if self._template is None:
            raise ConversationError(
                0,
                f'{self._without_template}: its model was not trained to chat, or the file was not copied: name one in '
                'model.chat_template',
            )
        (conversations, tools), mark = self._spellings.mark((conversations, tools), self._template.written)
        texts = self._template.render(conversations, tools)
        if self.takes_tools:
            require_names(texts, conversations, tools)
        found = self._encode_rendered(texts, mark)
        for index, tokens in enumerate(found):
            if not len(tokens):
                raise ConversationError(index, f'its prompt {texts[index][:80]!r} has no token: look at the template')
        return found

    def extend_chat(self, messages: Messages, tools: Tools = (), *, closed_by: int | None) -> np.ndarray | None:
        """Returns int32 [n] that follow a sampled answer, by template difference; see Tokenizer."""
        if self._template is None:
            return None
        (messages, tools), mark = self._spellings.mark((messages, tools), self._template.written)
        text = self._extension.render(messages, tools)
        if text is None:
            return None
        [tokens] = self._encode_rendered([text], mark)
        if closed_by is None:
            return tokens
        return tokens[1:] if tokens[:1] == [closed_by] else None

    @functools.cached_property
    def _extension(self) -> Extension:
        assert self._template is not None
        return Extension(self._template)

    @functools.cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self._bpe, self.special_token_ids(), self.source)

    def _encode_rendered(self, texts: list[str], mark: str) -> list[np.ndarray]:
        """int32 [n] of each text that the template wrote from messages with this mark; '' = without a mark."""
        for index, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f'half of a surrogate pair, {text[error.start]!r}'
                raise ConversationError(index, f'its prompt has {half}: write the whole character') from error
        bpe, texts = self._spellings.separate(texts, mark) if mark else (self._bpe, texts)
        with naming(f'{self.source}: the prompts cannot be encoded'):
            batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
            found = [one for batch in batches for one in bpe.encode_batch_fast(batch, add_special_tokens=False)]
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:  # type: ignore[override]  # made once
        return read_token_bytes(self._bpe)

    def special_token_ids(self) -> frozenset[int]:
        added = self._bpe.get_added_tokens_decoder()
        return frozenset({*self.end_ids, *(token for token, entry in added.items() if entry.special)})


class GgufTokenizer(_BpeTokenizer):
    """BPE and chat template as a GGUF file describes them.

    `fields`: model ('gpt2', byte-level, or 'llama', SentencePiece), tokens (list of str), token_types (list of int),
    eos_id, of 'gpt2' merges (list of 'left right') and pre (name of the pre-tokenizer), of 'llama' scores (list of
    float) and space_prefix, and optionally chat_template (jinja2 source), eot_id and eom_id (end of a turn, and of a
    message to a tool), bos_id, pad_id, unk_id, add_bos and add_eos, as formats.gguf.describe_gguf has them. `template`
    overrides chat_template. Without a template, `encode_chats` raises an error; everything else works.

    Args:
      all_ends: whether eot_id and eom_id end an answer too.
      day: see ChatTemplate.

    Raises TokenizerError for a missing field, an unknown `model` or `pre`, an unknown id, and fields that do not fit
    together.
    """

    def __init__(
        self,
        fields: JsonObject,
        source: str = 'the GGUF file',
        template: GivenTemplate | None = None,
        *,
        all_ends: bool = True,
        day: str = '',
    ):
        if template is not None:
            fields = {**fields, 'chat_template': template.source}
        self.source, self._fields = source, fields
        build = _find_builder(fields, source)
        tokens = require_tokens(fields, source)
        self.vocab_size = len(tokens)
        self.eos_id = require_id('eos_id', fields['eos_id'], tokens, source)
        others = [require_id(name, fields[name], tokens, source) for name in _GGUF_ENDS if fields.get(name) is not None]
        self.end_ids = tuple(dict.fromkeys([self.eos_id, *(others if all_ends else [])]))
        self.special_ids = {'eos': self.eos_id}  # by role, see tokenizer.describe_tokenizer
        for role in ('bos', 'pad', 'unk'):
            if fields.get(f'{role}_id') is not None:
                self.special_ids[role] = require_id(f'{role}_id', fields[f'{role}_id'], tokens, source)
        self._bpe = with_ends(build(fields, source), self._added_roles(), self.special_ids)
        self._without_template = f'{source} has no tokenizer.chat_template'
        self._template = self._read_template(source if template is None else template.place, template is not None, day)

    def _read_template(self, place: str, is_given: bool, day: str) -> ChatTemplate | None:
        if not (source := self._fields.get('chat_template')):
            return None
        text_of = lambda role: self._fields['tokens'][self.special_ids[role]] if role in self.special_ids else ''
        values = {'bos_token': text_of('bos'), 'eos_token': text_of('eos')}
        with_tools = None if is_given else self._fields.get('tool_template')
        return ChatTemplate(
            source, values, place, day=day,
            with_tools=ChatTemplate(with_tools, values, place, day=day) if with_tools else None,
        )  # fmt: skip

    def hf_files(self) -> dict[str, str]:
        """The contents of tokenizer.json and tokenizer_config.json by name; transformers builds the tokenizer of them.

        There add_bos and add_eos of the GGUF file apply to plain text, as in `encode_prompt`.
        """
        template = self._fields.get('chat_template')
        if template and (with_tools := self._fields.get('tool_template')):
            template = [
                {'name': name, 'template': one} for name, one in ((DEFAULT, template), (WITH_TOOLS, with_tools))
            ]
        return describe_tokenizer(self._bpe, self.special_ids, *self._added_roles(), template=template)

    def _added_roles(self) -> tuple[bool, bool]:
        """Whether BOS and EOS are put around plain text."""
        return bool(self._fields.get('add_bos')), bool(self._fields.get('add_eos'))


def _find_builder(fields: JsonObject, source: str) -> Callable[[JsonObject, str], tokenizers.Tokenizer]:
    """What builds the BPE of such a file; raises TokenizerError for another kind and for missing fields."""
    if (kind := fields.get('model')) not in GGUF_KINDS:
        raise TokenizerError(
            f'{source}: tokenizer.ggml.model is {kind!r}; only {" and ".join(GGUF_KINDS)} can be read: take the '
            "model's files of Hugging Face, with model.source=hf"
        )
    required, build = GGUF_KINDS[kind]
    if missing := [name for name in required if fields.get(name) in (None, '', [])]:
        raise TokenizerError(f'{source}: its metadata lacks {missing}; a tokenizer of the kind {kind!r} has them')
    return build


class HfTokenizer(_BpeTokenizer):
    """Tokenizer and chat template of a local Hugging Face checkpoint directory.

    Reads tokenizer.json, tokenizer_config.json (special tokens, tokens added to the vocabulary, chat template) and
    chat_template.jinja, which overrides the template in tokenizer_config.json as it does in transformers. `template`
    overrides both. Of several named templates, the one called default is used, and for conversations with tools the one
    called tool_use. Without a template, `encode_chats` raises an error; everything else works.

    Args:
      all_ends: whether the ids that generation_config.json and config.json name as eos_token_id end an answer too.
      day: see ChatTemplate.

    Raises TokenizerError for a file that is missing or cannot be read, a model without an EOS token, and a token to
    which the two files give different ids.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        template: GivenTemplate | None = None,
        *,
        all_ends: bool = True,
        day: str = '',
    ):
        directory = pathlib.Path(directory)
        self.source = str(directory / TOKENIZER)
        path = directory / CONFIG
        fields = read_object(path)
        self._bpe = read_hf_tokenizer(directory / TOKENIZER)
        add_tokens(self._bpe, fields.get('added_tokens_decoder') or {}, path)
        specials = {name: token_text(fields[name], path, name) for name in _HF_SPECIALS if fields.get(name)}
        if 'eos_token' not in specials:
            raise TokenizerError(f'{path} has no eos_token; name the token that ends an answer')
        eos_id = self._bpe.token_to_id(specials['eos_token'])
        if eos_id is None:
            raise TokenizerError(f'{path}: eos_token={specials["eos_token"]!r} is not in the vocabulary')
        self.eos_id = int(eos_id)
        self.end_ids = tuple(dict.fromkeys([self.eos_id, *(read_end_ids(directory) if all_ends else [])]))
        self.vocab_size = 1 + max(self._bpe.get_vocab(with_added_tokens=True).values())
        self._given = template
        self._without_template = f'{directory} has a chat template neither in {TEMPLATE} nor in {CONFIG}'
        values = {**specials, 'tools': None, 'documents': None}
        self._template = read_hf_template(directory, fields, values, template, day)

    def hf_files(self) -> dict[str, str]:
        """The contents of files that override the directory's, by name: a given chat template."""
        return {} if self._given is None else {TEMPLATE: self._given.source}
