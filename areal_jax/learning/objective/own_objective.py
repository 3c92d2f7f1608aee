"""Objectives of the user's own: loss.objective='FILE.py:FUNCTION', see docs/own_objective.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.objectives import FIELD
from areal_jax.errors import UserError
from areal_jax.learning.objective.aggregation import Counts, count_denominator
from areal_jax.learning.objective.objective import (
    END_VALUES,
    INPUTS,
    REFERENCE,
    TEACHER,
    VALUES,
    LossTokens,
    Metrics,
    Objective,
    TokenAdvantages,
    UndeclaredInputError,
)
from areal_jax.plugins import load_function, raising_user_error
from areal_jax.types import PackedBatch, TrajectoryGroup


def load_objective(spec: str, options: Mapping[str, object]) -> Objective:
    """What FUNCTION(**options) returns, checked.

    Raises UserError, naming the field and the spec, where it returns no Objective, or one that cannot be trained.
    """
    function = load_function(spec, FIELD)
    with raising_user_error(spec, FIELD):
        objective = function(**options)
    if not isinstance(objective, Objective):
        raise UserError(
            f'{FIELD}={spec}: it returned {type(objective).__name__}, and must return an Objective of '
            'areal_jax.learning.objective.objective'
        )
    if unknown := set(objective.reads) - INPUTS:
        raise UserError(
            f'{FIELD}={spec}: its `reads` has {sorted(unknown)[0]!r}, which no pass computes; use '
            f'{", ".join(sorted(INPUTS))}'
        )
    if {REFERENCE, TEACHER} <= objective.reads:
        raise UserError(f'{FIELD}={spec}: its `reads` has reference and teacher, of which an update computes one')
    if END_VALUES in objective.reads and VALUES not in objective.reads:
        raise UserError(f'{FIELD}={spec}: its `reads` has {END_VALUES!r} without {VALUES!r}, whose critic gives both')
    if VALUES in objective.reads and not objective.replaces_advantages:
        raise UserError(
            f'{FIELD}={spec}: its `reads` has {VALUES!r}, of which `token_advantages` makes advantages and returns: '
            'set replaces_advantages'
        )
    try:
        hash(objective)
        count_denominator(objective.aggregation, Counts(1, 1, 1))
    except TypeError as error:
        raise UserError(f'{FIELD}={spec}: {error}: make it a frozen dataclass') from error
    except ValueError as error:
        raise UserError(f'{FIELD}={spec}: {error}') from error
    object.__setattr__(objective, 'source', spec)  # it may be frozen
    return objective


def require_loss(objective: Objective, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
    """What its `loss` returns; raises UserError where an own one returns no scalars, or raises itself."""
    if not objective.source:
        return objective.loss(tokens)
    try:
        with raising_user_error(objective.source, FIELD):
            returned = objective.loss(tokens)
    except UndeclaredInputError as error:
        raise UserError(f'{FIELD}={objective.source}: {error}') from error
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.loss'
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise UserError(f'{name} returned {type(returned).__name__}, and must return (loss, metrics), metrics a dict')
    loss, metrics = returned
    for what, value in (('the loss', loss), *metrics.items()):
        if jnp.shape(value) != ():
            raise UserError(
                f'{name}: {what} has the shape {jnp.shape(value)}, and must be one number: sum over the tokens with '
                'tokens.mean, or tokens.total for a metric'
            )
    return jnp.asarray(loss, jnp.float32), metrics


def require_advantages(objective: Objective, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
    """Per group float32 [its answers]; raises UserError where an own one returns something else, or raises itself."""
    if not objective.source:
        return objective.advantages(groups)
    with raising_user_error(objective.source, FIELD):
        found = [np.asarray(advantages, np.float32) for advantages in objective.advantages(groups)]
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.advantages'
    shapes, wanted = [a.shape for a in found], [(len(group.trajectories),) for group in groups]
    if shapes != wanted:
        raise UserError(
            f'{name} returned arrays of the shapes {shapes}, and must return one number an answer: {wanted}'
        )
    if not all(np.isfinite(advantages).all() for advantages in found):
        raise UserError(f'{name} returned a number that is not finite in float32')
    return found


def require_token_advantages(
    objective: Objective,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    passed: Sequence[Mapping[str, np.ndarray]],
) -> list[TokenAdvantages]:
    """What `token_advantages` returns; raises UserError where an own one returns something else, or raises itself."""
    if not objective.source:
        return objective.token_advantages(groups, batches, passed)
    with raising_user_error(objective.source, FIELD):
        returned = [TokenAdvantages(*of) for of in objective.token_advantages(groups, batches, passed)]
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.token_advantages'
    needed = TokenAdvantages._fields if VALUES in objective.reads else ('advantages',)
    wanted = [batch.loss_mask.shape for batch in batches]
    for field in needed:
        found = [np.shape(getattr(of, field)) for of in returned]
        if found != wanted:
            raise UserError(f'{name} returned {field} of the shapes {found}, and must return one a minibatch: {wanted}')
        for of, batch in zip(returned, batches, strict=True):
            if not np.isfinite(np.asarray(getattr(of, field))[batch.loss_mask]).all():
                raise UserError(f'{name} returned {field} with a number that is not finite at a loss token')
    return returned


def require_prepared(
    objective: Objective, batch: PackedBatch, policy_logprobs: np.ndarray | None
) -> Mapping[str, np.ndarray]:
    """What `prepare` returns; raises UserError where an own one returns other names or shapes, or raises itself."""
    if not objective.source:
        return objective.prepare(batch, policy_logprobs)
    with raising_user_error(objective.source, FIELD):
        found = {
            name: np.asarray(values, np.float32) for name, values in objective.prepare(batch, policy_logprobs).items()
        }
    shapes = {name: values.shape for name, values in found.items()}
    wanted = dict.fromkeys(objective.prepares, batch.targets.shape)
    if shapes != wanted:
        raise UserError(
            f'{FIELD}={objective.source}: {type(objective).__name__}.prepare returned arrays of the shapes {shapes}, '
            f'and must return {wanted}, which its `prepares` names'
        )
    return found


def require_finite_loss(objective: Objective, loss: float, version: int) -> None:
    """Raises UserError for a loss that is not finite of an own objective, whose steps would all be skipped."""
    if objective.source and not math.isfinite(loss):
        raise UserError(
            f'{FIELD}={objective.source}: the loss of update {version + 1} is {loss}: {type(objective).__name__}.loss '
            'must be finite; bound log-ratios before exp, and mask with jnp.where before a division or logarithm'
        )
