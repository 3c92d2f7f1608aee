"""Segments as they arrive at an episode."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.control.episode import Episode, RunningGroup, digest_routes
from areal_jax.types import Prompt, Segment, Verdict


def _segment(tokens, version, cut):
    values = np.array(tokens, np.float32)
    return Segment(np.array(tokens, np.int32), -values, version, {'sampling_logprobs': -values / 2} if cut else {})


def test_segments_of_one_version_become_one_with_both_logprobs():
    episode = Episode(0)
    for tokens in ([1, 2], [3]):
        episode.append(_segment(tokens, 4, cut=True))
    (joined,) = episode.segments
    assert joined.tokens.tolist() == [1, 2, 3]
    assert joined.behavior_logprobs.tolist() == [-1, -2, -3]
    assert joined.columns['sampling_logprobs'].tolist() == [-0.5, -1, -1.5]
    assert joined.columns['sampling_logprobs'].dtype == np.float32


def test_segments_without_a_cut_stay_without():
    episode = Episode(0)
    for tokens in ([1, 2], [3]):
        episode.append(_segment(tokens, 4, cut=False))
    (joined,) = episode.segments
    assert joined.columns == {}


def test_other_versions_and_other_sampling_are_not_joined():
    episode = Episode(0)
    for version, cut in ((4, True), (5, True), (5, False)):
        episode.append(_segment([1], version, cut))
    kinds = [(s.policy_version, list(s.columns)) for s in episode.segments]
    assert kinds == [(4, ['sampling_logprobs']), (5, ['sampling_logprobs']), (5, [])]


def test_rows_of_an_episode_become_trajectories_with_its_reward():
    """The first row begins with the prompt of the draw, a fork with its own."""
    prompt = Prompt(7, np.array([1, 2], np.int32), 'task', {})
    group = RunningGroup(prompt, 0.5, [Episode(0), Episode(1)])
    episode = group.episodes[0]
    episode.append(_segment([3], 4, cut=False))
    episode.fork(np.array([1, 9], np.int32), 'history').append(_segment([5, 6], 5, cut=False))
    episode.finish_reason = 'stop'
    before = group.copy()
    group.record(episode, Verdict(0.25), 2.0)
    group.record(group.episodes[1], None, 2.0)
    assert group.complete
    made = group.group()
    assert [(t.sample, t.row, t.reward, t.tokens.tolist()) for t in made.trajectories] == [
        (0, 0, 0.25, [1, 2, 3]),
        (0, 1, 0.25, [1, 9, 5, 6]),
    ]
    assert made.trajectories[0].prompt is prompt
    assert [[t.row for t in rows] for rows in made.episodes] == [[0, 1]]
    assert made.heads == made.trajectories[:1]
    episode.append(_segment([8], 5, cut=False))
    assert [len(row.segments[0].tokens) for row in before.episodes[0].rows] == [1, 2]  # a snapshot does not grow


def test_a_digest_of_routes_tells_any_entry_and_which_tokens_have_them():
    routes = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)

    def digest(context, own):
        segment = Segment(np.ones(len(own), np.int32), np.zeros(len(own), np.float32), 0, {'routed_experts': own})
        return digest_routes([dataclasses.replace(segment, context={'routed_experts': context})])

    found = [digest(routes, routes), digest(routes, routes ^ 1), digest(routes[:2], routes), digest(routes, routes[:2])]
    assert len({*found}) == 4
    assert found[0] == digest(routes.copy(), routes.copy())
    assert {len(one) for one in found} == {16}
    assert digest_routes([Segment(np.ones(1, np.int32), np.zeros(1, np.float32), 0)]) == ''
