"""Columns of tokens in requests and replies; the names of the fields are made of the names of the columns.

vLLM's and OpenAI's bodies ask for a column with `return_NAME`, and their choices hold it as NAME. SGLang's say
`NAME_mode='selected'` and `output_token_NAME`. What replies hold of columns of the model is in row_fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from areal_jax.columns import Column, ColumnError, declared, find
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Answer, Call, Reply, read_logprobs

ASKED = 'return_{}'


def read_wanted(
    is_asked: Callable[[str], bool], field: str = ASKED, columns: Iterable[Column] | None = None
) -> tuple[str, ...]:
    """The columns that a body asks for, of `columns` or of all; `is_asked` takes a field out of it."""
    known = declared() if columns is None else columns
    return tuple(column.name for column in known if column.published and is_asked(field.format(column.name)))


def render_columns(call: Call, answer: Answer, first: int = 0, field: str = '{}') -> JsonObject:
    """The columns that a call wants, of the answer's tokens from `first` on."""
    return {field.format(name): answer.column(find(name))[first:].tolist() for name in call.token_columns}


def parse_columns(reply: Reply, call: Call, tokens: np.ndarray, field: str = '{}') -> dict[str, np.ndarray]:
    """What `render_columns` has written, of tokens int32 [n]; raises ReplyError."""
    found = {}
    for name in call.token_columns if len(tokens) else ():
        column, where = find(name), field.format(name)
        entries = reply.entries(where, len(tokens))
        if column.is_logprob:
            _, found[name] = read_logprobs(reply, where, list(zip(entries, tokens.tolist(), strict=True)))
            continue
        try:
            found[name] = column.read(entries, len(tokens))
        except ColumnError as error:
            raise reply.error(where, f'values that do not fit ({error})') from error
    return found
