"""Calls and reasoning in sampled ids, as the package renderers reads them for the models that it knows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig
from renderers.base import ParsedToolCall, Renderer, ToolCallParseStatus, create_renderer

from areal_jax.agents.conversation import Message, Tools
from areal_jax.agents.tokenizer_format import describe_message
from areal_jax.errors import UserError
from areal_jax.text.tokenizer import Tokenizer

FIELD = 'agent.notation'


class RenderersParser:
    """Implements tokenizer_format.AnswerParser.

    Args:
      name: of a renderer: 'qwen3', 'llama-3'.

    Raises UserError for a renderer that the package has not got, and for a tokenizer without its marks.
    """

    def __init__(self, tokenizer: Tokenizer, name: str):
        try:
            config = TypeAdapter(RendererConfig).validate_python({'name': name})
        except ValidationError as error:
            raise UserError(f'{FIELD}={name!r} is neither hermes nor a renderer of the package renderers') from error
        try:
            self._renderer: Renderer = create_renderer(_Texts(tokenizer), config)
        except Exception as error:  # also of a check that a mark is a token
            raise UserError(f'{FIELD}={name!r} does not fit the tokenizer of the model: {error}') from error

    def parse(self, answer: np.ndarray, tools: Tools, prefix: str) -> tuple[Message, int]:
        """See dialogue.ChatFormat. A broken call stays text, behind the content."""
        shown = [dict(tool) for tool in tools] or None
        found = self._renderer.parse_response(answer.tolist(), tools=shown)
        calls = [call for call in found.tool_calls if call.status is ToolCallParseStatus.OK and tools]
        broken = [call.raw for call in found.tool_calls if call not in calls]
        content = '\n'.join(text for text in (found.content, *broken) if text)
        message = describe_message(content, [(str(call.name), _write_arguments(call)) for call in calls], prefix)
        if found.reasoning_content:
            message['reasoning_content'] = found.reasoning_content
        return message, len(broken) if tools else 0


def _write_arguments(call: ParsedToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)


class _Texts:
    """What a renderer asks of a tokenizer."""

    name_or_path = ''
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return self._tokenizer.encode(text).tolist()

    def decode(self, ids: Sequence[int], *_: object, **__: object) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int32))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        ids = self._tokenizer.encode(token)
        return int(ids[0]) if len(ids) == 1 else None
