"""One update of one arm: a batch becomes rewards, advantages, minibatches and optimizer steps.

The arithmetic equals a single run's (learning/), with arrays in place of the decisions that a single run makes on the
host.
It runs under a vmap over arms. Shapes: B, G, P, A as in __init__.py; M minibatches of at most E groups each; N = G * A
loss tokens of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.advantages import SAMPLE_FLOOR, STD_FLOOR, WHITEN_FLOOR
from areal_jax.learning.objective.objective import LossTokens
from areal_jax.learning.objective.policy_loss import (
    KINDS,
    policy_loss,
    prepared_names,
    proximal_logprobs,
    recomputed_logprobs,
)
from areal_jax.learning.objective.ratios import masked_sum
from areal_jax.learning.optimizer import BRAKES
from areal_jax.learning.settings import effective_sample_size
from areal_jax.models.decoder import Attend
from areal_jax.models.logprobs import TokenFunction, token_collisions, token_logprobs
from areal_jax.studies.arms.answer_generation import Answers, Faults, count_faults, disturb_answers, disturb_right
from areal_jax.studies.arms.arm import ADVANTAGES
from areal_jax.studies.arms.setting import Constants, Setting, generating_version
from areal_jax.types import Tree

_MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


def answer_logprobs(
    setting: Setting,
    params: Tree,
    prompts: jax.Array,
    answers: jax.Array,
    temperature: jax.Array,
    compute: TokenFunction = token_logprobs,
) -> tuple[jax.Array, jax.Array]:
    """Computes (log-probs, entropies), or the results of another `compute`, of answers to prompts.

    Results are float32 [E, G * A]; answers are int32 [E, G, A], prompts int32 [E, P].
    """
    (groups, length), (_, size, tokens) = prompts.shape, answers.shape
    read = tokens - 1
    inputs = jnp.concatenate([prompts, answers[..., :-1].reshape(groups, -1)], axis=1)  # [E, P + G * C]
    places = np.concatenate([np.arange(length), np.tile(length + np.arange(read), size)])
    hidden, _ = setting.decoder.hidden(
        params, inputs.reshape(-1), jnp.tile(jnp.asarray(places), groups), _attend(groups, length, size)
    )
    hidden = hidden.reshape(groups, len(places), -1)
    width = hidden.shape[-1]
    last = jnp.broadcast_to(hidden[:, None, length - 1 : length], (groups, size, 1, width))
    own = hidden[:, length:].reshape(groups, size, read, width)
    predicting = jnp.concatenate([last, own], axis=2)  # [E, G, A, d]
    flat = predicting.reshape(-1, width)
    head, cap = setting.decoder.head(params), setting.decoder.config.logit_cap
    logprobs, entropy = compute(flat, head, answers.reshape(-1), temperature, cap=cap)
    return logprobs.reshape(groups, -1), entropy.reshape(groups, -1)


def _attend(groups: int, length: int, size: int) -> Attend:
    """Attention of prompts to themselves, and of answers to their prompt and themselves."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        scale = q.shape[-1] ** -0.5
        q = q.reshape(groups, -1, *heads, q.shape[-1])
        k, v = (x.reshape(groups, -1, *x.shape[1:]) for x in (k, v))
        (prompt_k, own_k), (prompt_v, own_v) = ((x[:, :length], _by_answer(x[:, length:], size)) for x in (k, v))
        prompt_q, own_q = q[:, :length], _by_answer(q[:, length:], size)
        scores = jnp.einsum('etkhd,eskd->ekhts', prompt_q, prompt_k) * scale
        seen = np.tri(length, dtype=bool)
        out = jnp.einsum('ekhts,eskd->etkhd', _softmax(scores, seen), prompt_v)
        read = own_q.shape[2]
        scores = jnp.concatenate(
            [
                jnp.einsum('egckhd,eskd->ekgchs', own_q, prompt_k),
                jnp.einsum('egckhd,egxkd->ekgchx', own_q, own_k),
            ],
            axis=-1,
        )
        seen = np.concatenate([np.ones((read, length), bool), np.tri(read, dtype=bool)], axis=1)
        weights = _softmax(scores * scale, seen[:, None])
        own = jnp.einsum('ekgchs,eskd->egckhd', weights[..., :length], prompt_v)
        own += jnp.einsum('ekgchx,egxkd->egckhd', weights[..., length:], own_v)
        whole = jnp.concatenate([out, own.reshape(groups, -1, *out.shape[2:])], axis=1)
        return whole.reshape(-1, heads[0] * heads[1], whole.shape[-1]), entry

    return attend


def _by_answer(x: jax.Array, size: int) -> jax.Array:
    """Reshapes [E, G * C, ...] to [E, G, C, ...]."""
    return x.reshape(len(x), size, -1, *x.shape[2:])


def _softmax(scores: jax.Array, seen: np.ndarray) -> jax.Array:
    return jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)


Rows = Mapping[str, jax.Array]  # see `make_rows`
Sums = dict[str, jax.Array]  # float32 scalars, from which `arm_training.py` makes the metrics of an update


class Batch(NamedTuple):
    """The groups of an update."""

    prompts: jax.Array  # int32 [B, P]
    truths: jax.Array  # int32 [B, A]
    answers: Answers
    faults: Faults | None = None


class _Minibatches(NamedTuple):
    """The groups of each minibatch; a place without a group is not `filled`."""

    groups: jax.Array  # int32 [M, E]
    filled: jax.Array  # bool [M, E]


class _Carry(NamedTuple):
    params: Tree
    state: Tree
    rate: jax.Array  # float32, learning rate of the last step


def update(
    setting: Setting, constants: Constants, params: Tree, state: Tree, batch: Batch, version: jax.Array
) -> tuple[Tree, Tree, Sums]:
    """Updates the weights of `version`; returns (weights, optimizer state, sums)."""
    batch = batch._replace(answers=disturb_answers(batch.faults, batch.answers))
    verified = jnp.sum(batch.answers.tokens == batch.truths[:, None], axis=-1)  # int32 [B, G]
    right = disturb_right(batch.faults, verified)
    kept = ~constants.filters | (right.max(axis=1) != right.min(axis=1))  # [B]
    minibatches = split_groups(setting, kept)
    policy_version = generating_version(constants, version)
    scalars = {
        'version': version,
        'scale': jnp.where(constants.counts_all, setting.groups / jnp.maximum(kept.sum(), 1), 1.0),
    }
    passed = _measure_gradients(setting, constants, params, batch) if setting.weighs_gradients else None
    values = advantages(setting, constants, right, passed)
    rows = make_rows(batch, values, policy_version, minibatches)  # leaves [M, E, ...]
    rows |= {'recomputed_logprobs': _recompute(setting, constants, params, rows)}

    number = setting.minibatches * setting.epochs
    scalars['lag'] = (version - policy_version) * number

    def step(carry: _Carry, now: tuple[Rows, jax.Array]) -> tuple[_Carry, tuple[Sums, jax.Array]]:
        return _step(setting, constants, scalars, carry, *now)

    whole = {name: jnp.concatenate([array] * setting.epochs) for name, array in rows.items()}
    start = _Carry(params, state, jnp.zeros((), jnp.float32))
    carry, (steps, logprobs) = jax.lax.scan(step, start, (whole, jnp.arange(number)))
    sums = {name: values.max() if name.endswith('_max') else values.sum() for name, values in steps.items()}
    sums |= {'kept': kept.sum(), 'right': right.sum(), 'right_squares': (right**2).sum(), 'learning_rate': carry.rate}
    sums |= _mismatch(setting, constants, rows, logprobs[0], policy_version == version)
    sums |= count_faults(batch.faults, verified)
    return carry.params, carry.state, {name: value.astype(jnp.float32) for name, value in sums.items()}


def advantages(
    setting: Setting, constants: Constants, right: jax.Array, passed: tuple[jax.Array, jax.Array] | None = None
) -> jax.Array:
    """Computes advantages.group_advantages, float32 [B, G], from the number of right symbols, int32 or float32 [B, G].

    A reward is right / (A + 1): the end of an answer counts, but no answer has one. Differences of rewards are taken
    between integers, so equal rewards have the advantage 0, whatever their mean is. `passed`: log-weights and norms
    [B, G] for 'optimal_baseline'.
    """
    size, unit = right.shape[1], right.shape[1] * (setting.answer_tokens + 1)
    above = size * right - right.sum(axis=1, keepdims=True)  # (reward - mean) * unit
    centred = above / unit
    spread = deviation = jnp.sqrt(jnp.mean(above**2, axis=1, keepdims=True)) / unit
    choices, rewards, total = setting.choices, right / (setting.answer_tokens + 1), right.sum(axis=1, keepdims=True)
    if choices.deviation == 'sample':
        deviation = deviation * (size / max(size - 1, 1)) ** 0.5 + SAMPLE_FLOOR
    else:
        deviation = deviation + STD_FLOOR
    beta = choices.oapl_value_beta
    value = beta * (jax.nn.logsumexp(rewards / beta, axis=1, keepdims=True) - np.log(size))
    found = {
        'group': centred / deviation,
        'group_mean': centred,
        'rloo': centred * (size / max(size - 1, 1)),
        'reward': rewards,
        'max_rl': jnp.where(total > 0, above / jnp.where(total > 0, total, 1), 0.0),
        'length_baseline': centred,  # answers have equal lengths
        'optimal_value': rewards - value,
        'optimal_baseline': _above_optimal(setting, right, passed) / (spread + SAMPLE_FLOOR),
    }
    chosen = jnp.stack([found[name] for name in ADVANTAGES])[constants.advantage]
    if choices.whiten == 'batch':
        chosen = (chosen - chosen.mean()) / jnp.sqrt(chosen.var() * _unbiased(chosen.size, setting) + WHITEN_FLOOR)
    return chosen


def _above_optimal(setting: Setting, right: jax.Array, passed: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """float32 [B, G]: r - b of advantages.optimal_baseline."""
    logs, norms = (jnp.zeros(right.shape), jnp.ones(right.shape)) if passed is None else passed
    shares = jnp.exp(2 * (logs - logs.max(axis=1, keepdims=True))) * norms
    above = (right - right[:, :1]).astype(jnp.float32)  # 0 for equal rewards
    total = shares.sum(axis=1, keepdims=True)
    baseline = jnp.where(
        total > 0,
        (shares * above).sum(axis=1, keepdims=True) / jnp.where(total > 0, total, 1.0),
        above.mean(1, keepdims=True),
    )
    return (above - baseline) / (setting.answer_tokens + 1)


def _measure_gradients(
    setting: Setting, constants: Constants, params: Tree, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """(log Π π / π_behav, squared norms) of answers, float32 [B, G], as in packed_advantages."""
    answers = batch.answers.tokens
    logprobs, collisions = answer_logprobs(
        setting, params, batch.prompts, answers, constants.temperature, compute=token_collisions
    )
    by_answer = lambda x: x.reshape(answers.shape).sum(axis=-1)
    norms = jnp.maximum(1 - 2 * jnp.exp(logprobs) + jnp.exp(collisions), 0.0)
    behavior = batch.answers.behavior_logprobs.reshape(logprobs.shape)
    return by_answer(logprobs - behavior), by_answer(norms)


def _unbiased(answers: int, setting: Setting) -> float:
    """The factor from the population variance over tokens to the variance with ddof 1, as in advantages.whiten."""
    tokens = answers * setting.answer_tokens
    return tokens / max(tokens - 1, 1)


def split_groups(setting: Setting, kept: jax.Array) -> _Minibatches:
    """Splits as packing.split_minibatches: groups, all of one length, are dealt out in turn, in the order of draws."""
    order = jnp.argsort(~kept, stable=True)  # kept groups first
    rank = np.arange(setting.minibatches)[:, None] + setting.minibatches * np.arange(setting.minibatch_groups)
    return _Minibatches(order[np.minimum(rank, setting.groups - 1)], jnp.asarray(rank) < kept.sum())


def make_rows(
    batch: Batch, values: jax.Array, policy_version: jax.Array, minibatches: _Minibatches
) -> dict[str, jax.Array]:
    """Arranges the groups in their minibatches, leaves [M, E, ...]; the inputs of the loss are [M, E, N]."""
    _, size, answer = batch.answers.tokens.shape
    of_groups = lambda x: x[minibatches.groups]
    by_token = lambda x: of_groups(x).reshape(*minibatches.groups.shape, -1)
    mask = jnp.repeat(minibatches.filled[..., None], size * answer, axis=-1)
    return {
        'prompts': of_groups(batch.prompts),
        'answers': of_groups(batch.answers.tokens),
        'loss_mask': mask,
        'behavior_logprobs': by_token(batch.answers.behavior_logprobs),
        'advantages': by_token(jnp.repeat(values[..., None], answer, axis=-1)),
        'policy_versions': jnp.broadcast_to(policy_version, mask.shape),
    }


def _recompute(setting: Setting, constants: Constants, params: Tree, rows: Rows) -> jax.Array:
    """float32 [M, E, N]: log-probs under the weights before the update, if a later step needs them, else 0."""
    zeros = jnp.zeros_like(rows['behavior_logprobs'])
    first = 0 if setting.epochs > 1 else 1  # the first step itself computes the log-probs of its minibatch
    if not setting.recomputes or first == setting.minibatches:
        return zeros
    prompts, answers = (rows[name][first:].reshape(-1, *rows[name].shape[2:]) for name in ('prompts', 'answers'))
    logprobs, _ = answer_logprobs(setting, params, prompts, answers, constants.temperature)
    return zeros.at[first:].set(logprobs.reshape(zeros[first:].shape))


def _step(
    setting: Setting,
    constants: Constants,
    scalars: Mapping[str, jax.Array],
    carry: _Carry,
    rows: Rows,
    number: jax.Array,
) -> tuple[_Carry, tuple[Sums, jax.Array]]:
    """Makes one optimizer step on a minibatch, rows [E, ...]; changes nothing if the minibatch has no group."""
    denominator = jnp.maximum(rows['loss_mask'].sum(), 1).astype(jnp.float32) * scalars['scale']
    denominator = denominator * constants.denominator_factor
    scalars = {**scalars, 'denominator': denominator, 'first': number == 0}

    def loss(params: Tree) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        return _loss(setting, constants, params, rows, scalars)

    gradients, (sums, logprobs) = jax.grad(loss, has_aux=True)(carry.params)
    size = _sample_size(setting, logprobs, rows)
    rate, braked = _brake(setting, constants.learning_rate, size, scalars['lag'] + number)
    params, state, measured = setting.optimizer.apply(carry.params, carry.state, gradients, rate)
    made = rows['loss_mask'].any()
    select = lambda new, old: jnp.where(made, new, old)
    measured |= braked
    sums |= {name: select(measured[name], 0.0) for name in BRAKES if name in measured}
    sums |= {
        'sample_sizes': select(size, 0.0),
        'steps': made,
        'skip_count': select(measured['skip_count'], 0.0),
        'grad_norm': select(measured['grad_norm'], 0.0),
    }
    after = _Carry(
        jax.tree.map(select, params, carry.params),
        jax.tree.map(select, state, carry.state),
        select(measured['learning_rate'], carry.rate),
    )
    return after, (sums, logprobs)


def _sample_size(setting: Setting, logprobs: jax.Array, rows: Rows) -> jax.Array:
    """The sequence effective sample size (settings.py) of a minibatch, whose answers have equal lengths."""
    by_answer = lambda x: x.reshape(-1, setting.answer_tokens)
    logs = by_answer(logprobs - rows['behavior_logprobs']).sum(axis=-1)
    return effective_sample_size(logs, by_answer(rows['loss_mask'])[:, 0])


def _brake(setting: Setting, rate: jax.Array, size: jax.Array, lag: jax.Array) -> tuple[jax.Array, Sums]:
    """Returns (the rate of a step, metrics), as passes.py does."""
    brake = setting.brake
    if brake.kind == 'ess':
        factor = brake.ess_factor(size)
    elif brake.kind == 'lag':
        factor = brake.lag / jnp.maximum(brake.lag, lag)
    else:
        return rate, {}
    return rate * factor, {'brake': factor}


def _loss(
    setting: Setting, constants: Constants, params: Tree, rows: Rows, scalars: Mapping[str, jax.Array]
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    """Returns (loss of the minibatch, (sums, log-probs [E, N])), as programs.Programs computes it."""
    policy_logprobs, entropy = answer_logprobs(setting, params, rows['prompts'], rows['answers'], constants.temperature)
    choices, mask = arm_choices(setting, constants), rows['loss_mask']
    fixed = jax.lax.stop_gradient(policy_logprobs)
    prepared = {name: _prepare(choices, name, fixed, rows) for name in prepared_names(choices)}
    tokens = LossTokens(
        policy_logprobs=policy_logprobs,
        entropy=entropy,
        token_weights=jnp.ones(mask.shape, jnp.float32),
        sequence_starts=jnp.broadcast_to(_starts(setting, mask.shape[1]), mask.shape),
        denominator=scalars['denominator'],
        version=scalars['version'],
        known=prepared,
        statistics={},
        **{name: rows[name] for name in ('behavior_logprobs', 'advantages', 'loss_mask', 'policy_versions')},
    )
    loss, sums = policy_loss(choices, tokens, _proximal(constants, tokens, rows, scalars['first']))
    if setting.rewards_entropy:
        loss = loss - constants.entropy_coefficient * tokens.mean(entropy)
    sums |= {'loss_sum': loss, 'entropy_sum': masked_sum(entropy, mask)}
    return loss, (jax.lax.stop_gradient(sums), policy_logprobs)


def arm_choices(setting: Setting, constants: Constants) -> PolicyChoices:
    """The combination that the arms share, with the numbers of this arm."""
    return dataclasses.replace(setting.choices, **constants.numbers)


def _starts(setting: Setting, tokens: int) -> np.ndarray:
    """int32 [N]: the start of the answer to which each loss token belongs."""
    return (np.arange(tokens) // setting.answer_tokens * setting.answer_tokens).astype(np.int32)


def _proximal(constants: Constants, tokens: LossTokens, rows: Rows, first: jax.Array) -> jax.Array:
    """log π_prox of the arm's kind."""
    policy, behavior = tokens.policy_logprobs, tokens.behavior_logprobs
    known = recomputed_logprobs(policy, rows['recomputed_logprobs'], first)
    centres = [
        proximal_logprobs(kind, policy, behavior, tokens.policy_versions, tokens.version, known) for kind in KINDS
    ]
    return jnp.stack(centres)[constants.proximal]


def _prepare(choices: PolicyChoices, name: str, policy: jax.Array, rows: Rows) -> jax.Array:
    """The gate of objective/policy_loss.py, [E, N]; here a minibatch is one program, so no earlier pass is needed."""
    mask = rows['loss_mask']
    if choices.gate == 'second_moment':
        squares = jnp.where(mask, (policy - rows['behavior_logprobs']) ** 2, jnp.inf)
        ascending = jnp.sort(squares, axis=None)
        means = jnp.cumsum(ascending) / jnp.arange(1, ascending.size + 1)
        kept = (means < choices.gate_threshold).sum()
        largest = jnp.where(kept > 0, ascending[jnp.maximum(kept - 1, 0)], -1.0)
        return (squares <= largest).astype(jnp.float32)
    values = jnp.where(mask, -rows['advantages'] * policy, -jnp.inf)
    kept = jnp.maximum(jnp.round(choices.delight_share * mask.sum()), 1).astype(jnp.int32)
    return (values >= -jnp.sort(-values, axis=None)[jnp.minimum(kept, values.size) - 1]).astype(jnp.float32)


def _mismatch(setting: Setting, constants: Constants, rows: Rows, first: jax.Array, current: jax.Array) -> Sums:
    """Sums for diagnostics.mismatch_metrics: |behavior - learner's log-prob| of tokens with the same weights in both.

    `first`: float32 [E, N], log-probs of the first minibatch before its step.
    """
    before = rows['recomputed_logprobs'].at[0].set(first)
    recomputed = setting.recomputes & (constants.proximal == KINDS.index('recompute'))
    known = (jnp.arange(setting.minibatches) == 0) | recomputed
    compared = rows['loss_mask'] & known[:, None, None] & current
    differences = jnp.where(compared, jnp.abs(rows['behavior_logprobs'] - before), 0.0)
    return {
        'mismatch_count': compared.sum(),
        'mismatch_sum': differences.sum(),
        'mismatch_max': differences.max(),
        'mismatch_exact': (compared & (differences == 0)).sum(),
    }
