"""Every method far from the policy that sampled, and on very short and very long answers, in float64 from its paper.

The log of a ratio is clamped to +-20 where exp is taken of it, and nowhere else. The formulas below are written from
the papers and differentiated in float64.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.objectives import OBJECTIVES, is_policy, resolve
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.counting import find_starts, token_weights
from areal_jax.learning.objective.objective import PROXIMAL, REFERENCE, TEACHER
from areal_jax.learning.objective.objectives import PolicyObjective, SampledDistillation
from areal_jax.learning.objective.policy_loss import keep_second_moment, kl_penalty
from areal_jax.learning.packing import empty_batch
from tests.learning.objective.tokens import loss_of, make_tokens

FAR = [sign * far for far in (19.0, 21.0, 30.0, 600.0) for sign in (1, -1)]
LENGTHS = (1, 3, 40, 20480, 5)  # of the answers of a row; of the last one a single token is far
IDS = np.repeat(np.arange(5), LENGTHS) + 5 * np.arange(len(FAR))[:, None]
fixed, sigmoid = jax.lax.stop_gradient, jax.nn.sigmoid


@functools.cache
def log_probs() -> dict[str, np.ndarray]:
    """float32 [R, N] of policy p, proximal x, behavior b and reference r, and advantages a.

    A row has one far log-ratio: of whole answers, over whose tokens it is spread, and of one token. The proximal policy
    is that of the behavior, that in training, or between them, by answer.
    """
    rng = np.random.default_rng(0)
    rows = []
    for number, far in enumerate(FAR):
        spread = [rng.uniform(0.5, 1.5, n) for n in LENGTHS[:-1]]
        moved = np.concatenate([*(far * share / share.sum() for share in spread), [0.1, -0.2, far, 0.2, -0.1]])
        behavior = -1.5 - rng.uniform(0.0, 1.0, len(moved)) - np.maximum(moved, 0) - (number % 3) * np.abs(moved)
        proximal = behavior + moved * np.repeat(rng.permutation([0.0, 1.0, 0.5, 0.0, 1.0]), LENGTHS)
        away = np.concatenate([rng.choice(FAR, 44), 0.1 * rng.normal(size=20480), rng.choice(FAR, 5)])
        policy = behavior + moved - np.maximum(-away, 0)
        behavior, proximal = behavior - np.maximum(-away, 0), proximal - np.maximum(-away, 0)
        advantages = np.repeat(rng.normal(size=5), LENGTHS)
        rows.append((policy, proximal, behavior, policy - away, advantages))
    return dict(zip('pxbra', np.float32(rows).swapaxes(0, 1), strict=True))


class Formula:
    """What formulas read, float64 [T]: the arrays of `log_probs`, and sums over the answer of a token."""

    def __init__(self, policy, arrays, ids):
        self.__dict__.update(arrays)
        self.p, self._ids = policy, ids
        self.n = self.sum(jnp.ones_like(policy))

    def sum(self, x):
        return jax.ops.segment_sum(x, self._ids, IDS.max() + 1)[self._ids]


def exp(log_ratio):
    return jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))


def ppo(o, low=0.2, high=0.2):
    q = exp(o.p - o.x)
    return -jnp.minimum(q * o.a, jnp.clip(q, 1 - low, 1 + high) * o.a)


def weighted(o, high=np.inf, low=0.0, outside=None):
    w = fixed(exp(o.x - o.b))
    return jnp.where((w >= low) & (w <= high), w, high if outside is None else outside) * ppo(o)


def gspo(o):
    q = exp(o.sum(o.p - o.x) / o.n)
    return -jnp.minimum(q * o.a, jnp.clip(q, 1 - 3e-4, 1 + 4e-4) * o.a)


def sapo(o):
    tau = jnp.where(o.a > 0, 1.0, 1.05)
    return -4 / tau * sigmoid(tau * (exp(o.p - o.x) - 1)) * o.a


def m2po(o):
    """The largest squares go until the mean of the rest is below 0.04."""
    squares = (o.p - o.b) ** 2
    ascending = jnp.sort(squares)
    kept = (jnp.cumsum(ascending) / jnp.arange(1, len(squares) + 1) < 0.04).sum()
    return -fixed(jnp.where(squares <= ascending[kept - 1], o.a, 0.0)) * exp(o.p - o.b)


def dppo(o):
    shift = jnp.exp(o.p) - jnp.exp(o.b)
    near = jnp.where(o.a > 0, shift <= 0.2, shift >= -0.2)
    return -fixed(jnp.where(near, o.a, 0.0)) * exp(o.p - o.b)


def topr(o):
    weight = jnp.where(o.a > 0, 1.0, jnp.minimum(exp(o.sum(o.p - o.b)), 1.0))
    return -fixed(weight) * o.a * o.p


def k3(o):
    return exp(o.r - o.p) - 1 + o.p - o.r


def unbiased(o):
    """Of value q k3, and with the gradient q l, in which no exp of l is left."""
    q, away = exp(o.p - o.b), o.p - o.r
    return fixed(q * k3(o)) + fixed(q * away) * (o.p - fixed(o.p))


TOKENS, MEAN, SUM = 'mean over tokens', 'mean over answers of means', 'mean over answers of sums'
FORMULAS = {
    'decoupled_ppo': (weighted, TOKENS),
    'ppo': (ppo, TOKENS),
    'ppo_critic': (weighted, TOKENS),
    'grpo': (lambda o: ppo(o) + 0.04 * k3(o), MEAN),
    'dr_grpo': (ppo, SUM),
    'rloo': (lambda o: -o.a * o.p, SUM),
    'reinforce_pp': (ppo, TOKENS),
    'reinforce_pp_baseline': (ppo, TOKENS),
    'maxrl': (ppo, TOKENS),
    'dapo': (lambda o: ppo(o, high=0.28), TOKENS),
    'gspo': (gspo, MEAN),
    'cispo': (lambda o: -fixed(jnp.clip(exp(o.p - o.x), 0.0, 5.0)) * o.a * o.p, TOKENS),
    'sapo': (sapo, MEAN),
    'm2po': (m2po, TOKENS),
    'dppo_tv': (dppo, TOKENS),
    'topr': (topr, TOKENS),
    'kimi': (lambda o: -o.a * o.p + 0.05 * (o.p - o.x) ** 2, TOKENS),
    'tis': (lambda o: weighted(o, high=2.0), TOKENS),
    'icepop': (lambda o: weighted(o, 5.0, 0.5, outside=0.0), TOKENS),
    'oapl': (lambda o: (1e-3 * o.sum(o.p - o.b) - o.a) ** 2, MEAN),
    'aent': (ppo, TOKENS),  # and an entropy, which reads no ratio
    'vcpo': (lambda o: -fixed(jnp.minimum(exp(o.sum(o.p - o.b)), 8.0)) * o.a * o.p, MEAN),
    'dg': (lambda o: -fixed(sigmoid(-o.a * o.p)) * o.a * o.p, TOKENS),
}
# terms of a gradient that may cancel
TERMS = {
    'grpo': lambda o: 0.04 * (1 + exp(o.r - o.p)) + exp(o.p - o.x) * abs(o.a),
    'k3': lambda o: 1 + exp(o.r - o.p),
    'sapo': lambda o: 4 * exp(o.p - o.x) * abs(o.a),
}


def from_paper(formula, mean, terms=lambda o: 0.0 * o.p):
    """(loss, its size, gradient [R, N], its size) in float64; a size is the sum of the absolute terms."""
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x.ravel(), jnp.float64) for name, x in log_probs().items()}
        answers, lengths = IDS.max() + 1, np.repeat(LENGTHS, LENGTHS)[None].repeat(len(FAR), 0).ravel()
        share = {TOKENS: 1 / IDS.size, MEAN: 1 / (lengths * answers), SUM: 1 / answers}[mean]
        given = lambda policy: Formula(policy, arrays, jnp.asarray(IDS.ravel()))

        def loss(policy):
            each = share * formula(given(policy))
            return each.sum(), jnp.abs(each).sum()

        (value, size), gradient = jax.value_and_grad(loss, has_aux=True)(arrays['p'])
        sizes = jnp.abs(gradient) + share * terms(given(arrays['p']))
    return float(value), float(size), *(np.asarray(x).reshape(IDS.shape) for x in (gradient, sizes))


def packed():
    """The same tokens as a minibatch of one micro-batch."""
    batch = empty_batch(1, *IDS.shape, IDS.shape[1])
    batch.trajectory_ids[0], batch.loss_mask[0], batch.behavior_logprobs[0] = IDS, True, log_probs()['b']
    return batch


def of_program(objective, **known):
    given, batch = {name: jnp.asarray(x) for name, x in log_probs().items()}, packed()
    weights, denominator = token_weights(batch, objective.aggregation, objective.length_constant)
    known = {name: jnp.asarray(x) for name, x in known.items()}

    def loss(policy):
        tokens = make_tokens(
            policy, given['b'], given['a'], jnp.ones(IDS.shape, bool), jnp.float32(denominator),
            token_weights=weights[0], starts=jnp.asarray(find_starts(IDS)), known=known,
        )  # fmt: skip
        return objective.loss(tokens)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(given['p'])
    return float(value), np.asarray(gradient), metrics


def assert_equal(found, expected):
    value, gradient, _ = found
    plain, size, slope, slope_size = expected
    assert abs(value - plain) <= 1e-5 * size
    far = np.abs(gradient - slope) / np.maximum(slope_size, 1e-30)
    assert far.max() <= 1e-5, (far.max(), np.unravel_index(far.argmax(), far.shape))


@pytest.mark.parametrize('method', FORMULAS)
def test_a_method_is_its_paper(method):
    given = log_probs()
    # an entropy reads no ratio, and a critic or a baseline makes advantages
    choices = resolve(types.SimpleNamespace(objective=method)) | {'entropy_coefficient': 0.0, 'advantage': 'reward'}
    objective = PolicyObjective(PolicyChoices(**choices))
    known = {PROXIMAL: given['x'], REFERENCE: given['r']}
    if 'gate' in objective.prepares:
        known['gate'] = keep_second_moment(packed(), given['p'][None], 0.04)[0]
    found = of_program(objective, **known)
    assert_equal(found, from_paper(*FORMULAS[method], *([TERMS[method]] if method in TERMS else [])))
    moved = given['p'].astype(np.float64) - given['b']
    np.testing.assert_allclose(found[2]['kl_sum'], (np.expm1(np.clip(moved, -20, 20)) - moved).sum(), rtol=1e-5)


def test_every_method_is_here():
    assert set(FORMULAS) == {name for name in OBJECTIVES if is_policy(name)}


def test_distillation_goes_on_where_the_teacher_is_far():
    formula = lambda o: -fixed(exp(o.p - o.b) * (o.r - o.p)) * o.p
    assert_equal(of_program(SampledDistillation(), **{TEACHER: log_probs()['r']}), from_paper(formula, TOKENS))


@pytest.mark.parametrize(
    ('estimator', 'formula'),
    [
        ('k1', lambda o: o.p - o.r),
        ('k2', lambda o: (o.p - o.r) ** 2 / 2),
        ('k3', k3),
        ('unbiased', unbiased),
    ],
)
def test_a_divergence_is_its_formula(estimator, formula):
    given, count = {name: jnp.asarray(x) for name, x in log_probs().items()}, np.float32(IDS.size)
    mask = jnp.ones(IDS.shape, bool)
    penalty = lambda p: kl_penalty(p, given['r'], mask, count, estimator=estimator, behavior_logprobs=given['b'])
    (value, metrics), gradient = jax.value_and_grad(penalty, has_aux=True)(given['p'])
    expected = from_paper(formula, TOKENS, *([TERMS[estimator]] if estimator in TERMS else []))
    assert_equal((float(value), np.asarray(gradient), metrics), expected)


def test_the_regression_of_a_far_answer_is_pulled_to_its_target():
    # OAPL, beta 0.001, A 0.642626: 2 beta (beta * -21 - A) = -0.001327
    choices = {'ratio': 'sequence', 'ratio_denominator': 'behavior', 'surrogate': 'oapl', 'correction': 'none'}
    zeros, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    loss = lambda policy: loss_of(policy, zeros, zeros, zeros + 0.642626, mask, 1.0, **choices)[0]
    np.testing.assert_allclose(jax.grad(loss)(zeros - 21.0), [[-0.001327252]], rtol=1e-5)


def test_a_veto_below_the_bound_of_a_ratio_acts():
    zeros, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    loss = lambda x: float(loss_of(x, x, zeros, zeros + 1.0, mask, 1.0, veto=1e-12)[0])
    assert loss(jnp.array([[-30.0, -1.0]])) == 0
    assert loss(jnp.array([[-22.0, -1.0]])) < 0  # log 1e-12 = -27.6
