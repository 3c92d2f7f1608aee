"""Which reader takes the tokens of an answer."""

from __future__ import annotations

import functools
import secrets
from typing import cast

import numpy as np

from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.wire.answer_reader import (
    BEGIN_TOKEN,
    END_TOKEN,
    NOTATIONS,
    AnswerParser,
    AnswerReader,
    AnswerText,
    CallParser,
    CallReader,
    PlainReader,
    WholeReader,
    cut_stop,
)
from areal_jax.rollout.http.wire.exchange import Call
from areal_jax.text.chat_template import TokenizerError

_ID_BYTES = 12  # random, of the id of a call


class AnswerReaders:
    """Those of one model.

    Args:
      parser: of calls in another notation than that of Hermes.
    """

    def __init__(self, texts: Texts, parser: AnswerParser | None = None):
        self._texts, self._parser, self._notation = texts, parser, NOTATIONS['hermes']
        spelled = ((BEGIN_TOKEN, self._notation.begin), (END_TOKEN, self._notation.end))
        self._marks = {token: mark for mark, text in spelled if (token := _find_token(texts, text)) is not None}

    def open(self, call: Call, prompt: int = 0) -> AnswerReader:
        """Of one answer to the prompt with this index, from its beginning; calls are found if the request has tools."""
        sampling = call.sampling[prompt]
        if not call.tools:
            return PlainReader(self._texts.answer(sampling))
        if self._parser is not None:
            before = cast(np.ndarray, call.prompts[prompt])
            return WholeReader(
                functools.partial(self._parser.parse, tools=call.tools, prompt=before),
                functools.partial(
                    cut_stop,
                    keep_stop=sampling.keep_stop,
                    token_bytes=self._texts.token_bytes,
                    encode=self._texts.encode,
                ),
                call.one_tool_call,
                _make_id,
            )
        decoder = self._texts.open(skip_special=sampling.skip_special_tokens, marks=self._marks)
        text = AnswerText(decoder, sampling.stop_strings, sampling.keep_stop)
        parser = CallParser(self._notation, tuple(self._marks.values()))
        return CallReader(text, parser, call.one_tool_call, _make_id)


def _find_token(texts: Texts, text: str) -> int | None:
    """The token that a text is; None where it is several, or characters that the tokenizer does not know."""
    try:
        ids = texts.encode(text)
    except TokenizerError:
        return None
    return int(ids[0]) if len(ids) == 1 else None


def _make_id() -> str:
    return f'call_{secrets.token_hex(_ID_BYTES)}'
