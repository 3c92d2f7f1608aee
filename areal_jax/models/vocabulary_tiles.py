"""Walks over a vocabulary tile by tile, so that no program holds the logits of all its tokens; also over a mesh.

Shapes: N tokens, d model width, V vocabulary, t devices of the axis that cuts V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

TILE_BYTES = 2**25  # size of one tile of float32 logits
_LEAST_CHUNK = 2048  # vocabulary entries per tile: smaller tiles read and write the sum of d_hidden too often
LOWEST = -1e30  # below every logit, and finite because 0 * -inf is NaN

Index = jax.Array | int
_State = TypeVar('_State')
_Heads = TypeVar('_Heads')
_Results = TypeVar('_Results')


def scale_logits(logits: jax.Array, temperature: ArrayLike) -> jax.Array:
    """logits / temperature in float32: the logits of the policy, whose softmax it is."""
    return logits.astype(jnp.float32) / effective_temperature(temperature)[..., None]


def effective_temperature(temperature: ArrayLike) -> jax.Array:
    """float32; 0 (greedy) counts as 1."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return jnp.where(temperature > 0, temperature, 1.0)


def choose_chunk(chunk: int | None, tokens: int, rows: int) -> int:
    """Vocabulary entries per tile of a head of so many rows: `chunk`, or what fills 32 MB of float32, at least 2048."""
    if chunk is None:
        chunk = max(TILE_BYTES // (4 * tokens) // 128 * 128, _LEAST_CHUNK)
    return min(chunk, rows)


def fold_tiles(fold: Callable[[_State, _Heads, Index], _State], state: _State, heads: _Heads, chunk: int) -> _State:
    """Folds `chunk` rows at a time of a head, or of several of equal length, into the state, in a loop, then the rest.

    `fold` gets the state, the rows and the index of the first. The rest is a smaller tile of its own instead of a
    padded one: padding with -inf gives NaN, with zeros a wrong sum. A loop instead of an unrolled program, in which XLA
    would keep all tiles in memory at once.
    """
    rows = len(jax.tree.leaves(heads)[0])
    if chunk == rows:
        return fold(state, heads, 0)
    whole = rows // chunk

    def tile(index: jax.Array, state: _State) -> _State:
        cut = lambda head: jax.lax.dynamic_slice_in_dim(head, index * chunk, chunk)
        return fold(state, jax.tree.map(cut, heads), index * chunk)

    state = jax.lax.fori_loop(0, whole, tile, state)
    return (
        fold(state, jax.tree.map(lambda head: head[whole * chunk :], heads), whole * chunk) if rows % chunk else state
    )


def tile_logits(hidden: jax.Array, columns: jax.Array, temperature: jax.Array) -> jax.Array:
    """float32 [N, rows] of some rows of a head."""
    return scale_logits(product('nd,vd->nv', hidden, columns), temperature)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with sums in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def pull_back(
    slopes: Callable[[tuple[jax.Array, ...], Index], jax.Array],
    hidden: jax.Array,
    heads: tuple[jax.Array, ...],
    temperature: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """The gradients with respect to `hidden` [N, d] and to the first of the heads, in their dtypes.

    Args:
      slopes: from rows of the heads and the index of the first one the gradient with respect to logits / temperature
        there, float32 [N, rows].
    """
    head = heads[0]

    def fold(
        state: tuple[jax.Array, jax.Array], columns: tuple[jax.Array, ...], first: Index
    ) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_head = state
        d_logits = (slopes(columns, first) / temperature[:, None]).astype(hidden.dtype)
        d_hidden = d_hidden + product('nv,vd->nd', d_logits, columns[0])
        d_columns = product('nv,nd->vd', d_logits, hidden).astype(head.dtype)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_columns, first, 0)

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head))
    d_hidden, d_head = fold_tiles(fold, start, heads, chunk)
    return d_hidden.astype(hidden.dtype), d_head


def shift_sums(total: jax.Array, moment: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of e^x and x e^x after adding `by` to every x."""
    return jnp.exp(by) * total, jnp.exp(by) * (moment + total * by)


def over_mesh(
    compute: Callable[[tuple[jax.Array, ...], tuple[jax.Array, ...]], _Results],
    tokens: Sequence[jax.Array],
    heads: Sequence[jax.Array],
    *,
    mesh: Mesh,
    token_axes: Sequence[str],
    vocab_axis: str,
) -> _Results:
    """`compute` of whole arrays, with tokens sharded over `token_axes` and the vocabulary over `vocab_axis`.

    Args:
      compute: gets this device's parts of `tokens` and of `heads`, inside jax.shard_map; its results, [N] each and
        equal on all devices of `vocab_axis`, are sharded like the tokens.
      tokens: [N, ...] each.
      heads: [V, ...] each.

    Raises ValueError if N or V is not a multiple of the number of devices over which it is sharded.
    """
    token_shards = math.prod(mesh.shape[axis] for axis in token_axes)
    for name, size, axes, shards in (
        ('tokens', len(tokens[0]), tuple(token_axes), token_shards),
        ('rows of the head (the vocabulary)', len(heads[0]), (vocab_axis,), mesh.shape[vocab_axis]),
    ):
        if size % shards:
            axis_sizes = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)
            raise ValueError(f'{size} {name} do not divide over {axis_sizes}: pad them or change the mesh')
    by_token = PartitionSpec(tuple(token_axes))
    specs = (by_token, PartitionSpec(vocab_axis))
    local = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=by_token, check_vma=False)
    return local(tuple(tokens), tuple(heads))
