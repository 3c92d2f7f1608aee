"""Conversations of lines that a user wrote: their turns, what else messages hold, and the tokens of their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import OF_MESSAGES, LineKeys, refuse, require_text, says_something
from areal_jax.text.chat_template import ConversationError, Messages, Tools, for_template, require_shown
from areal_jax.text.tokenizer import Tokenizer

_TURN = ('role', 'content', 'tool_calls', 'tool_call_id', 'name')  # of a message for a chat template
_COUNTS = ('weight', 'train', 'training', 'loss')  # whether a turn is trained


def read_tools(row: JsonObject, place: str) -> list[JsonObject]:
    """The tools of a line; raises TaskError for what is no list of definitions."""
    tools = row.get('tools') or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and 'function' in tool for tool in tools):
        raise TaskError(f"{place}: tools must be a list of objects {{'type': 'function', 'function': ...}}")
    return tools


def require_conversation(messages: object, source: str, name: str = 'messages') -> list[JsonObject]:
    """The turns, whose last one is the answer; raises TaskError for what is no list of turns that ends in one."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TaskError(f'{source}: {name} must be a list of objects with role and content')
    turns = [_with_content(message) for message in messages]
    for index, message in enumerate(turns):
        if missing := [key for key in ('role', 'content') if not isinstance(message.get(key), str)]:
            raise TaskError(
                f'{source}: {name}[{index}] needs {" and ".join(missing)}, each a text; it has {sorted(message)[:8]}'
            )
    roles = [message['role'] for message in turns]
    if 'user' not in roles[:-1] or roles[-1] != 'assistant':
        raise TaskError(
            f'{source}: {name} has turns of the roles {roles[:8]}; they must end with assistant, after a user'
        )
    needed = {roles.index('user'), len(roles) - 1}
    for index, message in enumerate(turns):
        require_text(message['content'], f'{name}[{index}].content', source, may_be_blank=index not in needed)
    return turns


def take_keys(
    turns: Sequence[JsonObject], source: str, keys: LineKeys, tokenizer: Tokenizer, name: str = 'messages'
) -> list[JsonObject]:
    """The turns with what the chat template reads of them; `keys` counts what nothing reads.

    Raises TaskError for a key of the published list that is not used: in the answer, of which the content alone is
    trained, and in a turn before it, where the template does not read it.
    """
    found = []
    for number, turn in enumerate(turns):
        is_answer = number == len(turns) - 1
        kept: JsonObject = {}
        for key, value in turn.items():
            place = f'{name}[{number}].{key}'
            if key in _COUNTS and says_something(key, value):
                if value not in ((1, True) if is_answer else (0, False)):
                    raise refuse(place, value, source, OF_MESSAGES[key])
            elif key in ('role', 'content') or (not is_answer and _reads(tokenizer, key)):
                kept[key] = value
            elif says_something(key, value) and not (key == 'name' and turn['role'] == 'tool'):
                raise refuse(place, value, source, OF_MESSAGES[key])
            elif key not in OF_MESSAGES and key not in _TURN:
                keys.note(f'{name}.{key}')
        found.append(kept)
    for number, turn in enumerate(found[:-1]):
        if turn['role'] != 'tool' and turn.get('name') and not _shows_name(found[:-1], number, tokenizer):
            raise refuse(f'{name}[{number}].name', turn['name'], source, OF_MESSAGES['name'])
    return found


def encode_prompts(
    tokenizer: Tokenizer, conversations: Sequence[Messages], sources: Sequence[str], tools: Sequence[Tools] = ()
) -> list[np.ndarray]:
    """int32 [P] of each conversation; raises TaskError that names the source of one that no template renders.

    Args:
      tools: of each conversation; () = there are none.
    """
    places: dict[str, list[int]] = {}  # conversations by their tools: those with equal ones are encoded together
    for index in range(len(conversations)):
        places.setdefault(json.dumps(tools[index]) if tools else '[]', []).append(index)
    found: dict[int, np.ndarray] = {}
    for shown, indices in places.items():
        alike, listed = [for_template(conversations[index]) for index in indices], json.loads(shown)
        try:
            require_shown(tokenizer, alike, listed)
            prompts = tokenizer.encode_chats(alike, listed)
        except ConversationError as error:
            raise TaskError(f'{sources[indices[error.index]]}: {error}') from error
        found.update(zip(indices, prompts, strict=True))
    return [found[index] for index in range(len(conversations))]


def _with_content(message: JsonObject) -> JsonObject:
    """A turn of calls alone has no content, which is an empty one."""
    return {**message, 'content': ''} if message.get('content') is None and message.get('tool_calls') else message


def _reads(tokenizer: Tokenizer, key: str) -> bool:
    """Whether a turn before the answer may have the key; calls are refused later if they are not shown."""
    return key in ('tool_calls', 'tool_call_id') or tokenizer.reads(key)


def _shows_name(turns: Sequence[JsonObject], number: int, tokenizer: Tokenizer) -> bool:
    """Whether the prompt is another one without the name: templates read the names of tools too."""
    without = [dict(turn) for turn in turns]
    del without[number]['name']
    try:
        first, second = tokenizer.encode_chats([for_template(turns), for_template(without)])
    except ConversationError:
        return True  # the template says why when the prompt is made
    return not np.array_equal(first, second)
