"""Tools in OpenAI's chat: functions that a chat template shows to the model, and calls and results in the turns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Wish
from areal_jax.rollout.http.wire.openai import call_wish
from areal_jax.rollout.http.wire.request_fields import MOST_LEVELS, Fields, count_levels

_MOST_TOOLS = 1024  # of a request, and calls in one turn
# of a tool: what other servers do with it
_IGNORED = ('title', 'strict', 'cache_control', 'annotations', 'defer_loading', 'allowed_callers', 'input_examples')


@dataclasses.dataclass(frozen=True)
class AskedTools:
    """What a request says of tools."""

    tools: tuple[JsonObject, ...] = ()  # that the model sees
    one_tool_call: bool = False
    wishes: tuple[Wish, ...] = ()


def read_tools(fields: Fields) -> AskedTools:
    """The functions that the model may call, without the fields that are ignored; none with tool_choice='none'."""
    only_one = not fields.take_flag('parallel_tool_calls', True)
    tools = tuple(_read_tool(entry) for entry in list_tools(fields))
    given = fields.take('tool_choice')
    word, name = _read_choice(fields, given)
    return choose(fields, given, word, name, tools, only_one)


def list_tools(fields: Fields) -> list[Fields]:
    """The entries of `tools`, [] where it is absent."""
    given = fields.take('tools')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise fields.refuse('tools', given, 'must be a list of functions')
    fields.require_few('tools', given, _MOST_TOOLS)
    return [fields.inside(entry, f'tools[{index}]') for index, entry in enumerate(given)]


def read_function(function: Fields, parameters: str = 'parameters') -> JsonObject:
    """A function as templates show it: name, description and JSON schema, in the order in which they were sent."""
    order = [name for name in function.names() if name in ('name', 'description', parameters)]
    function.take_ignored(*_IGNORED)
    schema = function.peek(parameters)
    function.require_shallow(parameters, schema)
    values = {'name': take_name(function), 'description': function.take_text('description', longest=None)}
    function.take_fields(parameters)  # a JSON schema, which is the model's to read
    function.finish()
    return {'parameters' if name == parameters else name: values.get(name, schema) for name in order}


def choose(
    fields: Fields, given: object, word: str, name: str, tools: tuple[JsonObject, ...], only_one: bool
) -> AskedTools:
    """The tools under `tool_choice`, which is `given`: `word` is auto, none or required, `name` that of one tool."""
    if word == 'none':
        return AskedTools()
    if word == 'auto':
        return AskedTools(tools, only_one)
    if not tools:
        raise fields.refuse('tool_choice', given, 'needs tools: send some, or leave it out')
    if name and all(tool['function']['name'] != name for tool in tools):
        raise fields.refuse('tool_choice', given, 'names no tool of the request')
    return AskedTools(tools, only_one, (call_wish(fields.name('tool_choice'), given, name),))


def read_calls(message: Fields) -> tuple[JsonObject, ...]:
    """The calls in a turn of the assistant."""
    given = message.take('tool_calls')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise message.refuse('tool_calls', given, 'must be a list of calls')
    message.require_few('tool_calls', given, _MOST_TOOLS)
    return tuple(_read_call(message.inside(entry, f'tool_calls[{i}]')) for i, entry in enumerate(given))


def describe_call(call_id: str, name: str, arguments: JsonObject | str) -> JsonObject:
    """A call as chat templates have it."""
    return {'id': call_id, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def take_name(function: Fields) -> str:
    name = function.take_text('name')
    if not name:
        raise function.refuse('name', name, 'is missing: name the function')
    return name


def take_arguments(function: Fields) -> JsonObject | str:
    """The object that templates expect, from JSON in a string; the string itself where it holds no such JSON."""
    given = function.take('arguments')
    if isinstance(given, str):
        function.require_characters('arguments', given)
        try:
            value = json.loads(given or '{}')
        except (ValueError, RecursionError):
            return given
        return value if isinstance(value, dict) and count_levels(value) <= MOST_LEVELS else given
    if not isinstance(given, dict):
        raise function.refuse('arguments', given, 'must be a string, with a JSON object in it')
    function.require_shallow('arguments', given)
    return given


def _read_tool(fields: Fields) -> JsonObject:
    fields.take_choice('type', ('function',))
    fields.take_ignored(*_IGNORED)
    function = read_function(fields.take_fields('function'))
    fields.finish()
    return {'type': 'function', 'function': function}


def _read_choice(fields: Fields, given: object) -> tuple[str, str]:
    """('auto', 'none' or 'required', name of a function)."""
    if given is None or given in ('auto', 'none', 'required'):
        return str(given or 'auto'), ''
    if not isinstance(given, Mapping):
        raise fields.refuse('tool_choice', given, "must be 'auto', 'none', 'required' or a function")
    inside = fields.inside(given, 'tool_choice')
    inside.take_choice('type', ('function',))
    name = take_name(inside.take_fields('function'))
    inside.finish()
    return 'required', name


def _read_call(fields: Fields) -> JsonObject:
    fields.take_choice('type', ('function',))
    call_id, function = fields.take_text('id'), fields.take_fields('function')
    name, arguments = take_name(function), take_arguments(function)
    function.take_ignored('parsed_arguments')  # of the helpers of openai
    function.finish()
    fields.take_ignored('index', 'cache_control', 'extra_content', 'provider_specific_fields')
    fields.finish()
    return describe_call(call_id, name, arguments)
