"""A run of two updates whose every number can be worked out by hand."""

from __future__ import annotations

from typing import Any

from areal_jax.telemetry.facts import EvaluationScores, RunFacts


def event_log(*entries: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Events from (time, kind, fields), numbered in order."""
    return [
        {'seq': seq, 'time': t, 'lane': fields.get('engine'), 'kind': kind, **fields}
        for seq, (t, kind, fields) in enumerate(entries)
    ]


def work(lane: str, kind: str, start: float, end: float, run: int) -> list[tuple[float, str, dict[str, Any]]]:
    """The two events of an occupation of a lane."""
    common = {'lane': lane, 'run': run, 'work': kind, 'amount': 1.0}
    return [
        (start, 'run_start', common),
        (end, 'run_done', {**common, 'started': start, 'seconds': end - start}),
    ]


def dispatch(
    start: float, end: float, run: int, slots: list[str | None], tokens: int, version: int
) -> list[tuple[float, str, dict[str, Any]]]:
    """A decode dispatch of engine/0: its occupation of the lane, then its event."""
    fields = {'engine': 'engine/0', 'dispatch': run, 'slots': slots, 'bucket': 32, 'steps': 4}
    done = (end, 'decode', {**fields, 'tokens': tokens, 'version': version})
    return [*work('engine/0', 'decode', start, end, run), done]


def load(time: float, version: int, pause: float) -> tuple[float, str, dict[str, Any]]:
    return (time, 'load', {'engine': 'engine/0', 'version': version, 'pause_seconds': pause})


def publish(time: float, version: int) -> tuple[float, str, dict[str, Any]]:
    return (time, 'publish', {'version': version, 'manifest': f'm{version}'})


def two_updates() -> list[dict[str, Any]]:
    """Window 10..30 s. Draw 0 -> update 1, draw 1 -> update 2, draw 2 interrupted at 24 s and dropped, 3 running after
    the window, 4 pending. The engine was idle when version 2 came.

    engine/0: 10-14, 14-18, 18-24 (v0), rebuild 24-24.5, 24.5-28 (v1): 18 s.
    learner: train 18-22, snapshot 22-22.5, train 24-29: 9.5 s. publish: 22.5-23, load 23-23.5, 29-30: 2 s.
    """
    interrupt = {'engine': 'engine/0', 'requests': ['0/2/0'], 'from_version': 0, 'to_version': 1}
    return event_log(
        (0, 'join', {'engine': 'engine/0'}),
        load(0, 0, 9.0),
        (0, 'evaluate', {'phase': 'before', 'mode': 'start'}),
        *dispatch(0, 2, 0, ['0/-1/0', None], 100, 0),
        (2, 'evaluate', {'phase': 'before', 'mode': 'done'}),
        (10, 'draw', {'draw': 0}),
        (10, 'admit', {'draw': 0}),
        (10, 'draw', {'draw': 1}),
        (10, 'admit', {'draw': 1}),
        *dispatch(10, 14, 1, ['0/0/0', '0/1/0'], 8, 0),
        *dispatch(14, 18, 2, ['0/0/0', '0/1/0'], 8, 0),
        (18, 'buffer', {'draw': 0, 'partial': False}),
        (18, 'buffer', {'draw': 1, 'partial': False}),
        (18, 'consume', {'update': 1, 'draws': [0]}),
        (18, 'draw', {'draw': 2}),
        (18, 'admit', {'draw': 2}),
        *work('learner', 'train', 18, 22, 3),
        *work('learner', 'snapshot', 22, 22.5, 4),
        *work('publish', 'publish', 22.5, 23, 5),
        publish(23, 1),
        *work('publish', 'load', 23, 23.5, 6),
        *dispatch(18, 24, 7, ['0/2/0', None], 4, 0),
        (24, 'interrupt', interrupt),
        *work('engine/0', 'prefill', 24, 24.5, 8),
        load(24.5, 1, 0.5),
        (24, 'consume', {'update': 2, 'draws': [1]}),
        *dispatch(24.5, 28, 9, ['0/2/0', None], 3, 1),
        (28, 'buffer', {'draw': 2, 'partial': False}),
        *work('learner', 'train', 24, 29, 10),
        (29, 'drop', {'draw': 2, 'reason': 'over_age', 'detail': ''}),
        (29, 'draw', {'draw': 3}),
        (29, 'admit', {'draw': 3}),
        (29, 'draw', {'draw': 4}),
        *work('publish', 'publish', 29, 30, 11),
        publish(30, 2),
        (30.2, 'interrupt', {**interrupt, 'requests': [], 'from_version': 1, 'to_version': 2}),
        load(30.2, 2, 0.1),
        *dispatch(30.2, 30.8, 12, ['0/3/0', None], 5, 2),
        (31, 'evaluate', {'phase': 'after', 'mode': 'start'}),
        *dispatch(31, 33, 13, ['0/-1/0', None], 100, 2),
        (33, 'evaluate', {'phase': 'after', 'mode': 'done'}),
    )


def two_metrics(*optimizer_steps: tuple[float, float]) -> list[dict[str, Any]]:
    """Ages: 10 tokens of age 0; then 2 of age 0 and 4 of age 1. Mismatch on 10 and then 30 tokens. Admission was closed
    for 16 of 20 s: 10 by eta, 6 by the running groups.

    `optimizer_steps`: (applied, skipped) of either update; by default one applied each.
    """
    shared = {'groups/trained': 1, 'buffer/groups': 1, 'update/trained_trajectories': 2}
    lines: list[dict[str, Any]] = [
        {
            'step': 1, 'time': 13.0, 'reward/mean': 0.25, 'tokens/trained': 10, **shared,
            'staleness/token_age_histogram': [10], 'staleness/versions_per_trajectory_mean': 1.0,
            'staleness/versions_per_trajectory_max': 1, 'mismatch/n': 10.0, 'mismatch/mean_abs': 0.04,
            'mismatch/max_abs': 0.5, 'mismatch/exact_share': 0.5, 'admission/held_seconds/eta': 8.0,
        },
        {
            'step': 2, 'time': 20.0, 'reward/mean': 0.75, 'tokens/trained': 6, **shared,
            'staleness/token_age_histogram': [2, 4], 'staleness/versions_per_trajectory_mean': 2.0,
            'staleness/versions_per_trajectory_max': 2, 'mismatch/n': 30.0, 'mismatch/mean_abs': 0.08,
            'mismatch/max_abs': 0.25, 'mismatch/exact_share': 0.9, 'update/filtered_equal_rewards': 1.0,
            'admission/held_seconds/eta': 2.0, 'admission/held_seconds/max_running_groups': 6.0,
            'admission/idle_slot_seconds/max_running_groups': 2.0,
        },
    ]  # fmt: skip
    for line, (applied, skipped) in zip(lines, optimizer_steps or ((1.0, 0.0),) * 2, strict=True):
        line |= {'update/optimizer_steps': applied, 'update/skipped_steps': skipped}
    return lines


def two_facts(**changes: Any) -> RunFacts:
    """Three problems: greedy 1 of 3 then 3 of 3; gains of the sampled means .5, 0, 1."""
    fields: dict[str, Any] = {
        'config': 'configs/two.py', 'seed': 7, 'eta': 1.0, 'schedule': 'natural', 'clock': 'real', 'wall_seconds': 40.0,
        'planned_steps': None, 'compilation_budget': 0,
        'evaluation_before': EvaluationScores((1.0, 0.0, 0.0), ((0.0, 1.0), (0.0, 0.0), (0.0, 0.0)), 0.5),
        'evaluation_after': EvaluationScores((1.0, 1.0, 1.0), ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0)), 0.6),
        'peak_memory_bytes': 3 * 2**30, 'event_loop_lag_max': 0.01, 'weights_sha256': 'ab' * 32, 'git_commit': 'c0ffee',
        'versions': {'jax': '0.10.2'}, 'hardware': {'cores': 2, 'platform': 'Linux'},
        'devices': {'learner': [0], 'engines': {'engine/0': [0]}},
        'alone_seconds': {'generate': 6.0, 'train': 3.0}, 'cpu_seconds': 32.0, 'cores': 2,
        'problems': {'train': 12, 'held_out': 3, 'dropped': 2},
    }  # fmt: skip
    return RunFacts(**{**fields, **changes})
