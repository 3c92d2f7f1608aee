"""The tokenizer of the served model, as routes need it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.body_values import BodyBound
from areal_jax.rollout.http.wire.exchange import CallSampling, Message
from areal_jax.rollout.http.wire.request_fields import refuse
from areal_jax.rollout.http.wire.text import AnswerText
from areal_jax.text.shown_tools import ToolsNotShownError, require_place
from areal_jax.text.tokenizer import Tokenizer


class Texts:
    """One model's; used on the HTTP thread and its workers."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_ids = (tokenizer.eos_id,)
        self._hidden = tokenizer.special_token_ids()
        self.reads = tokenizer.reads  # whether the chat template looks at something of this name

    def bound(self, context_tokens: int) -> BodyBound:
        """Of bodies of requests to this model."""
        return BodyBound.of(context_tokens, self._tokenizer.vocabulary())

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] of a plain prompt, as of /v1/completions and /tokenize: what spells a special token becomes it."""
        return self._tokenizer.encode(text)

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
        """Of int32 [n]."""
        if skip_special:
            tokens = np.array([token for token in tokens.tolist() if token not in self._hidden], np.int32)
        return self._tokenizer.decode(tokens) if len(tokens) else ''

    def spell(self, tokens: np.ndarray, *, skip_special: bool = False) -> str:
        """The whole text of int32 [n], an EOS at its end included."""
        last = [self.eos_ids[0]] if len(tokens) and self.eos_ids[0] in self._hidden else []  # it would be left out
        return self.decode(
            tokens if skip_special else np.append(tokens, last).astype(np.int32), skip_special=skip_special
        )

    def special_tokens(self) -> dict[str, str | None]:
        """The text of the token that ends an answer; None for a model without."""
        eos = self.eos_ids[0]
        return {'eos_token': self.spell(np.array([eos], np.int32)) if eos in self._hidden else None}

    def answer(self, sampling: CallSampling) -> AnswerText:
        """Of one answer, from its beginning."""
        decode = functools.partial(self.decode, skip_special=sampling.skip_special_tokens)
        return AnswerText(decode, sampling.stop_strings, sampling.keep_stop)

    def token_text(self, token: int) -> str:
        return self._tokenizer.decode(np.asarray([token], np.int32))
