"""The importance ratio falls into parts that are each measured: engine mismatch, drift of every update, the update."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.learning.diagnostics.ratio_split import Tokens, is_sampled, split_ratio
from areal_jax.learning.row_layout import RowLayout
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import Segment, TrajectoryGroup
from tests.learning import examples
from tests.learning.examples import random_groups, tiny_decoder

_CONFIG = tiny_decoder(n_layers=2).config
_PARAMS = tiny_decoder(n_layers=2).init(seed=2, scale=2.0)
_BYTES = sum(leaf.size * 4 for leaf in jax.tree.leaves(_PARAMS))
_ALL = {'ratio_sample': 1.0, 'ring_bytes': 8 * _BYTES}


def make_learner(ratio=_ALL, *, layers='list', fsdp=1, **settings):
    settings = {'rows_per_microbatch': fsdp} | settings | (ratio or {})
    return examples.make_learner(
        make_mesh(fsdp=fsdp), decoder=Decoder(_CONFIG, layers=layers), params=_PARAMS, **settings
    )


@pytest.fixture(scope='module')
def shared():
    """(a learner, its weights at the start): tests put them back."""
    learner = make_learner(n_minibatches=2)
    return learner, learner.save()


@pytest.fixture
def learner(shared):
    learner, start = shared
    learner.restore(start)
    learner.publish(0)
    return learner


def generate(learner, version, groups):
    """The groups with the log-probs of the learner's weights in the segments of this version, as an engine's."""
    return [
        dataclasses.replace(g, trajectories=tuple(_generate(learner, version, t) for t in g.trajectories))
        for g in groups
    ]


def _generate(learner, version, trajectory):
    scored = learner.score(version, trajectory.prompt.tokens, trajectory.answer_tokens)
    segments, begin = [], 0
    for segment in trajectory.segments:
        own = scored[begin : begin + len(segment.tokens)]
        begin += len(segment.tokens)
        segments.append(Segment(segment.tokens, own, version) if segment.policy_version == version else segment)
    return dataclasses.replace(trajectory, segments=tuple(segments))


def train_to_version_2(learner, change=lambda groups: groups):
    """Metrics of the third update, whose tokens are of versions 0, 1 and 2 (random_groups), each by its own weights."""
    groups = random_groups(5, 5)
    for version in range(3):
        groups = generate(learner, version, groups)
        if version < 2:
            fresh = [_at(g, version) for g in random_groups(version, 4)]
            learner.update(generate(learner, version, fresh), version)
            learner.publish(version + 1)
    return learner.update(change(groups), 2)


def _at(group, version):
    """All generated tokens of one version."""
    moved = [
        dataclasses.replace(
            t,
            segments=tuple(
                dataclasses.replace(s, policy_version=version) if s.policy_version >= 0 else s for s in t.segments
            ),
        )
        for t in group.trajectories
    ]
    return TrajectoryGroup(group.draw, tuple(moved))


def test_the_parts_add_up_and_each_has_its_cause(learner):
    metrics = train_to_version_2(learner)
    assert metrics['ratio/tokens'] == metrics['update/trained_tokens'] > 40
    assert metrics['ratio/left_ring_tokens'] == 0
    assert metrics['ratio/identity_error'] < 1e-6
    for age in '012':  # the engine has the learner's own log-probs: of tokens of every age
        assert metrics[f'ratio/of_age/{age}/mismatch_rms'] < 2e-6
    assert metrics['ratio/of_age/0/drift_rms'] == 0
    assert metrics['ratio/of_age/1/drift_rms'] > 1e-3
    assert metrics['ratio/of_age/2/drift_rms'] > 1e-3
    assert metrics['ratio/of_update/1/tokens'] > metrics['ratio/of_update/2/tokens'] > 0
    assert metrics['ratio/inside_rms'] > 1e-4  # of the second minibatch
    total = sum(metrics[f'ratio/{part}_mean'] for part in ('mismatch', 'drift', 'inside'))
    np.testing.assert_allclose(total, metrics['ratio/total_mean'], atol=1e-9)
    assert 0 < metrics['ratio/share'] < 1


def test_without_learning_there_is_no_drift():
    learner = make_learner(n_minibatches=2, learning_rate=0.0)
    learner.publish(0)
    metrics = train_to_version_2(learner)
    assert metrics['ratio/drift_rms'] == 0
    assert metrics['ratio/of_age/2/drift_rms'] == 0
    assert metrics['ratio/inside_rms'] < 2e-6  # two programs, the same weights


def test_a_version_published_twice_adds_no_drift(learner):
    groups = generate(learner, 0, [_at(g, 0) for g in random_groups(5, 4)])
    learner.update(generate(learner, 0, [_at(g, 0) for g in random_groups(1, 4)]), 0)
    learner.publish(1)
    learner.publish(2)
    metrics = learner.update(groups, 2)
    assert metrics['ratio/of_update/1/drift_rms'] == 0
    assert metrics['ratio/of_update/2/drift_rms'] > 1e-3


def test_a_bias_of_one_engine_moves_its_mismatch_and_nothing_else(shared):
    learner, start = shared

    def one_engine_biased(bias):
        def change(groups):
            moved = []
            for group in groups:
                answers = [
                    dataclasses.replace(t, engine=f'engine/{t.sample % 2}', segments=_shift(t, bias * (t.sample % 2)))
                    for t in group.trajectories
                ]
                moved.append(TrajectoryGroup(group.draw, tuple(answers)))
            return moved

        return change

    found = []
    for bias in (0.0, 1e-2):
        learner.restore(start)
        learner.publish(0)
        found.append(train_to_version_2(learner, one_engine_biased(bias)))
    right, biased = found
    # the engine says more than its policy has: mismatch = log π_u - log μ falls
    moved = biased['ratio/of_engine/engine/1/mismatch_mean'] - right['ratio/of_engine/engine/1/mismatch_mean']
    assert moved == pytest.approx(-1e-2, abs=1e-6)
    still = [name for name in right if 'drift' in name or name.startswith('ratio/of_engine/engine/0')]
    assert len(still) > 8
    assert {name: biased[name] for name in still} == {name: right[name] for name in still}
    assert biased['ratio/identity_error'] < 1e-6


def _shift(trajectory, bias):
    return tuple(
        dataclasses.replace(s, behavior_logprobs=s.behavior_logprobs + np.float32(bias)) if s.policy_version >= 0 else s
        for s in trajectory.segments
    )


def test_one_wrong_version_breaks_the_identity(learner, monkeypatch):
    pack = RowLayout.pack

    def mislabel(layout, groups, advantages, *, n_minibatches, **settings):
        batches, report = pack(layout, groups, advantages, n_minibatches=n_minibatches, **settings)
        if n_minibatches == 2 and len(groups) == 5:  # the batch of the third update, not the rows to score
            place = np.argwhere(batches[0].policy_versions == 1)[0]
            batches[0].policy_versions[tuple(place)] = 2
        return batches, report

    monkeypatch.setattr(RowLayout, 'pack', mislabel)
    assert train_to_version_2(learner)['ratio/identity_error'] > 1e-4


def test_the_mismatch_of_age_0_is_the_metric_of_every_run(learner):
    groups = [_at(g, 0) for g in random_groups(5, 5)]  # log-probs of no policy
    metrics = learner.update(groups, 0)
    assert metrics['ratio/of_age/0/tokens'] == metrics['mismatch/n']
    np.testing.assert_allclose(metrics['ratio/of_age/0/mismatch_mean_abs'], metrics['mismatch/mean_abs'], atol=2e-6)
    assert metrics['mismatch/mean_abs'] > 0.1


def test_measuring_changes_no_number(shared):
    measured, start = shared
    plain = make_learner(None, n_minibatches=2)
    found = []
    for learner in (plain, measured):
        learner.restore(start)
        learner.publish(0)
        found.append((train_to_version_2(learner), learner.save()))
    (expected, state), (metrics, measured_state) = found
    jax.tree.map(np.testing.assert_array_equal, measured_state, state)
    assert {name: value for name, value in metrics.items() if not name.startswith('ratio/')} == expected


@pytest.mark.parametrize('ratio', [None, _ALL], ids=['plain', 'measured'])
def test_answers_are_scored_for_the_parts_alone(ratio):
    learner = make_learner(ratio, proximal='behavior')  # which needs no scores
    learner.publish(2)
    ran, run = [], learner.programs.run
    with mock.patch.object(learner.programs, 'run', lambda name, *args: (ran.append(name), run(name, *args))[1]):
        learner.update([_at(g, 2) for g in random_groups(5, 4)], 2)
    assert 'accumulate' in ran
    assert ('logprobs' in ran) == (ratio is not None)


def test_tokens_whose_version_left_the_ring_are_counted():
    learner = make_learner(_ALL | {'ring_bytes': 2 * _BYTES + 5})
    learner.publish(0)
    metrics = train_to_version_2(learner)
    ages = metrics['staleness/token_age_histogram']
    assert (metrics['ratio/tokens'], metrics['ratio/left_ring_tokens']) == (ages[0] + ages[1], ages[2])
    assert 'ratio/of_age/2/tokens' not in metrics


def test_a_ring_that_holds_no_version_is_refused():
    with pytest.raises(ConfigError, match=rf'^diagnostics\.ring_bytes={_BYTES - 1} does not hold the weights of one'):
        make_learner(_ALL | {'ring_bytes': _BYTES - 1})


@pytest.mark.slow
@pytest.mark.parametrize('how', [{'layers': 'stacked', 'fsdp': 2}, {'accumulate': 'scan'}], ids=['sharded', 'scan'])
def test_in_every_form_of_the_learner(how):
    learner = make_learner(**how, **({'max_microbatches': 8} if 'accumulate' in how else {}))
    learner.publish(0)
    metrics = train_to_version_2(learner)
    assert metrics['ratio/identity_error'] < 1e-6
    assert metrics['ratio/mismatch_rms'] < 2e-6
    assert metrics['ratio/drift_rms'] > 1e-3


def test_a_sample_is_a_function_of_the_names():
    chosen = {(d, s) for d in range(500) for s in range(4) if is_sampled(0, d, s, 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen < {(d, s) for d in range(500) for s in range(4) if is_sampled(0, d, s, 0.2)}
    assert chosen != {(d, s) for d in range(500) for s in range(4) if is_sampled(1, d, s, 0.1)}
    assert all(is_sampled(0, d, 0, 1.0) for d in range(100))


def test_the_parts_by_hand():
    # versions 3, 4, 5 of three tokens; the first is of version 3, the second of 4, the third of 5
    tokens = Tokens(
        engines=np.array(['a', 'a', 'b']),
        versions=np.array([3, 4, 5]),
        packed_versions=np.array([3, 4, 5]),
        behavior=np.array([-1.0, -2.0, -3.0]),
        packed_behavior=np.array([-1.0, -2.0, -3.0]),
        policy=np.array([-0.5, -1.0, -2.0]),
    )
    scored = np.array([[-1.25, -9.0, -9.0], [-1.0, -2.5, -9.0], [-0.75, -1.5, -3.5]])
    parts = split_ratio(tokens, scored, first=3)
    np.testing.assert_array_equal(parts.mismatch, [-0.25, -0.5, -0.5])
    np.testing.assert_array_equal(parts.by_update, [[0.25, 0, 0], [0.25, 1.0, 0]])
    np.testing.assert_array_equal(parts.drift, [0.5, 1.0, 0])
    np.testing.assert_array_equal(parts.inside, [0.25, 0.5, 1.5])
    np.testing.assert_array_equal(parts.total, [0.5, 1.0, 1.0])
    assert parts.error == 0
