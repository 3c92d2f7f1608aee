"""What a request demands of an answer and sampling cannot promise: a call of a tool, or JSON.

Forcing it would cut the distribution that is sampled. A server refuses such a request, or tells the model in the prompt
and counts the answers that miss it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Wish
from areal_jax.rollout.http.wire.request_fields import Fields, refuse

Required = Literal['refuse', 'wish']  # server.required
_TAKEN = "server.required='wish' takes it as a wish"


def call_wish(field: str, value: object, tool: str = '') -> Wish:
    """Of a call: of the tool of this name, or of any."""
    sentence = f'Answer with a call of the tool {tool}.' if tool else 'Answer with a call of one of the tools.'
    return Wish(field, value, 'call', sentence, f"must be 'auto' or 'none': a call can not be forced; {_TAKEN}", tool)


def json_wish(field: str, value: object, schema: JsonObject | None) -> Wish:
    """Of a JSON object as the whole answer; the schema is shown to the model and not checked."""
    fits = '' if schema is None else f' that fits this JSON schema: {json.dumps(schema, ensure_ascii=False)}'
    sentence = f'Answer with a JSON object alone{fits or "."}'
    return Wish(field, value, 'json', sentence, f'is not served: answers are plain text; {_TAKEN}')


def read_format(fields: Fields, field: str, nested: bool = False) -> tuple[Wish, ...]:
    """Takes the format of the answer: () for plain text.

    Args:
      nested: name, schema and strict of json_schema are in an object of that name.
    """
    given = fields.take(field)
    if given is None:
        return ()
    inside = fields.inside(given, field)
    kind = inside.take_choice('type', ('text', 'json_object', 'json_schema'))
    schema = None
    if kind == 'json_schema':
        inner = inside.take_fields('json_schema') if nested else inside
        inner.take_ignored('name', 'description', 'strict')
        found = inner.take('schema', type='object')
        if found is not None and not isinstance(found, dict):
            raise inner.refuse('schema', found, 'must be a JSON schema')
        inner.require_shallow('schema', found)
        schema = found
        if nested:
            inner.finish()
    inside.finish()
    return () if kind == 'text' else (json_wish(fields.name(field), given, schema),)


def require_granted(call: Call, required: Required) -> None:
    """Raises RequestError for a call with a wish that is refused or can not be shown."""
    for wish in call.wishes:
        if required == 'refuse':
            raise refuse(wish.field, wish.value, wish.fix)
        if not all(isinstance(prompt, tuple) for prompt in call.prompts):
            raise refuse(wish.field, wish.value, 'can not be shown to the model in a prompt of ids: send messages')


def grant(call: Call, required: Required) -> Call:
    """The call with its wishes in the prompt; raises RequestError as `require_granted` does."""
    require_granted(call, required)
    prompts = [show(prompt, call.wishes) if isinstance(prompt, tuple) else prompt for prompt in call.prompts]
    return dataclasses.replace(call, prompts=tuple(prompts)) if call.wishes else call


def show(messages: Sequence[Message], wishes: Sequence[Wish]) -> tuple[Message, ...]:
    """The messages with a sentence for each wish, at the end of the system turn or in a new one."""
    said = describe_wishes(wishes)
    if not said:
        return tuple(messages)
    first, rest = messages[0], messages[1:]
    if first.role != 'system':
        return Message('system', said), *messages
    return dataclasses.replace(first, content=f'{first.content}\n\n{said}'), *rest


def describe_wishes(wishes: Sequence[Wish]) -> str:
    """What the model is told; '' where nothing is wished."""
    return ' '.join(wish.sentence for wish in wishes)


def find_misses(call: Call, answers: Sequence[Answer]) -> list[str]:
    """The fields whose wishes at least one of the answers misses."""
    return [wish.field for wish in call.wishes if not all(_is_met(wish, answer) for answer in answers)]


def _is_met(wish: Wish, answer: Answer) -> bool:
    if wish.kind == 'call':
        return any(wish.tool in ('', call.name) for call in answer.calls)
    if answer.calls and not answer.text:  # tools come first: the text is that of a later turn
        return True
    try:
        return isinstance(json.loads(answer.text), dict)
    except (ValueError, RecursionError):
        return False
