"""Routes in requests and replies: which experts each token has reached.

A body asks for them with `return_routed_experts`. Row i is that of token i of prompt and answer, so n tokens have n - 1
rows: nothing has read the last one. vLLM's and OpenAI's choices hold an .npy file as base64; an event of a stream has
the rows of its tokens, the first one those of the prompt in front. SGLang's `meta_info` holds int32 as base64, of the
whole answer when it is complete.
"""

from __future__ import annotations

import base64
import io
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, ColumnArrays
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Call, Piece
from areal_jax.rollout.http.wire.replies import Reply
from areal_jax.rollout.http.wire.request_fields import Fields
from areal_jax.rollout.http.wire.route_form import UNKNOWN, RouteForm

ASKED, FIELD = 'return_routed_experts', ROUTED_EXPERTS.name
_RECORDING = 'with rollout.record_routes=True, a server of others with --enable-return-routed-experts'
_RAW = np.dtype('<i4')  # of SGLang
_OF_VLLM = ('uint8', 'int16')  # the first also where an id is 255; the second in older versions
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class FoundRoutes(NamedTuple):
    """Of the tokens of a reply or an event, and of those before them where they begin the answer (Piece.context)."""

    columns: ColumnArrays
    context: ColumnArrays


NO_ROUTES = FoundRoutes({}, {})


def read_start(fields: Fields, field: str, most: int) -> int:
    """The first token, at most `most`, whose row is wanted."""
    start = fields.take_integer(field, 0, least=0)
    if start > most:
        raise fields.refuse(field, start, f'must be a position of the prompt, at most {most}')
    return start


def find_rows(pieces: Sequence[Piece], start: int = 0) -> np.ndarray | None:
    """Of the tokens of pieces, and of the prompt where they begin an answer; None where there are no tokens.

    Rows before token `start` of the prompt are left out.
    """
    held = [piece for piece in pieces if len(piece.tokens)]
    if not held:
        return None
    of_prompt = [values[1:] for name, values in held[0].context.items() if name == FIELD]  # the first is read by none
    rows = np.concatenate([*of_prompt, *(piece.columns[FIELD] for piece in held)])
    return rows[start:] if of_prompt else rows


def render_npy(call: Call, pieces: Sequence[Piece]) -> JsonObject:
    """The field of a choice, where it is asked for."""
    if not call.return_routes:
        return {}
    if (rows := find_rows(pieces, call.routes_start)) is None:
        return {FIELD: None}
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return {FIELD: _write(file.getvalue())}


def render_raw(call: Call, pieces: Sequence[Piece]) -> JsonObject:
    """The field of `meta_info`, where it is asked for."""
    if not call.return_routes:
        return {}
    if (rows := find_rows(pieces, call.routes_start)) is None:
        return {FIELD: None}
    raw = np.where(rows == np.iinfo(rows.dtype).max, UNKNOWN, rows.astype(_RAW))
    return {FIELD: _write(raw.astype(_RAW).tobytes())}


def parse_npy(choice: Reply, call: Call, n_tokens: int, first: int) -> FoundRoutes:
    """What `render_npy` has written of `n_tokens` tokens that come after `first` others; raises ReplyError."""
    if not call.return_routes or not n_tokens:
        return NO_ROUTES
    form = _form_of(call)
    try:
        rows = _read_npy(_read(choice))
    except (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise choice.error(FIELD, f'no .npy file of integers ({type(error).__name__}: {error})') from error
    if rows.dtype.name not in (form.column.dtype, *_OF_VLLM):
        raise choice.error(FIELD, f'the dtype {rows.dtype.name}, and routes of this model are {form.column.dtype}')
    return _split(choice, call, rows, n_tokens, first)


def parse_raw(meta: Reply, call: Call, n_tokens: int) -> FoundRoutes:
    """What `render_raw` has written of an answer; raises ReplyError."""
    if not call.return_routes or not n_tokens:
        return NO_ROUTES
    form, length = _form_of(call), len(call.prompts[0]) - 1 - call.routes_start + n_tokens
    if meta.values.get(f'{FIELD}_dtype', 'int32') != 'int32':
        raise meta.error(FIELD, f'the dtype {meta.values[f"{FIELD}_dtype"]!r}: have the server send int32')
    data = _read(meta)
    for layers in {form.row[0], form.n_layers}:
        if len(data) == length * layers * form.row[1] * _RAW.itemsize:
            rows = np.frombuffer(data, _RAW).reshape(length, layers, form.row[1])
            return _split(meta, call, rows, n_tokens, 0)
    fault = f'{len(data)} bytes, and {length} rows of int32 {form.row} belong there (layers with experts, choices)'
    raise meta.error(FIELD, fault)


def _form_of(call: Call) -> RouteForm:
    assert call.routes is not None, 'who asks for routes says of which model they are'
    return call.routes


def _split(reply: Reply, call: Call, rows: np.ndarray, n_tokens: int, first: int) -> FoundRoutes:
    """Checked rows, of which the last `n_tokens` are of the passes that gave those tokens.

    Servers of others have rows for all layers, whatever they hold for those without experts.
    """
    form = _form_of(call)
    rows = form.pick(rows)
    of_prompt = 0 if first else len(call.prompts[0]) - 1 - call.routes_start
    if fault := form.find_fault(rows, of_prompt + n_tokens, of_prompt):
        raise reply.error(FIELD, fault)
    rows = form.convert(rows)
    is_whole = not first and not call.routes_start
    context = {FIELD: np.concatenate([form.column.blank(1), rows[:of_prompt]])} if is_whole else {}
    return FoundRoutes({FIELD: rows[of_prompt:]}, context)


def _write(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(reply: Reply) -> bytes:
    text = reply.values.get(FIELD)
    if text is None:
        raise reply.error(FIELD, f'nothing in it: start the server {_RECORDING}')
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise reply.error(FIELD, f'no base64 but {str(text)[:60]!r}')


def _read_npy(data: bytes) -> np.ndarray:
    """Takes no room for more than the bytes hold; raises what numpy raises for a header that is none."""
    file = io.BytesIO(data)
    shape, is_fortran, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
    if dtype.kind not in 'iu':
        raise ValueError(f'it holds {dtype}')
    array = np.frombuffer(data[file.tell() :], dtype).reshape(shape, order='F' if is_fortran else 'C')
    return array.astype(dtype.newbyteorder('='))
