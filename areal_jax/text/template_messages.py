"""Messages of OpenAI's chat as chat templates expect them: a text as content, and arguments of calls as objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from areal_jax.text.chat_template import Messages

Message = Mapping[str, object]


def for_template(messages: Messages) -> list[dict[str, object]]:
    """Templates expect arguments as objects, programs send JSON in a string; what is none stays the string."""
    return [_with_objects(message) for message in messages]


def read_arguments(arguments: object) -> object:
    """The JSON in a text of arguments; what is none stays as it is."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments


def _with_objects(message: Message) -> dict[str, object]:
    calls = message.get('tool_calls')
    own = {**message, 'content': message.get('content') or ''}
    return {**own, 'tool_calls': [_with_object(call) for call in calls]} if isinstance(calls, list) else own


def _with_object(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get('function'), Mapping):
        return call
    return {**call, 'function': {**function, 'arguments': read_arguments(function.get('arguments'))}}
