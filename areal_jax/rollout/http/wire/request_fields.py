"""Reads a JSON object of a request field by field; an invalid value is refused by the name of its field."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from areal_jax.errors import UserError, show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import ASKED, Call, CallSampling, RequestError
from areal_jax.types import MOST_ALTERNATIVES

_LARGEST_TOKEN = 2**31 - 1  # of int32
LARGEST_VERSION = 2**63 - 1  # of weights, in a text
_LONGEST_NAME = 80  # characters of a field's name that a sentence repeats: clients choose the names of unknown fields
_LONGEST_TEXT = 4096  # characters of a name, an id or a path: replies and events repeat some of them
MOST_PROMPTS = 4096  # of one request, and entries of other lists of texts
_MOST_BIASES = 1024
MOST_LEVELS = 128  # of JSON that goes to the model or comes from it
TOKEN_ID: JsonObject = {'type': 'integer', 'minimum': 0, 'maximum': _LARGEST_TOKEN}  # schemas, like the next
_TEXT: JsonObject = {'type': 'string', 'minLength': 1}
_BIAS: JsonObject = {
    'maxProperties': _MOST_BIASES,
    'propertyNames': {'pattern': '^0*[0-9]{1,10}$'},
    'additionalProperties': {'type': 'number', 'minimum': -100, 'maximum': 100},
}
_INDEX = re.compile(r'\[\d+\]')
_NOTHING: list[object] = [None, False, 0, '', [], {}]


def parse_json(content: bytes) -> object:
    """Decodes the JSON body of a request; raises RequestError if it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and very deep nesting
        reason = str(error).splitlines()[0] if isinstance(error, ValueError) else 'it is nested too deep'
        raise RequestError('body', f'body must be JSON: {reason}') from error


def refuse(field: str, value: object, fix: str) -> RequestError:
    """Returns the error for a value that is not served, to be raised."""
    if len(field) > _LONGEST_NAME:
        field = f'{field[:_LONGEST_NAME]}...'
    return RequestError(field, f'{field}={show(value)} {fix}')


class Notes:
    """The fields that a reader takes of an object: a JSON schema each, {} if the reader checks the value itself."""

    def __init__(self) -> None:
        self.fields: dict[str, JsonObject] = {}
        self.inside: dict[str, Notes] = {}  # of objects in a field, or in its list
        self.raw: set[str] = set()  # fields whose values a reader checked itself
        self.closed = False  # unknown fields are refused

    def add(self, field: str, schema: JsonObject) -> None:
        """Adds the schema of a field; of two bounds the wider counts, and of two forms either is accepted."""
        before = self.fields.get(field) or {}
        if not schema:
            self.raw.add(field)
        elif before and 'maximum' in before and 'maximum' in schema:
            schema = schema | {'maximum': max(before['maximum'], schema['maximum'])}
        elif before and schema != before:
            forms = [*before.get('anyOf', [before]), *schema.get('anyOf', [schema])]
            schema = {'anyOf': [form for index, form in enumerate(forms) if form not in forms[:index]]}
        self.fields[field] = schema or before


class WatchedObject(dict[str, object]):
    """An object whose reader leaves notes, from which the schema of requests is made."""

    def __init__(self, values: JsonObject, notes: Notes):
        super().__init__(values)
        self.notes = notes


class Fields:
    """The fields of one JSON object; each is taken once, and `finish` refuses the rest.

    null means that a field is absent. `path` is the name of the object for errors: 'sampling_params'. `ignored` is the
    set of the enclosing object, see `inside`.
    """

    def __init__(self, values: object, path: str = '', ignored: set[str] | None = None):
        if not isinstance(values, Mapping):
            raise refuse(path or 'body', values, 'must be a JSON object')
        self._values: dict[str, object] = {str(name): value for name, value in values.items()}
        self._path = path
        self._ignored = set() if ignored is None else ignored
        self._notes = values.notes if isinstance(values, WatchedObject) else None

    def name(self, field: str) -> str:
        """Returns the field with its path: 'sampling_params.top_p'."""
        return f'{self._path}.{field}' if self._path else field

    def refuse(self, field: str, value: object, fix: str) -> RequestError:
        """Returns the error for the value of a field that was taken, to be raised."""
        return refuse(self.name(field), value, fix)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that were sent, here or inside, and have no influence on the answer: 'messages.name'."""
        return tuple(sorted(self._ignored))

    def inside(self, value: object, field: str) -> Fields:
        """Returns the fields of an object that was found in a field of this one: 'messages[0]'."""
        return Fields(value, self.name(field), self._ignored)

    def names(self) -> list[str]:
        """Lists the fields that have values and are not taken yet, in the order as sent."""
        return [name for name, value in self._values.items() if value is not None]

    def has(self, field: str) -> bool:
        """Whether a value was sent and is not taken yet."""
        return self.peek(field) is not None

    def peek(self, field: str) -> object:
        """Returns the value as sent, without taking it; None = absent."""
        return self._values.get(field)

    def take(self, field: str, **schema: object) -> object:
        """Takes the value as sent; None = absent. `schema` describes the accepted values."""
        if self._notes is not None:
            self._notes.add(field, schema)
        return self._values.pop(field, None)

    def take_flag(self, field: str, default: bool = False) -> bool:
        value = self.take(field, type='boolean', default=default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, value, 'must be true or false')
        return value

    def take_integer(self, field: str, default: int, least: int, most: int = _LARGEST_TOKEN) -> int:
        value = self.take(field, type='integer', minimum=least, maximum=most, default=default)
        return default if value is None else self._require_integer(field, value, least, most)

    def take_optional_integer(self, field: str, least: int, most: int = _LARGEST_TOKEN) -> int | None:
        """Takes an integer in [least, most]; None if it is absent."""
        value = self.take(field, type='integer', minimum=least, maximum=most)
        return None if value is None else self._require_integer(field, value, least, most)

    def take_number(self, field: str, default: float, least: float, most: float, above: bool = False) -> float:
        """Takes a number in [least, most], with `above` in (least, most]; both bounds are finite."""
        lower = 'exclusiveMinimum' if above else 'minimum'
        value = self.take(field, type='number', **{lower: least}, maximum=most, default=default)
        return default if value is None else self._require_number(field, value, least, most, above)

    def take_text(self, field: str, default: str = '', longest: int | None = _LONGEST_TEXT) -> str:
        """Takes a string of at most `longest` characters; None = as long as the body may be."""
        value = self.take(field, type='string', **({} if longest is None else {'maxLength': longest}))
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(field, value, 'must be a string')
        if longest is not None and len(value) > longest:
            raise self.refuse(field, value, f'has {len(value)} characters: send {longest} at most')
        return self.require_characters(field, value)

    def take_choice(self, field: str, choices: Sequence[str], default: str | None = None) -> str:
        """Takes one of the choices; if absent, returns `default`, or the first choice without a default."""
        value = self.take(field, type='string', enum=list(choices))
        if value is None:
            return choices[0] if default is None else default
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(field, value, f'must be {" or ".join(map(repr, choices))}')
        return value

    def take_texts(self, field: str, most: int = MOST_PROMPTS, longest: int | None = None) -> tuple[str, ...]:
        """Takes a string or a list of up to `most` strings, not empty; `longest` bounds their total characters."""
        value = self.take(field, anyOf=[_TEXT, {'type': 'array', 'items': _TEXT, 'maxItems': most}])
        texts = value if isinstance(value, list) else [] if value is None else [value]
        self.require_few(field, texts, most)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise self.refuse(field, value, 'must be a string or a list of strings, none of them empty')
            self.require_characters(field, text)
        if longest is not None and (total := sum(map(len, texts))) > longest:
            raise self.refuse(field, value, f'has {total} characters: send {longest} at most')
        return tuple(texts)

    def take_token_ids(self, field: str, most: int | None = None) -> tuple[int, ...]:
        """Takes a list of ids, () if it is absent."""
        value = self.take(field, type='array', items=TOKEN_ID, **({} if most is None else {'maxItems': most}))
        if most is not None:
            self.require_few(field, value, most)
        return () if value is None else tuple(read_token_ids(self.name(field), value, least=0).tolist())

    def require_few(self, field: str, value: object, most: int) -> None:
        """Raises RequestError for a list, or an object, of more than `most` entries."""
        if isinstance(value, list | dict) and len(value) > most:
            raise self.refuse(field, value, f'has {len(value)} entries: send {most} at most')

    def require_shallow(self, field: str, value: object) -> None:
        """Raises RequestError for JSON nested deeper than replies and templates may write (MOST_LEVELS)."""
        if count_levels(value) > MOST_LEVELS:
            raise self.refuse(field, '...', f'is nested more than {MOST_LEVELS} levels deep: make it flatter')

    def take_bias(self, field: str) -> tuple[tuple[int, float], ...]:
        """Takes an object of token ids and biases to add to their logits, in [-100, 100]."""
        value = self.take(field, type='object', **_BIAS)
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            raise self.refuse(field, value, 'must be an object of token ids and numbers')
        self.require_few(field, value, _MOST_BIASES)
        found = []
        for token, bias in value.items():
            name = f'{field}.{token}'
            if (token_id := read_integer(token, _LARGEST_TOKEN)) is None:
                raise self.refuse(name, bias, 'is not named by a token id: use the id as a string')
            found.append((token_id, self._require_number(name, bias, -100, 100)))
        return tuple(sorted(found))

    def take_fields(self, field: str) -> Fields:
        """Takes the fields of an object inside this one, no fields if it is absent."""
        value = self.take(field, type='object')
        return self.inside({} if value is None else value, field)

    def take_unserved(self, *fields: str, fix: str = 'is not served: leave it out') -> None:
        """Takes fields that may only have values that change nothing: null, false, 0, and empty ones."""
        for field in fields:
            if value := self.take(field, enum=_NOTHING, description='Not served.'):
                raise self.refuse(field, value, fix)

    def take_ignored(self, *fields: str) -> None:
        """Takes fields that have no influence on the answer."""
        for field in fields:
            if self.take(field, description='Has no influence on the answer.') is not None:
                self._ignored.add(_INDEX.sub('', self.name(field)))

    def note_ignored(self, **sent: object) -> None:
        """Notes taken fields that, if they have a value, have no influence on the answer to this request."""
        self._ignored.update(_INDEX.sub('', self.name(field)) for field, value in sent.items() if value)

    def finish(self) -> None:
        """Refuses fields that were not taken; null is not a value."""
        if self._notes is not None:
            self._notes.closed = True
        for field, value in self._values.items():
            if value is not None:
                raise self.refuse(field, value, 'is an unknown field: leave it out')

    def require_characters(self, field: str, text: str) -> str:
        """Returns the text; raises RequestError if it has a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self.refuse(field, text, 'has half of a surrogate pair: write the whole character') from error
        return text

    def _require_integer(self, field: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(field, value, f'must be an integer from {least} to {most}')
        return value

    def _require_number(self, field: str, value: object, least: float, most: float, above: bool = False) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            fits = False  # also nan, and integers that no float holds
        else:
            fits = not above or value > least
        if not fits:
            raise self.refuse(field, value, f'must be a number {"above" if above else "from"} {least:g} to {most:g}')
        return float(typing.cast(float, value))


def count_levels(value: object) -> int:
    """Counts the nested levels of objects and lists."""
    levels, layer = 0, [value]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        levels += 1
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return levels


def read_integer(text: str, most: int) -> int | None:
    """Reads a text of ASCII digits as a number; None for any other text, and for a number above `most`.

    Use it for all numbers in text from HTTP: int() raises ValueError for thousands of digits.
    """
    digits = text.lstrip('0')
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):
        return None
    number = int(digits or '0')
    return number if number <= most else None


def read_token_ids(field: str, value: object, least: int = 1) -> np.ndarray:
    """Reads a list of non-negative ids as int32 [n], n >= least."""
    if not isinstance(value, list) or len(value) < least:
        raise refuse(field, value, f'must be a list of {"one or more " if least else ""}token ids')
    for token in value:
        if type(token) is not int or not 0 <= token <= _LARGEST_TOKEN:
            raise refuse(field, token, f'is no token id: use integers from 0 to {_LARGEST_TOKEN}')
    return np.array(value, np.int32)


def require_same(fields: Fields, field: str, values: Collection[int]) -> int:
    """Returns the value that all prompts of a batch must share; raises RequestError if they differ."""
    found = set(values)
    if len(found) != 1:
        raise fields.refuse(field, sorted(found), 'differs between the prompts of a batch: send them one by one')
    return found.pop()


def require_scored(call: Call, limit_field: str, alternatives_field: str) -> None:
    """Refuses a call that generates nothing and scores nothing, and options that a stream can not carry."""
    if any(sampling.max_new_tokens == 0 for sampling in call.sampling):
        if not call.prompt_starts or max(call.prompt_starts) < 0:
            raise refuse(limit_field, 0, 'generates nothing: ask for log-probs of the prompt, or for tokens')
        if call.n > 1:
            raise refuse('n', call.n, f'scores the same prompt {call.n} times with {limit_field}=0: use 1')
        if call.model_columns:
            asked = ASKED.format(call.model_columns[0])
            raise refuse(asked, True, f'is not served with {limit_field}=0: ask for a token at least')
    if call.stream and call.alternatives:
        fix = 'is not served with stream=true, for they are known when the answer is complete: leave one of them out'
        raise refuse(alternatives_field, call.alternatives, fix)
    if call.stream and call.prompt_logprobs is not None:
        raise refuse('prompt_logprobs', call.prompt_logprobs, 'is not served with stream=true: leave one of them out')


# Sampling parameters on the wire: they have the same meaning in all dialects, which differ in a few names.


_LEAST_TEMPERATURE = 1e-5  # logits divided by less may overflow float32
_LARGEST_TEMPERATURE = 1e4
_LARGEST_PENALTY = 2.0  # presence and frequency
_LARGEST_REPETITION = 10.0
_LARGEST_SEED = 2**63 - 1
# every token of an answer is compared with all stop strings, so these bound the cost of one request to the others
_MOST_STOP_STRINGS, _STOP_CHARACTERS, _MOST_STOP_TOKENS = 64, 4096, 1024


@dataclasses.dataclass(frozen=True)
class Names:
    """A dialect's names of parameters whose names differ between dialects."""

    min_new_tokens: str = 'min_tokens'
    seed: str = 'seed'
    keep_stop: str = 'include_stop_str_in_output'


OPENAI = Names()  # vLLM's too
SGLANG = Names('min_new_tokens', 'sampling_seed', 'no_stop_trim')


def read_sampling(fields: Fields, names: Names, max_new_tokens: int | None) -> CallSampling:
    """Takes every sampling parameter except the limit of new tokens, whose name and default depend on the dialect."""
    bound = max_new_tokens or 2**31 - 1
    top_k = fields.take_integer('top_k', 0, least=-1)
    return CallSampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=fields.take_integer(names.min_new_tokens, 0, least=0, most=bound),
        temperature=_read_temperature(fields),
        top_k=max(top_k, 0),  # -1 is off too
        top_p=fields.take_number('top_p', 1.0, 0, 1, above=True),
        min_p=fields.take_number('min_p', 0.0, 0, 1),
        repetition_penalty=fields.take_number('repetition_penalty', 1.0, 0, _LARGEST_REPETITION, above=True),
        presence_penalty=fields.take_number('presence_penalty', 0.0, -_LARGEST_PENALTY, _LARGEST_PENALTY),
        frequency_penalty=fields.take_number('frequency_penalty', 0.0, -_LARGEST_PENALTY, _LARGEST_PENALTY),
        logit_bias=fields.take_bias('logit_bias'),
        stop_tokens=fields.take_token_ids('stop_token_ids', _MOST_STOP_TOKENS),
        stop_strings=fields.take_texts('stop', _MOST_STOP_STRINGS, _STOP_CHARACTERS),
        ignore_eos=fields.take_flag('ignore_eos'),
        seed=fields.take_optional_integer(names.seed, least=0, most=_LARGEST_SEED),
        skip_special_tokens=fields.take_flag('skip_special_tokens', True),
        keep_stop=fields.take_flag(names.keep_stop),
    )


def render_sampling(sampling: CallSampling, names: Names) -> JsonObject:
    """Renders a client's sampling parameters except the limit of new tokens; omits defaults, for older servers."""
    found: JsonObject = {
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k or -1,
        'ignore_eos': sampling.ignore_eos,
        'skip_special_tokens': sampling.skip_special_tokens,
    }
    named = {
        names.min_new_tokens: (sampling.min_new_tokens, 0),
        'min_p': (sampling.min_p, 0.0),
        'repetition_penalty': (sampling.repetition_penalty, 1.0),
        'presence_penalty': (sampling.presence_penalty, 0.0),
        'frequency_penalty': (sampling.frequency_penalty, 0.0),
        'logit_bias': ({str(token): bias for token, bias in sampling.logit_bias}, {}),
        'stop_token_ids': (list(sampling.stop_tokens), []),
        'stop': (list(sampling.stop_strings), []),
        names.seed: (sampling.seed, None),
        names.keep_stop: (sampling.keep_stop, False),
    }
    return found | {name: value for name, (value, default) in named.items() if value != default}


def _read_temperature(fields: Fields) -> float:
    temperature = fields.take_number('temperature', 1.0, 0, _LARGEST_TEMPERATURE)
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise fields.refuse('temperature', temperature, f'must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}')
    return temperature


# JSON schemas of the bodies of requests, made from the fields that the parsers take: the parser is the declaration.


Parser = Callable[[object], object]
_TOKEN = re.compile(r'<?\d+>?')
_IDS: JsonObject = {'type': 'array', 'items': TOKEN_ID, 'minItems': 1}
_MAYBE_IDS: JsonObject = {'type': 'array', 'items': TOKEN_ID}
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
# fields that parsers check themselves, by the path of the field; OBJECT means the objects inside
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
    """Returns the schema of a body with all fields that the parser takes from the examples, which must be valid."""
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
    """Returns a schema that also allows null, which means that a field is absent."""
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
    """Returns the common schema of these replies: a field is required if all replies have it.

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
