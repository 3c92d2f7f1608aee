"""Tokenizers: text to tokens for the prompts of the tasks, tokens to text for the verifier."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from areal_jax.errors import show
from areal_jax.text.chat_template import ConversationError, Messages, TokenizerError, Tools, can_extend
from areal_jax.text.decoding import TokenBytes


class Tokenizer(Protocol):
    """Text <-> token ids; `eos_id` ends an answer and is a token like any other."""

    eos_id: int
    end_ids: tuple[int, ...]  # all that end an answer; `eos_id` is the first
    vocab_size: int  # ids are below it

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added. Where the text spells a special token it becomes that token."""
        ...

    def encode_prompt(self, text: str) -> np.ndarray:
        """int32 [n] of a text that the model continues: with what the tokenizer adds around texts, most often BOS."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat form shows tools."""
        ...

    @property
    def shows_results(self) -> bool:
        """Whether it shows results of tools, turns of the role 'tool', also where it shows no tools."""
        ...

    def reads(self, key: str) -> bool:
        """Whether the model's chat form looks at something of this name, as at a key of a message."""
        ...

    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        """int32 [P] of each: the messages in the model's chat form, up to where the answer begins.

        Messages and tools are ordinary text, whatever they spell: the special tokens are those of the form itself.
        `tools` are for forms that show them: who takes them from outside calls shown_tools.require_shown before. Raises
        ConversationError for the first one that has no such form, or whose form leaves out the name of a tool.
        """
        ...

    def extend_chat(self, messages: Messages, tools: Tools = (), *, closed_by: int | None) -> np.ndarray | None:
        """int32 [n] that follow a sampled answer in the model's chat form, up to where the next answer begins.

        The row of a conversation is then prompt + sampled ids + these, and the sampled ids are never encoded again.

        Args:
          messages: all that came after the answer: results of tools, then at most one message of the user.
          tools: those of the prompt.
          closed_by: the last of the sampled ids, one of `end_ids`; None = they were cut, and these begin with what
            closes the turn.

        None where the form does not go on like that: other messages, a form that refuses them, that changes earlier
        turns (e.g. takes out their reasoning), or that closes a turn with another token than `closed_by`. The whole
        conversation must then be encoded anew. Raises TokenizerError for texts that have no ids.
        """
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones spelled out, except for one of `end_ids` at the very end."""
        ...

    @property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text."""
        ...

    def special_token_ids(self) -> frozenset[int]:
        """Ids that control the model and are left out of a text for readers."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special ones among them; in a byte-level one a character stands for each byte."""
        ...

    def fits(self, vocab_size: int) -> None:
        """Raises TokenizerError when a model with `vocab_size` embeddings lacks some of the ids."""
        ...


def chat_messages(question: str, system_prompt: str = '') -> list[dict[str, str]]:
    """One user turn; an empty system prompt leaves the choice to the chat template."""
    system = [{'role': 'system', 'content': system_prompt}] if system_prompt else []
    return [*system, {'role': 'user', 'content': question}]


class SizedTokenizer:
    """What all tokenizers have."""

    eos_id: int
    end_ids: tuple[int, ...]
    vocab_size: int
    source: str  # what describes the vocabulary, for errors

    def fits(self, vocab_size: int) -> None:
        if vocab_size < self.vocab_size:
            raise TokenizerError(
                f'the model has {vocab_size} embeddings, the tokenizer {self.vocab_size} ids ({self.source}): '
                'tokens beyond the model would read garbage. Use the tokenizer that belongs to the model'
            )

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode_prompt(self, text: str) -> np.ndarray:
        """int32 [n] of a text that the model continues."""
        return self.encode(text)

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat form shows tools."""
        return False

    @property
    def shows_results(self) -> bool:
        """Whether it shows results of tools."""
        return True  # it writes the content of any turn

    def reads(self, key: str) -> bool:
        """Whether the model's chat form looks at something of this name."""
        return key == 'content'

    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        raise NotImplementedError

    def encode_chat(self, messages: Messages) -> np.ndarray:
        """int32 [P]: one conversation; many together cost little more."""
        return self.encode_chats([messages])[0]

    def _without_end(self, tokens: np.ndarray) -> list[int]:
        ids = [int(token) for token in tokens]
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids


class CharacterTokenizer(SizedTokenizer):
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
        """int32 [n]; raises TokenizerError for a character without an id."""
        if unknown := sorted({character for character in text if character not in self._ids}):
            raise TokenizerError(f'{show(text)} has characters {show(unknown)} that are not among {self.characters!r}')
        return np.asarray([self._ids[character] for character in text], np.int32)

    def encode_chats(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[np.ndarray]:
        """int32 [P] of each: the contents one after the other, since such a model has no chat form."""
        found = []
        for index, messages in enumerate(conversations):
            try:
                found.append(self.encode(''.join(str(message['content']) for message in messages)))
            except TokenizerError as error:
                raise ConversationError(index, str(error)) from error
        return found

    def extend_chat(self, messages: Messages, tools: Tools = (), *, closed_by: int | None) -> np.ndarray | None:
        """int32 [n]: the contents one after the other. Nothing closes a turn here."""
        return self.encode_chats([messages])[0] if can_extend(messages) else None

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, `eos_text` for an EOS that is not the last token."""
        return self.token_bytes.decode(self._without_end(tokens))

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text."""
        return TokenBytes(lambda token: self._texts[token].encode() if token < len(self._texts) else None)

    def special_token_ids(self) -> frozenset[int]:
        return frozenset({self.eos_id} if self.eos_id < self.vocab_size else ())
