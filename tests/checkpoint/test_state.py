"""The host side as JSON and back: equal to the bit, and a clear error where it can not be."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal_jax import columns
from areal_jax.checkpoint import store as records
from areal_jax.checkpoint.store import RunStateError, decode_run_state, encode_run_state
from areal_jax.control.controller import HostState
from areal_jax.control.episode import Episode, Row, RunningGroup
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup

_INT32 = st.integers(-(2**31), 2**31 - 1)
_SECONDS = st.floats()  # float64, NaN and infinities with them
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _segments(draw):
    length = draw(st.integers(1, 4))
    logprobs = draw(hnp.arrays(np.float32, length, elements=st.floats(width=32)))
    cut = draw(st.none() | hnp.arrays(np.float32, length, elements=st.floats(width=32)))
    columns = {} if cut is None else {'sampling_logprobs': cut}
    return Segment(draw(hnp.arrays(np.int32, length, elements=_INT32)), logprobs, draw(_INT32), columns)


_prompts = st.builds(
    Prompt,
    draw=st.integers(0, 2**40),
    tokens=hnp.arrays(np.int32, st.integers(0, 4), elements=_INT32),
    task=st.text(max_size=5),
    problem=st.dictionaries(st.text(max_size=5), _JSON, max_size=2),
    source=st.sampled_from(['', 'gsm8k']),
)
_trajectories = st.builds(
    Trajectory,
    prompt=_prompts,
    sample=st.integers(0, 100),
    segments=st.lists(_segments(), max_size=3).map(tuple),
    reward=st.floats(),
    finish_reason=st.sampled_from(['stop', 'length']),
    engine=st.text(max_size=5),
    admitted_s=_SECONDS,
    finished_s=_SECONDS,
    consumed_s=_SECONDS,
)
_groups = st.builds(
    TrajectoryGroup, draw=st.integers(0, 2**40), trajectories=st.lists(_trajectories, min_size=1, max_size=2).map(tuple)
)
_rows = st.builds(
    Row,
    prompt_tokens=st.none() | hnp.arrays(np.int32, st.integers(0, 4), elements=_INT32),
    fork=st.text(max_size=5),
    segments=st.lists(_segments(), max_size=2),
)
_episodes = st.builds(
    Episode,
    sample=st.integers(0, 100),
    rows=st.lists(_rows, min_size=1, max_size=2),
    finish_reason=st.sampled_from([None, 'stop', 'length']),
    engine=st.text(max_size=5),
)
_running = st.builds(
    RunningGroup,
    prompt=_prompts,
    admitted_s=_SECONDS,
    episodes=st.lists(_episodes, max_size=2),
    finished=st.lists(_trajectories, max_size=2, unique_by=lambda t: t.sample).map(
        lambda ts: {t.sample: (t, dataclasses.replace(t, row=1)) for t in ts}
    ),
    failed=st.dictionaries(st.integers(0, 100), st.sampled_from(['timeout', 'crash']), max_size=2),
)


@settings(deadline=None, max_examples=60)
@given(_groups, _running)
def test_groups_come_back_bit_for_bit(group, running):
    _assert_same(records.decode_group(_through_json(records.encode_group(group))), group)
    _assert_same(records.decode_running(_through_json(records.encode_running(running))), running)


def test_run_state_comes_back():
    state = _state()
    back = decode_run_state(_through_json(encode_run_state(state)))
    _assert_same(back, state)
    assert back['order'] == [('engine/0', 7, 1)]  # tuples again


def test_keys_beyond_the_schema_are_carried():
    back = decode_run_state(_through_json(encode_run_state({**_state(), 'tokens': {'trained': 12}})))
    assert back['tokens'] == {'trained': 12}


def test_decoded_arrays_have_the_types_of_the_contract_even_when_empty():
    prompt = records.decode_prompt({'draw': 0, 'tokens': [], 'task': 't', 'problem': {}})
    record = {'tokens': [1], 'behavior_logprobs': [-1], 'policy_version': 0, 'context': {}, 'sampling_logprobs': [-1]}
    segment = records.decode_segment(record)
    assert (prompt.tokens.dtype, segment.tokens.dtype) == (np.int32, np.int32)
    assert (segment.behavior_logprobs.dtype, segment.columns['sampling_logprobs'].dtype) == (np.float32, np.float32)


def test_a_segment_has_the_columns_that_are_saved_and_earlier_checkpoints_have_fewer(monkeypatch):
    monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))
    for name, saved in (('kept', True), ('left', False)):
        columns.declare(columns.Column(name, 'int32', saved=saved))
    ones = np.ones(1, np.int32)
    record = records.encode_segment(Segment(ones, np.zeros(1, np.float32), 0, {'kept': ones, 'left': ones}))
    assert (list(record)[3:], record['kept']) == (['sampling_logprobs', 'routed_experts', 'kept', 'context'], [1])
    assert {n: a.tolist() for n, a in records.decode_segment(record).columns.items()} == {'kept': [1]}
    assert records.decode_segment({n: v for n, v in record.items() if n != 'kept'}).columns == {}
    with pytest.raises(
        columns.ColumnError, match="column 'more' is not declared, only sampling_logprobs, routed_experts"
    ):
        records.decode_segment(record | {'more': [1]})


def test_routes_and_the_context_of_a_segment_come_back_as_bytes():
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    columns_of = lambda part: {'routed_experts': part}
    tokens = np.ones(2, np.int32)
    segment = Segment(tokens, np.zeros(2, np.float32), 0, columns_of(routes[:2]), columns_of(routes))
    back = records.decode_segment(_through_json(records.encode_segment(segment)))
    for found, expected in ((back.columns, routes[:2]), (back.context, routes)):
        assert (found['routed_experts'].dtype, found['routed_experts'].tolist()) == (np.uint8, expected.tolist())


@pytest.mark.parametrize('key', ['format', *sorted(HostState.__annotations__.keys() - {'filter'})])
def test_a_missing_key_is_named(key):
    record = encode_run_state(_state())
    del record[key]
    with pytest.raises(RunStateError, match=f"run state has no '{key}'"):
        decode_run_state(record)


def test_a_missing_key_of_a_part_is_named():
    record = encode_run_state(_state())
    del record['running'][0]['episodes'][0]['rows'][0]['segments'][0]['behavior_logprobs']
    with pytest.raises(RunStateError, match="segment has no 'behavior_logprobs'"):
        decode_run_state(record)


@pytest.mark.parametrize(
    ('part', 'key', 'value', 'kind'),
    [
        ('trajectory', 'reward', 'x', 'float'),
        ('episode', 'engine', 3, 'str'),
        ('row', 'prompt_tokens', ['x'], 'list of int or null'),
        ('prompt', 'problem', [], 'Mapping'),
    ],
)
def test_a_wrong_type_in_a_part_is_named(part, key, value, kind):
    record = encode_run_state(_state())
    running = record['running'][0]
    parts = {
        'trajectory': running['trajectories'][0],
        'episode': running['episodes'][0],
        'row': running['episodes'][0]['rows'][0],
        'prompt': running['prompt'],
    }
    parts[part][key] = value
    with pytest.raises(RunStateError, match=re.escape(f'{part} {key!r} is {value!r}, not of type {kind}')):
        decode_run_state(record)


def test_another_format_and_a_wrong_type_are_refused():
    record = encode_run_state(_state())
    with pytest.raises(RunStateError, match='format 2, this version reads 10: resume with the one that saved'):
        decode_run_state({**record, 'format': 2})
    with pytest.raises(RunStateError, match="'gate' is 3, not of type dict"):
        decode_run_state({**record, 'gate': 3})


@pytest.mark.parametrize('value', [(1, 2), {3: 'x'}, np.int64(1), np.zeros(2)], ids=repr)
def test_what_json_would_change_is_refused_by_name(value):
    prompt = Prompt(5, np.zeros(1, np.int32), 'sums', {'x': [value]})
    with pytest.raises(RunStateError, match=r"problem of draw 5 \(task 'sums'\)"):
        records.encode_prompt(prompt)
    with pytest.raises(RunStateError, match="'stream'"):
        encode_run_state({**_state(), 'stream': {'x': value}})


def _state():
    prompt = Prompt(7, np.arange(3, dtype=np.int32), 'sums', {'answer': '12'})
    segment = Segment(np.array([4, 5], np.int32), np.array([-0.1, -2.5], np.float32), 3)
    trajectory = Trajectory(prompt, 0, (segment,), 1.0, 'stop', 'engine/0', 0.1, 0.2)
    fork = Row(np.array([1, 2], np.int32), 'history', [segment])
    episodes = [
        Episode(0, 'stop', 'engine/0', [Row(segments=[segment]), fork]),
        Episode(1, rows=[Row(segments=[segment])]),
    ]
    running = RunningGroup(prompt, 0.25, episodes)
    running.finished[0] = trajectory, dataclasses.replace(trajectory, row=1)
    return {
        'version': 3,
        'clock_s': 0.1 + 0.2,
        'next_seq': 99,
        'next_run': 21,
        'stream': {'draw': 8, 'seed': 0},
        'gate': {'version': 3, 'admitted': 8, 'running': 1, 'buffered': 1},
        'buffer': [TrajectoryGroup(6, (trajectory,))],
        'running': [running],
        'order': [('engine/0', 7, 1)],
        'dropped': {'over_age': 2},
        'admission': {'seconds': {'eta': 0.5}, 'bound': 'checkpoint', 'weight': 1, 'since_s': 12.5},
        'idle_slots': {'seconds': {}, 'bound': None, 'weight': 0, 'since_s': 12.5},
        'observer': {'generated': 7},
        'generated_update': None,
        'pool': {'sparing': None, 'decoded': {'engine/0': [120.0, 0.5]}},
        'reallocation': None,
    }


def _through_json(record):
    return json.loads(json.dumps(record))


def _assert_same(actual, expected):
    """Equal types, dtypes and values; floats to the bit (-0.0 is not 0.0), but any NaN for a NaN."""
    assert type(actual) is type(expected)
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            _assert_same(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
        if expected.dtype == np.float32:
            signs = np.signbit(actual) == np.signbit(expected)
            assert np.all(signs | np.isnan(expected))
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            _assert_same(actual[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, float):
        assert repr(actual) == repr(expected) or (math.isnan(actual) and math.isnan(expected))
    else:
        assert actual == expected
