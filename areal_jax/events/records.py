"""Checks the declared shape of a JSON object, a TypedDict, at run time.

A field is declared as `name: Annotated[type, comment]`, an optional one as `name: NotRequired[Annotated[type,
comment]]`; a literal, which names its record, needs no comment. The types are the JSON types: bool, int, float (which
accepts an int too), str, None, lists of them, unions and literals. `check_of` also knows objects: mappings from names,
TypedDicts and dataclasses.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NotRequired, Union

Check = Callable[[object], bool]  # whether a value is of the declared type
_LISTS, _OBJECTS = (list, tuple, Sequence), (dict, Mapping)
_PLAIN = frozenset((str, bool, types.NoneType))  # instances of these types are exactly the values of the type


@dataclasses.dataclass(frozen=True)
class Field:
    """One declared field; `fits` tests whether a value is of its type."""

    name: str
    type_name: str  # 'int', 'list of str', "'start' or 'done'"
    comment: str
    optional: bool
    fits: Check


@dataclasses.dataclass(frozen=True)
class Record:
    """A TypedDict in a form that the program can read."""

    comment: str  # the first line of the docstring
    fields: tuple[Field, ...]  # in the order of their declaration, the base class first
    required: frozenset[str]
    allowed: frozenset[str]  # required or optional

    def find_fault(self, values: Mapping[str, object]) -> str:
        """Describes why `values` is no such record, as the end of a sentence ("has no 'draw'"); '' if it is one."""
        for field in self.fields:
            if field.name not in values:
                if not field.optional:
                    return f'has no {field.name!r}'
            elif not field.fits(values[field.name]):
                return f'has {field.name}={values[field.name]!r}, which is not of type {field.type_name}'
        unknown = sorted(values.keys() - self.allowed)
        return f'has the unknown field {unknown[0]}={values[unknown[0]]!r}' if unknown else ''


def describe_record(declaration: type) -> Record:
    """Returns the record that a TypedDict declares; raises TypeError, naming a field without type and comment."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    fields = tuple(_describe_field(name, hint) for name, hint in hints.items())
    names = frozenset(field.name for field in fields)
    required = frozenset(field.name for field in fields if not field.optional)
    return Record((declaration.__doc__ or '').split('\n')[0], fields, required, names)


def _describe_field(name: str, hint: object) -> Field:
    optional = typing.get_origin(hint) is NotRequired
    annotated = typing.get_args(hint)[0] if optional else hint
    if typing.get_origin(annotated) is Annotated:
        kind, comment = typing.get_args(annotated)
    elif typing.get_origin(annotated) is Literal:
        kind, comment = annotated, ''
    else:
        raise TypeError(f'field {name!r} is declared as {annotated}; use Annotated[type, comment]')
    return Field(name, name_type(kind), comment, optional, check_of(kind))


def name_type(kind: object) -> str:
    """Names a type in words: 'list of int'."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ' or '.join(map(repr, arguments))
    if _is_union(kind):
        return ' or '.join(map(name_type, arguments))
    if typing.get_origin(kind) is list:
        name = name_type(arguments[0])
        return f'list of ({name})' if _is_union(arguments[0]) else f'list of {name}'
    return 'null' if kind is types.NoneType else str(getattr(kind, '__name__', kind))


def check_of(kind: object) -> Check:
    """Returns a test of a JSON value's type; a sequence must be a list. Raises TypeError if `kind` is no JSON type."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return lambda value: value in arguments
    if _is_union(kind) and set(arguments) <= _PLAIN:
        return lambda value: isinstance(value, arguments)
    if _is_union(kind):
        checks = [check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in checks)
    if typing.get_origin(kind) in _LISTS:
        check = check_of(arguments[0])
        return lambda value: isinstance(value, list) and all(map(check, value))
    if typing.get_origin(kind) in _OBJECTS:
        check, is_name = check_of(arguments[1]), str.isdecimal if arguments[0] is int else bool
        return lambda value: isinstance(value, dict) and all(map(check, value.values())) and all(map(is_name, value))
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return _check_of_fields(typing.cast(type, kind))
    if kind is object or kind is typing.Any:
        return lambda value: True
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in _PLAIN:
        plain = typing.cast(type, kind)
        return lambda value: isinstance(value, plain)
    raise TypeError(f'{kind} is no type of JSON; use bool, int, float, str, None, a list, a union or a literal')


def _check_of_fields(kind: type) -> Check:
    """Returns a test for a TypedDict or a dataclass; ignores unknown fields, which belong to a later version."""
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        required = {one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING}
    else:
        # __required_keys__ does not recognise NotRequired in annotations given as strings
        written = typing.get_type_hints(kind, include_extras=True)
        required = {name for name, hint in written.items() if typing.get_origin(hint) is not NotRequired}
    checks = {name: check_of(hint) for name, hint in hints.items()}
    fits = lambda value: all(check(value[name]) for name, check in checks.items() if name in value)
    return lambda value: isinstance(value, dict) and required <= value.keys() and fits(value)


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)
