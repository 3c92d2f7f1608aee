"""JSON schemas of the bodies of requests, made of what the parsers take: the parser is the declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import MOST_PROMPTS, TOKEN_ID, Notes, WatchedObject
from areal_jax.types import MOST_ALTERNATIVES

Parser = Callable[[object], object]
_TOKEN = re.compile(r'<?\d+>?')
_IDS: JsonObject = {'type': 'array', 'items': TOKEN_ID, 'minItems': 1}
_MAYBE_IDS: JsonObject = {'type': 'array', 'items': TOKEN_ID}
_TEXT: JsonObject = {'type': 'string', 'minLength': 1}
_NAME: JsonObject = {'type': 'string', 'maxLength': 4096}
_FLAG: JsonObject = {'type': 'boolean'}
_START: JsonObject = {'type': ['integer', 'null'], 'minimum': -1}
_TOP: JsonObject = {'type': 'integer', 'minimum': 0, 'maximum': MOST_ALTERNATIVES}


def _list(items: JsonObject, most: int | None = MOST_PROMPTS, least: int = 0) -> JsonObject:
    bounds = {'minItems': least} | ({} if most is None else {'maxItems': most})
    return {'type': 'array', 'items': items} | bounds


def _either(*schemas: JsonObject) -> JsonObject:
    return {'anyOf': list(schemas)}


_TEXTS = _either(_TEXT, _list(_TEXT, least=1))
# what parsers look at themselves, by the path of the field; OBJECT means the objects inside
OBJECT: JsonObject = {'$object': True}
_RAW: dict[str, JsonObject] = {
    'text': _TEXTS,
    'input_ids': _either(_IDS, _list(_IDS, least=1)),
    'sampling_params': _either(OBJECT, _list(OBJECT)),
    'return_logprob': _either(_FLAG, _list(_FLAG)),
    'logprob_start_len': _either(_START, _list(_START)),
    'top_logprobs_num': _either(_TOP, _list(_TOP)),
    'rid': _either(_NAME, _list(_NAME, None)),
    'token_ids': _IDS,
    'prompt': _either(_TEXT, _IDS, _list(_TEXT, least=1), _list(_IDS, least=1)),
    'tokens': _either(_MAYBE_IDS, _list(_MAYBE_IDS, None)),
    'messages': _list(OBJECT, least=1),
    'messages.content': _either({'type': 'string'}, _list(OBJECT)),
    'messages.tool_calls': _list(OBJECT, 1024),
    'messages.tool_calls.function.arguments': {'type': ['string', 'object']},
    'messages.content.content': _either({'type': 'string'}, _list(OBJECT)),
    'system': _either({'type': 'string'}, _list(OBJECT)),
    'input': _either(_TEXT, _list(OBJECT, least=1)),
    'input.content': _either({'type': 'string'}, _list(OBJECT)),
    'input.output': _either({'type': 'string'}, _list(OBJECT)),
    'input.arguments': {'type': ['string', 'object']},
    'tools': _list(OBJECT, 1024),
    'tool_choice': _either({'enum': ['auto', 'none', 'required']}, {'type': 'object'}),
    'response_format': {'type': 'object'},
    'modalities': {'enum': [['text']]},
}


def describe_request(parse: Parser, examples: Sequence[JsonObject]) -> JsonObject:
    """The schema of a body, of all fields that the parser takes for the examples; they must be accepted."""
    notes = Notes()
    for example in examples:
        parse(_watch(example, notes))
    schema = _render(notes, '')
    names = [name for name in notes.fields if all(name in example for example in examples)]
    required = [name for name in names if not any(_accepts(parse, _without(example, name)) for example in examples)]
    return schema | ({'required': required} if required else {})


def _watch(value: object, notes: Notes) -> object:
    if isinstance(value, Mapping):
        inside = {name: _watch(part, notes.inside.setdefault(name, Notes())) for name, part in value.items()}
        return WatchedObject(inside, notes)
    return [_watch(part, notes) for part in value] if isinstance(value, list) else value


def _render(notes: Notes, path: str) -> JsonObject:
    properties = {name: _render_field(notes, name, f'{path}{name}') for name in notes.fields}
    schema: JsonObject = {'type': 'object', 'properties': properties}
    return schema | ({'additionalProperties': {'type': 'null'}} if notes.closed else {})


def _render_field(notes: Notes, name: str, path: str) -> JsonObject:
    schema, inside = notes.fields[name], notes.inside.get(name, Notes())
    content = _render(inside, f'{path}.')
    if path in _RAW and (name in notes.raw or path in ('messages.content', 'messages.tool_calls')):
        schema = _fill(_RAW[path], content)
    elif schema.get('type') == 'object' and inside.fields:
        schema = schema | content
    return _allow_null(schema)


def _fill(schema: object, content: JsonObject) -> JsonObject:
    def fill(part: object) -> object:
        if part == OBJECT:
            return content
        if isinstance(part, dict):
            return {name: fill(inner) for name, inner in part.items()}
        return [fill(inner) for inner in part] if isinstance(part, list) else part

    filled = fill(schema)
    assert isinstance(filled, dict)
    return filled


def _allow_null(schema: JsonObject) -> JsonObject:
    """null means that a field is absent."""
    plain = {name: value for name, value in schema.items() if name not in ('description', 'default')}
    if not plain or None in schema.get('enum', ()):
        return schema
    kept = {name: value for name, value in schema.items() if name not in plain}
    return {'anyOf': [plain, {'type': 'null'}], **kept}


def _without(example: JsonObject, name: str) -> JsonObject:
    return {other: value for other, value in example.items() if other != name}


def _accepts(parse: Parser, body: JsonObject) -> bool:
    try:
        parse(body)
    except (RequestError, UserError):
        return False
    return True


def describe_value(*values: object) -> JsonObject:
    """The schema that these replies have in common: fields are required where all of them have one.

    Objects whose keys are ids of tokens, 5 or <5>, may have any key.
    """
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    found: list[JsonObject] = []
    if any(objects) and all(_TOKEN.fullmatch(name) for one in objects for name in one):
        parts = [part for one in objects for part in one.values()]
        found.append({'type': 'object', 'additionalProperties': describe_value(*parts)})
    elif objects:
        names = list(dict.fromkeys(name for one in objects for name in one))
        properties = {name: describe_value(*(one[name] for one in objects if name in one)) for name in names}
        required = [name for name in names if all(name in one for one in objects)]
        found.append({'type': 'object', 'properties': properties, 'required': required})
    if lists:
        found.append({'type': 'array', 'items': describe_value(*(part for one in lists for part in one))})
    words = {bool: 'boolean', int: 'integer', float: 'number', str: 'string', type(None): 'null'}
    kinds = dict.fromkeys(words[type(value)] for value in values if type(value) in words)
    found += [{'type': kind} for kind in kinds if not (kind == 'integer' and 'number' in kinds)]
    return found[0] if len(found) == 1 else {'anyOf': found} if found else {}
