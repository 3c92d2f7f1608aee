"""Segments as they arrive at an episode."""

from __future__ import annotations

import numpy as np

from areal_jax.control.episode import Episode
from areal_jax.types import Segment


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
