"""The controller's snapshot as the JSON-able run state of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_jax.checkpoint import state as records
from areal_jax.control.episode import Episode, RunningGroup


def encode_snapshot(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    return {
        'format': 1,
        **snapshot,
        'buffer': [records.encode_group(group) for group in snapshot['buffer']],
        'running': [_encode_running(group) for group in snapshot['running']],
    }


def decode_snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **state,
        'buffer': [records.decode_group(group) for group in state['buffer']],
        'running': [_decode_running(group) for group in state['running']],
    }


def _encode_running(group: RunningGroup) -> dict[str, Any]:
    return {
        'prompt': records.encode_prompt(group.prompt),
        'admitted_s': group.admitted_s,
        'episodes': [_encode_episode(episode) for episode in group.episodes],
        'trajectories': [records.encode_trajectory(t) for t in group.trajectories.values()],
        'failed': [[sample, label] for sample, label in group.failed.items()],
    }


def _decode_running(state: Mapping[str, Any]) -> RunningGroup:
    trajectories = [records.decode_trajectory(t) for t in state['trajectories']]
    return RunningGroup(
        prompt=records.decode_prompt(state['prompt']),
        admitted_s=state['admitted_s'],
        episodes=[_decode_episode(episode) for episode in state['episodes']],
        trajectories={t.sample: t for t in trajectories},
        failed=dict(state['failed']),
    )


def _encode_episode(episode: Episode) -> dict[str, Any]:
    return {
        'sample': episode.sample,
        'segments': [records.encode_segment(segment) for segment in episode.segments],
        'finish_reason': episode.finish_reason,
        'engine': episode.engine,
    }


def _decode_episode(state: Mapping[str, Any]) -> Episode:
    segments = [records.decode_segment(segment) for segment in state['segments']]
    return Episode(state['sample'], segments, state['finish_reason'], state['engine'])
