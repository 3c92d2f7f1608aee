from __future__ import annotations

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning import row_layout as layout
from areal_jax.learning.learner import SpmdLearner
from areal_jax.models.attention.cudnn import MAX_SEGMENTS
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import (
    group,
    learner_settings,
    make_learner,
    make_optimizer,
    random_groups,
    segment,
    tiny_decoder,
    tiny_params,
    trajectory,
)

_DECODER = tiny_decoder(n_layers=1)
PARAMS = tiny_params(1)
_GROUPS = random_groups(5, 5)  # policy versions 0..2
_SGD = make_optimizer('sgd', clip_norm=0)
ADAM = make_optimizer('adamw', clip_norm=1.0)


def make_weights(learner: SpmdLearner):
    return learner.save()['params']


def _assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def _assert_bit_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope='module')
def one_row_at_a_time():
    """Prompts are repeated and every micro-batch is one row of a trajectory or two."""
    learner = make_learner(packing='ordinary', row_tokens=16, row_loss_tokens=12, n_minibatches=2)
    return learner.update(_GROUPS, version=2), make_weights(learner)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        pytest.param({'rows_per_microbatch': 3}, marks=pytest.mark.slow),
        {'accumulate': 'scan'},  # 2 micro-batches, and 3 with an empty one
        {'rows_per_microbatch': 8, 'mesh': (2, 4)},
        pytest.param(
            {'rows_per_microbatch': 8, 'mesh': (2, 4), 'accumulate': 'scan', 'packing': 'ordinary', 'row_tokens': 20},
            marks=pytest.mark.slow,
        ),
    ],
    ids=['shared prompts', '3 rows', 'scan', 'data=2 fsdp=4', 'data=2 fsdp=4 scan'],
)
def test_update_does_not_depend_on_packing_split_or_devices(one_row_at_a_time, settings):
    settings = dict(settings)
    learner = make_learner(make_mesh(*settings.pop('mesh', (1, 1))), n_minibatches=2, **settings)
    metrics = learner.update(_GROUPS, version=2)
    expected, weights = one_row_at_a_time
    for name, value in expected.items():
        if not name.startswith('train/'):  # rows and micro-batches
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    _assert_close(make_weights(learner), weights, atol=1e-5)
    change = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), weights, jax.device_get(PARAMS))
    assert max(jax.tree.leaves(change)) > 0.01  # far more than the tolerance


def test_rows_for_cudnn_have_no_more_segments_than_it_takes(monkeypatch):
    monkeypatch.setattr(layout, 'choose_checked', lambda *_, **__: ('cudnn', ()))
    rows = layout.RowLayout(_DECODER.config, make_mesh(), learner_settings(row_tokens=4096, row_loss_tokens=4096))
    groups = [group([1, 2], [[3, 4]] * 100)]
    (batch,), _ = rows.pack(groups, [np.ones(100, np.float32)], n_minibatches=1)
    assert batch.segment_ids.max(axis=(1, 2)).tolist() == [MAX_SEGMENTS - 1, 100 - (MAX_SEGMENTS - 1)]


def test_later_minibatches_keep_the_centre_of_the_weights_before_the_update():
    current = [_at_version(g, 2) for g in _GROUPS]
    # one step: policy and proximal policy are the same weights, nothing can be clipped, w = prox / behavior
    once = make_learner(learning_rate=0.5).update(current, version=2)
    assert once['loss/clip_fraction'] == 0
    # two steps: in the second the policy has moved away from a centre that has not
    twice = make_learner(learning_rate=0.5, n_minibatches=2).update(current, version=2)
    assert twice['update/optimizer_steps'] == 2
    assert twice['loss/clip_fraction'] > 0
    # behavior weights and mismatch are those of the weights before the update, for both minibatches
    for name in ('loss/behavior_weight_mean', 'loss/effective_sample_size', 'mismatch/mean_abs', 'mismatch/n'):
        np.testing.assert_allclose(twice[name], once[name], rtol=1e-5, err_msg=name)


def _at_version(g: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """All generated tokens from one version."""
    moved = []
    for t in g.trajectories:
        segments = [dataclasses.replace(s, policy_version=version) if s.policy_version >= 0 else s for s in t.segments]
        moved.append(dataclasses.replace(t, segments=tuple(segments)))
    return TrajectoryGroup(g.draw, tuple(moved))


def test_data_metrics_by_hand():
    # rewards 0 1 | 1 1: mean 3/4; the second group has no signal. Ages at version 5: 1 (two tokens), 3 (one token)
    mixed = TrajectoryGroup(
        0,
        (
            trajectory([1], [segment([2, 3], 4)], reward=0.0),
            trajectory([1], [segment([4], 2)], reward=1.0, sample=1),
        ),
    )
    metrics = make_learner().update([mixed, group([1], [[2], [3]], [1.0, 1.0], draw=1, version=4)], version=5)
    assert metrics['reward/mean'] == 0.75
    assert (metrics['update/groups'], metrics['update/trained_groups']) == (2, 1)
    assert metrics['update/filtered_equal_rewards'] == 1
    assert metrics['update/trained_tokens'] == 3
    assert metrics['staleness/token_age_max'] == 3
    np.testing.assert_allclose(metrics['staleness/token_age_mean'], (1 + 1 + 3) / 3)
    assert metrics.pop('staleness/token_age_histogram') == [0, 2, 0, 1]
    assert metrics.pop('ledger/trained_by_age') == [0, 2, 0, 1]
    assert metrics.pop('ledger/filtered_by_age') == [0, 2]
    assert metrics.pop('ledger/masked_by_age') == metrics.pop('ledger/unused_by_age') == []
    assert metrics['staleness/versions_per_trajectory_max'] == 1
    assert metrics['mismatch/n'] == 0
    assert 'mismatch/mean_abs' not in metrics
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize(
    ('settings', 'loss'),
    [
        # at this temperature every token has probability 1/11, as recorded: r = w = 1, a token's loss is -A = +-.5
        # minibatch 0: tokens +.5 | -.5 -.5 -.5, mean -.25; minibatch 1: +.5 | -.5, mean 0; mean of both -.125
        ({}, -0.125),
        # sequences count alike: (.5 - .5) / 2 = 0 in both
        ({'aggregation': 'sequence_mean'}, 0.0),
        # a bonus of .1 of the entropy log 11 = 2.397895
        ({'entropy_coefficient': 0.1}, -0.125 - 0.2397895),
    ],
    ids=['token mean', 'sequence mean', 'entropy'],
)
def test_loss_of_two_minibatches_by_hand(settings, loss):
    learner = make_learner(temperature=1e6, advantage='group_mean', n_minibatches=2, learning_rate=0.0, **settings)
    groups = []
    for draw, answers in enumerate([([2], [3, 4, 5]), ([6], [7])]):
        members = [
            trajectory([1], [segment(a, 0, [-np.log(11)] * len(a))], reward=float(i), draw=draw, sample=i)
            for i, a in enumerate(answers)
        ]
        groups.append(TrajectoryGroup(draw, tuple(members)))
    metrics = learner.update(groups, version=0)
    np.testing.assert_allclose(metrics['loss/value'], loss, atol=1e-5)
    np.testing.assert_allclose(metrics['loss/entropy'], np.log(11), rtol=1e-5)
    np.testing.assert_allclose(metrics['loss/effective_sample_size'], 1.0, rtol=1e-5)
    assert metrics['mismatch/n'] == 6
    assert metrics['mismatch/max_abs'] < 1e-5


def test_mismatch_is_zero_where_the_engine_says_what_the_learner_says():
    learner = make_learner(learning_rate=0.0)
    first = learner.update(_GROUPS, version=2)
    assert first['mismatch/mean_abs'] > 0.1  # behavior log-probs of the examples are noise
    # a trajectory of the examples has one to three versions
    counts = [len(set(t.policy_versions) - {-1}) for g in _GROUPS for t in g.trajectories]
    assert first['staleness/versions_per_trajectory_max'] == max(counts) == 3
    np.testing.assert_allclose(first['staleness/versions_per_trajectory_mean'], np.mean(counts))
    # tokens of version 2 alone count
    tokens = np.concatenate([t.policy_versions for g in _GROUPS for t in g.trajectories])
    assert first['mismatch/n'] == (tokens == 2).sum()
    # one token with the log-prob of the weights, one with that + .5: mean .25, half of them exact
    prompt, logprob = [1, 2], _logprobs_after([1, 2])
    pair = (
        trajectory(prompt, [segment([3], 2, [logprob[3]])], reward=0.0),
        trajectory(prompt, [segment([4], 2, [logprob[4] + 0.5])], reward=1.0, sample=1),
    )
    metrics = learner.update([TrajectoryGroup(0, pair)], version=2)
    assert metrics['mismatch/n'] == 2
    np.testing.assert_allclose(metrics['mismatch/mean_abs'], 0.25, atol=1e-5)
    np.testing.assert_allclose(metrics['mismatch/max_abs'], 0.5, atol=1e-5)


def test_the_mismatch_is_told_for_each_engine():
    learner = make_learner(learning_rate=0.0, n_minibatches=2)
    prompt, logprob = [1, 2], _logprobs_after([1, 2])
    wrong = {'engine/0': 0.0, 'engine/1': 0.5}
    groups = []
    for draw in range(3):
        pair = [
            trajectory(prompt, [segment([3], 2, [logprob[3] + off])], reward=float(i), draw=draw, sample=i)
            for i, off in enumerate(wrong.values())
        ]
        groups.append(TrajectoryGroup(draw, tuple(map(_of_engine, pair, wrong))))
    metrics = learner.update(groups, version=2)
    found = {name: metrics[f'mismatch/of/{name}/mean_abs'] for name in wrong}
    np.testing.assert_allclose(list(found.values()), list(wrong.values()), atol=1e-5)
    assert sum(metrics[f'mismatch/of/{name}/n'] for name in wrong) == metrics['mismatch/n'] > 1


def _of_engine(one, engine):
    return dataclasses.replace(one, engine=engine)


def test_an_answer_is_scored_under_the_weights_of_its_version_only():
    learner = make_learner(temperature=2.0, scores=True)
    prompt, answer = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    assert learner.score(0, prompt, answer) is None  # nobody has told the version
    learner.publish(4)
    compiled = learner.warm_up()
    (first, *others) = learner.score(4, prompt, answer)
    assert len(learner.programs.compiled) == compiled
    np.testing.assert_allclose(first, jax.nn.log_softmax(_last_logits(prompt) / 2.0)[3], atol=1e-5)
    assert len(others) == 2
    learner.update(_GROUPS, version=4)
    assert learner.score(4, prompt, answer) is None
    assert not np.allclose(learner.score(5, prompt, answer)[0], first)


def _last_logits(prompt):
    """Up to a constant."""
    return _logprobs_after(prompt.tolist())


def _logprobs_after(prompt, params=PARAMS) -> np.ndarray:
    """float32 [V] of the token after the prompt."""
    return np.asarray(_last_logprobs(params, jnp.array(prompt, jnp.int32)))


@jax.jit
def _last_logprobs(params, tokens):
    def attend(q, k, v, cache, window):
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum('qhd,khd->hqk', q, k) / jnp.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones((len(q), len(q)), bool))
        return jnp.einsum('hqk,khd->qhd', jax.nn.softmax(jnp.where(causal, scores, -1e30)), v), cache

    hidden, _ = _DECODER.hidden(params, tokens, jnp.arange(len(tokens)), attend)
    return jax.nn.log_softmax(hidden[-1] @ _DECODER.head(params).T)


def test_nothing_to_train_changes_no_bit():
    learner = make_learner(optimizer=ADAM, max_token_age=1, over_age='mask')
    learner.update(_GROUPS, version=2)  # Adam has momentum now
    before = learner.save()
    equal = group([1, 2], [[3], [4, 5]], [1.0, 1.0], version=9)
    too_old = group([1, 2], [[3], [4, 5]], [0.0, 1.0], version=7)
    alone = group([1, 2], [[3]], [1.0], version=9)
    for groups, masked in (([], 0), ([equal], 0), ([too_old], 3), ([alone], 0), ([equal, too_old, alone], 3)):
        metrics = learner.update(groups, version=9)
        assert metrics['staleness/masked_tokens'] == masked
        assert metrics['update/optimizer_steps'] == 0
        assert metrics['update/trained_tokens'] == 0
        assert metrics['mismatch/n'] == 0
        assert 'loss/value' not in metrics
    _assert_bit_equal(learner.save(), before)


def test_equal_rewards_have_no_gradient_even_unfiltered():
    learner = make_learner(filter_equal_rewards=False)
    metrics = learner.update([group([1, 2], [[3], [4, 5]], [1.0, 1.0])], version=0)
    assert metrics['update/optimizer_steps'] == 1
    assert metrics['update/grad_norm'] == 0
    _assert_bit_equal(make_weights(learner), jax.device_get(PARAMS))


def test_non_finite_gradient_skips_the_step_and_is_counted():
    learner = make_learner(optimizer=ADAM, advantage='group_mean')
    before = learner.save()
    poisoned = group([1, 2], [[3], [4]], [0.0, 1e30])  # finite advantages, whose gradient's square is not
    metrics = learner.update([poisoned], version=0)
    assert (metrics['update/skipped_steps'], metrics['update/optimizer_steps']) == (1, 0)
    _assert_bit_equal(learner.save(), before)
    # the gradient is not left over in the accumulator
    assert learner.update([group([1, 2], [[3], [4]])], version=0)['update/optimizer_steps'] == 1


def test_future_token_is_refused_and_weights_are_untouched():
    learner = make_learner()
    with pytest.raises(ValueError, match='policy version 2, but the update starts from version 1'):
        learner.update(_GROUPS, version=1)
    _assert_bit_equal(make_weights(learner), jax.device_get(PARAMS))


@pytest.mark.parametrize('publication', ['gathered', 'leaves', 'shards'])
def test_published_weights_are_not_touched_by_later_updates(publication):
    learner = make_learner(publication=publication)
    published = learner.publish(0)
    held = jax.tree.map(np.array, published)
    for version in (2, 3):
        learner.update(_GROUPS, version)
        _assert_bit_equal(jax.tree.map(np.array, published), held)
    _assert_bit_equal(held, jax.device_get(PARAMS))  # nor was the caller's tree, which the learner copied
    moved = jax.tree.map(lambda a, b: bool((np.array(a) != b).any()), learner.publish(1), held)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize('holds', [False, True])
def test_a_version_for_a_file_is_a_copy_on_the_host(holds):
    """Updates write in place, whoever holds an earlier version, and give the same weights."""
    files, copies = (make_learner(optimizer=ADAM, publication=kind) for kind in ('leaves', 'gathered'))
    assert files.warm_up() == copies.warm_up() - 1
    held, places = [], _places(files)
    for version in (2, 3, 4):
        published = files.publish(version)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(published))
        expected = jax.device_get(copies.publish(version))
        held += [(published, jax.tree.map(np.array, expected))] if holds else []
        if version == 3:
            _assert_bit_equal(files.save(), copies.save())
        files.update(_GROUPS, version)
        copies.update(_GROUPS, version)
        _assert_bit_equal(published, expected)
        assert _places(files) == places
    for published, expected in held:
        _assert_bit_equal(published, expected)
    _assert_bit_equal(files.save(), copies.save())


def _places(learner):
    """Where in memory the weights are."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(learner.state.params)]


def test_restored_learner_goes_on_as_the_saved_one():
    first, second = make_learner(optimizer=ADAM), make_learner(optimizer=ADAM)
    first.update(_GROUPS[:3], version=2)
    saved = first.save()
    kept = jax.tree.map(np.array, saved)
    moments = jax.tree.leaves(saved['optimizer'])
    assert not any(leaf.flags.owndata for leaf in moments if leaf.ndim)  # nothing is copied before an update needs it
    second.restore(saved)
    for learner in (first, second):
        learner.update(_GROUPS[3:], version=3)
    _assert_bit_equal(second.save(), first.save())
    _assert_bit_equal(saved, kept)  # no update writes into what was saved or restored from
    sharded = make_learner(make_mesh(fsdp=8), optimizer=ADAM, rows_per_microbatch=8)
    sharded.restore(saved)
    sharded.update(_GROUPS[3:], version=3)
    # Adam divides by sqrt(v): rounding of tiny gradients shows, so weights move by at most the rate, .1, times it
    _assert_close(make_weights(sharded), make_weights(first), atol=1e-3)


def test_of_one_version_there_is_one_published_copy():
    learner = make_learner()
    learner.update(_GROUPS[:3], version=2)
    first = learner.publish(3)
    assert learner.publish(3) is first
    learner.update(_GROUPS[3:], version=3)
    assert learner.publish(4) is not first


def test_gradients_live_no_longer_than_their_step(monkeypatch):
    learner = make_learner(optimizer=ADAM)
    run, held = learner.programs.run, []

    def keep(name, *args):
        if name == 'apply':
            held.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(args[2]))
        return run(name, *args)

    monkeypatch.setattr(learner.programs, 'run', keep)
    learner.update(_GROUPS[:3], version=2)
    assert held
    assert not any(ref() is not None for ref in held)


def test_the_optimizer_needs_no_copy_of_weights_or_gradients():
    learner = make_learner(optimizer=ADAM)
    learner.warm_up()
    (apply,) = (program for (name, _), program in learner.programs.compiled.items() if name == 'apply')
    needed = apply.memory_analysis().temp_size_in_bytes
    assert needed < 0.25 * sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state.params))


def test_a_save_changes_no_update():
    saved, other = make_learner(optimizer=ADAM), make_learner(optimizer=ADAM)
    for learner in (saved, other):
        learner.update(_GROUPS[:3], version=2)
    saved.save()
    for learner in (saved, other):
        learner.update(_GROUPS[3:], version=3)
    _assert_bit_equal(saved.state.params, other.state.params)


def test_a_restore_has_room_for_one_state():
    """What the learner held is gone when the first leaf is read; on devices both would not fit."""
    learner = make_learner()
    saved = learner.save()
    held = [weakref.ref(x) for x in jax.tree.leaves((learner.state.params, learner.state.optimizer)) if x.size > 1]

    class Leaf:
        def __init__(self, values):
            self.values, self.shape = values, values.shape

        def __getitem__(self, region):
            assert not any(ref() is not None for ref in held)
            return self.values[region]

    learner.restore(jax.tree.map(Leaf, saved))
    _assert_bit_equal(learner.save(), saved)


def test_restore_of_other_shapes_is_refused_and_changes_nothing():
    learner = make_learner(optimizer=ADAM)
    before = learner.save()
    other = learner.save()
    other['params']['embedding'] = np.zeros((12, 16), np.float32)
    with pytest.raises(ValueError, match=r"saved params differ from the learner's in 2 names or shapes.*embedding"):
        learner.restore(other)
    without_moments = {'params': before['params'], 'optimizer': make_learner().save()['optimizer']}
    with pytest.raises(ValueError, match='saved optimizer differ'):
        learner.restore(without_moments)
    _assert_bit_equal(learner.save(), before)


@pytest.mark.parametrize(
    'settings',
    [
        {'n_minibatches': 2},  # the log-prob pass too
        {'accumulate': 'scan', 'max_microbatches': 2, 'row_tokens': 64, 'row_loss_tokens': 64},
    ],
    ids=['dispatch', 'scan'],
)
def test_nothing_compiles_after_warm_up(settings):
    learner = make_learner(optimizer=ADAM, **settings)
    # copy, initial state, export; dispatch: zeros, accumulate, apply, log-probs; scan: 1 and 2 micro-batches
    assert learner.warm_up() == (7 if settings.get('n_minibatches') else 5)
    compiled = []

    def listener(event: str, duration: float, **_) -> None:
        if 'backend_compile' in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for version, groups in enumerate([_GROUPS, _GROUPS[:1], [], _GROUPS[1:]], start=2):
            learner.update(groups, version)
            learner.publish(version)
            learner.save()
        assert compiled == []
        jax.jit(lambda x: x + version)(1.0)
        assert len(compiled) == 1  # a compilation would have been seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_update_tokens_prices_what_the_filter_leaves():
    groups = [group([1, 2, 3], [[4, 5], [6]]), group([1, 2, 3], [[4], [5]], [1.0, 1.0], draw=1)]
    assert make_learner().update_tokens(groups) == 3 + 1 + 0  # the prompt once; an answer's last token is never read
    assert make_learner(filter_equal_rewards=False).update_tokens(groups) == 4 + 3


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'rows_per_microbatch': 3, 'mesh': (1, 2)}, r'learner.rows_per_microbatch=3 must be a multiple of the 2 dev'),
        ({'accumulate': 'loop'}, r"learner.accumulate='loop' is not known; use one of dispatch, scan"),
        ({'proximal': 'ema'}, r"loss.proximal='ema' is not known"),
        ({'aggregation': 'sum'}, r"loss.aggregation='sum' is not known"),
        ({'over_age': 'keep'}, r"staleness.over_age='keep' is not known"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    settings = dict(settings)
    with pytest.raises(ValueError, match=message):
        make_learner(make_mesh(*settings.pop('mesh', (1, 1))), **settings)


@pytest.mark.parametrize(
    'proximal',
    [pytest.param('recompute', marks=pytest.mark.slow), 'loglinear', pytest.param('behavior', marks=pytest.mark.slow)],
)
def test_bandit_learns(proximal):
    # one prompt, one-token answers, reward 1 for token 3: a share of 1/11 before, nearly 1 after
    learner = make_learner(optimizer=ADAM, learning_rate=0.02, proximal=proximal, row_tokens=8, row_loss_tokens=16)
    rng = np.random.default_rng(0)
    rewards, stale = [], PARAMS
    for version in range(14):
        # data one version old, as in an asynchronous run
        logprobs = _logprobs_after([1], stale)
        answers = rng.choice(11, size=16, p=np.exp(logprobs) / np.exp(logprobs).sum())
        members = [
            trajectory([1], [segment([a], max(version - 1, 0), [logprobs[a]])], reward=float(a == 3), sample=i)
            for i, a in enumerate(answers)
        ]
        stale = learner.publish(version)
        metrics = learner.update([TrajectoryGroup(version, tuple(members))], version)
        rewards.append(metrics['reward/mean'])
        if proximal == 'behavior' and metrics['update/optimizer_steps']:
            assert metrics['loss/behavior_weight_max'] == 1
    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-3:]) > 0.8
