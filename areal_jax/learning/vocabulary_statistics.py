"""What an objective reads of whole distributions over the vocabulary at its loss tokens; see LossTokens.statistic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.learning.forward import Rows, Stream, predicting_states
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    DIVERGENCES,
    FORWARD_KL,
    REVERSE_KL,
    STATISTICS,
    Objective,
)
from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import over_mesh
from areal_jax.models.vocabulary_divergence import clamped_entropy, count_kept, token_divergences
from areal_jax.sharding.rules import TOKEN_AXES
from areal_jax.types import Tree

_Arrays = tuple[jax.Array, ...]


class TeacherForm(NamedTuple):
    """What a program of a step knows of a teacher before it gets its weights."""

    decoder: Decoder
    attention: str  # resolved implementation


def vocabulary_statistics(
    objective: Objective,
    states: jax.Array,
    head: jax.Array,
    temperature: jax.Array,
    mesh: Mesh,
    teacher: Callable[[], tuple[jax.Array, jax.Array]],
) -> dict[str, jax.Array]:
    """float32 [R, N] each, those that the objective reads; nothing else is computed.

    Args:
      states: hidden states [R, N, d] of the policy where it predicts.
      head: [V, d].
      teacher: the same two of the teacher, see `read_teacher`.
    """
    found: dict[str, jax.Array] = {}
    if not STATISTICS & objective.reads:
        return found
    rates = jnp.broadcast_to(temperature, states.shape[:2])
    if CLAMPED_ENTROPY in objective.reads:
        kept = count_kept(len(head), objective.entropy_clamp)
        (found[CLAMPED_ENTROPY],) = _map(functools.partial(_entropies, kept=kept), (states, rates), (head,), mesh)
    if DIVERGENCES & objective.reads:
        teacher_states, teacher_head = teacher()
        tokens, heads = (states, teacher_states, rates), (head, teacher_head)
        found[REVERSE_KL], found[FORWARD_KL] = _map(_divergences, tokens, heads, mesh)
    return found


def read_teacher(form: TeacherForm | None, weights: Tree, rows: Rows, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """(hidden states [R, N, d'] where loss tokens are predicted, head [V, d']), constant: its pass over the rows."""
    assert form is not None, 'place_teacher refuses an objective whose teacher is not there'
    weights = jax.lax.stop_gradient(weights)
    states, _ = predicting_states(form.decoder, weights, rows, attention=form.attention, mesh=mesh)
    return states, form.decoder.head(weights)


def _map(compute: Callable[..., _Arrays], tokens: _Arrays, heads: _Arrays, mesh: Mesh) -> _Arrays:
    """`compute` of tokens [R, N, ...], whose results [R * N] become [R, N], on the devices of the mesh."""
    stream = Stream(mesh, *tokens[0].shape[:2])
    flat = tuple(stream.flatten(x) for x in tokens)
    if stream.mesh is None:
        results = compute(flat, heads)
    else:
        local = functools.partial(compute, axis_name='tensor')
        results = over_mesh(local, flat, heads, mesh=stream.mesh, token_axes=TOKEN_AXES, vocab_axis='tensor')
    return tuple(stream.unflatten(x) for x in results)


def _entropies(tokens: _Arrays, heads: _Arrays, *, kept: int, axis_name: str | None = None) -> _Arrays:
    states, rates = tokens
    return (clamped_entropy(states, heads[0], rates, kept, axis_name=axis_name),)


def _divergences(tokens: _Arrays, heads: _Arrays, *, axis_name: str | None = None) -> _Arrays:
    states, teacher_states, rates = tokens
    return tuple(token_divergences(states, heads[0], teacher_states, heads[1], rates, axis_name=axis_name))
