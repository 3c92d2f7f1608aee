"""Parses the messages of both services. Imports no JetStream, because the body-parsing process reads large ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from areal_jax.rollout.http.server.limits import SMALL_BYTES, BodyBound
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.encoding import parse_json
from areal_jax.rollout.http.wire.exchange import Call, RequestError
from areal_jax.rollout.jetstream.messages import parse_request
from areal_jax.rollout.jetstream.record import SETTINGS, read_settings


def read_request(bound: BodyBound, settings: str | None, message: bytes) -> Call:
    """Parses the call of a DecodeRequest, whose prompt is a text or int32 [n], with the settings in its metadata.

    Raises RequestError; for a prompt that is too long for the context, before it is copied.
    """
    try:
        request = parse_request(message)
    except DecodeError as error:
        raise RequestError('message', f'the message is no DecodeRequest ({error}): send one of JetStream') from error
    if unknown := sorted({field.field_number for field in _list_unknown(request)}):
        raise RequestError('message', f'the message has a field {unknown[0]} that is not served: leave it out')
    if request.max_tokens < 1:
        raise RequestError('max_tokens', f'max_tokens={request.max_tokens} must be 1 or more')
    if request.WhichOneof('content') == 'text_content':
        text = request.text_content.text
        bound.require_text(text, 'text')
        call = _read_settings(settings, [0], request.max_tokens)  # a placeholder until the text is tokenized
        return dataclasses.replace(call, prompts=(text,), prompt_field='text')
    ids = request.token_content.token_ids
    if len(ids) > bound.context_tokens:
        raise RequestError(
            'token_ids',
            f'token_ids of {len(ids)} tokens do not fit the context of {bound.context_tokens} tokens: shorten it',
        )
    return _read_settings(settings, list(ids), request.max_tokens)


def _read_settings(settings: str | None, ids: Sequence[int], max_tokens: int) -> Call:
    call = vllm.parse(read_settings(settings, ids, max_tokens))
    if call.ignored:
        raise RequestError(SETTINGS, f'{SETTINGS}: {call.ignored[0]} has no influence on the answer: leave it out')
    if call.n != 1 or call.alternatives or call.prompt_logprobs is not None or call.model_columns:
        raise RequestError(
            SETTINGS,
            f'{SETTINGS} asks for several answers, alternatives, routed experts or log-probs of the '
            'prompt: JetStream has none, ask for one answer with logprobs=0',
        )
    return call


def _list_unknown(request: Any) -> list[Any]:
    """Lists fields of newer messages, here and inside, which protobuf would keep silently."""
    inside = getattr(request, request.WhichOneof('content') or '', None)
    return [field for one in (request, inside) if one is not None for field in UnknownFieldSet(one)]


def read_control(message: bytes) -> object:
    """Reads the fields of a message of the second service; b'' has no fields.

    Raises RequestError; for a message larger than any of that service, before it is parsed.
    """
    if len(message) > SMALL_BYTES:
        raise RequestError(
            'message',
            f'the message has {len(message)} bytes, and one of this service {SMALL_BYTES} at most: send the '
            'fields that it takes',
        )
    return parse_json(message or b'{}')
