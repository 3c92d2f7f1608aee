"""The state of the host side as one JSON value, exact to the bit, and back.

Every `encode_*` has a `decode_*` that gives an equal value. A float32 is written as the shortest decimal of its
float64, which is exact; NaN and infinity are spelled as Python's json does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.columns import declared, find
from areal_jax.control.episode import Call, Episode, Row, RunningGroup
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup

FORMAT = 10
_NUMBER = (int, float)

# what a run state must have besides 'format'; further keys are carried as they are
SCHEMA: Mapping[str, type | tuple[type, ...]] = {
    'version': int,  # updates trained
    'clock_s': _NUMBER,
    'next_seq': int,  # of the event log
    'next_run': int,  # number of the next run on a lane
    'stream': dict,  # position in the stream of prompts
    'gate': dict,  # counters of admission
    'buffer': list,  # finished groups
    'running': list,  # admitted groups: finished trajectories, partial segments
    'order': list,  # (engine, draw, sample) of open requests, as engines serve them
    'dropped': dict,  # counts by reason
    'admission': dict,  # seconds in which it was closed since the last update, by bound
    'observer': dict,  # what the metrics of the next update need from before the save
    'pool': dict,  # what is known and decided of engines
    'reallocation': (dict, type(None)),  # the split of the devices, and what moves them next; None: it is fixed
    'generated_update': (int, type(None)),  # lock-step schedules: whose batch the engines generate
}


class RunStateError(UserError, ValueError):
    """A run state that cannot be written or read; the message names the key and the fix."""


def encode_run_state(state: Mapping[str, object]) -> JsonObject:
    """`Controller.snapshot()` and any further JSON-able keys as a JSON-able dict.

    Raises RunStateError that names a missing key or a value that JSON cannot carry unchanged.
    """
    record = {
        **state,
        'format': FORMAT,
        'buffer': [encode_group(group) for group in _take(state, 'buffer', list, 'run state')],
        'running': [encode_running(group) for group in _take(state, 'running', list, 'run state')],
        'order': [list(entry) for entry in _take(state, 'order', list, 'run state')],
    }
    validate_run_state(record)
    for key, value in record.items():
        _require_json(value, f'run state {key!r}')
    return record


def decode_run_state(record: Mapping[str, Any]) -> JsonObject:
    """What `encode_run_state` was given; raises RunStateError that names a missing or malformed key."""
    validate_run_state(record)
    state = {key: value for key, value in record.items() if key != 'format'}
    state['buffer'] = [decode_group(group) for group in record['buffer']]
    state['running'] = [decode_running(group) for group in record['running']]
    state['order'] = [(engine, draw, sample) for engine, draw, sample in record['order']]
    return state


def validate_run_state(record: Mapping[str, object]) -> None:
    """Raises RunStateError that names a key which is missing, of the wrong type, or of another format."""
    found = _take(record, 'format', int, 'run state')
    if found != FORMAT:
        raise RunStateError(
            f'run state has format {found}, this version reads {FORMAT}: resume with the one that saved'
        )
    for key, kind in SCHEMA.items():
        _take(record, key, kind, 'run state')


def encode_group(group: TrajectoryGroup) -> JsonObject:
    return {'draw': int(group.draw), 'trajectories': [encode_trajectory(t) for t in group.trajectories]}


def decode_group(record: Mapping[str, object]) -> TrajectoryGroup:
    trajectories = _take(record, 'trajectories', list, 'group')
    return TrajectoryGroup(_take(record, 'draw', int, 'group'), tuple(decode_trajectory(t) for t in trajectories))


def encode_running(group: RunningGroup) -> JsonObject:
    return {
        'prompt': encode_prompt(group.prompt),
        'admitted_s': float(group.admitted_s),
        'episodes': [_encode_episode(episode) for episode in group.episodes],
        'trajectories': [encode_trajectory(t) for rows in group.finished.values() for t in rows],
        'failed': [[int(sample), label] for sample, label in group.failed.items()],
    }


def decode_running(record: Mapping[str, object]) -> RunningGroup:
    trajectories = [decode_trajectory(t) for t in _take(record, 'trajectories', list, 'running group')]
    return RunningGroup(
        prompt=decode_prompt(_take(record, 'prompt', dict, 'running group')),
        admitted_s=float(_take(record, 'admitted_s', _NUMBER, 'running group')),
        episodes=[_decode_episode(episode) for episode in _take(record, 'episodes', list, 'running group')],
        finished={rows[0].sample: rows for rows in TrajectoryGroup(0, tuple(trajectories)).episodes},
        failed=dict(_take(record, 'failed', list, 'running group')),
    )


def encode_trajectory(trajectory: Trajectory) -> JsonObject:
    return {
        'prompt': encode_prompt(trajectory.prompt),
        'sample': int(trajectory.sample),
        'segments': [encode_segment(segment) for segment in trajectory.segments],
        'reward': float(trajectory.reward),
        'finish_reason': trajectory.finish_reason,
        'engine': trajectory.engine,
        'admitted_s': float(trajectory.admitted_s),
        'finished_s': float(trajectory.finished_s),
        'consumed_s': float(trajectory.consumed_s),
        'label': trajectory.label,
        'row': int(trajectory.row),
    }


def decode_trajectory(record: Mapping[str, object]) -> Trajectory:
    times = {
        key: float(_take(record, key, _NUMBER, 'trajectory')) for key in ('admitted_s', 'finished_s', 'consumed_s')
    }
    return Trajectory(
        prompt=decode_prompt(_take(record, 'prompt', dict, 'trajectory')),
        sample=_take(record, 'sample', int, 'trajectory'),
        segments=tuple(decode_segment(segment) for segment in _take(record, 'segments', list, 'trajectory')),
        reward=float(_take(record, 'reward', _NUMBER, 'trajectory')),
        finish_reason=_take(record, 'finish_reason', str, 'trajectory'),
        engine=_take(record, 'engine', str, 'trajectory'),
        label=_take(record, 'label', str, 'trajectory'),
        row=_take(record, 'row', int, 'trajectory'),
        **times,
    )


def encode_segment(segment: Segment) -> JsonObject:
    own = segment.columns
    return {
        'tokens': np.asarray(segment.tokens, np.int32).tolist(),
        'behavior_logprobs': np.asarray(segment.behavior_logprobs, np.float32).tolist(),
        'policy_version': int(segment.policy_version),
        **{c.name: c.write(own[c.name]) if c.name in own else None for c in declared() if c.saved},
        'context': {name: find(name).write(values) for name, values in segment.context.items() if find(name).saved},
    }


def decode_segment(record: Mapping[str, object]) -> Segment:
    tokens = np.array(_take(record, 'tokens', list, 'segment'), np.int32)
    further = record.keys() - {'tokens', 'behavior_logprobs', 'policy_version', 'context'}
    context = _take(record, 'context', dict, 'segment')
    return Segment(
        tokens=tokens,
        behavior_logprobs=np.array(_take(record, 'behavior_logprobs', list, 'segment'), np.float32),
        policy_version=_take(record, 'policy_version', int, 'segment'),
        columns={n: find(n).read(record[n], len(tokens)) for n in sorted(further) if record[n] is not None},
        context={name: find(name).read(values, None) for name, values in context.items()},
    )


def encode_prompt(prompt: Prompt) -> JsonObject:
    """Raises RunStateError when `problem` holds what JSON can not carry unchanged."""
    problem = dict(prompt.problem)
    _require_json(problem, f'problem of draw {prompt.draw} (task {prompt.task!r})')
    tokens = np.asarray(prompt.tokens, np.int32).tolist()
    return {'draw': int(prompt.draw), 'tokens': tokens, 'task': prompt.task, 'problem': problem}


def decode_prompt(record: Mapping[str, object]) -> Prompt:
    return Prompt(
        draw=_take(record, 'draw', int, 'prompt'),
        tokens=np.array(_take(record, 'tokens', list, 'prompt'), np.int32),
        task=_take(record, 'task', str, 'prompt'),
        problem=_take(record, 'problem', dict, 'prompt'),
    )


def _encode_episode(episode: Episode) -> JsonObject:
    return {
        'sample': int(episode.sample),
        'finish_reason': episode.finish_reason,
        'engine': episode.engine,
        'rows': [_encode_row(row) for row in episode.rows],
        'calls': [dataclasses.asdict(call) for call in episode.calls],
        'results': list(episode.results),
        'label': episode.label,
        'discarded': sorted([version, tokens] for version, tokens in episode.discarded.items()),
        'counts': dict(sorted(episode.counts.items())),
        'outcome': episode.outcome,
    }


def _decode_episode(record: Mapping[str, object]) -> Episode:
    return Episode(
        sample=_take(record, 'sample', int, 'episode'),
        finish_reason=_take(record, 'finish_reason', (str, type(None)), 'episode'),
        engine=_take(record, 'engine', str, 'episode'),
        rows=[_decode_row(row) for row in _take(record, 'rows', list, 'episode')],
        calls=[Call(**call) for call in _take(record, 'calls', list, 'episode')],
        results=_take(record, 'results', list, 'episode'),
        label=_take(record, 'label', str, 'episode'),
        discarded=dict(_take(record, 'discarded', list, 'episode')),
        counts=_take(record, 'counts', dict, 'episode'),
        outcome=_take(record, 'outcome', (dict, type(None)), 'episode'),
    )


def _encode_row(row: Row) -> JsonObject:
    own = row.prompt_tokens
    return {
        'prompt_tokens': None if own is None else np.asarray(own, np.int32).tolist(),
        'fork': row.fork,
        'segments': [encode_segment(segment) for segment in row.segments],
    }


def _decode_row(record: Mapping[str, object]) -> Row:
    own = _take(record, 'prompt_tokens', (list, type(None)), 'row')
    return Row(
        prompt_tokens=None if own is None else np.array(own, np.int32),
        fork=_take(record, 'fork', str, 'row'),
        segments=[decode_segment(segment) for segment in _take(record, 'segments', list, 'row')],
    )


def _take(record: Mapping[str, object], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """The value of a required key."""
    if key not in record:
        raise RunStateError(
            f'{where} has no {key!r}: it was cut short or saved by another program; keys: {list(record)}'
        )
    if not isinstance(record[key], kind):
        names = ' or '.join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise RunStateError(f'{where} {key!r} is {record[key]!r}, not of type {names}')
    return record[key]


def _require_json(value: object, where: str) -> None:
    """Refuses what `json` would refuse or silently change: tuples, keys that are not text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, list):
        for item in value:
            _require_json(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RunStateError(f'{where} has the key {key!r}, which JSON would turn into text: use str keys')
            _require_json(item, where)
    else:
        raise RunStateError(
            f'{where} holds {value!r} of type {type(value).__name__}, which JSON cannot carry unchanged: '
            'use dict, list, str, int, float, bool or None'
        )
