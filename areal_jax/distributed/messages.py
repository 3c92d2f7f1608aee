"""Messages between the processes of a run, and the errors that report a failure in another process. jax-free.

Each message belongs to a lane: the other end executes the commands of one lane in the order of sending,
and the lanes run concurrently.
"""

from __future__ import annotations

import itertools
import json
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from areal_jax.checkpoint.shards import ArrayShape, Piece, StoredArray
from areal_jax.columns import ColumnArrays, join
from areal_jax.errors import UserError
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup, concatenate

_TIMES = ('admitted_s', 'finished_s', 'consumed_s')
_TEXTS = ('finish_reason', 'engine', 'label')


def join_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Joins groups into columns: lists of text, and arrays. `split_groups` restores them, in the dtypes of types.py."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    prompts = {id(trajectory.prompt): trajectory.prompt for trajectory in trajectories}
    number = {key: index for index, key in enumerate(prompts)}
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return {
        'group_draw': _integers(group.draw for group in groups),
        'group_size': _integers(len(group.trajectories) for group in groups),
        'prompt_draw': _integers(prompt.draw for prompt in prompts.values()),
        'prompt_task': [prompt.task for prompt in prompts.values()],
        'prompt_source': [prompt.source for prompt in prompts.values()],
        'prompt_problem': [dict(prompt.problem) for prompt in prompts.values()],
        'prompt_length': _integers(len(prompt.tokens) for prompt in prompts.values()),
        'prompt_tokens': concatenate([prompt.tokens for prompt in prompts.values()], np.int32),
        'prompt': _integers(number[id(trajectory.prompt)] for trajectory in trajectories),
        'sample': _integers(trajectory.sample for trajectory in trajectories),
        'row': _integers(trajectory.row for trajectory in trajectories),
        'reward': np.array([trajectory.reward for trajectory in trajectories], np.float64),
        **{name: np.array([getattr(t, name) for t in trajectories], np.float64) for name in _TIMES},
        **{name: [getattr(t, name) for t in trajectories] for name in _TEXTS},
        'segments': _integers(len(trajectory.segments) for trajectory in trajectories),
        'length': _integers(len(segment.tokens) for segment in segments),
        'version': _integers(segment.policy_version for segment in segments),
        'tokens': concatenate([segment.tokens for segment in segments], np.int32),
        'behavior': concatenate([segment.behavior_logprobs for segment in segments], np.float32),
        'columns': _join_columns([segment.columns for segment in segments]),
        'contexts': _join_columns([segment.context for segment in segments]),
    }


def _join_columns(of_segments: Sequence[ColumnArrays]) -> dict[str, dict[str, np.ndarray]]:
    """Joins each column's values; 'held' counts them per segment, -1 = the segment does not have the column."""
    found = {}
    for name in sorted({name for columns in of_segments for name in columns}):
        held = _integers(len(columns[name]) if name in columns else -1 for columns in of_segments)
        found[name] = {'held': held, **join([{'values': c[name]} for c in of_segments if name in c])}
    return found


def split_groups(columns: Mapping[str, Any]) -> list[TrajectoryGroup]:
    """The inverse of `join_groups`, with views of the columns; raises ValueError or KeyError if they do not fit."""
    prompts = list(_split_prompts(columns))
    segments = _split_segments(columns)
    trajectories = []
    fields = (columns[name].tolist() for name in ('prompt', 'sample', 'row', 'reward', 'segments', *_TIMES))
    for row in zip(*fields, *(columns[name] for name in _TEXTS), strict=True):
        prompt, sample, number, reward, count, admitted_s, finished_s, consumed_s, finish_reason, engine, label = row
        own = tuple(itertools.islice(segments, count))
        trajectories.append(
            Trajectory(
                prompts[prompt], sample, own, reward, finish_reason, engine, admitted_s, finished_s, consumed_s, label,
                number,
            )
        )  # fmt: skip
    ends = np.cumsum(columns['group_size'])
    starts = ends - columns['group_size']
    return [
        TrajectoryGroup(draw, tuple(trajectories[start:end]))
        for draw, start, end in zip(columns['group_draw'].tolist(), starts, ends, strict=True)
    ]


def _split_prompts(columns: Mapping[str, Any]) -> Iterator[Prompt]:
    tokens = _pieces(columns['prompt_tokens'], columns['prompt_length'])
    draws = columns['prompt_draw'].tolist()
    told = (columns[f'prompt_{name}'] for name in ('task', 'problem', 'source'))
    for draw, own, task, problem, source in zip(draws, tokens, *told, strict=True):
        yield Prompt(draw, own, task, problem, source)


def _split_segments(columns: Mapping[str, Any]) -> Iterator[Segment]:
    lengths = columns['length']
    of_each = zip(
        _pieces(columns['tokens'], lengths),
        _pieces(columns['behavior'], lengths),
        columns['version'].tolist(),
        _split_columns(columns['columns'], len(lengths)),
        _split_columns(columns['contexts'], len(lengths)),
        strict=True,
    )
    for fields in of_each:
        yield Segment(*fields)


def _split_columns(columns: Mapping[str, Any], segments: int) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = [{} for _ in range(segments)]
    for name, column in columns.items():
        has = np.flatnonzero(column['held'] >= 0)
        for index, values in zip(has.tolist(), _pieces(column['values'], column['held'][has]), strict=True):
            found[index][name] = values
    return found


def _pieces(whole: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    if int(lengths.sum()) != len(whole) or (lengths < 0).any():
        raise ValueError(f'{len(whole)} values where the lengths say {int(lengths.sum())}')
    return [whole[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


# Values as bytes and back: a JSON header, then the raw bytes of the arrays. Only the listed types can be encoded.
#
#     body        length of the header (4 bytes), the header, the arrays; each part begins at a multiple of 8 bytes
#     header      {'value': ..., 'arrays': [[dtype, shape, first byte], ...]}
#
# In `value`, null, numbers and strings are themselves and a JSON array is a list. An object has one key, the kind:
# dict, tuple, array, scalar, groups or the name of a record. Decoding runs no code of the sender
# and makes no object of a type that is not listed here. Decoded arrays are views of the body.


_LENGTH = struct.Struct('!I')
_ALIGNMENT = 8
_UNREADABLE = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError),
    *(SyntaxError, struct.error, MemoryError),  # numpy raises SyntaxError for some names of dtypes
)
_KINDS = 'biuf'  # of numpy dtypes: bool, integers, floats
_SCALARS = (bool, int, float, str)
Body: TypeAlias = bytes | bytearray | mmap.mmap
Buffer: TypeAlias = bytes | memoryview  # a memoryview is of bytes
_Pack = Callable[[Any], tuple[Any, ...]]
_Unpack = Callable[..., Any]


class CodecError(ValueError):
    """A value cannot be encoded, or bytes cannot be decoded."""


def _pack_stored(leaf: StoredArray) -> tuple[Any, ...]:
    return (
        leaf.directory,
        leaf.name,
        leaf.shape,
        leaf.dtype.str,
        [tuple(piece) for piece in leaf.pieces],
        leaf.if_damaged,
    )


def _unpack_stored(directory: str, name: str, shape: Any, dtype: str, pieces: Any, if_damaged: str) -> StoredArray:
    return StoredArray(directory, name, tuple(shape), np.dtype(dtype), tuple(Piece(*p) for p in pieces), if_damaged)


# the records that can be encoded: type -> (name, record to fields, fields to record)
_RECORDS: Mapping[type, tuple[str, _Pack, _Unpack]] = {
    Piece: ('Piece', tuple, Piece),
    ArrayShape: ('ArrayShape', lambda leaf: (leaf.shape, leaf.dtype), ArrayShape),
    StoredArray: ('StoredArray', _pack_stored, _unpack_stored),
}
_UNPACK = {name: unpack for name, _, unpack in _RECORDS.values()}


def encode(value: object) -> bytes:
    """Encodes a value; raises CodecError for a type that cannot be sent."""
    return b''.join(encode_parts(value))


def encode_parts(value: object) -> list[Buffer]:
    """The parts of `encode`, without a copy of arrays, or of arrays [n, ...] whose n entries are each contiguous."""
    arrays: list[np.ndarray] = []
    described = _describe(value, arrays)
    table, offset = [], 0
    for array in arrays:
        table.append([array.dtype.str, array.shape, offset])
        offset += _padded(array.nbytes)
    header = json.dumps({'value': described, 'arrays': table}, separators=(',', ':')).encode()
    padding = b' ' * (_padded(_LENGTH.size + len(header)) - _LENGTH.size - len(header))
    parts: list[Buffer] = [_LENGTH.pack(len(header) + len(padding)), header, padding]
    for array in arrays:
        parts += [*_list_bytes(array), bytes(_padded(array.nbytes) - array.nbytes)]
    return parts


def _list_bytes(array: np.ndarray) -> list[memoryview]:
    if not array.flags.c_contiguous and array.size and array[0].flags.c_contiguous:
        return [_list_bytes(entry)[0] for entry in array]
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]


def decode(body: Body) -> Any:
    """Decodes a value; raises CodecError for anything that `encode` has not made."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        first = _LENGTH.size + length
        header = json.loads(bytes(memoryview(body)[_LENGTH.size : first]))
        arrays = [_read_array(body, first, *described) for described in header['arrays']]
        return _rebuild(header['value'], arrays)
    except _UNREADABLE as error:
        raise CodecError(f'a message cannot be read ({type(error).__name__}: {error})') from error


def _describe(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or (isinstance(value, _SCALARS) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return {'array' if isinstance(value, np.ndarray) else 'scalar': _add(np.asarray(value), arrays)}
    if (record := _RECORDS.get(type(value))) is not None:
        name, pack, _ = record
        return {name: [_describe(field, arrays) for field in pack(value)]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise CodecError(f'a dict with other keys than strings does not travel: {list(value)[:4]}')
        return {'dict': {str(key): _describe(item, arrays) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        is_tuple = isinstance(value, tuple)
        if value and all(isinstance(item, TrajectoryGroup) for item in value):
            return {'groups': [is_tuple, _describe(join_groups(value), arrays)]}
        items = [_describe(item, arrays) for item in value]
        return {'tuple': items} if is_tuple else items
    raise CodecError(f'a {type(value).__name__} does not travel between processes')


def _add(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    if array.dtype.kind not in _KINDS:
        raise CodecError(f'an array of dtype {array.dtype} does not travel between processes')
    arrays.append(array)
    return len(arrays) - 1


def _read_array(body: Body, first: int, name: str, shape: Sequence[int], offset: int) -> np.ndarray:
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise CodecError(f'an array of dtype {dtype} does not travel between processes')
    if not all(type(size) is int and size >= 0 for size in (*shape, offset)):
        raise CodecError(f'an array of shape {shape} at byte {offset}')
    count = 1
    for size in shape:
        count *= size
    return np.frombuffer(body, dtype, count, first + offset).reshape(shape)


def _rebuild(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_rebuild(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'dict':
        return {key: _rebuild(item, arrays) for key, item in content.items()}
    if kind == 'tuple':
        return tuple(_rebuild(item, arrays) for item in content)
    if kind == 'array':
        return arrays[content]
    if kind == 'scalar':
        return arrays[content][()]
    if kind == 'groups':
        groups = split_groups(_rebuild(content[1], arrays))
        return tuple(groups) if content[0] else groups
    return _UNPACK[kind](*(_rebuild(field, arrays) for field in content))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def describe_arrays(tree: Any) -> Any:
    """Replaces each array in nested dicts by its ArrayShape, as a description for another process."""
    if isinstance(tree, Mapping):
        return {key: describe_arrays(item) for key, item in tree.items()}
    return ArrayShape(tuple(int(size) for size in tree.shape), str(tree.dtype))


LEARNER, CHECKPOINT, PUBLICATION, ROWS = LANES = ('learner', 'checkpoint', 'publication', 'rows')
CLOSE = 'close'  # the command after which the other end returns


class RemoteUserError(UserError):
    """An error that the user can fix, raised by another process of the run; keeps its message."""


class RemoteValueError(ValueError):
    """A ValueError of another process; the message begins with the place."""


class RemoteError(RuntimeError):
    """A bug in another process of the run; the output of that process has the traceback."""


class Command(NamedTuple):
    """Asks another process to execute something."""

    name: str  # on the learner's lane, a method of the learner
    args: tuple[Any, ...] = ()
    lane: str = LEARNER


class Failure(NamedTuple):
    """The reason why a command failed."""

    kind: str  # type of the exception
    text: str
    is_user_error: bool
    is_value_error: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), isinstance(error, UserError), isinstance(error, ValueError))

    def __str__(self) -> str:
        return f'{self.kind}: {(self.text.splitlines() or [""])[0][:300]}'


class Answer(NamedTuple):
    """The answer to a command: its result, or its failure."""

    value: Any = None
    failure: Failure | None = None


class Message(NamedTuple):
    """A command or an answer, as it is sent over a connection."""

    lane: str
    number: int  # of the command, also in its answer
    content: Command | Answer


def encode_message(message: Message) -> list[Buffer]:
    """Encodes a message, as the parts of `encode`; raises CodecError for arguments or results that cannot be sent."""
    content = message.content
    if isinstance(content, Command):
        return encode_parts([True, message.lane, message.number, content.name, tuple(content.args)])
    failure = None if content.failure is None else tuple(content.failure)
    return encode_parts([False, message.lane, message.number, content.value, failure])


def decode_message(body: bytes | bytearray) -> Message:
    """The inverse of `encode_message`; raises CodecError for anything else."""
    try:
        is_command, lane, number, first, second = decode(body)
        if lane not in LANES or type(number) is not int:
            raise CodecError(f'a message for the lane {lane!r} with the number {number!r}')
        if is_command:
            return Message(lane, number, Command(first, second, lane))
        return Message(lane, number, Answer(first, None if second is None else Failure(*second)))
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, CodecError) else CodecError(f'a message cannot be read ({error})') from error


def raise_failure(failure: Failure, where: str) -> None:
    """Raises the error of another process: a user error with its text alone, any other with the place before it."""
    if failure.is_user_error:
        raise RemoteUserError(failure.text)
    told = f'{where}: {failure.kind}: {failure.text}'
    if failure.is_value_error:
        raise RemoteValueError(told)
    raise RemoteError(f'{told} (the traceback is in the output of that process)')
