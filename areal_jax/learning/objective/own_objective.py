"""Objectives of the user's own: loss.objective='FILE.py:FUNCTION', see docs/own_objective.md."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from areal_jax.config.objectives import FIELD
from areal_jax.errors import UserError
from areal_jax.learning.objective.aggregation import Counts, count_denominator
from areal_jax.learning.objective.objective import INPUTS, REFERENCE, TEACHER, LossTokens, Metrics, Objective
from areal_jax.plugins import load_function, raising_user_error


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
    try:
        hash(objective)
        count_denominator(objective.aggregation, Counts(1, 1, 1))
    except TypeError as error:
        raise UserError(f'{FIELD}={spec}: {error}: make it a frozen dataclass') from error
    except ValueError as error:
        raise UserError(f'{FIELD}={spec}: {error}') from error
    return objective


def require_loss(objective: Objective, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
    """What its `loss` returns, if that is a scalar and metrics are scalars; raises UserError for another shape."""
    name = type(objective).__name__
    returned = objective.loss(tokens)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(f'{FIELD}: {name}.loss returned {type(returned).__name__}, and must return (loss, metrics)')
    loss, metrics = returned
    for what, value in (('loss', loss), *metrics.items()):
        if jnp.shape(value) != ():
            raise UserError(
                f'{FIELD}: {what} of {name}.loss has the shape {jnp.shape(value)}, and must be one number: sum '
                'over the tokens with tokens.mean, or tokens.total for a metric'
            )
    return jnp.asarray(loss, jnp.float32), metrics
