"""Tools in OpenAI's chat: functions that a chat template shows to the model, and calls and results in the turns.

What the model writes is its own notation of a call, which differs by model: it stays text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Message
from areal_jax.rollout.http.wire.request_fields import Fields, refuse

_MOST_TOOLS = 1024  # of a request, and calls in one turn


def read_tools(fields: Fields) -> tuple[JsonObject, ...]:
    """The functions that the model may call, as they were sent; () where tool_choice='none'."""
    choice = fields.take_choice('tool_choice', ('auto', 'none'))
    fields.take_ignored('parallel_tool_calls')
    given = fields.take('tools')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise fields.refuse('tools', given, 'must be a list of functions')
    fields.require_few('tools', given, _MOST_TOOLS)
    for index, entry in enumerate(given):
        _require_function(Fields(entry, f'tools[{index}]'))
    return () if choice == 'none' else tuple(given)


def read_calls(message: Fields) -> tuple[JsonObject, ...]:
    """The calls in a turn of the assistant. Their arguments come as JSON in a string, and templates expect objects."""
    given = message.take('tool_calls')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise message.refuse('tool_calls', given, 'must be a list of calls')
    message.require_few('tool_calls', given, _MOST_TOOLS)
    return tuple(_read_call(Fields(entry, message.name(f'tool_calls[{i}]'))) for i, entry in enumerate(given))


def require_shown(messages: Sequence[Message], tools: Sequence[JsonObject]) -> None:
    """Raises RequestError where the request has tools, for a chat template that does not show them."""
    reason = 'is not served: the chat template of this model has no place for tools; write them into a message as text'
    if tools:
        raise refuse('tools', list(tools), reason)
    for index, message in enumerate(messages):
        if message.tool_calls:
            raise refuse(f'messages[{index}].tool_calls', list(message.tool_calls), reason)
        if message.role == 'tool':
            raise refuse(f'messages[{index}].role', message.role, reason)


def _require_function(fields: Fields) -> None:
    fields.take_choice('type', ('function',))
    function = fields.take_fields('function')
    _take_name(function)
    function.take_text('description', longest=None)
    function.take_fields('parameters')  # a JSON schema, which is the model's to read
    function.take_flag('strict')
    function.finish()
    fields.finish()


def _read_call(fields: Fields) -> JsonObject:
    fields.take_choice('type', ('function',))
    request_id, function = fields.take_text('id'), fields.take_fields('function')
    name, arguments = _take_name(function), _take_arguments(function)
    function.finish()
    fields.take_ignored('index')
    fields.finish()
    return {'id': request_id, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def _take_name(function: Fields) -> str:
    name = function.take_text('name')
    if not name:
        raise function.refuse('name', name, 'is missing: name the function')
    return name


def _take_arguments(function: Fields) -> JsonObject:
    given = value = function.take('arguments')
    if isinstance(given, str):
        try:
            value = json.loads(given or '{}')
        except (ValueError, RecursionError):
            value = given
    if not isinstance(value, dict):
        raise function.refuse('arguments', given, 'must be a JSON object in a string')
    return value
