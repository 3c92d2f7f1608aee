"""Parses calls and reasoning in sampled ids, with the package renderers, for the models that it knows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from pydantic import TypeAdapter
from renderers import RendererConfig
from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus, create_renderer

from areal_jax.errors import UserError
from areal_jax.rollout.http.wire.answer_reader import STRICT_JSON, ParsedAnswer, Tools, require_call
from areal_jax.text.tokenizer import Tokenizer

_CONFIGS: TypeAdapter[RendererConfig] = TypeAdapter(RendererConfig)
_OF_MORE = ('auto', 'default', 'custom')  # need more than a name


class RenderersParser:
    """Implements answer_reader.AnswerParser.

    Args:
      name: of a renderer: 'qwen3', 'llama-3'.
      field: the config field with the name, for errors.

    Raises UserError for a renderer that the package lacks, and for a tokenizer without its marks.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, field: str):
        require_renderer(name, field)
        self._tokenizer = tokenizer
        try:
            config = _CONFIGS.validate_python({'name': name})
            self._renderer: Renderer = create_renderer(_Texts(tokenizer), config)
        except Exception as error:  # also from the check that each mark is a token
            raise UserError(f'{field}={name!r} does not fit the tokenizer of the model: {error}') from error

    def parse(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None = None) -> ParsedAnswer:
        """Parses an answer, see answer_reader.AnswerParser. Malformed calls follow the text, without their marks."""
        found = self._read(answer, tools, prompt)
        if found is None:
            return ParsedAnswer(self._tokenizer.decode(answer), unparsed=int(bool(tools)))
        calls, broken = [], []
        for call in found.tool_calls:
            read = _read_call(call) if tools else None
            if read is None:
                broken.append(call.raw)
            else:
                calls.append(read)
        text = '\n'.join(text for text in (found.content, *broken) if text)
        return ParsedAnswer(text, tuple(calls), found.reasoning_content or '', len(broken) if tools else 0)

    def _read(self, answer: np.ndarray, tools: Tools, prompt: np.ndarray | None) -> ParsedResponse | None:
        """Parses with the package; None if the package fails on the answer."""
        shown = [dict(tool) for tool in tools] or None
        before = None if prompt is None else prompt.tolist()
        try:
            return self._renderer.parse_response(answer.tolist(), tools=shown, prompt_ids=before)
        except Exception:  # caused by the model's text: deeply nested JSON, a name that is a list
            return None


def require_renderer(name: str, field: str) -> None:
    """Raises UserError for a renderer that the package lacks."""
    known = [one for one in _CONFIGS.json_schema()['discriminator']['mapping'] if one not in _OF_MORE]
    if name not in known:
        raise UserError(
            f'{field}={name!r} is neither hermes nor a renderer of the package renderers: use hermes or one of '
            f'{", ".join(known)}'
        )


def _read_call(call: ParsedToolCall) -> tuple[str, str] | None:
    """Returns (name, arguments); None for a malformed call."""
    if call.status is not ToolCallParseStatus.OK:
        return None
    try:
        written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
        return require_call(call.name, STRICT_JSON.decode(written), written)
    except (ValueError, RecursionError):
        return None


class _Texts:
    """The tokenizer interface that a renderer needs."""

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
