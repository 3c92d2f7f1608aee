"""Which reader takes the tokens of an answer."""

from __future__ import annotations

import functools
import secrets

from areal_jax.rollout.http.server.texts import Texts
from areal_jax.rollout.http.wire.answer_reader import AnswerReader, CallReader, PlainReader, mark_tokens
from areal_jax.rollout.http.wire.exchange import Call, CallSampling
from areal_jax.rollout.http.wire.notation import BEGIN_TOKEN, END_TOKEN, NOTATIONS, CallParser
from areal_jax.rollout.http.wire.text import AnswerText
from areal_jax.text.chat_template import TokenizerError

_ID_BYTES = 12  # random, of the id of a call


class AnswerReaders:
    """Those of one model.

    Args:
      notation: in which it writes calls, a name of NOTATIONS.
    """

    def __init__(self, texts: Texts, notation: str = 'hermes'):
        self._texts, self._notation = texts, NOTATIONS[notation]
        spelled = ((BEGIN_TOKEN, self._notation.begin), (END_TOKEN, self._notation.end))
        self._marks = {token: mark for mark, text in spelled if (token := _find_token(texts, text)) is not None}

    def open(self, call: Call, sampling: CallSampling) -> AnswerReader:
        """Of one answer, from its beginning; calls are found where the request has tools."""
        if not call.tools:
            return PlainReader(self._texts.answer(sampling))
        decode = functools.partial(self._texts.decode, skip_special=sampling.skip_special_tokens)
        text = AnswerText(mark_tokens(decode, self._marks), sampling.stop_strings, sampling.keep_stop)
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
