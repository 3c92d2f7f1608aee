"""The whole update, with every option of the loss, against a plain one: no packing, float64, from the equations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.objectives import Likelihood
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import learner_settings, make_optimizer, random_groups, segment, trajectory

_CONFIG = ModelConfig(
    vocab_size=11, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=100.0,
    tie_embeddings=False, qkv_bias=True, qk_norm=True, family='qwen2', kinds=(LayerKind(5),),
)  # fmt: skip
_PARAMS = jax.tree.map(  # no bias is 0, no norm 1
    lambda x: np.asarray(x + 0.1 * np.cos(np.arange(x.size)).reshape(x.shape), np.float32), Decoder(_CONFIG).init(2)
)
_RATE = 0.1
_ADAM = {'b1': 0.9, 'b2': 0.95, 'eps': 1e-3, 'weight_decay': 0.1, 'clip_norm': 0.05}
_VERSION = 2
_TOKENS = 24


# The model: one sequence of tokens [T].


def _norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + _CONFIG.rms_eps) * scale


def _rotate(x):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * _CONFIG.rope_theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return jnp.concatenate([pairs.real, pairs.imag], -1)


def _attention(p, x):
    heads = lambda name: (x @ p[name]['weight'] + p[name]['bias']).reshape(len(x), -1, _CONFIG.head_dim)
    q, k = _rotate(_norm(heads('query'), p['query_norm'])), _rotate(_norm(heads('key'), p['key_norm']))
    k, v = (jnp.repeat(y, _CONFIG.n_heads // _CONFIG.n_kv_heads, axis=1) for y in (k, heads('value')))
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    seen = (distance >= 0) & (distance < _CONFIG.window(0))
    scores = jnp.where(seen, jnp.einsum('qhd,khd->hqk', q, k) / _CONFIG.head_dim**0.5, -jnp.inf)
    return jnp.einsum('hqk,khd->qhd', jax.nn.softmax(scores), v).reshape(len(x), -1) @ p['output']['weight']


@jax.jit
def _sequence(params, tokens, temperature):
    """(log-prob of each token given those before it, entropy of that choice), [T]; 0 for the first."""
    x = params['embedding'][tokens]
    for p in params['layers'].values():
        x = x + _attention(p['attention'], _norm(x, p['attention_norm']))
        y, mlp = _norm(x, p['mlp_norm']), p['mlp']
        x = x + (jax.nn.silu(y @ mlp['gate']['weight']) * (y @ mlp['up']['weight'])) @ mlp['down']['weight']
    logprobs = jax.nn.log_softmax(_norm(x, params['final_norm']) @ params['head'].T / temperature)[:-1]
    chosen = jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]
    return tuple(jnp.append(0.0, y) for y in (chosen, -(jnp.exp(logprobs) * logprobs).sum(-1)))


# The loss.


def _flatten(settings):
    """The settings and the choices of their objective under one roof."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for section in (settings.rollout, settings.learner, settings.staleness):
        fields |= dataclasses.asdict(section)
    choices = getattr(settings.objective, 'choices', settings.objective)
    return _Flat(fields | dataclasses.asdict(choices) | {'is_likelihood': choices is settings.objective})


class _Flat:
    """Hashed by what it is, as static arguments are."""

    def __init__(self, values):
        self.__dict__.update(values)


def _advantages(rewards, s):
    r = np.array(rewards)
    if s.is_likelihood or (r == r[0]).all():
        return np.full(len(r), float(s.is_likelihood))
    if s.advantage == 'rloo':
        return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])
    return (r - r.mean()) / (r.std() + 1e-4 if s.advantage == 'group' else 1.0)


def _minibatches(groups, s):
    """Whole groups, the largest first, each to the minibatch with least loss tokens so far."""
    if s.filter_equal_rewards and not s.is_likelihood:
        groups = [g for g in groups if len({t.reward for t in g.trajectories}) > 1]
    sizes = [sum(int(t.loss_mask.sum()) for t in g.trajectories) for g in groups]
    members = [[] for _ in range(min(s.n_minibatches, len(groups)))]
    for g in sorted(range(len(groups)), key=lambda g: -sizes[g]):
        min(members, key=lambda m: sum(sizes[i] for i in m)).append(g)
    return [[groups[g] for g in m] for m in members]


def _trajectories(groups, s):
    """Of a minibatch, by token and of one length; `trained` lacks those too old, `weights` adds up to 1 with them."""
    pad = lambda values: np.pad(values, (0, _TOKENS - len(values)))
    rows = []
    for g in groups:
        for t, advantage in zip(g.trajectories, _advantages([t.reward for t in g.trajectories], s), strict=True):
            generated, ages = pad(t.loss_mask), _VERSION - pad(t.policy_versions)
            rows.append({
                'tokens': pad(t.tokens),
                'trained': generated & (ages <= (s.max_token_age if s.over_age == 'mask' else _VERSION)),
                'behavior': pad(t.behavior_logprobs.astype(np.float64)),
                'ages': ages,
                'weights': generated / (generated.sum() if s.aggregation == 'sequence_mean' else 1.0),
                'advantage': advantage,
            })  # fmt: skip
    total = sum(t['weights'].sum() for t in rows)
    return [t | {'weights': t['weights'] / total} for t in rows]


@functools.partial(jax.jit, static_argnums=2)
@jax.value_and_grad
def _loss(params, t, s):
    """A trajectory's part of the loss of its minibatch."""
    policy, entropy = _sequence(params, t['tokens'], s.temperature)
    mean = lambda x: jnp.sum(jnp.where(t['trained'], x * t['weights'], 0.0))
    if s.is_likelihood:
        return -mean(policy)
    now, behavior = jax.lax.stop_gradient(policy), t['behavior']
    proximal = {
        'recompute': t['before'],
        'behavior': behavior,
        'loglinear': behavior + t['ages'] / (t['ages'] + 1) * (now - behavior),
    }[s.proximal]
    ratio, weight = jnp.exp(policy - proximal), jnp.exp(proximal - behavior)
    weight = jnp.minimum(weight, s.behavior_weight_cap or np.inf)
    high = 1 + (s.clip_epsilon_high or s.clip_epsilon)
    free, clipped = ratio * t['advantage'], jnp.clip(ratio, 1 - s.clip_epsilon, high) * t['advantage']
    log = policy - t['before']  # the reference is the weights at the start, here those before the update
    kl = {'k1': log, 'k2': log**2 / 2, 'k3': jnp.exp(-log) - 1 + log}[s.kl_estimator]
    loss = -mean(weight * jnp.minimum(free, clipped)) - s.entropy_coefficient * mean(entropy)
    return loss + s.kl_coefficient * mean(kl)


# The update.


def _plain_update(groups, s, adam=None):
    """(weights, mean loss of the steps)."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), _PARAMS)
    first = second = jax.tree.map(np.zeros_like, params)
    batches = [_trajectories(groups, s) for groups in _minibatches(groups, s)]
    batches = [b for b in batches if any(t['trained'].any() for t in b)]
    for t in (t for b in batches for t in b):
        t['before'] = _sequence(params, t['tokens'], s.temperature)[0]
    losses = []
    for number, b in enumerate(batches * s.epochs, start=1):
        parts = jax.device_get([_loss(params, t, s) for t in b])
        losses.append(sum(loss for loss, _ in parts))
        step = jax.tree.map(lambda *g: sum(g), *(gradient for _, gradient in parts))
        if adam:
            norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(step)))
            step = jax.tree.map(lambda g: g * min(1.0, adam['clip_norm'] / norm), step)
            first = jax.tree.map(lambda m, g: adam['b1'] * m + (1 - adam['b1']) * g, first, step)
            second = jax.tree.map(lambda v, g: adam['b2'] * v + (1 - adam['b2']) * g**2, second, step)
            step = jax.tree.map(functools.partial(_adam_step, number, adam), first, second, params)
        params = jax.tree.map(lambda p, d: p - _RATE * d, params, step)
    return params, np.mean(losses)


def _adam_step(number, adam, first, second, param):
    mean, square = first / (1 - adam['b1'] ** number), second / (1 - adam['b2'] ** number)
    return mean / (np.sqrt(square) + adam['eps']) + adam['weight_decay'] * param


_GROUPS = [
    *random_groups(7, 3),
    TrajectoryGroup(3, (trajectory([1], [segment([2], 2)], reward=1.0, draw=3),)),  # alone
    TrajectoryGroup(
        4,  # from the one token of the prompt; versions 0 and 2; equal rewards
        tuple(trajectory([1], [segment([3], 0), segment([4] * n, 2)], draw=4, sample=n) for n in (1, 2)),
    ),
]


@pytest.mark.parametrize(
    ('settings', 'adam'),
    [
        (
            {
                **{'n_minibatches': 2, 'epochs': 2, 'aggregation': 'sequence_mean', 'behavior_weight_cap': 1.5},
                **{'entropy_coefficient': 0.1, 'kl_coefficient': 0.3, 'temperature': 0.7, 'clip_epsilon_high': 0.02},
                **{'over_age': 'mask', 'max_token_age': 1, 'filter_equal_rewards': False, 'clip_epsilon': 0.01},
            },
            None,
        ),
        (
            {
                **{'proximal': 'loglinear', 'advantage': 'rloo', 'kl_coefficient': 0.3, 'kl_estimator': 'k2'},
                **{'accumulate': 'scan', 'n_minibatches': 3},
            },
            _ADAM,
        ),
        ({'proximal': 'behavior', 'advantage': 'group_mean', 'kl_coefficient': 0.3, 'kl_estimator': 'k1'}, None),
        ({'objective': Likelihood('sequence_mean'), 'packing': 'ordinary'}, None),
    ],
    ids=['recompute', 'loglinear and Adam', 'behavior', 'sft'],
)
def test_an_update_is_what_the_equations_say(settings, adam):
    shapes = {'row_tokens': _TOKENS, 'row_loss_tokens': 20, 'rows_per_microbatch': 2}
    settings = learner_settings(**shapes | settings)
    optimizer = make_optimizer('adamw', **adam) if adam else make_optimizer('sgd', clip_norm=0)
    learner = SpmdLearner(
        Decoder(_CONFIG), _PARAMS, make_mesh(), optimizer=optimizer, learning_rate=_RATE, settings=settings
    )
    metrics, found = learner.update(_GROUPS, _VERSION), learner.save()['params']
    with jax.enable_x64(True):
        expected, loss = _plain_update(_GROUPS, _flatten(settings), adam)
    np.testing.assert_allclose(metrics['loss/value'], loss, rtol=1e-5)
    if settings.learner.n_minibatches * settings.learner.epochs > 1:
        assert metrics['loss/clip_fraction'] > 0
    for (path, weight), before, after in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(_PARAMS), jax.tree.leaves(expected), strict=True
    ):
        step = np.linalg.norm(after - before)
        assert np.linalg.norm(weight - after) <= 1e-4 * step + 1e-6, jax.tree_util.keystr(path)
        assert step > 1e-4
