"""Columns in requests and replies, and what clients read of a reply: it is refused as a whole if it can not be trusted.

The names of fields are made from the names of columns. vLLM's and OpenAI's bodies request a column with `return_NAME`,
and their choices contain it as NAME; SGLang's use `NAME_mode='selected'` and `output_token_NAME`.

Columns of the model have entries of every token that a pass has read, in the prompt too: row i belongs to token i of
prompt and answer, so n tokens have n - 1 rows, for no pass has read the last token. vLLM's and OpenAI's choices contain
an .npy file as base64; an event of a stream has the rows of its tokens, the first event also the prompt's rows before
them. SGLang's `meta_info` contains int32 as base64, for the whole answer when it is complete.
"""

from __future__ import annotations

import base64
import io
import math
import tokenize
import typing
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.columns import ColumnArrays, ColumnError, cut, find
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import UNKNOWN, Answer, Call, ColumnForm, Piece, ReplyError
from areal_jax.types import LARGEST_LOGPROB

_MISSING_LOGPROB = -9999.0  # vLLM's value for a missing log-prob
_LARGEST_TOKEN = 2**31 - 1
_LARGEST_NUMBER = 1e30  # also excludes integers that no float holds
_NO_COLUMNS: ColumnArrays = {}


class Reply:
    """A JSON object of a reply, with its name for errors."""

    def __init__(self, values: object, name: str = 'reply'):
        if not isinstance(values, dict):
            raise ReplyError(f'{name} of the server is no JSON object but {show(values)}: send the request again')
        self.values: JsonObject = values
        self._name = name

    def error(self, field: str, fault: str) -> ReplyError:
        """Returns the error for a wrong field, to be raised."""
        return ReplyError(f'{field} in the {self._name} of the server has {fault}: the reply is not used')

    def name(self, field: str) -> str:
        """Reads a name: printable text, or an integer as text; '' for anything else."""
        found = self.values.get(field)
        text = str(found) if type(found) is int else self.text(field)
        return text if text.isprintable() else ''

    def nested(self, field: str) -> Reply:
        return Reply(self.values.get(field), field)

    def text(self, field: str) -> str:
        """Reads a text; '' for anything else."""
        found = self.values.get(field)
        return found if isinstance(found, str) else ''

    def number(self, field: str) -> float:
        """Reads a number that is never negative and only reported; 0 for anything else."""
        found = self.values.get(field)
        return found if isinstance(found, int | float) and 0 <= found < _LARGEST_NUMBER else 0

    def integer(self, field: str, most: int) -> int:
        """Reads an integer from 0 to `most`; 0 if it is absent."""
        found = self.values.get(field, 0)
        if type(found) is not int or not 0 <= found <= most:
            raise self.error(field, f'{show(found)}, which is no integer from 0 to {most}')
        return found

    def entries(self, field: str, length: int | None = None) -> Sequence[object]:
        found = self.values.get(field)
        if not isinstance(found, list) or (length is not None and len(found) != length):
            raise self.error(field, f'no list of {"any length" if length is None else length} but {show(found)}')
        return found


def read_logprobs(
    reply: Reply, field: str, pairs: Sequence[Sequence[object]], vocab_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reads tokens, int32 [n], and log-probs, float32 [n], from (log-prob, token) pairs; raises ReplyError."""
    most = _LARGEST_TOKEN if vocab_size is None else vocab_size - 1
    for logprob, token in pairs:
        if type(token) is not int or not 0 <= token <= most:
            raise reply.error(field, f'the token {show(token)}, which is no id from 0 to {most}')
        number = isinstance(logprob, float | int) and not isinstance(logprob, bool)
        value = typing.cast(float, logprob)
        if not number or not -_LARGEST_NUMBER < value <= LARGEST_LOGPROB or value == _MISSING_LOGPROB:
            raise reply.error(field, f'the log-prob {show(logprob)}, which no policy can have')
    tokens = np.array([token for _, token in pairs], np.int32)
    return tokens, np.array([logprob for logprob, _ in pairs], np.float32)


def cut_by_spans(
    reply: Reply,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    columns: ColumnArrays,
    first: int = 0,
    context: ColumnArrays = _NO_COLUMNS,
) -> list[Piece]:
    """Splits tokens into one piece for each span of `weight_versions`; without spans, one piece of version ''.

    `first` is the index of tokens[0] in the answer: spans count from the answer's beginning. `context` belongs to the
    first piece.
    """
    spans = reply.values.get('weight_versions')
    if not spans:
        return [Piece(tokens, logprobs, '', columns, context=context)] if len(tokens) else []
    if not isinstance(spans, list):
        raise reply.error('weight_versions', f'no list but {show(spans)}')
    pieces: list[Piece] = []
    end, last = first, first + len(tokens)
    for span in spans:
        version, begin, behind = _read_span(reply, span)
        if behind <= end:
            continue  # the span of earlier tokens
        if max(begin, first) != end or behind > last:
            break
        part = slice(end - first, behind - first)
        before = _NO_COLUMNS if pieces else context
        pieces.append(Piece(tokens[part], logprobs[part], version, cut(columns, part), context=before))
        end = behind
    if end != last:
        raise reply.error('weight_versions', f'spans that do not cover {len(tokens)} tokens: {show(spans)}')
    return pieces


def _read_span(reply: Reply, span: object) -> tuple[str, int, int]:
    entry = span if isinstance(span, dict) else {}
    version, begin, behind = (entry.get(name) for name in ('version', 'start', 'end'))
    if not isinstance(version, str) or type(begin) is not int or type(behind) is not int or begin > behind:
        raise reply.error('weight_versions', f'the span {show(span)}')
    return version, begin, behind


def render_columns(call: Call, answer: Answer, first: int = 0, field: str = '{}') -> JsonObject:
    """Renders the columns that a call wants, for the answer's tokens from `first` on."""
    return {field.format(name): answer.column(find(name))[first:].tolist() for name in call.token_columns}


def parse_columns(reply: Reply, call: Call, tokens: np.ndarray, field: str = '{}') -> dict[str, np.ndarray]:
    """Parses the fields of `render_columns` for tokens int32 [n]; raises ReplyError."""
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


# Columns of the model.


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
