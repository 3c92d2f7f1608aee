"""The declared shape of a JSON object: a TypedDict, checked at run time.

A field is declared as `name: Annotated[type, comment]`, an optional one as `name: NotRequired[Annotated[type,
comment]]`; a literal, which names its record, needs no comment. The types are the JSON types: bool, int, float (which
takes an int too), str, None, lists of them, unions and literals.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NotRequired, Union

Check = Callable[[object], bool]  # whether a value is of the declared type
_PLAIN = frozenset((str, bool, types.NoneType))  # whose instances are the values of the type


@dataclasses.dataclass(frozen=True)
class Field:
    """One declared field; `fits` says whether a value is of its type."""

    name: str
    type_name: str  # 'int', 'list of str', "'start' or 'done'"
    comment: str
    optional: bool
    fits: Check


@dataclasses.dataclass(frozen=True)
class Record:
    """A TypedDict as the program can look at it."""

    comment: str  # the first line of the docstring
    fields: tuple[Field, ...]  # in the order of their declaration, the base class first
    required: frozenset[str]
    allowed: frozenset[str]  # required or optional

    def find_fault(self, values: Mapping[str, object]) -> str:
        """What keeps `values` from being such a record, as the end of a sentence ("has no 'draw'"); '' for nothing."""
        for field in self.fields:
            if field.name not in values:
                if not field.optional:
                    return f'has no {field.name!r}'
            elif not field.fits(values[field.name]):
                return f'has {field.name}={values[field.name]!r}, which is not of type {field.type_name}'
        unknown = sorted(values.keys() - self.allowed)
        return f'has the unknown field {unknown[0]}={values[unknown[0]]!r}' if unknown else ''


def describe_record(declaration: type) -> Record:
    """The record that a TypedDict declares; raises TypeError, naming the field, for one without type and comment."""
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
    return Field(name, _type_name(kind), comment, optional, _check_of(kind))


def _type_name(kind: object) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ' or '.join(map(repr, arguments))
    if _is_union(kind):
        return ' or '.join(map(_type_name, arguments))
    if typing.get_origin(kind) is list:
        name = _type_name(arguments[0])
        return f'list of ({name})' if _is_union(arguments[0]) else f'list of {name}'
    return 'null' if kind is types.NoneType else str(getattr(kind, '__name__', kind))


def _check_of(kind: object) -> Check:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return lambda value: value in arguments
    if _is_union(kind) and set(arguments) <= _PLAIN:
        return lambda value: isinstance(value, arguments)
    if _is_union(kind):
        checks = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in checks)
    if typing.get_origin(kind) is list:
        check = _check_of(arguments[0])
        return lambda value: isinstance(value, list) and all(map(check, value))
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in _PLAIN:
        plain = typing.cast(type, kind)
        return lambda value: isinstance(value, plain)
    raise TypeError(f'{kind} is no type of JSON; use bool, int, float, str, None, a list, a union or a literal')


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)
