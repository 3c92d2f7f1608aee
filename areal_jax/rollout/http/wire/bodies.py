"""Bodies of requests as pydantic models: the types that dialects share, and refusals that name a field.

A model declares each field once, with its range and default; its JSON schema comes from it. null means that a field is
absent. pydantic stops at the first wrong entry of a list, and a refusal names the first wrong field.
"""

from __future__ import annotations

import array
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pydantic
import pydantic_core
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import core_schema

from areal_jax.columns import Column, find
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.encoding import MOST_LEVELS, MOST_PROMPTS, count_levels, read_integer, refuse
from areal_jax.rollout.http.wire.exchange import ASKED, Call, CallSampling, RequestError
from areal_jax.types import MOST_ALTERNATIVES

_LARGEST = 2**31 - 1  # of int32
_MOST_BIASES = 1024
_LEAST_TEMPERATURE = 1e-5  # logits divided by less may overflow float32
# every token of an answer is compared with all stop strings, so these bound the cost of one request to the others
_MOST_STOPS, _STOP_CHARACTERS, _MOST_STOP_TOKENS = 64, 4096, 1024
_NOT_SERVED: JsonObject = {'enum': [None, False, 0, '', [], {}], 'description': 'Not served.'}
_SENT = '\0'  # alias of Body.sent; a client may send it too: as an unknown field
_INDEX = re.compile(r'\[\d+\]')
_KIND = 'kind of '  # before the field that tells the models of a union apart: a type of errors
_NO_OBJECT = 'must be a JSON object'
_ONE, _LIST = '(one)', '(list)'  # tags of unions are in parentheses, which tells them from fields
BodyT = TypeVar('BodyT', bound='Body')
One = TypeVar('One')
Many = TypeVar('Many')


def refusal(fix: str, **place: object) -> pydantic_core.PydanticCustomError:
    """Returns the error of a validator: for its value, for another `value`, or for the `field` of an object."""
    held = {name: (one,) for name, one in place.items()}  # pydantic can not hold half of a surrogate pair itself
    return pydantic_core.PydanticCustomError('refused', '{fix}', {'fix': fix, **held})


class ColumnField(NamedTuple):
    """A field that requests a column."""

    column: str
    value: bool | str  # that requests it


def ask_columns(columns: Iterable[Column], field: str = ASKED, value: bool | str = True) -> dict[str, ColumnField]:
    """Returns the fields that request these columns, as far as they are published."""
    return {field.format(one.name): ColumnField(one.name, value) for one in columns if one.published}


class Body(pydantic.BaseModel):
    """A JSON object of a request: declared fields, and fields that a class lists by name because none is read."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()  # have no influence on the answer
    unserved: ClassVar[tuple[str, ...]] = ()  # may only have values that change nothing: false, 0 and empty ones
    fixes: ClassVar[Mapping[str, str]] = {}  # for unserved fields with a better fix than to leave them out
    attributes: ClassVar[Mapping[str, str]]  # by the name of the field
    sent: Annotated[dict[str, object], pydantic.SkipValidation] = Field(alias='\0')  # fields with a value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        fields = {field.alias or name: name for name, field in cls.model_fields.items()}
        cls.attributes = {field: name for field, name in fields.items() if field != _SENT}

    @classmethod
    def column_fields(cls) -> Mapping[str, ColumnField]:
        """Returns the fields that request columns: users may declare columns at any time."""
        return {}

    @pydantic.model_validator(mode='before')
    @classmethod
    def drop_null(cls, values: object) -> object:
        """Returns the fields without null, which means that a field is absent."""
        if not isinstance(values, dict):
            raise refusal(_NO_OBJECT)
        sent = {name: value for name, value in values.items() if value is not None}
        return {**sent, _SENT: sent}

    @property
    def columns(self) -> tuple[str, ...]:
        """The requested columns."""
        return tuple(one.column for name, one in self.column_fields().items() if self.sent.get(name))

    @property
    def has_rows(self) -> bool:
        """Whether a column of the model is requested."""
        return any(find(name).shape is None for name in self.columns)

    def list_ignored(self, path: str) -> Iterator[str]:
        """Lists the sent fields without influence, here and inside; raises RequestError for an unknown field."""
        for name, value in self.sent.items():
            if attribute := self.attributes.get(name):
                yield from _list_inside(getattr(self, attribute), f'{path}{name}')
            elif self.ignores(name, value, path):
                yield path + name

    @classmethod
    def ignores(cls, name: str, value: object, path: str) -> bool:
        """Whether a field that is not declared has no influence; raises RequestError for one that is not taken."""
        if name in cls.unserved:
            if value:
                raise refuse(path + name, value, cls.fixes.get(name, 'is not served: leave it out'))
        elif name not in cls.ignored:
            if (column := cls.column_fields().get(name)) is None:
                raise refuse(path + name, value, 'is an unknown field: leave it out')
            if value not in (column.value, False) or type(value) not in (bool, type(column.value)):
                raise refuse(path + name, value, f'must be {column.value!r}')
        return name in cls.ignored

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: pydantic_core.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> JsonObject:
        schema: JsonObject = handler.resolve_ref_schema(handler(core))
        required = [name for name in schema.get('required', ()) if name != _SENT]
        fields = {name: schema['properties'][name] for name in cls.attributes}
        fields = {name: one if name in required else _allow_null(one) for name, one in fields.items()}
        fields |= {name: {'enum': [one.value, False, None]} for name, one in cls.column_fields().items()}
        fields |= dict.fromkeys(cls.unserved, _NOT_SERVED)
        fields |= {name: {'description': 'Has no influence on the answer.'} for name in cls.ignored}
        found: JsonObject = {'type': 'object', 'properties': fields, 'additionalProperties': {'type': 'null'}}
        return found | {'required': required} if required else found


def _list_inside(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Body):
        yield from value.list_ignored(f'{path}.')
    elif isinstance(value, list):
        for index, one in enumerate(value):
            if isinstance(one, Body):
                yield from one.list_ignored(f'{path}[{index}].')


class Skipped(Body):
    """An object that has no influence on the answer, whatever is in it."""

    type: str

    @pydantic.model_validator(mode='before')
    @classmethod
    def drop_null(cls, values: object) -> object:
        return {**values, _SENT: values} if isinstance(values, dict) else values

    def list_ignored(self, path: str) -> Iterator[str]:
        yield f'{path}{self.type}'

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: pydantic_core.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> JsonObject:
        return super().__get_pydantic_json_schema__(core, handler) | {'additionalProperties': True}


def read(kind: type[BodyT], values: object) -> tuple[BodyT, set[str]]:
    """Returns the body of a request, and the fields in it that have no influence; raises RequestError."""
    try:
        body = kind.model_validate(values)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        if fault['type'] == 'missing' and len(fault['loc']) == 1 and isinstance(values, dict):
            for name, value in values.items():  # a misspelt name, most likely
                if value is not None and name not in kind.attributes:
                    kind.ignores(name, value, '')
        raise _refuse(fault) from None
    return body, {_INDEX.sub('', path) for path in body.list_ignored('')}


def _refuse(fault: pydantic_core.ErrorDetails) -> RequestError:
    """Translates an error of pydantic: names the field by its place, its value, and the fix."""
    kind, context, value = fault['type'], fault.get('ctx', {}), fault['input']
    place = [part for part in fault['loc'] if not str(part).startswith('(')]
    fix = _FIXES.get(kind) or re.sub(r'^\w+ should', 'must', fault['msg'])
    (inside,) = (kind.removeprefix(_KIND),) if kind.startswith(_KIND) else context.get('field', (None,))
    if inside is not None and not isinstance(value, dict):
        fix = _NO_OBJECT
    elif inside is not None:
        place.append(inside)
        value = value.get(inside)
    elif kind == 'missing':
        value = None
    elif kind != 'refused' and place and isinstance(place[-1], int):
        place.pop()  # a list of plain values is named as a whole
    name = ''.join(f'[{part}]' if isinstance(part, int) else f'.{part}' for part in place)
    (value,) = context.get('value', (value,))
    return refuse(name.removeprefix('.') or 'body', value, fix)


_FIXES = {
    'missing': 'is missing: send it',
    'dict_type': _NO_OBJECT,
    'bool_type': 'must be true or false',
    'string_unicode': 'has half of a surrogate pair: write the whole character',
}


def describe(kind: type[Body]) -> JsonObject:
    """Returns the JSON schema of a body, without references."""
    schema = kind.model_json_schema()
    parts: JsonObject = schema.pop('$defs', {})

    def fill(part: object) -> object:
        if isinstance(part, list):
            return [fill(one) for one in part]
        if not isinstance(part, dict):
            return part
        if '$ref' in part:
            return fill(parts[part['$ref'].rpartition('/')[2]])
        names = {'oneOf': 'anyOf'}
        kept = {name: one for name, one in part.items() if name != 'title' or not isinstance(one, str)}
        return {names.get(name, name): fill(one) for name, one in kept.items()}

    found = fill(schema)
    assert isinstance(found, dict)
    return found


def _allow_null(schema: JsonObject) -> JsonObject:
    """Returns a schema that also allows null, which means that a field is absent."""
    plain = {name: value for name, value in schema.items() if name not in ('description', 'default')}
    if not plain:
        return schema
    return {'anyOf': [plain, {'type': 'null'}]} | {name: schema[name] for name in schema if name not in plain}


# Types of fields.

OBJECT = Field(default_factory=dict, validate_default=True)  # an object that is absent has no fields


def choose_form(value: object) -> str:
    """Returns the tag of a list, or of one value."""
    return _LIST if isinstance(value, list) else _ONE


_NO_NAMES: Mapping[str, str] = {}


def by(field: str, kinds: Collection[str], default: str = '', same: Mapping[str, str] = _NO_NAMES) -> Discriminator:
    """Returns the choice of a model, tagged '(KIND)', by the kind in `field`, or by `default` without one.

    Kinds in `same` have the model of another kind.
    """

    def choose(value: object) -> str:
        kind = value.get(field) or default if isinstance(value, dict) else ''
        return f'({same.get(kind, kind)})' if isinstance(kind, str) and kind in kinds else ''

    return Discriminator(choose, f'{_KIND}{field}', f'must be {" or ".join(map(repr, kinds))}')


class Within(NamedTuple):
    """The range of a number, [least, most] or (least, most]."""

    least: float
    most: float
    above: bool = False

    def __get_pydantic_core_schema__(
        self, kind: type, handler: pydantic.GetCoreSchemaHandler
    ) -> pydantic_core.CoreSchema:
        least, most = self.least, self.most
        if kind is int:
            words = f'an integer from {least} to {most}'
            schema: pydantic_core.CoreSchema = core_schema.int_schema(ge=int(least), le=int(most), strict=True)
        else:
            words = f'a number {"above" if self.above else "from"} {least:g} to {most:g}'
            ge, gt = (None, least) if self.above else (least, None)
            schema = core_schema.float_schema(ge=ge, gt=gt, le=most, strict=True, allow_inf_nan=False)
        return core_schema.custom_error_schema(schema, 'range', custom_error_message=f'must be {words}')


# a value, or a list of up to MOST_PROMPTS entries
OneOrList: TypeAlias = Annotated[
    Annotated[One, Tag(_ONE)] | Annotated[list[Many], Tag(_LIST), Field(max_length=MOST_PROMPTS, fail_fast=True)],
    Discriminator(choose_form),
]
Turns: TypeAlias = Annotated[list[One], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
OneOrTurns: TypeAlias = Annotated[
    Annotated[One, Tag(_ONE)] | Annotated[Turns[Many], Tag(_LIST)], Discriminator(choose_form)
]  # not empty
Text = Annotated[str, Field(max_length=4096)]  # a name, an id or a path: replies and events repeat some of them
LongText = Annotated[str, Field(max_length=_LARGEST)]  # with any bound pydantic refuses half a surrogate pair
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Natural = Annotated[int, Within(0, _LARGEST)]
Positive = Annotated[int, Within(1, _LARGEST)]
Samples = Annotated[int, Within(1, 1024)]  # bounds the answers of one body
Alternatives = Annotated[int, Within(0, MOST_ALTERNATIVES)]
Priority = Annotated[int, Within(-(2**31), _LARGEST)]
Start = Annotated[int, Within(-1, _LARGEST)]  # a position; -1 = none
Seed = Annotated[int, Within(0, 2**63 - 1)]
Penalty = Annotated[float, Within(-2, 2)]


def read_arguments(given: object) -> JsonObject | str:
    """Reads arguments as the object that templates expect; a string that is no JSON object stays a string."""
    if isinstance(given, str):
        if not _has_characters(given):
            raise refusal(_FIXES['string_unicode'])
        try:
            value = json.loads(given or '{}')
        except (ValueError, RecursionError):
            return given
        return value if isinstance(value, dict) and count_levels(value) <= MOST_LEVELS else given
    if not isinstance(given, dict):
        raise refusal('must be a string, with a JSON object in it')
    return _require_shallow(given)


def _has_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_shallow(value: dict[str, object]) -> dict[str, object]:
    if count_levels(value) > MOST_LEVELS:
        raise refusal(f'is nested more than {MOST_LEVELS} levels deep: make it flatter', value='...')
    return value


Arguments = Annotated[
    JsonObject | str, PlainValidator(read_arguments), WithJsonSchema({'type': ['string', 'object']})
]  # of a call
FreeObject = Annotated[dict[str, object], AfterValidator(_require_shallow)]  # JSON that goes to the model


def _read_ids(value: object, least: int = 0) -> np.ndarray:
    if not isinstance(value, list) or len(value) < least:
        raise refusal(f'must be a list of {"one or more " if least else ""}token ids')
    try:
        ids = np.array(array.array('i', value), np.int32)
        if set(map(type, value)) <= {int} and not (ids < 0).any():
            return ids
    except (OverflowError, TypeError):
        pass
    wrong = next(one for one in value if type(one) is not int or not 0 <= one <= _LARGEST)
    raise refusal(f'is no token id: use integers from 0 to {_LARGEST}', value=wrong)


def choose_rows(value: object) -> str:
    """Returns the tag of a list of lists, or of one list."""
    return _LIST if isinstance(value, list) and value and isinstance(value[0], list) else _ONE


_TOKENS: JsonObject = {'type': 'array', 'items': {'type': 'integer', 'minimum': 0, 'maximum': _LARGEST}}
MaybeIds = Annotated[np.ndarray, PlainValidator(_read_ids), WithJsonSchema(_TOKENS)]  # int32 [n]
Ids = Annotated[
    np.ndarray, PlainValidator(functools.partial(_read_ids, least=1)), WithJsonSchema(_TOKENS | {'minItems': 1})
]
IdRows = Annotated[Annotated[Ids, Tag(_ONE)] | Annotated[Turns[Ids], Tag(_LIST)], Discriminator(choose_rows)]


def _list_texts(value: object) -> tuple[object, ...]:
    if not isinstance(value, str | list):
        raise refusal('must be a string or a list of strings')
    return (value,) if isinstance(value, str) else tuple(value)


def _require_few_characters(texts: tuple[str, ...]) -> tuple[str, ...]:
    if (total := sum(map(len, texts))) > _STOP_CHARACTERS:
        raise refusal(f'has {total} characters: send {_STOP_CHARACTERS} at most')
    return texts


def _read_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise refusal('must be an object of token ids and numbers')
    if len(value) > _MOST_BIASES:
        raise refusal(f'has {len(value)} entries: send {_MOST_BIASES} at most')
    found = []
    for name, bias in value.items():
        if (token := read_integer(name, _LARGEST)) is None:
            raise refusal('is not named by a token id: use the id as a string', field=name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise refusal('must be a number from -100 to 100', field=name)
        found.append((token, float(bias)))
    return tuple(sorted(found))


def _require_divisor(value: float) -> float:
    if 0 < value < _LEAST_TEMPERATURE:
        raise refusal(f'must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}')
    return value


def _read_stop_tokens(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > _MOST_STOP_TOKENS:
        raise refusal(f'has {len(value)} entries: send {_MOST_STOP_TOKENS} at most')
    return tuple(_read_ids(value).tolist())


Spelled = Annotated[str, Field(min_length=1, max_length=_LARGEST)]
_TEXT: JsonObject = {'type': 'string', 'minLength': 1}
Stops = Annotated[
    tuple[Spelled, ...],
    Field(max_length=_MOST_STOPS, fail_fast=True),
    BeforeValidator(_list_texts),
    AfterValidator(_require_few_characters),
    WithJsonSchema({'anyOf': [_TEXT, {'type': 'array', 'items': _TEXT, 'maxItems': _MOST_STOPS}]}),
]
StopTokens = Annotated[
    tuple[int, ...], PlainValidator(_read_stop_tokens), WithJsonSchema(_TOKENS | {'maxItems': _MOST_STOP_TOKENS})
]
Bias = Annotated[
    tuple[tuple[int, float], ...],  # (token, added to its logit)
    PlainValidator(_read_bias),
    WithJsonSchema({
        'type': 'object', 'maxProperties': _MOST_BIASES, 'propertyNames': {'pattern': '^0*[0-9]{1,10}$'},
        'additionalProperties': {'type': 'number', 'minimum': -100, 'maximum': 100},
    }),
]  # fmt: skip


# Sampling parameters have the same meaning in all dialects, which differ in a few names.


class Sampling(Body):
    """Every sampling parameter except the limit of new tokens, with the names of vLLM and OpenAI."""

    temperature: Annotated[float, Within(0, 1e4), AfterValidator(_require_divisor)] = 1.0
    top_k: Start = 0  # -1 is off too
    top_p: Annotated[float, Within(0, 1, above=True)] = 1.0
    min_p: Annotated[float, Within(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Within(0, 10, above=True)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Bias = ()
    stop_token_ids: StopTokens = ()
    stop: Stops = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    skip_special_tokens: bool = True
    min_tokens: Natural = 0
    include_stop_str_in_output: bool = False

    @classmethod
    def spell(cls, attribute: str) -> str:
        """Returns the field of an attribute in this dialect."""
        return cls.model_fields[attribute].alias or attribute

    def make(self, max_new_tokens: int | None, path: str = '') -> CallSampling:
        """Returns the sampling of a call; raises RequestError, with the field below `path`."""
        if max_new_tokens and self.min_tokens > max_new_tokens:
            field = path + self.spell('min_tokens')
            raise refuse(field, self.min_tokens, f'must be an integer from 0 to {max_new_tokens}')
        return CallSampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop_tokens=self.stop_token_ids,
            stop_strings=self.stop,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            skip_special_tokens=self.skip_special_tokens,
            keep_stop=self.include_stop_str_in_output,
        )


def render_sampling(sampling: CallSampling, kind: type[Sampling]) -> JsonObject:
    """Renders a client's sampling parameters except the limit of new tokens; omits defaults, for older servers."""
    found: JsonObject = {
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k or -1,
        'ignore_eos': sampling.ignore_eos,
        'skip_special_tokens': sampling.skip_special_tokens,
    }
    named = {
        kind.spell('min_tokens'): (sampling.min_new_tokens, 0),
        'min_p': (sampling.min_p, 0.0),
        'repetition_penalty': (sampling.repetition_penalty, 1.0),
        'presence_penalty': (sampling.presence_penalty, 0.0),
        'frequency_penalty': (sampling.frequency_penalty, 0.0),
        'logit_bias': ({str(token): bias for token, bias in sampling.logit_bias}, {}),
        'stop_token_ids': (list(sampling.stop_tokens), []),
        'stop': (list(sampling.stop_strings), []),
        kind.spell('seed'): (sampling.seed, None),
        kind.spell('include_stop_str_in_output'): (sampling.keep_stop, False),
    }
    return found | {name: value for name, (value, default) in named.items() if value != default}


def number_ids(request_id: str, answers: int) -> tuple[str, ...]:
    """Returns an id for each answer: numbered, if there are several; '' = the server makes one."""
    return (request_id,) if answers == 1 else tuple(f'{request_id}_{i}' if request_id else '' for i in range(answers))


def join_ignored(ignored: set[str], others: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names of all fields that have no influence: of `others`, those with a value."""
    return tuple(sorted(ignored.union(name for name in others if others[name])))


def require_row(field: str, start: int, most: int) -> None:
    """Raises RequestError if the first token whose row is wanted lies behind `most`."""
    if start > most:
        raise refuse(field, start, f'must be a position of the prompt, at most {most}')


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
