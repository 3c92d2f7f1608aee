"""Random combinations that do not contradict themselves, and random tokens for them, from the number of a case."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.config.policy_choices import SURROGATES, PolicyChoices
from areal_jax.types import PackedBatch
from tests.learning.objective.plain_losses import Tokens

ROWS, PLACES = 2, 24
_SCALES = (0.05, 0.4, 3.0, 20.0, 600.0)  # largest |log-ratio| of a token
_TOKEN_SUMS = ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum')
_SEQUENCE_SUMS = ('sequence_mean', 'sequence_sum')
_WHOLE = ('sequence', 'geometric', 'geometric_token')


def draw_choices(rng: np.random.Generator, scale: float) -> PolicyChoices:
    """One choice an axis: each factor of theta / behavior once, units agree, the rules of OAPL and DG."""
    pick = lambda *values: values[rng.integers(len(values))]
    surrogate = pick(*SURROGATES)
    found: dict[str, object] = {
        'surrogate': surrogate, 'entropy_coefficient': pick(0.0, 0.0, 0.3), 'correction': 'none',
        'clip_epsilon': rng.uniform(0.05, 0.6), 'clip_epsilon_high': pick(None, rng.uniform(0.05, 2.0)),
        'dual_clip': rng.uniform(1.1, 4.0), 'sapo_positive': rng.uniform(0.5, 2.0),
        'sapo_negative': rng.uniform(0.5, 2.0), 'quadratic_weight': rng.uniform(0.01, 1.0),
        'oapl_beta': pick(1e-3, 0.1, 0.5), 'delight_temperature': rng.uniform(0.3, 3.0),
        'delight_share': rng.uniform(0.05, 0.9), 'delight_mix': rng.uniform(0.0, 1.0),
        'delight_gate': pick('sigmoid', 'bernoulli', 'kondo', 'additive'), 'length_constant': int(rng.integers(1, 9)),
    }  # fmt: skip
    if surrogate == 'oapl':
        found |= {'ratio': 'sequence', 'ratio_denominator': 'behavior', 'aggregation': 'sequence_mean'}
        return PolicyChoices(**found)
    found |= {'kl_coefficient': pick(0.0, 0.0, 0.7), 'kl_estimator': pick('k1', 'k2', 'k3', 'unbiased')}
    found['ratio'] = {
        'cispo': ('token',), 'reinforce': ('none', 'none', 'token'), 'delight': ('none',), 'topr': ('token', 'sequence')
    }.get(surrogate, ('token', 'token', *_WHOLE))  # fmt: skip
    found['ratio'] = ratio = pick(*found['ratio'])
    found['aggregation'] = pick(*(_SEQUENCE_SUMS if ratio in _WHOLE else _TOKEN_SUMS))
    if surrogate == 'delight':
        return PolicyChoices(**found)
    return PolicyChoices(**found | _draw_corrections(pick, rng, str(ratio), surrogate, scale))


def _draw_corrections(pick, rng, ratio: str, surrogate: str, scale: float) -> dict[str, object]:
    found: dict[str, object] = {'ratio_denominator': pick('proximal', 'proximal', 'behavior')}
    found['proximal'] = pick('recompute', 'recompute', 'loglinear', 'behavior')
    if scale > 100 and found['proximal'] == 'loglinear':
        found['proximal'] = 'recompute'  # a point between log-probs of -1000 is rounded by 6e-5
    weighs = surrogate != 'topr' and found['ratio_denominator'] == 'proximal' and found['proximal'] != 'behavior'
    if ratio == 'none' or weighs:
        whole = ratio in ('sequence', 'geometric', 'geometric_token')
        found |= {
            'correction': pick('none', 'truncate', 'mask'),
            'correction_level': pick(*('sequence', 'geometric'), *(() if whole else ('token', 'token'))),
            'behavior_weight_cap': pick(None, rng.uniform(0.5, 3.0)),
            'correction_low': pick(0.0, rng.uniform(0.3, 0.9)), 'correction_high': rng.uniform(1.1, 5.0),
        }  # fmt: skip
    if found['proximal'] != 'behavior':
        found['veto'] = pick(None, None, np.exp(-min(scale, 60.0) * rng.uniform(0.3, 1.0)))
    gates = ('none', 'none', 'second_moment', *(('probability_shift',) if ratio == 'token' else ()))
    found['gate'] = gate = pick(*gates)
    found['gate_threshold'] = scale**2 * rng.uniform(0.01, 0.3) if gate == 'second_moment' else rng.uniform(0.01, 0.3)
    return found


def draw_tokens(rng: np.random.Generator, scale: float) -> Tokens:
    """Answers of 1 to 7 tokens of groups of 1 to 4, some of their tokens masked, and now and then all of them."""
    lengths: list[int] = []
    ids = np.full((ROWS, PLACES), -1)
    for row in range(ROWS):
        place = 0
        while (length := int(rng.integers(1, 8))) + place <= PLACES - 3:
            ids[row, place : place + length] = len(lengths)
            place += length
            lengths.append(length)
    prompts = np.repeat(np.arange(len(lengths)), rng.integers(1, 5, len(lengths)))[: len(lengths)]
    mask = (ids >= 0) & (rng.random(ids.shape) > 0.15) & (rng.random() > 0.05)
    mask &= ids != rng.integers(len(lengths))  # an answer without any
    base = -scale - rng.uniform(0.0, 3.0, ids.shape)
    near = lambda: np.float32(base + scale / 2 * rng.uniform(-1.0, 1.0, ids.shape))
    policy, behavior, proximal, reference = near(), near(), near(), near()
    extreme = rng.random(ids.shape) < 0.05
    policy[extreme], behavior[extreme] = (base + 0.499 * scale)[extreme], (base - 0.499 * scale)[extreme]
    advantages = np.float32(rng.normal(size=len(lengths)) * (rng.random(len(lengths)) > 0.1))
    return Tokens(
        policy=policy, behavior=behavior, proximal=proximal, reference=reference,
        advantages=np.where(ids >= 0, advantages[ids], 0), entropy=np.float32(rng.uniform(0.0, 3.0, ids.shape)),
        versions=rng.integers(0, 5, ids.shape), version=4, mask=mask, ids=ids, prompts=tuple(prompts.tolist()),
        uniform=np.zeros(ids.shape),
    )  # fmt: skip


def draw_case(number: int) -> tuple[PolicyChoices, Tokens]:
    rng = np.random.default_rng(number)
    scale = _SCALES[number % len(_SCALES)]
    return draw_choices(rng, scale), draw_tokens(rng, scale)


def poison(tokens: Tokens, rng: np.random.Generator) -> Tokens:
    """NaN and infinity at every masked place."""
    bad = lambda x: np.where(tokens.mask, x, rng.choice([np.nan, np.inf, -np.inf], x.shape).astype(np.float32))
    names = ('policy', 'behavior', 'proximal', 'reference', 'advantages', 'entropy')
    versions = np.where(tokens.mask, tokens.versions, 10**6)
    return dataclasses.replace(tokens, versions=versions, **{name: bad(getattr(tokens, name)) for name in names})


def batch_of(tokens: Tokens) -> PackedBatch:
    """One micro-batch; what only the model reads is 0."""
    one = lambda x, dtype: np.asarray(x, dtype)[None]
    zeros = np.zeros((1, *tokens.ids.shape), np.int32)
    return PackedBatch(
        **dict.fromkeys(('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets'), zeros),
        loss_mask=one(tokens.mask, bool), behavior_logprobs=one(tokens.behavior, np.float32),
        advantages=one(tokens.advantages, np.float32), policy_versions=one(tokens.versions, np.int32),
        trajectory_ids=one(tokens.ids, np.int32),
    )  # fmt: skip


def starts_of(ids: np.ndarray) -> np.ndarray:
    """Where in its row each answer begins."""
    return np.array([[row.tolist().index(i) for i in row] for row in ids], np.int32)
