"""Columns of the model in requests and replies: entries of every token that a pass has read, in the prompt too.

A body requests one with `return_NAME`. Row i belongs to token i of prompt and answer, so n tokens have n - 1 rows: no
pass has read the last token. vLLM's and OpenAI's choices contain an .npy file as base64 in NAME; an event of a stream
has the rows of its tokens, the first event also the prompt's rows before them. SGLang's `meta_info` contains int32 as
base64, for the whole answer when it is complete.
"""

from __future__ import annotations

import base64
import io
import math
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.column_form import UNKNOWN, ColumnForm
from areal_jax.rollout.http.wire.exchange import Call, Piece, Reply

_RECORDING = 'with rollout.record_routes=True, a server of others with --enable-return-routed-experts'
_RAW = np.dtype('<i4')  # of SGLang
# numpy's errors for an invalid header
_NO_FILE = (
    ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, OverflowError,
)  # fmt: skip
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class FoundRows(NamedTuple):
    """Rows of the tokens of a reply or event; if these begin the answer, also of the prompt (Piece.context)."""

    columns: dict[str, np.ndarray]
    context: dict[str, np.ndarray]


NO_ROWS = FoundRows({}, {})


def find_rows(pieces: Sequence[Piece], name: str, start: int = 0) -> np.ndarray | None:
    """Returns the rows of the pieces' tokens, and of the prompt if they begin an answer; None without tokens.

    Rows before token `start` of the prompt are left out.
    """
    held = [piece for piece in pieces if len(piece.tokens)]
    if not held:
        return None
    context = held[0].context
    of_prompt = [context[name][1:]] if name in context else []  # no pass predicts the first token
    rows = np.concatenate([*of_prompt, *(piece.columns[name] for piece in held)])
    return rows[start:] if of_prompt else rows


def render_npy(call: Call, pieces: Sequence[Piece]) -> JsonObject:
    """Renders the requested fields of a choice."""
    return {name: _write_npy(find_rows(pieces, name, call.first_row)) for name in call.model_columns}


def render_raw(call: Call, pieces: Sequence[Piece]) -> JsonObject:
    """Renders the requested fields of `meta_info`."""
    return {name: _write_raw(find_rows(pieces, name, call.first_row)) for name in call.model_columns}


def parse_npy(choice: Reply, call: Call, n_tokens: int, first: int) -> FoundRows:
    """Parses the fields of `render_npy` for `n_tokens` tokens after `first` earlier ones; raises ReplyError."""
    found = FoundRows({}, {})
    for name in call.model_columns if n_tokens else ():
        form = call.forms[name]
        try:
            rows = _read_npy(_read(choice, name))
        except _NO_FILE as error:
            raise choice.error(name, f'no .npy file of integers ({type(error).__name__}: {error})') from error
        if rows.dtype.name not in form.sent_dtypes:
            raise choice.error(name, f'the dtype {rows.dtype.name}, and rows of this model are {form.column.dtype}')
        _take(found, choice, call, form, rows, n_tokens, first)
    return found


def parse_raw(meta: Reply, call: Call, n_tokens: int) -> FoundRows:
    """Parses the fields of `render_raw` for an answer; raises ReplyError."""
    found = FoundRows({}, {})
    for name in call.model_columns if n_tokens else ():
        form, length = call.forms[name], len(call.prompts[0]) - 1 - call.first_row + n_tokens
        if meta.values.get(f'{name}_dtype', 'int32') != 'int32':
            raise meta.error(name, f'the dtype {show(meta.values[f"{name}_dtype"])}: have the server send int32')
        data = _read(meta, name)
        fitting = [row for row in form.sent_rows if len(data) == length * math.prod(row) * _RAW.itemsize]
        if not fitting:
            fault = f'{len(data)} bytes, and {length} rows of int32 {form.row} belong there{form.axes}'
            raise meta.error(name, fault)
        _take(found, meta, call, form, np.frombuffer(data, _RAW).reshape(length, *fitting[0]), n_tokens, 0)
    return found


def _take(
    found: FoundRows, reply: Reply, call: Call, form: ColumnForm, rows: np.ndarray, n_tokens: int, first: int
) -> None:
    """Checks rows and adds them to `found`; the last `n_tokens` are of the passes that generated those tokens."""
    name = form.column.name
    rows = form.pick(rows)
    of_prompt = 0 if first else len(call.prompts[0]) - 1 - call.first_row
    if fault := form.find_fault(rows, of_prompt + n_tokens, of_prompt):
        raise reply.error(name, fault)
    rows = form.convert(rows)
    found.columns[name] = rows[of_prompt:]
    if not first and not call.first_row:
        found.context[name] = np.concatenate([form.column.blank(1), rows[:of_prompt]])


def _write_npy(rows: np.ndarray | None) -> str | None:
    if rows is None:
        return None
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _write_raw(rows: np.ndarray | None) -> str | None:
    if rows is None:
        return None
    raw = np.where(rows == np.iinfo(rows.dtype).max, UNKNOWN, rows.astype(_RAW))
    return base64.b64encode(raw.astype(_RAW).tobytes()).decode()


def _read(reply: Reply, name: str) -> bytes:
    text = reply.values.get(name)
    if text is None:
        raise reply.error(name, f'nothing in it: start the server {_RECORDING}')
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise reply.error(name, f'no base64 but {show(text)}')


def _read_npy(data: bytes) -> np.ndarray:
    """Reads an .npy file without allocating more than its bytes; raises one of _NO_FILE for other bytes."""
    file = io.BytesIO(data)
    shape, is_fortran, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
    if dtype.kind not in 'iu':
        raise ValueError(f'it holds {dtype}')
    array = np.frombuffer(data[file.tell() :], dtype).reshape(shape, order='F' if is_fortran else 'C')
    return array.astype(dtype.newbyteorder('='))
