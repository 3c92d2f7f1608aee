"""Checks JSON values against declared types: of records, TypedDicts whose fields have comments, and any others.

A field of a record is declared as `name: Annotated[type, comment]`, an optional one as
`name: NotRequired[Annotated[type, comment]]`; a literal, which names its record, needs no comment.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, Union

import msgspec


@dataclasses.dataclass(frozen=True)
class Field:
    """One declared field."""

    name: str
    kind: object  # its type
    comment: str
    optional: bool

    @property
    def type_name(self) -> str:
        return name_type(self.kind)


@dataclasses.dataclass(frozen=True)
class Record:
    """A TypedDict in a form that the program can read."""

    declaration: type
    fields: tuple[Field, ...]  # in the order of their declaration, the base class first
    required: frozenset[str]
    allowed: frozenset[str]  # required or optional

    @property
    def comment(self) -> str:
        """The first line of the docstring."""
        return (self.declaration.__doc__ or '').split('\n')[0]

    def find_fault(self, values: Mapping[str, object]) -> str:
        """Describes why `values` is no such record, as the end of a sentence ("has no 'draw'"); '' if it is one."""
        if values.keys() <= self.allowed and fits(values, self.declaration):
            return ''
        for field in self.fields:
            if field.name not in values:
                if not field.optional:
                    return f'has no {field.name!r}'
            elif not fits(values[field.name], field.kind):
                return f'has {field.name}={values[field.name]!r}, which is not of type {field.type_name}'
        unknown = min(values.keys() - self.allowed)
        return f'has the unknown field {unknown}={values[unknown]!r}'


def describe_record(declaration: type) -> Record:
    """Returns the record that a TypedDict declares; raises TypeError, naming a field without type and comment."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    fields = tuple(_describe_field(name, hint) for name, hint in hints.items())
    required = frozenset(field.name for field in fields if not field.optional)
    return Record(declaration, fields, required, frozenset(hints))


def _describe_field(name: str, hint: object) -> Field:
    optional = typing.get_origin(hint) is NotRequired
    annotated = typing.get_args(hint)[0] if optional else hint
    if typing.get_origin(annotated) is Annotated:
        kind, comment = typing.get_args(annotated)
        return Field(name, kind, comment, optional)
    if typing.get_origin(annotated) is Literal:
        return Field(name, annotated, '', optional)
    raise TypeError(f'field {name!r} is declared as {annotated}; use Annotated[type, comment]')


def name_type(kind: object) -> str:
    """Names a type in words: 'list of int'."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ' or '.join(map(repr, arguments))
    if _is_union(kind):
        return ' or '.join(map(name_type, arguments))
    if typing.get_origin(kind) in (list, tuple, Sequence):
        name = name_type(arguments[0])
        return f'list of ({name})' if _is_union(arguments[0]) else f'list of {name}'
    return 'null' if kind is types.NoneType else str(getattr(kind, '__name__', kind))


def fits(value: object, kind: object) -> bool:
    """Tells whether a JSON value is of a type; a float may be written without a point, an int as a key of a mapping."""
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return True


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)
