"""Groups of trajectories as columns and back: one array for each field of all trajectories together.

The batch of an update has thousands of trajectories: a few large arrays are written and read much faster than thousands
of small ones. checkpoint/store.py has the form for run states, which is text. A prompt that trajectories share is
written once, and shared again after reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.columns import ColumnArrays, join
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup, concatenate

_TIMES = ('admitted_s', 'finished_s', 'consumed_s')
_TEXTS = ('finish_reason', 'engine', 'label')


def join_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Columns: lists of text, and arrays. `split_groups` gives equal groups, with the dtypes that types.py declares."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    prompts = {id(trajectory.prompt): trajectory.prompt for trajectory in trajectories}
    number = {key: index for index, key in enumerate(prompts)}
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return {
        'group_draw': _integers(group.draw for group in groups),
        'group_size': _integers(len(group.trajectories) for group in groups),
        'prompt_draw': _integers(prompt.draw for prompt in prompts.values()),
        'prompt_task': [prompt.task for prompt in prompts.values()],
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
    """Of each column: of how many tokens each segment has it, -1 = it has none, and the values."""
    found = {}
    for name in sorted({name for columns in of_segments for name in columns}):
        held = _integers(len(columns[name]) if name in columns else -1 for columns in of_segments)
        found[name] = {'held': held, **join([{'values': c[name]} for c in of_segments if name in c])}
    return found


def split_groups(columns: Mapping[str, Any]) -> list[TrajectoryGroup]:
    """The inverse; arrays are views of the columns. Raises ValueError or KeyError where the columns do not fit."""
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
    for draw, own, task, problem in zip(draws, tokens, columns['prompt_task'], columns['prompt_problem'], strict=True):
        yield Prompt(draw, own, task, problem)


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
    """Consecutive views of these lengths, which together are the whole."""
    ends = np.cumsum(lengths)
    if int(lengths.sum()) != len(whole) or (lengths < 0).any():
        raise ValueError(f'{len(whole)} values where the lengths say {int(lengths.sum())}')
    return [whole[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)
