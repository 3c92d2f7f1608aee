"""What travels comes out equal, bit for bit and of the same types; nothing else can be sent or read."""

from __future__ import annotations

import dataclasses
import json
import math
import struct

import numpy as np
import pytest

from areal_jax.checkpoint.shards import ArrayShape, Piece, StoredArray
from areal_jax.distributed.messages import (
    Answer,
    CodecError,
    Command,
    Failure,
    Message,
    decode,
    decode_message,
    describe_arrays,
    encode,
    encode_message,
    encode_parts,
)
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup


def _same(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _same(one, other)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, StoredArray):
        for field in dataclasses.fields(expected):
            _same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected or (math.isnan(found) and math.isnan(expected))


_PIECE = Piece([0, 4], [2, 4], 123, 'writer_0001/0000')
_VALUES = {
    'plain': [None, True, 3, -(2**70), 0.1, float('nan'), float('-inf'), 'text \u00e9', '', [], {}, ()],
    'nested': {'a': [1, (2, [3, {'b': ()}])], 'kind': {'array': 0}, 'tuple': [1]},
    'arrays': [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(2.5),
        np.array([True, False]),
        np.arange(12, dtype=np.float64).reshape(3, 4).T,
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.arange(3, dtype=np.uint8),
    ],
    'scalars': [np.float32(1.5), np.int64(7), np.bool_(True)],
    'records': [_PIECE, ArrayShape((2, 3), 'float32'), {'w': [_PIECE, _PIECE]}],
}


@pytest.mark.parametrize('name', _VALUES)
def test_values_come_out_as_they_were(name):
    _same(decode(encode(_VALUES[name])), _VALUES[name])


def test_a_stored_array_is_told_without_what_its_reader_keeps():
    leaf = StoredArray('/steps/arrays', 'params/w', (2, 8), np.dtype(np.float32), (_PIECE,), 'go back')
    leaf.reader.tables['x'] = 'kept'
    found = decode(encode({'w': leaf}))['w']
    assert found == leaf
    assert found.reader.tables == {}
    assert isinstance(found.pieces[0], Piece)


def _columns(version, n, floats):
    """(columns, context), each of which some segments have and others have not."""
    routes = np.arange(4 * n, dtype=np.uint8).reshape(2 * n, 1, 2)
    if version == 0:
        return {'routed_experts': routes[:n]}, {'routed_experts': routes}
    return {'sampling_logprobs': floats(n)} if version == 1 else {}, {}


def _groups():
    rng = np.random.default_rng(0)
    floats = lambda n: -rng.random(n, np.float32)
    tokens = lambda n: rng.integers(0, 99, n, np.int32)
    groups = []
    for draw in range(3):
        shared = Prompt(draw, tokens(4 + draw), 'task', {'answer': [draw, None, {'x': 0.1}]}, ['', 'a', 'b'][draw])
        trajectories = []
        for sample in range(2 + draw):
            sizes = [3, 1, 5][: sample + 1]
            segments = tuple(
                Segment(tokens(n), floats(n), version - 1, *_columns(version, n, floats))
                for version, n in enumerate(sizes)
            )
            prompt = shared if sample else Prompt(draw, shared.tokens.copy(), 'task', {'answer': 'another'})
            times = 0.1 * draw, 0.2 * sample
            trajectory = Trajectory(prompt, sample, segments, 0.3 * sample, 'stop', f'engine/{draw}', *times)
            trajectories.append(
                trajectory if sample else dataclasses.replace(trajectory, label='unparsed', consumed_s=9.5, row=2)
            )
        groups.append(TrajectoryGroup(draw, tuple(trajectories)))
    return groups


def test_groups_come_out_as_they_were():
    groups = _groups()
    _same(decode(encode(groups)), groups)
    _same(decode(encode((tuple(groups), 3))), (tuple(groups), 3))
    trajectories = decode(encode(groups))[2].trajectories
    assert trajectories[1].prompt is trajectories[2].prompt  # as it was sent
    assert trajectories[0].prompt is not trajectories[1].prompt


def test_a_group_without_trajectories_or_segments_travels():
    prompt = Prompt(1, np.zeros(0, np.int32), '', {})
    empty = TrajectoryGroup(1, (Trajectory(prompt, 0, (), 0.0, 'stop', '', 0.0, 0.0),))
    _same(decode(encode([empty, TrajectoryGroup(2, ())])), [empty, TrajectoryGroup(2, ())])


def test_messages_come_out_as_they_were():
    command = Message('checkpoint', 7, Command('write_shards', ('/x', np.ones(2)), 'checkpoint'))
    answers = [Answer({'loss': 0.5}), Answer(None, Failure('ValueError', 'bad', False, True))]
    for message in (command, *(Message('learner', 1, answer) for answer in answers)):
        _same(decode_message(b''.join(encode_message(message))), message)


@pytest.mark.parametrize(
    'value',
    [object(), {1: 2}, {1, 2}, b'bytes', np.array([object()]), np.array(['text']), lambda: 1, 1j, [[Exception()]]],
)
def test_other_types_do_not_travel(value):
    with pytest.raises(CodecError, match='travel'):
        encode(value)


@pytest.mark.parametrize(
    'place', [np.s_[:], np.s_[:, 1:3], np.s_[:, [0, 3]], np.s_[:, :, ::2], np.s_[:0, 1:3], np.s_[2]]
)
def test_cuts_of_an_array_travel_and_rows_of_a_batch_are_not_copied(place):
    whole = np.arange(5 * 4 * 6, dtype=np.int32).reshape(5, 4, 6)
    cut = whole[place]
    np.testing.assert_array_equal(decode(encode(cut)), cut)
    if place in (np.s_[:], np.s_[:, 1:3]):
        pieces = encode_parts(cut)[3:-1]
        assert all(np.shares_memory(whole, np.frombuffer(piece, np.uint8)) for piece in pieces)


def _forged(header) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack('!I', len(content)) + content + bytes(64)


@pytest.mark.parametrize(
    'body',
    [
        b'',
        b'\xff\xff\xff\xff{}',
        _forged([]),
        _forged({'value': {'os.system': ['ls']}, 'arrays': []}),
        _forged({'value': {'array': 0, 'dict': {}}, 'arrays': []}),
        _forged({'value': {'array': 0}, 'arrays': [['|O', [1], 0]]}),
        _forged({'value': {'array': 0}, 'arrays': [['<f4', [10**9], 0]]}),
        _forged({'value': {'array': 0}, 'arrays': [['<f4', [-1], 0]]}),
        _forged({'value': {'array': 0}, 'arrays': [['<f4', [10**30], 0]]}),
        _forged({'value': {'array': 0}, 'arrays': [['<f4', [1], 10**30]]}),
        _forged({'value': {'array': 0}, 'arrays': [['<f4', [1], -4]]}),
        _forged({'value': {'array': 0}, 'arrays': [['a,(', [1], 0]]}),
        _forged({'value': {'groups': [False, {'dict': {}}]}, 'arrays': []}),
        _forged({'value': {'Piece': [1]}, 'arrays': []}),
        _forged('[' * 5000),
        struct.pack('!I', 5000) + b'[' * 5000,
        struct.pack('!I', 5012) + b'{"value":' + b'[' * 5003,
        _forged({'value': 1, 'arrays': [['<f4', [float('inf')], 0]]}),
    ],
)
def test_bytes_that_nobody_encoded_are_refused(body):
    with pytest.raises(CodecError):
        decode(body)


@pytest.mark.parametrize('value', [None, [True, 'lane', 0, 'update', ()], [True, 'learner', 'x', 'update', ()], [1]])
def test_values_that_are_no_messages_are_refused(value):
    with pytest.raises(CodecError):
        decode_message(encode(value))


def test_arrays_are_described_without_their_values():
    tree = {'a': {'w': np.ones((2, 3), np.float32)}, 'n': np.array(1)}
    assert describe_arrays(tree) == {'a': {'w': ArrayShape((2, 3), 'float32')}, 'n': ArrayShape((), 'int64')}
