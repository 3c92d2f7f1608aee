"""Columns: quantities that engines record of each token in addition to id, log-prob and version.

Segments, pieces of replies, rows and batches carry a mapping from the names of columns to arrays; entry t describes
token t. The declaration of a column determines its handling on the way from the engine to the loss, so a new quantity
needs one declaration, the code that fills it and the code that reads it. A module declares its columns when it is
imported, in every process of the run; declarations cannot be changed.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from areal_jax.errors import UserError, show

ColumnArrays = Mapping[str, np.ndarray]  # by name: [n, *shape] for n tokens
# other arrays and JSON fields of packed and trained rows, segments and choices of a reply. A field that vLLM has and
# this program does not fill, sampling_mask, is free
TAKEN = frozenset({
    'tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets', 'loss_mask', 'behavior_logprobs',
    'advantages', 'policy_version', 'policy_versions', 'trajectory_ids', 'recomputed_logprobs', 'reference_logprobs',
    'token_weights', 'sequence_starts', 'gate', 'uniform', 'proximal', 'reference', 'index', 'text', 'message', 'delta',
    'finish_reason', 'stop_reason', 'logprobs', 'logprobs_length', 'prompt_logprobs', 'token_ids', 'prompt_token_ids',
    'response_token_ids', 'tokens_as_token_ids', 'meta_info', 'weight_versions', 'context', 'inputs',
})  # fmt: skip


class ColumnError(UserError):
    """A declaration or an array that does not fit; the message names the column, the value and the fix."""


class Sampling(Protocol):
    """The part of types.SamplingParams that a declaration may use."""

    @property
    def changes_softmax(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Column:
    """A quantity of each generated token."""

    name: str  # also the name of its array in the loss, and of its field in replies and checkpoints
    dtype: str  # of numpy: a bool, integer or float
    # of one token's entry; None = the run's model determines it and the width of the dtype: see `of_model`
    shape: tuple[int, ...] | None = ()
    fill: float = 0  # for tokens that were not generated (prompt, environment), for padding, and for unknown values
    saved: bool = True  # in checkpoints, with the unfinished answers and the buffer; else lost in a resume
    published: bool = True  # over HTTP: a request asks for it with `return_NAME`
    packed: bool = True  # for the loss, as an array [R, N, *shape]
    is_logprob: bool = False  # checked as log-probs are; replaced by the behavior log-prob if unknown
    # whether a request must have it, or else has none; None = every request has it, if its engine knows it
    needed: Callable[[Sampling], bool] | None = None

    def of_model(self, dtype: str, shape: tuple[int, ...]) -> Column:
        """The declaration of a column without a shape, for one model; the fill value is the dtype's largest."""
        return dataclasses.replace(self, dtype=dtype, shape=shape, fill=int(np.iinfo(dtype).max))

    def blank(self, n: int) -> np.ndarray:
        """[n, *shape] of the fill value; raises ColumnError if the shape is not known."""
        if self.shape is None:
            raise self.error('has no shape of its own', 'ask the declaration for the model (of_model)')
        return np.full((n, *self.shape), self.fill, self.dtype)

    def of(self, columns: ColumnArrays, behavior_logprobs: np.ndarray) -> np.ndarray:
        """[n, *shape]: the entries of n generated tokens; default values if `columns` lacks this column."""
        if self.name in columns:
            return columns[self.name]
        return behavior_logprobs if self.is_logprob else self.blank(len(behavior_logprobs))

    def write(self, values: np.ndarray) -> object:
        """Encodes as JSON: lists of numbers; if the model determines the shape, base64 bytes with dtype and shape."""
        if self.shape is not None:
            return values.tolist()
        data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
        return {'data': data, 'dtype': values.dtype.name, 'shape': list(values.shape)}

    def read(self, values: object, n: int | None) -> np.ndarray:
        """Decodes [n, *shape] from the output of `write`; raises ColumnError for anything else. n=None: any number."""
        if self.shape is None:
            return self._read_bytes(values, n)
        if n is None:
            n = len(values) if isinstance(values, list) else 0
        kinds = {'b': 'b', 'f': 'iuf'}.get(np.dtype(self.dtype).kind, 'iu')
        try:
            found = np.array(values) if n or values else self.blank(0)  # [] does not tell the shape
            with np.errstate(over='ignore'):  # a number too large for float32 becomes infinite
                array = found.astype(self.dtype) if found.dtype.kind in kinds else None
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(f'is {show(values)}', f'give lists of numbers ({error})') from error
        if array is None or (kinds == 'iu' and (found != array).any()):
            raise self.error(f'holds {show(values)}', f'give values of {self.dtype}')
        self.check(array, (n,))
        return array

    def _read_bytes(self, values: object, n: int | None) -> np.ndarray:
        given: Mapping[str, object] = values if isinstance(values, dict) else {}
        try:
            data = np.frombuffer(base64.b64decode(str(given['data']), validate=True), _dtype_of(given['dtype']))
            rows, *row = cast(Sequence[int], given['shape'])
            array = data.reshape([rows, *row])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            fix = f'give data in base64, dtype and shape ({type(error).__name__}: {error})'
            raise self.error(f'is {show(values)}', fix) from error
        self.check(array, (len(array) if n is None else n,))
        return array

    def check(self, values: np.ndarray, leading: tuple[int, ...]) -> None:
        """Raises ColumnError if the array is not [*leading, *shape] of the declared dtype."""
        if self.shape is None:
            if values.dtype.kind != np.dtype(self.dtype).kind or values.shape[: len(leading)] != leading:
                fix = f'give one entry for each of {leading} tokens, of the kind of {self.dtype}'
                raise self.error(f'is {values.dtype} {values.shape}', fix)
            return
        if values.dtype != self.dtype:
            raise self.error(f'has the dtype {values.dtype}', f'give {self.dtype}, or declare the other')
        if values.shape != (*leading, *self.shape):
            tokens = ' x '.join(map(str, leading))
            fix = f'give one entry of the shape {self.shape} for each of {tokens} tokens: {(*leading, *self.shape)}'
            raise self.error(f'has the shape {values.shape}', fix)

    def error(self, fault: str, fix: str) -> ColumnError:
        """The error for a value that does not fit, for the caller to raise."""
        return ColumnError(f'column {self.name!r} {fault}: {fix}')


def _dtype_of(name: object) -> np.dtype:
    """The dtype of this name; raises TypeError or ValueError for other texts, which numpy would evaluate."""
    if not isinstance(name, str) or not re.fullmatch(r'[a-z]+\d*', name):
        raise ValueError(f'{show(name)} is no dtype')
    return np.dtype(name)


DECLARED: dict[str, Column] = {}  # by name, in the order of declaration; `declare` adds to it


def declare(column: Column) -> Column:
    """Declares a column in this process; returns it. A second call with the same declaration does nothing.

    Call it at the import of a module, before engines and learner are built. Raises ColumnError.
    """
    known = DECLARED.get(column.name)
    if known == column:
        return column
    if known is not None:
        raise column.error(f'is declared twice, as {column} and as {known}', 'give the new one another name')
    if not re.fullmatch('[a-z][a-z0-9_]*', column.name) or column.name in TAKEN:
        why = 'is the name of something else' if column.name in TAKEN else 'has no name in the form of a_name_2'
        raise column.error(why, 'give it another name')
    try:
        dtype = np.dtype(column.dtype)
    except TypeError as error:
        raise column.error(f'has the dtype {column.dtype!r}', 'use a dtype of numpy') from error
    if dtype.kind not in 'biuf' or dtype.name != column.dtype:
        raise column.error(f'has the dtype {column.dtype!r}', "use the name of a bool, an integer or a float: 'int32'")
    if column.shape is None and (column.packed or dtype.kind != 'u'):
        fix = 'declare an unsigned integer and packed=False'
        raise column.error('has no shape of its own', fix)
    if column.packed and dtype.itemsize > 4:
        raise column.error(f'is packed as {column.dtype}', 'devices hold 32 bits: declare such a dtype or packed=False')
    if column.is_logprob and (column.dtype, column.shape, column.fill) != ('float32', (), 0):
        raise column.error(f'is a log-prob of {column.dtype} {column.shape}', "use 'float32', the shape () and fill=0")
    if dtype.kind != 'f' and not np.array_equal(np.array(column.fill).astype(dtype), column.fill):
        raise column.error(f'has the fill value {column.fill!r}', f'use one of {column.dtype}')
    DECLARED[column.name] = column
    return column


def find(name: str) -> Column:
    """Returns the column of this name; raises ColumnError if it is not declared."""
    if name not in DECLARED:
        raise ColumnError(
            f'column {name!r} is not declared, only {", ".join(DECLARED)}: import the module that declares it, in '
            'every process of the run'
        )
    return DECLARED[name]


def declared() -> tuple[Column, ...]:
    """All columns, in the order of declaration."""
    return tuple(DECLARED.values())


def of_tokens() -> tuple[Column, ...]:
    """The columns with a declared shape, which have an entry for each generated token."""
    return tuple(column for column in DECLARED.values() if column.shape is not None)


def of_models() -> tuple[Column, ...]:
    """The columns whose shape depends on the model; the learner's passes read an entry for every token of a row."""
    return tuple(column for column in DECLARED.values() if column.shape is None)


def of_request(sampling: Sampling) -> tuple[Column, ...]:
    """The columns of the tokens of a request, if its engine knows them."""
    return tuple(column for column in DECLARED.values() if column.needed is None or column.needed(sampling))


def check(columns: ColumnArrays, leading: tuple[int, ...]) -> None:
    """Raises ColumnError for an array that is not [*leading, *shape] as its column is declared."""
    for name, values in columns.items():
        find(name).check(values, leading)


def join(parts: Sequence[ColumnArrays]) -> dict[str, np.ndarray]:
    """Joins the columns of consecutive tokens; all parts have the same columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def cut(columns: ColumnArrays, place: slice | int | tuple[int, slice]) -> dict[str, np.ndarray]:
    """The columns at some of the tokens."""
    return {name: values[place] for name, values in columns.items()}


def check_alike(columns: ColumnArrays) -> None:
    """Raises ColumnError for arrays that are not as declared, or have different numbers of tokens."""
    lengths = [len(values) for values in columns.values()]
    check(columns, (lengths[0],) if lengths else (0,))


SAMPLING_LOGPROBS = declare(
    Column(
        'sampling_logprobs',  # of the distribution that was sampled; behavior log-probs are of the full softmax
        'float32',
        packed=False,
        is_logprob=True,
        needed=lambda sampling: sampling.changes_softmax,
    )
)
ROUTED_EXPERTS = declare(
    Column(
        'routed_experts',  # [layers with experts, choices]: the routers' choices in the pass that gave the log-prob
        'uint8',  # to 255 experts, uint16 above; the largest value = not recorded
        shape=None,
        fill=255,
        packed=False,  # not by loss token; rows hold it for all their tokens, see learning/packed_rows.py
    )
)
