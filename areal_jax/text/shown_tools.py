"""Tools are shown to the model or refused: one check, for every door through which a conversation becomes a prompt.

The doors are the routes of areal-serve and of the gateway, agents, environments and data of supervised training
(tests/text/test_shown_tools.py lists them). A template that has no place for tools leaves them out without a word, and
the model would be trained or asked without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from areal_jax.errors import show
from areal_jax.text.chat_template import ChatTemplate, ConversationError, Messages, Tools

REMEDY = "name one that shows them in model.chat_template, 'package:configs/templates/hermes.jinja' for ChatML models"
_RESULT = {
    'role': 'tool',
    'content': 'zq7zq',
    'name': 'z',
    'tool_call_id': 'zzzzzzzzz',
}  # Mistral's have nine characters
NO_PLACE = f'is not shown to the model: the chat template of this model has no place for tools; {REMEDY}'
_LEFT_OUT = f'is not shown to the model: the chat template of this model leaves its name out here; {REMEDY}'


class ToolsNotShownError(ConversationError):
    """Something of the first of several conversations that the chat form does not show to the model.

    `field` names it as requests do, 'tools' or 'messages[1].tool_calls', `value` is what it holds.
    """

    def __init__(self, index: int, field: str, value: object, reason: str):
        super().__init__(index, f'{field}={show(value)} {reason}')
        self.field, self.value, self.reason = field, value, reason


class ChatForm(Protocol):
    """What the check asks of a tokenizer."""

    @property
    def takes_tools(self) -> bool: ...

    @property
    def shows_results(self) -> bool: ...


def require_shown(form: ChatForm, conversations: Sequence[Messages], tools: Tools) -> None:
    """Raises ToolsNotShownError for tools, calls, and results of tools that the chat form of a model does not show."""
    if form.takes_tools:
        return  # a prompt that lacks a name all the same is refused by `require_names`
    has_results = any(message.get('role') == _RESULT['role'] for messages in conversations for message in messages)
    require_place(conversations, tools, shows_results=has_results and form.shows_results)


def require_place(conversations: Sequence[Messages], tools: Tools, *, shows_results: bool = False) -> None:
    """The same for a chat form that is known to have no place for tools; with `shows_results` for their results."""
    if tools and conversations:
        raise ToolsNotShownError(0, 'tools', list(tools), NO_PLACE)
    for index, messages in enumerate(conversations):
        for number, message in enumerate(messages):
            if calls := message.get('tool_calls'):
                raise ToolsNotShownError(index, f'messages[{number}].tool_calls', calls, NO_PLACE)
            if message.get('role') == _RESULT['role'] and not shows_results:
                raise ToolsNotShownError(index, f'messages[{number}].role', message['role'], NO_PLACE)


def shows_results(template: ChatTemplate) -> bool:
    """Whether a template writes the content of a turn of the role 'tool': it is tried out."""
    asked: list[Mapping[str, object]] = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}]
    try:
        [text] = template.render([[*asked, _RESULT]])
    except ConversationError:
        return False
    return str(_RESULT['content']) in text


def require_names(texts: Sequence[str], conversations: Sequence[Messages], tools: Tools) -> None:
    """For a chat form with tools: raises ToolsNotShownError where a prompt lacks the name of a tool or of a call.

    So a template that reads the tools and shows them under a condition alone, as to the first user, is found out.
    """
    for index, (text, messages) in enumerate(zip(texts, conversations, strict=True)):
        for field, value, name in _list_names(messages, tools):
            if not any(spelled in text for spelled in (name, json.dumps(name)[1:-1])):
                raise ToolsNotShownError(index, field, value, _LEFT_OUT)


def _list_names(messages: Messages, tools: Tools) -> Iterator[tuple[str, object, str]]:
    """(field, what it holds, name of the function) of each tool and each call that has a name."""
    for number, tool in enumerate(tools):
        if name := _name(tool):
            yield f'tools[{number}]', tool, name
    for place, message in enumerate(messages):
        calls = message.get('tool_calls')
        for number, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
            if name := _name(call):
                yield f'messages[{place}].tool_calls[{number}]', call, name


def _name(tool: object) -> str:
    """Of a tool or a call in the form of OpenAI's chat, or of a bare function; '' = none."""
    function: object = tool.get('function', tool) if isinstance(tool, Mapping) else None
    name = function.get('name') if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ''


def describe_untold(fields: Mapping[str, Sequence[str]]) -> str:
    """The sentence that refuses a run before it begins: its config names tools that no prompt would show.

    Args:
      fields: those of the config that are set, with their values; '' where none is.
    """
    return next((f'{field}={tuple(values)!r} {NO_PLACE}' for field, values in fields.items() if values), '')
