"""Losses and gradients of combinations in float64, token by token, written from the papers' formulas.

Nothing of the program is called, so that both can be compared. The loss of token t of answer i is

  u_t M_t c_t l(q_t, A_i) + u_t (b K_t - h H_t)

with u the aggregation (its denominator included), M a gate in {0, 1}, c a constant weight, l a surrogate of a ratio q,
K the divergence from the reference and H the entropy. Logarithms of ratios are clamped to +-20 where exp is taken of
them, and nowhere else. Beside each number stands its size: the same sum with absolute values, of which a float32 result
may be a small share off.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

LIMIT = 20.0
Place = tuple[int, int]  # row and loss token


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Loss tokens [R, N] of a minibatch; only those under the mask are read."""

    policy: np.ndarray
    behavior: np.ndarray
    proximal: np.ndarray  # of the weights before the update
    reference: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray
    versions: np.ndarray
    version: int  # before the update
    mask: np.ndarray
    ids: np.ndarray  # number of the answer, -1 = padding; an answer's masked tokens have it too
    prompts: tuple[int, ...]  # number of the prompt of each answer
    uniform: np.ndarray  # drawn numbers, of a Bernoulli gate

    def answers(self) -> dict[int, list[Place]]:
        """The trained tokens of each answer that has some."""
        found: dict[int, list[Place]] = {}
        for row, place in zip(*np.nonzero(self.mask), strict=True):
            found.setdefault(int(self.ids[row, place]), []).append((int(row), int(place)))
        return found


class Plain(NamedTuple):
    """A loss and its gradients by log-probs and entropies, each with its size."""

    value: float
    size: float
    gradient: np.ndarray
    gradient_size: np.ndarray
    entropy_gradient: np.ndarray


class Slopes(NamedTuple):
    """A surrogate at one token: value, and derivatives by its own log-prob and by log q; sizes of value and slope."""

    value: float
    own: float = 0.0
    through: float = 0.0
    size: float | None = None
    through_size: float | None = None


def differentiate(choices, tokens: Tokens) -> Plain:
    """The loss of a combination, an object with the fields of the section `loss`."""
    value = size = 0.0
    gradient, gradient_size = np.zeros((2, *tokens.policy.shape))
    entropy_gradient = np.zeros(tokens.policy.shape)
    weights, gate = aggregate(choices, tokens), open_tokens(choices, tokens)
    for answer in tokens.answers().values():
        for t in answer:
            u = weights[t]
            slopes = surrogate(choices, tokens, answer, t)
            weight = u * gate[t] * correct(choices, tokens, answer, t)
            penalty, slope, penalty_size, slope_size = divergence(choices, tokens, t)
            bonus = choices.entropy_coefficient * tokens.entropy[t]
            value += weight * slopes.value + u * (penalty - bonus)
            size += weight * _size(slopes.size, slopes.value) + u * (penalty_size + abs(bonus))
            gradient[t] += weight * slopes.own + u * slope
            gradient_size[t] += weight * abs(slopes.own) + u * slope_size
            for s, share in spread(choices, tokens, answer, t).items():
                gradient[s] += weight * slopes.through * share
                gradient_size[s] += weight * _size(slopes.through_size, slopes.through) * share
            entropy_gradient[t] = -u * choices.entropy_coefficient
    return Plain(value, size, gradient, gradient_size, entropy_gradient)


def _size(given: float | None, value: float) -> float:
    return abs(value) if given is None else given


def aggregate(choices, tokens: Tokens) -> np.ndarray:
    """What each token counts; lengths and numbers of answers and prompts are those before any token is masked."""
    lengths = {int(i): int((tokens.ids == i).sum()) for i in np.unique(tokens.ids) if i >= 0}
    of_prompt: dict[int, int] = {}
    for i, length in lengths.items():
        of_prompt[tokens.prompts[i]] = of_prompt.get(tokens.prompts[i], 0) + length
    answers, prompts, total = len(lengths), len(of_prompt), sum(lengths.values())
    weights = np.zeros(tokens.ids.shape)
    for t in np.ndindex(tokens.ids.shape):
        if (i := int(tokens.ids[t])) >= 0:
            weights[t] = {
                'token_mean': 1 / total,
                'sequence_mean': 1 / (answers * lengths[i]),
                'sequence_sum': 1 / answers,
                'constant': 1 / (answers * choices.length_constant),
                'prompt_mean': 1 / (prompts * of_prompt[tokens.prompts[i]]),
                'token_sum': 1.0,
            }[choices.aggregation]
    return weights


def centre(choices, tokens: Tokens, t: Place) -> float:
    """log of the proximal policy. A-3PO: the weight on theta is e / (e + 1) at age e."""
    if choices.proximal == 'behavior':
        return tokens.behavior[t]
    if choices.proximal == 'loglinear':
        age = max(0, tokens.version - int(tokens.versions[t]))
        return (tokens.behavior[t] + age * tokens.policy[t]) / (age + 1)
    return tokens.proximal[t]


def log_ratio(choices, tokens: Tokens, answer: list[Place], t: Place) -> float:
    """log q of a token, not clamped."""
    below = lambda s: tokens.behavior[s] if choices.ratio_denominator == 'behavior' else centre(choices, tokens, s)
    each = [tokens.policy[s] - below(s) for s in answer]
    return {
        'none': 0.0,
        'token': tokens.policy[t] - below(t),
        'sequence': sum(each),
        'geometric': sum(each) / len(each),
        'geometric_token': sum(each) / len(each),
    }[choices.ratio]


def spread(choices, tokens: Tokens, answer: list[Place], t: Place) -> dict[Place, float]:
    """d log q_t / d log-prob, by token: a geometric mean reaches the whole answer, its token form the own token."""
    if choices.ratio == 'geometric_token':
        return {t: 1.0}
    reads_log = choices.surrogate in ('quadratic', 'oapl')
    if choices.ratio == 'none' or (not reads_log and abs(log_ratio(choices, tokens, answer, t)) > LIMIT):
        return {}
    if choices.ratio == 'token':
        return {t: 1.0}
    return dict.fromkeys(answer, 1.0 if choices.ratio == 'sequence' else 1 / len(answer))


def behind(choices, tokens: Tokens, t: Place) -> float:
    """log of what a correction weighs: prox / behavior, or theta / behavior where there is no ratio."""
    above = tokens.policy[t] if choices.ratio == 'none' else centre(choices, tokens, t)
    return above - tokens.behavior[t]


def correct(choices, tokens: Tokens, answer: list[Place], t: Place) -> float:
    """Truncated importance sampling, or a mask that keeps the weight inside its bounds."""
    if choices.correction == 'none':
        return 1.0
    each = [behind(choices, tokens, s) for s in answer]
    log_weight = {
        'token': behind(choices, tokens, t), 'sequence': sum(each), 'geometric': sum(each) / len(each),
    }[choices.correction_level]  # fmt: skip
    weight = exp(log_weight)
    if choices.correction == 'truncate':
        return weight if choices.behavior_weight_cap is None else min(weight, choices.behavior_weight_cap)
    return weight if choices.correction_low <= weight <= choices.correction_high else 0.0


def open_tokens(choices, tokens: Tokens) -> np.ndarray:
    """M: 1 at the tokens that veto and gate leave."""
    found = np.ones(tokens.mask.shape)
    for answer in tokens.answers().values():
        for t in answer:
            if choices.veto is not None and min(behind(choices, tokens, s) for s in answer) < math.log(choices.veto):
                found[t] = 0
            if choices.gate == 'probability_shift':
                found[t] *= stays_near(choices, tokens, t)
    if choices.gate == 'second_moment':
        found *= second_moment(tokens, choices.gate_threshold)
    return found


def stays_near(choices, tokens: Tokens, t: Place) -> bool:
    """DPPO's total-variation mask: not yet too far in the direction of the advantage."""
    below = tokens.behavior[t] if choices.ratio_denominator == 'behavior' else centre(choices, tokens, t)
    shift = math.exp(tokens.policy[t]) - math.exp(below)
    return shift <= choices.gate_threshold if tokens.advantages[t] > 0 else shift >= -choices.gate_threshold


def second_moment(tokens: Tokens, threshold: float) -> np.ndarray:
    """M2PO: the largest squares are dropped until the mean of the rest is below the threshold."""
    squares = {t: (tokens.policy[t] - tokens.behavior[t]) ** 2 for answer in tokens.answers().values() for t in answer}
    kept = sorted(squares, key=squares.__getitem__)
    while kept and sum(squares[t] for t in kept) / len(kept) >= threshold:
        kept.pop()
    found = np.zeros(tokens.mask.shape)
    for t in kept:
        found[t] = 1
    return found


def surrogate(choices, tokens: Tokens, answer: list[Place], t: Place) -> Slopes:
    """l(q, A) and its slopes."""
    a, logprob = float(tokens.advantages[t]), float(tokens.policy[t])
    log_q = log_ratio(choices, tokens, answer, t)
    q, name = exp(log_q), choices.surrogate
    high = choices.clip_epsilon if choices.clip_epsilon_high is None else choices.clip_epsilon_high
    inside = min(max(q, 1 - choices.clip_epsilon), 1 + high)
    if name in ('clip', 'dual_clip'):
        bound = -a * choices.dual_clip if name == 'dual_clip' and a < 0 else math.inf
        pessimistic = max(-a * q, -a * inside)
        value = min(pessimistic, bound)
        return Slopes(value, through=-a * q if value == -a * q else 0.0)
    if name == 'cispo':
        return Slopes(-inside * a * logprob, own=-inside * a)
    if name == 'is_pg':
        return Slopes(-q * a, through=-q * a)
    if name == 'sapo':
        tau = choices.sapo_positive if a > 0 else choices.sapo_negative
        s = sigmoid(tau * (q - 1))
        return Slopes(-a * 4 / tau * s, through=-a * 4 * q * s * (1 - s), through_size=abs(a) * 4 * q * s * (1 + s))
    if name == 'topr':
        weight = 1.0 if a > 0 else min(q, 1.0)
        return Slopes(-weight * a * logprob, own=-weight * a)
    if name == 'quadratic':
        tau = choices.quadratic_weight
        size = abs(a * logprob) + tau / 2 * log_q**2
        # a point between two log-probs is rounded as they are
        log_size = abs(log_q) + (abs(logprob) if choices.proximal == 'loglinear' else 0.0)
        return Slopes(-a * logprob + tau / 2 * log_q**2, -a, tau * log_q, size, tau * log_size)
    if name == 'oapl':
        beta = choices.oapl_beta
        residual, whole = beta * log_q - a, abs(beta * log_q) + abs(a)
        return Slopes(residual**2, 0.0, 2 * beta * residual, whole**2, 2 * beta * whole)
    weight = 1.0 if name == 'reinforce' else delight(choices, tokens, t)
    return Slopes(-weight * a * logprob, own=-weight * a)


def delight(choices, tokens: Tokens, t: Place) -> float:
    """The gate of Delightful policy gradient: of advantage times surprisal."""
    a, surprisal = tokens.advantages[t], -tokens.policy[t]
    eta, mix = choices.delight_temperature, choices.delight_mix
    if choices.delight_gate == 'additive':
        return sigmoid(((1 - mix) * a + mix * surprisal) / eta)
    if choices.delight_gate == 'bernoulli':
        return float(tokens.uniform[t] < sigmoid(a * surprisal / eta))
    if choices.delight_gate == 'kondo':
        values = [-tokens.advantages[s] * tokens.policy[s] for answer in tokens.answers().values() for s in answer]
        kept = max(1, round(choices.delight_share * len(values)))
        return float(a * surprisal >= sorted(values)[-kept])
    return sigmoid(a * surprisal / eta)


def divergence(choices, tokens: Tokens, t: Place) -> tuple[float, float, float, float]:
    """(estimate, slope, and their sizes) of KL(theta || reference), times its coefficient."""
    if not choices.kl_coefficient:
        return 0.0, 0.0, 0.0, 0.0
    x = tokens.policy[t] - tokens.reference[t]
    k = exp(-x)
    through = k if abs(x) <= LIMIT else 0.0
    value, slope, size, slope_size = {
        'k1': (x, 1.0, abs(x), 1.0),
        'k2': (x * x / 2, x, x * x / 2, abs(x)),
        'k3': (k - 1 + x, 1 - through, k + 1 + abs(x), 1 + through),
    }[choices.kl_estimator.replace('unbiased', 'k3')]
    if choices.kl_estimator == 'unbiased':
        q = exp(tokens.policy[t] - tokens.behavior[t])
        value, size, slope, slope_size = q * value, q * size, q * x, q * abs(x)
    return tuple(choices.kl_coefficient * x for x in (value, slope, size, slope_size))


def exp(log_weight: float) -> float:
    return math.exp(min(LIMIT, max(-LIMIT, log_weight)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
