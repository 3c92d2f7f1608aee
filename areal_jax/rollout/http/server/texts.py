"""The tokenizer of the served model, as routes need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.body_values import BodyBound
from areal_jax.rollout.http.wire.answer_reader import AnswerText
from areal_jax.rollout.http.wire.exchange import CallSampling, Message
from areal_jax.rollout.http.wire.request_fields import refuse
from areal_jax.text.chat_template import ToolsNotShownError, require_place
from areal_jax.text.decoding import TextDecoder
from areal_jax.text.tokenizer import Tokenizer


class Texts:
    """One model's; used on the HTTP thread and its workers."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.token_bytes = tokenizer, tokenizer.token_bytes
        self.end_ids = tokenizer.end_ids
        self._hidden = tokenizer.special_token_ids()
        self.reads = tokenizer.reads  # whether the chat template looks at something of this name

    def bound(self, context_tokens: int) -> BodyBound:
        """Of bodies of requests to this model."""
        return BodyBound.of(context_tokens, self._tokenizer.vocabulary())

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added: what spells a special token becomes it."""
        return self._tokenizer.encode(text)

    def encode_prompt(self, text: str, *, adds_special: bool) -> np.ndarray:
        """The same of a plain prompt, as of /v1/completions and /tokenize.

        Args:
          adds_special: with what the tokenizer adds around texts, most often BOS.
        """
        return self._tokenizer.encode_prompt(text) if adds_special else self._tokenizer.encode(text)

    def apply_template(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> np.ndarray:
        """int32 [P]: special tokens where the template writes them, ordinary text where messages or tools spell them.

        Calls take turns, since one process renders all of them. The first one starts it.
        Raises RequestError for tools that the template of the model does not show.
        """
        conversations = [[message.describe() for message in messages]]
        try:
            if not self._tokenizer.takes_tools:
                require_place(conversations, tools)  # also where the form writes the content of any turn
            return self._tokenizer.encode_chats(conversations, tools)[0]
        except ToolsNotShownError as error:
            raise refuse(error.field, error.value, error.reason) from error

    def decode(self, tokens: np.ndarray, *, skip_special: bool) -> str:
        """Of int32 [n]; special tokens are spelled out, except for the end of an answer at the very end."""
        return self.open(skip_special=skip_special).extend(tokens, is_last=True)

    def open(self, *, skip_special: bool, marks: Mapping[int, str] | None = None) -> TextDecoder:
        """`decode` for a text whose tokens come in pieces; `marks`: see TextDecoder."""
        hidden = self._hidden if skip_special else ()
        return TextDecoder(self.token_bytes, hidden, self.end_ids, marks)

    def spell(self, tokens: np.ndarray, *, skip_special: bool = False) -> str:
        """The whole text of int32 [n], an EOS at its end included."""
        return TextDecoder(self.token_bytes, self._hidden if skip_special else ()).extend(tokens, is_last=True)

    def special_tokens(self) -> dict[str, str | None]:
        """The text of the token that ends an answer; None for a model without."""
        eos = self.end_ids[0]
        return {'eos_token': self.spell(np.array([eos], np.int32)) if eos in self._hidden else None}

    def answer(self, sampling: CallSampling) -> AnswerText:
        """Of one answer, from its beginning."""
        decoder = self.open(skip_special=sampling.skip_special_tokens)
        return AnswerText(decoder, sampling.stop_strings, sampling.keep_stop)

    def token_text(self, token: int) -> str:
        """The text of a token behind others; none of one that ends an answer."""
        return '' if token in self.end_ids else self.token_bytes.text_of(token)
