"""The chat form of a tokenizer as agents use it: prompts, what follows a sampled turn, and calls in sampled ids."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from areal_jax.agents.dialogue import Message, Messages, Tools
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.answer_reader import (
    BEGIN_TOKEN,
    END_TOKEN,
    AnswerParser,
    CallParser,
    FoundCall,
    Notation,
    ParsedAnswer,
)
from areal_jax.text.chat_template import for_template, require_shown
from areal_jax.text.decoding import TextDecoder
from areal_jax.text.tokenizer import Tokenizer


class TokenizerFormat:
    """Implements dialogue.ChatFormat."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser):
        self._tokenizer, self._parser = tokenizer, parser

    def render(self, messages: Messages, tools: Tools) -> np.ndarray:
        """See conversation.Renderer; raises ConversationError for what the template refuses, or does not show."""
        conversations, listed = [for_template(messages)], [dict(tool) for tool in tools]
        require_shown(self._tokenizer, conversations, listed)
        return self._tokenizer.encode_chats(conversations, listed)[0]

    def extend(self, messages: Messages, tools: Tools, *, closed_by: int | None) -> np.ndarray | None:
        """See conversation.Renderer; raises ConversationError as `render` does."""
        following, listed = for_template(messages), [dict(tool) for tool in tools]
        require_shown(self._tokenizer, [following], listed)
        return self._tokenizer.extend_chat(following, listed, closed_by=closed_by)

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        """See dialogue.ChatFormat."""
        found = self._parser.parse(answer, tools)
        return _describe_message(found, prefix), found.unparsed

    def closes(self, token: int) -> bool:
        return token in self._tokenizer.end_ids


class NotationParser:
    """Implements AnswerParser for calls between two marks.

    Args:
      notation: of calls, which the template shows to the model.
    """

    def __init__(self, tokenizer: Tokenizer, notation: Notation):
        self._tokenizer, self._notation = tokenizer, notation
        spelled = ((notation.begin, BEGIN_TOKEN), (notation.end, END_TOKEN))
        self._marks = {ids[0]: mark for text, mark in spelled if len(ids := self._encode(text)) == 1}

    def parse(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None = None) -> ParsedAnswer:
        """See answer_reader.AnswerParser. The prompt is not read."""
        decoder = TextDecoder(self._tokenizer.token_bytes, ends=self._tokenizer.end_ids, marks=self._marks)
        text = decoder.extend(answer, is_last=True)
        parser = CallParser(self._notation, tuple(self._marks.values()))
        parts = parser.extend(text, is_last=True) if tools else [text]
        content = ''.join(part for part in parts if isinstance(part, str))
        calls = tuple((part.name, part.arguments) for part in parts if isinstance(part, FoundCall))
        return ParsedAnswer(content, calls, unparsed=parser.unparsed)

    def _encode(self, text: str) -> Sequence[int]:
        """Ids of a mark; none where the tokenizer cannot write it."""
        with contextlib.suppress(ValueError):
            return [int(token) for token in self._tokenizer.encode(text)]
        return ()


def _describe_message(found: ParsedAnswer, prefix: str) -> JsonObject:
    """The message of the assistant, as OpenAI's chat has it; the ids of its calls begin with `prefix`."""
    message: JsonObject = {'role': 'assistant', 'content': found.text or None}
    if found.reasoning:
        message['reasoning_content'] = found.reasoning
    if found.calls:
        message['tool_calls'] = [
            {'id': f'{prefix}_{number}', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
            for number, (name, arguments) in enumerate(found.calls)
        ]
    return message
