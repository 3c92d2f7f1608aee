"""Recorded experts in the learner: which token they belong to, what following them changes, what is measured."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.fields import ConfigError
from areal_jax.learning.diagnostics.measurement import count_differing_prompts
from areal_jax.learning.packing import next_token_form, pack
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import Routing, measure_balance
from areal_jax.models.layer_parts import Experts
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import NOT_GENERATED, TrajectoryGroup
from tests.learning import examples
from tests.learning.examples import random_groups, segment, tiny_decoder, trajectory
from tests.rollout.decode.examples import whole_attention

NAME = ROUTED_EXPERTS.name
CONFIG = dataclasses.replace(
    tiny_decoder(n_layers=2).config, family='qwen3_moe', qk_norm=True, experts=Experts(8, 2, 12, dense_layers=(0,))
)
DECODER = Decoder(CONFIG)
PARAMS = DECODER.init(seed=2, scale=2.0)
ROUTES = CONFIG.routes


def make_learner(*, routes='replay', records=True, **settings):
    mesh = make_mesh(fsdp=settings.pop('fsdp', 1))
    settings = {'row_tokens': 48, 'rows_per_microbatch': 1, 'records_routes': records} | settings
    return examples.make_learner(mesh, decoder=DECODER, params=PARAMS, routes=routes if records else 'live', **settings)


def give_routes(groups, routes_of):
    """The groups with `routes_of(tokens)`, [T, L, k] as of a column, recorded for all of their tokens."""

    def give(one):
        routes, start, segments = routes_of(one), len(one.prompt.tokens), []
        seen = 0  # tokens that a segment before has told of
        for part in one.segments:
            end = start + len(part.tokens)
            if part.policy_version == NOT_GENERATED:
                segments.append(part)
            else:
                known = {NAME: routes[start:end]}
                segments.append(dataclasses.replace(part, columns=known, context={NAME: routes[seen:start]}))
                seen = end
            start = end
        return dataclasses.replace(one, segments=tuple(segments))

    return [TrajectoryGroup(g.draw, tuple(give(t) for t in g.trajectories)) for g in groups]


def draw_routes(one):
    """Experts drawn at random, the same for the same tokens before."""
    rows = [np.full(ROUTES.shape, ROUTES.fill, ROUTES.dtype)]
    for t in range(1, len(one.tokens)):
        rng = np.random.default_rng([*one.tokens[:t].tolist(), 1])
        rows.append(np.array([rng.permutation(8)[:2] for _ in range(ROUTES.shape[0])], ROUTES.dtype))
    return np.stack(rows)


GROUPS = random_groups(5, 3)
FOREIGN = give_routes(GROUPS, draw_routes)


def test_an_input_has_the_entry_of_the_token_behind_it():
    mark = lambda *numbers: np.array(numbers, np.uint8)[:, None, None]
    column = ROUTED_EXPERTS.of_model('uint8', (1, 1))
    first = dataclasses.replace(segment([3, 4], 0), columns={NAME: mark(13, 14)}, context={NAME: mark(255, 12)})
    tool = segment([5], NOT_GENERATED)
    # the second turn tells of the whole history again; generated tokens keep what their own pass has recorded
    history = mark(255, 92, 93, 94, 15)
    second = dataclasses.replace(segment([6, 7], 1), columns={NAME: mark(16, 17)}, context={NAME: history})
    form = next_token_form(trajectory([1, 2], [first, tool, second]), inputs=[column])
    assert form.inputs.tolist() == [1, 2, 3, 4, 5, 6]
    assert form.read[NAME].ravel().tolist() == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize('packing', ['shared_prompt', 'ordinary'])
def test_rows_hold_the_routes_of_their_tokens(packing):
    ones = [np.ones(len(group.trajectories), np.float32) for group in FOREIGN]
    (batch,), _ = pack(
        FOREIGN, ones, mode=packing, fill='first_fit', row_tokens=48, row_loss_tokens=24, rows_per_microbatch=1,
        n_minibatches=1, inputs=[ROUTES],
    )  # fmt: skip
    rows, wanted = batch.inputs[NAME], [t for g in FOREIGN for t in g.trajectories]
    expected = [draw_routes(one) for one in wanted]
    for m, r, n in np.argwhere(batch.loss_mask):
        source, number = batch.sources[m, r, n], batch.trajectory_ids[m, r, n]
        position = batch.positions[m, r, source] + 1
        np.testing.assert_array_equal(rows[m, r, source], expected[number][position])
    assert (rows[batch.segment_ids == 0] == ROUTES.fill).all()
    assert (rows[batch.segment_ids > 0] != ROUTES.fill).all()


@jax.jit
def _pass(tokens, recorded=None):
    states, _, routed = DECODER.hidden_and_routes(
        PARAMS, tokens, jnp.arange(len(tokens)), whole_attention, routing=Routing(recorded=recorded)
    )
    return jax.nn.log_softmax(DECODER.logits(PARAMS, states)), routed.live


def live_routes(one):
    """What the routers choose in a pass over the trajectory."""
    found = np.moveaxis(np.asarray(_pass(jnp.asarray(one.tokens))[1]), 0, 1)[:-1].astype(ROUTES.dtype)
    return np.concatenate([np.full_like(found[:1], ROUTES.fill), found])


def logprobs_of_pass(one, routes=None):
    """Of the tokens of version 2, with experts of a column or with the live ones."""
    tokens = jnp.asarray(one.tokens)
    if routes is not None:
        routes = jnp.moveaxis(jnp.concatenate([routes[1:], routes[:1]]), 1, 0)  # the last token predicts nothing here
    logprobs = np.asarray(_pass(tokens, routes)[0])
    return np.array([logprobs[t - 1, tokens[t]] for t in np.flatnonzero(one.policy_versions == 2)])


@pytest.mark.slow
def test_packing_does_not_change_what_is_replayed():
    shared, ordinary = (make_learner(packing=p).update(FOREIGN, 2) for p in ('shared_prompt', 'ordinary'))
    for name in ('loss/value', 'update/grad_norm', 'loss/approx_kl', 'routes/sets_changed'):
        np.testing.assert_allclose(shared[name], ordinary[name], rtol=2e-5, err_msg=name)


@pytest.mark.parametrize('accumulate', ['dispatch', pytest.param('scan', marks=pytest.mark.slow)])
def test_routes_of_the_same_weights_change_no_bit(accumulate):
    same_routes = give_routes(GROUPS, live_routes)
    how = {'accumulate': accumulate, 'max_microbatches': 4} if accumulate == 'scan' else {'accumulate': accumulate}
    found = {}
    for routes in ('live', 'replay'):
        learner = make_learner(routes=routes, **how)
        found[routes] = learner.update(same_routes, 2), learner.save()['params']
    (plain, expected), (metrics, weights) = found.values()
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    assert metrics == plain
    assert (metrics['routes/recorded'], metrics['routes/sets_changed'], metrics['routes/prompts_differ']) == (1, 0, 0)
    assert metrics['experts/load'] > 1


@pytest.mark.slow
def test_a_learner_without_routes_computes_the_same():
    groups = give_routes(GROUPS, live_routes)
    plain, metrics = (make_learner(records=records).update(groups, 2) for records in (False, True))
    for name in ('loss/value', 'update/grad_norm', 'experts/load', 'experts/dead'):
        np.testing.assert_allclose(metrics[name], plain[name], rtol=1e-6, err_msg=name)
    assert 'routes/recorded' not in plain


@pytest.fixture(scope='module')
def measured():
    """Metrics of an update with foreign routes, followed and not."""
    found = []
    for routes in ('replay', 'live'):
        learner = make_learner(routes=routes, ratio_sample=1.0, ring_bytes=10**8)
        learner.publish(2)  # no other version is known
        found.append(learner.update(FOREIGN, 2))
    return found


def test_metrics_are_of_the_live_choice_under_replay_too(measured):
    followed, live = measured
    # two of eight experts drawn at random are the chosen ones once in 28 times
    for metrics in (followed, live):
        assert 0.8 < metrics['routes/sets_changed'] < 1
        assert metrics['routes/sets_changed'] <= metrics['routes/tokens_changed'] <= 1
        tokens = sum(metrics[f'routes/of_age/{age}/tokens'] for age in '012')
        assert tokens == metrics['routes/tokens'] > 20
    assert followed['loss/value'] != live['loss/value']


def test_the_routing_part_of_the_ratio_is_what_following_changes(measured):
    answers = [one for group in FOREIGN for one in group.trajectories]
    expected = np.concatenate([logprobs_of_pass(a, draw_routes(a)) - logprobs_of_pass(a) for a in answers])
    for metrics in measured:
        np.testing.assert_allclose(metrics['ratio/routing_mean'], expected.mean(dtype=np.float64), atol=1e-5)
        np.testing.assert_allclose(metrics['ratio/routing_rms'], np.sqrt(np.mean(expected**2.0)), rtol=1e-4)
        assert metrics['ratio/identity_error'] < 1e-6
    assert np.abs(expected).mean() > 0.05


def test_prompts_that_reached_other_experts_are_counted_and_share_no_copy():
    (group, *_) = FOREIGN
    assert count_differing_prompts([group]) == 0
    last = group.trajectories[-1]
    head, *rest = last.segments
    other = head.context[NAME].copy()
    other[-1, 0, 0] ^= 1
    changed = dataclasses.replace(last, segments=(dataclasses.replace(head, context={NAME: other}), *rest))
    mixed = TrajectoryGroup(0, (*group.trajectories[:-1], changed))
    assert count_differing_prompts([mixed]) == 1
    batches = [
        pack(
            [one], [np.ones(len(one.trajectories), np.float32)], mode='shared_prompt', fill='first_fit', row_tokens=64,
            row_loss_tokens=48, rows_per_microbatch=1, n_minibatches=1, inputs=[ROUTES],
        )[0][0]
        for one in (group, mixed)
    ]  # fmt: skip
    alike, other = ((batch.segment_ids > 0).sum() for batch in batches)
    assert other - alike == len(group.trajectories[0].prompt.tokens)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'records_routes': True}, r'rollout\.record_routes=True needs a model with experts; set it to False'),
        ({'router_aux_loss': 0.5}, r'learner\.router_aux_loss=0\.5 needs a model with experts; set it to 0'),
    ],
)
def test_a_dense_model_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        examples.make_learner(**settings)


@jax.jit
def _loads_and_scores(tokens, valid):
    routing = Routing(valid=valid)
    routed = DECODER.hidden_and_routes(PARAMS, tokens, jnp.arange(len(tokens)), whole_attention, routing=routing)[2]
    return routed.loads, routed.scores


def balance_by_hand():
    """E sum f P, the mean over the layers, over the tokens that rows of one answer each hold."""
    loads, scores, tokens = 0.0, 0.0, 0
    for one in [one for group in GROUPS for one in group.trajectories]:
        padded = np.zeros(24, np.int32)
        padded[: len(one.tokens)] = one.tokens
        read = int(np.flatnonzero(one.loss_mask)[-1])  # the last loss token is predicted and not read
        found = _loads_and_scores(padded, np.arange(24) < read)
        loads, scores = (
            total + np.asarray(part, np.float64) for total, part in zip((loads, scores), found, strict=True)
        )
        tokens += read
    return np.mean([8 * (f / (2 * tokens) * p / tokens).sum() for f, p in zip(loads, scores, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize('how', [{}, {'row_tokens': 24}, {'accumulate': 'scan', 'max_microbatches': 8}])
def test_the_loss_of_balance_is_that_of_the_minibatch_however_it_is_split(how):
    how |= {'records': False, 'routes': 'live', 'packing': 'ordinary'}
    metrics = make_learner(router_aux_loss=0.5, **how).update(GROUPS, 2)
    plain = make_learner(**how).update(GROUPS, 2)
    np.testing.assert_allclose(metrics['loss/router_balance'], balance_by_hand(), rtol=1e-5)
    np.testing.assert_allclose(metrics['loss/value'] - plain['loss/value'], 0.5 * balance_by_hand(), rtol=1e-5)
    assert metrics['update/grad_norm'] != plain['update/grad_norm']
    assert 'loss/router_balance' not in plain


def test_the_balance_is_1_where_loads_are_even_and_has_the_gradient_of_the_scores():
    even = jnp.full((2, 4), 3.0)
    assert measure_balance(even, even * 2, choices=2) == 1.0
    loads = jnp.array([[4.0, 0.0, 0.0, 0.0]])
    uneven = jnp.array([[2.5, 0.5, 0.5, 0.5]])  # of 4 tokens, one choice each
    assert measure_balance(uneven, loads, choices=1) == 4 * 2.5 / 4
    slope = jax.grad(lambda scores: measure_balance(scores, loads, choices=1))(uneven)
    np.testing.assert_allclose(slope, [[1.0, 0.0, 0.0, 0.0]])
