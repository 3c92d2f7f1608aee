"""The one definition of a token's log-prob: on whole logits for decoding, tile by tile for training.

Shapes: N tokens whose log-probs are taken, d model width, V vocabulary, t devices of the axis that cuts V.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
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
    """logits / temperature in float32: the policy is the softmax of the result."""
    return logits.astype(jnp.float32) / effective_temperature(temperature)[..., None]


def cap_logits(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap) in float32: the logits of a model with ModelConfig.logit_cap; None = as they are."""
    return logits if cap is None else cap * jnp.tanh(logits.astype(jnp.float32) / cap)


def effective_temperature(temperature: ArrayLike) -> jax.Array:
    """The temperature in float32; 0 (greedy) counts as 1."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return jnp.where(temperature > 0, temperature, 1.0)


def choose_chunk(chunk: int | None, tokens: int, rows: int) -> int:
    """Vocabulary entries per tile of a head with `rows` rows: `chunk`, or as many as fill 32 MB (at least 2048)."""
    if chunk is None:
        chunk = max(TILE_BYTES // (4 * tokens) // 128 * 128, _LEAST_CHUNK)
    return min(chunk, rows)


def fold_tiles(fold: Callable[[_State, _Heads, Index], _State], state: _State, heads: _Heads, chunk: int) -> _State:
    """Folds `chunk` rows at a time of a head, or of several of equal length, into the state, in a loop, then the rest.

    `fold` gets the state, the rows and the index of the first. The rest is a smaller tile, not a padded one: padding
    with -inf gives NaN, with zeros a wrong sum. It is a loop because XLA would keep all tiles of an unrolled program in
    memory at once.
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


def tile_logits(hidden: jax.Array, columns: jax.Array, temperature: jax.Array, cap: float | None = None) -> jax.Array:
    """logits / temperature for some rows of a head, float32 [N, rows]; `cap` as in cap_logits."""
    return scale_logits(cap_logits(product('nd,vd->nv', hidden, columns), cap), temperature)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with sums in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def pull_back(
    slopes: Callable[[tuple[jax.Array, ...], Index], jax.Array],
    hidden: jax.Array,
    heads: tuple[jax.Array, ...],
    temperature: jax.Array,
    chunk: int,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients with respect to `hidden` [N, d] and to the first of the heads, in their dtypes.

    Args:
      slopes: (rows of the heads, index of the first one) -> the gradient with respect to logits / temperature there,
        float32 [N, rows].
      cap: of the logits of the first head, see cap_logits.
    """
    head = heads[0]

    def fold(
        state: tuple[jax.Array, jax.Array], columns: tuple[jax.Array, ...], first: Index
    ) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_head = state
        d_logits = slopes(columns, first) / temperature[:, None]
        if cap is not None:  # d cap tanh(z / cap) / dz = 1 - tanh(z / cap)^2
            d_logits *= 1 - jnp.square(jnp.tanh(product('nd,vd->nv', hidden, columns[0]) / cap))
        d_logits = d_logits.astype(hidden.dtype)
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
    stored: Sequence[PartitionSpec] = (),
) -> _Results:
    """Applies `compute` to whole arrays, with tokens sharded over `token_axes` and the vocabulary over `vocab_axis`.

    Args:
      compute: gets this device's parts of `tokens` and of `heads`, inside jax.shard_map; its results, [N] each and
        equal on all devices of `vocab_axis`, are sharded like the tokens.
      tokens: [N, ...] each.
      heads: [V, ...] each.
      stored: how the first heads are sharded where they are kept. Axes other than `vocab_axis` are gathered inside, so
        that the gradient leaves as a reduce-scatter to its shards; a head without an entry is gathered by the
        compiler, and its gradient is summed whole on every device.

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
    by_rows = PartitionSpec(vocab_axis)
    specs = (*(_with_rows(spec, vocab_axis, mesh) for spec in stored), *[by_rows] * (len(heads) - len(stored)))

    def gathered(tokens: tuple[jax.Array, ...], heads: tuple[jax.Array, ...]) -> _Results:
        whole = (_gather(head, spec, vocab_axis) for head, spec in zip(heads, specs, strict=True))
        return compute(tokens, tuple(whole))

    local = jax.shard_map(gathered, mesh=mesh, in_specs=(by_token, specs), out_specs=by_token, check_vma=False)
    return local(tuple(tokens), tuple(heads))


def _with_rows(stored: PartitionSpec, vocab_axis: str, mesh: Mesh) -> PartitionSpec:
    """The sharding in which a head enters: as stored, or with its rows over `vocab_axis` where these are whole."""
    rows, *others = tuple(stored) or (None,)
    if rows is None or mesh.shape[vocab_axis] > 1:
        rows = vocab_axis
    return PartitionSpec(rows, *others)


def _gather(head: jax.Array, stored: PartitionSpec, vocab_axis: str) -> jax.Array:
    for dimension, axis in enumerate(stored):
        if axis not in (None, vocab_axis):
            head = jax.lax.all_gather(head, axis, axis=dimension, tiled=True)
    return head


# vocabulary entries per block: about the square root of a large vocabulary; native/vocabulary.h has the same
VOCABULARY_BLOCK = 256

_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_Ranks = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # top, total, chosen, values, ids
_Saved = tuple[jax.Array, ...]  # hidden, head, targets, temperature, log-sum-exp, entropy
TokenFunction = Callable[..., tuple[jax.Array, jax.Array]]  # token_logprobs, token_collisions


class BlockSums(NamedTuple):
    """The sums of each block of the vocabulary of z, float32 [blocks, ...] for z [..., V]."""

    largest: jax.Array
    logsumexp: jax.Array


class Ranking(NamedTuple):
    """Log-probs of given tokens and of the most likely ones, K of them."""

    logprobs: jax.Array  # float32 [N], of the given tokens
    ids: jax.Array  # int32 [N, K], descending by log-prob; ties by ascending id
    largest: jax.Array  # float32 [N, K], their log-probs


def logprob_of(
    logits: jax.Array, target: jax.Array, temperature: ArrayLike, sums: BlockSums | None = None
) -> jax.Array:
    """log softmax(logits / temperature)[target], float32 [...], for logits [..., V] and target int [...].

    `temperature` is a scalar or [...]; it is part of the policy. 0 means greedy, whose log-probs are taken at 1. `sums`
    are the sums of logits / temperature if already computed.
    """
    sums = sum_blocks(scale_logits(logits, temperature)) if sums is None else sums
    chosen = jnp.take_along_axis(jnp.moveaxis(logits, -1, 0), target[None], axis=0)[0]
    return scale_logits(chosen[..., None], temperature)[..., 0] - jax.nn.logsumexp(sums.logsumexp, axis=0)


def sum_blocks(z: jax.Array) -> BlockSums:
    """Sums z [..., V] by blocks. Sampling draws from these sums too, so a program passes over the logits only once.

    The vocabulary comes first because the logits of a decoder with tokens as columns are stored that way.
    """
    z = jnp.moveaxis(z, -1, 0)
    entries = min(VOCABULARY_BLOCK, len(z))
    behind = [(0, -len(z) % entries)] + [(0, 0)] * (z.ndim - 1)
    blocked = jnp.pad(z, behind, constant_values=-jnp.inf).reshape(-1, entries, *z.shape[1:])
    return BlockSums(jnp.max(blocked, axis=1), jax.nn.logsumexp(blocked, axis=1))


def sum_blocks_over(mesh: Mesh, axis: str, vocabulary: int) -> Callable[[jax.Array], BlockSums]:
    """Returns `sum_blocks` for z [N, V] whose vocabulary is sharded over an axis of the mesh.

    Blocks of the whole vocabulary cross the slices of the devices. Each device sums the blocks that begin in its slice,
    for which it gets the first entries of the slice that follows; without that, the compiler gathers all logits.
    """
    devices = mesh.shape[axis]
    size, rest = divmod(vocabulary, devices)
    is_whole = devices == 1 or rest  # what devices do not divide is not sharded
    if is_whole or size % VOCABULARY_BLOCK == 0 or size < VOCABULARY_BLOCK:  # no block crosses, or all are small
        return sum_blocks
    most = -(-size // VOCABULARY_BLOCK)  # blocks that begin in a slice
    counts = [len(range(-size * device % VOCABULARY_BLOCK, size, VOCABULARY_BLOCK)) for device in range(devices)]
    begun = np.concatenate([device * most + np.arange(count) for device, count in enumerate(counts)])

    def own(z: jax.Array) -> BlockSums:
        device = jax.lax.axis_index(axis)
        ahead = jax.lax.ppermute(z[:, :VOCABULARY_BLOCK], axis, [(i, i - 1) for i in range(1, devices)])
        ahead = jnp.where(device == devices - 1, -jnp.inf, ahead)
        behind = jnp.full_like(ahead, -jnp.inf)  # of blocks that begin in the next slice, which are left out
        joined = jnp.concatenate([z, ahead, behind], axis=1)
        first = -size * device % VOCABULARY_BLOCK
        sums = sum_blocks(jax.lax.dynamic_slice_in_dim(joined, first, most * VOCABULARY_BLOCK, axis=1))
        return BlockSums(*(jax.lax.all_gather(part, axis, tiled=True)[begun] for part in sums))

    by_entry, everywhere = PartitionSpec(None, axis), PartitionSpec()
    return jax.shard_map(own, mesh=mesh, in_specs=by_entry, out_specs=everywhere, check_vma=False)


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: ArrayLike,
    *,
    cap: float | None = None,
    chunk: int | None = None,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and entropy of its whole distribution, float32 [N] each, without logits [N, V].

    `logprob_of(hidden @ head.T, targets, temperature)` for hidden [N, d], head [V, d] and targets int [N] in [0, V),
    the logits capped by `cap` as in cap_logits, differentiable in `hidden` and `head`. A tile has `chunk` entries of
    the vocabulary; None chooses the number that fills 32 MB of float32, at least 2048. Only the log-sum-exp and the
    entropy are saved; the backward pass recomputes the tiles. If a logit of a token is NaN, both its results are NaN
    and other tokens are unaffected.

    `axis_name` is for use inside `jax.shard_map`; `sharded_token_logprobs` does all of the following. `head` is then
    this device's slice [V/t, d], in the order of the axis. hidden, targets (in the whole vocabulary) and temperature
    must be equal on all t devices; so are the results. The gradients are per device: `d_hidden` is the part that comes
    through this slice of `head`. Do not sum d_hidden over the axis yourself: `shard_map(check_vma=False)` inserts the
    psum when it is differentiated from outside and neither `hidden` nor the outputs are sharded over the axis.
    check_vma=True refuses to differentiate.
    """
    temperature = jnp.broadcast_to(effective_temperature(temperature), targets.shape)
    chunk = choose_chunk(chunk, len(targets), len(head))
    return _token_logprobs(hidden, head, targets, temperature, chunk, axis_name, cap)


def rank_tokens(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: ArrayLike,
    most: int,
    chunk: int | None = None,
    *,
    cap: float | None = None,
) -> Ranking:
    """`token_logprobs` of the targets and of the `most` likeliest tokens, without logits [N, V]; forward only.

    If `ids` contains a target, the two log-probs are equal bit for bit. Other arguments: see `token_logprobs`.
    """
    temperature = jnp.broadcast_to(effective_temperature(temperature), targets.shape)

    def fold(state: _Ranks, columns: jax.Array, first: Index) -> _Ranks:
        top, total, chosen, values, ids = state
        z = tile_logits(hidden, columns, temperature, cap)
        new_top = jnp.maximum(top, z.max(axis=-1))
        total = total * jnp.exp(top - new_top) + jnp.exp(z - new_top[:, None]).sum(axis=-1)
        column = targets - first
        inside = (column >= 0) & (column < len(columns))
        found = jnp.take_along_axis(z, jnp.where(inside, column, 0)[:, None], axis=-1)[:, 0]
        own, places = jax.lax.top_k(z, min(most, len(columns)))
        # earlier candidates come first: of equal values top_k takes the first, so the smaller id
        values, order = jax.lax.top_k(jnp.concatenate([values, own], axis=1), most)
        ids = jnp.take_along_axis(jnp.concatenate([ids, places + first], axis=1), order, axis=1)
        return new_top, total, jnp.where(inside, found, chosen), values, ids

    zeros = jnp.zeros(targets.shape, jnp.float32)
    shape = (len(targets), most)
    state = (zeros + LOWEST, zeros, zeros, jnp.full(shape, LOWEST), jnp.zeros(shape, jnp.int32))
    top, total, chosen, values, ids = fold_tiles(fold, state, head, choose_chunk(chunk, len(targets), len(head)))
    lse = top + jnp.log(total)
    return Ranking(chosen - lse, ids, values - lse[:, None])


def token_collisions(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: ArrayLike,
    *,
    cap: float | None = None,
    chunk: int | None = None,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target, and log Σ_v π_v², the log-prob that two draws are equal, float32 [N]; forward only.

    For the arguments, also inside `jax.shard_map`, and the effect of NaN see `token_logprobs`.
    """
    temperature = jnp.broadcast_to(effective_temperature(temperature), targets.shape)
    local_targets = targets - _first_row(head, axis_name)

    def fold(state: _Sums, columns: jax.Array, first: Index) -> _Sums:
        top, total, squares, chosen = state  # largest z; sums of e^(z - top) and e^2(z - top); z of the target
        z = tile_logits(hidden, columns, temperature, cap)
        new_top = jnp.maximum(top, z.max(axis=-1))
        weights, down = jnp.exp(z - new_top[:, None]), jnp.exp(top - new_top)
        column = local_targets - first
        inside = (column >= 0) & (column < len(columns))
        found = jnp.take_along_axis(z, jnp.where(inside, column, 0)[:, None], axis=-1)[:, 0]
        total, squares = total * down + weights.sum(axis=-1), squares * down**2 + jnp.sum(weights**2, axis=-1)
        return new_top, total, squares, jnp.where(inside, found, chosen)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    state = fold_tiles(fold, (zeros + LOWEST, zeros, zeros, zeros), head, choose_chunk(chunk, len(targets), len(head)))
    top, total, squares, chosen = state
    if axis_name is not None:
        highest = jax.lax.pmax(top, axis_name)
        down = jnp.exp(top - highest)
        total, squares, chosen = jax.lax.psum((total * down, squares * down**2, chosen), axis_name)
        top = highest
    return chosen - (top + jnp.log(total)), jnp.log(squares) - 2 * jnp.log(total)


def sharded_token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: ArrayLike,
    *,
    mesh: Mesh,
    token_axes: Sequence[str],
    vocab_axis: str,
    stored: Sequence[PartitionSpec] = (),
    cap: float | None = None,
    chunk: int | None = None,
    compute: TokenFunction = token_logprobs,
) -> tuple[jax.Array, jax.Array]:
    """Applies `compute` to whole arrays, with tokens sharded over `token_axes` and the vocabulary over `vocab_axis`.

    `compute` is `token_logprobs` or `token_collisions`. The results are sharded like the tokens. A device holds only
    V/t rows of `head` and of its gradient; `stored` has the sharding in which the head is kept, see `over_mesh`.
    `chunk` is per device. Differentiate this function from outside; gradients
    are whole. The axes of `mesh` are of type Auto.

    Raises ValueError if N or V is not a multiple of the number of devices over which it is sharded.
    """

    def local(tokens: tuple[jax.Array, ...], heads: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return compute(tokens[0], heads[0], *tokens[1:], cap=cap, chunk=chunk, axis_name=vocab_axis)

    temperature = jnp.broadcast_to(effective_temperature(temperature), targets.shape)
    tokens = (hidden, targets, temperature)
    return over_mesh(local, tokens, (head,), mesh=mesh, token_axes=token_axes, vocab_axis=vocab_axis, stored=stored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array, chunk: int, axis_name: str | None,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    return _forward(hidden, head, targets, temperature, chunk, axis_name, cap)[0]


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array, chunk: int, axis_name: str | None,
    cap: float | None,
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:  # fmt: skip
    local_targets = targets - _first_row(head, axis_name)

    def fold(state: _Sums, columns: jax.Array, first: Index) -> _Sums:
        top, total, moment, chosen = state  # largest z; sums of e^(z - top) and (z - top) e^(z - top); z of the target
        z = tile_logits(hidden, columns, temperature, cap)
        new_top = jnp.maximum(top, z.max(axis=-1))
        shifted = z - new_top[:, None]
        weights = jnp.exp(shifted)
        total, moment = shift_sums(total, moment, top - new_top)
        column = local_targets - first
        inside = (column >= 0) & (column < len(columns))
        found = jnp.take_along_axis(z, jnp.where(inside, column, 0)[:, None], axis=-1)[:, 0]
        moment = moment + jnp.sum(weights * shifted, axis=-1)
        return new_top, total + weights.sum(axis=-1), moment, jnp.where(inside, found, chosen)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    top, total, moment, chosen = fold_tiles(fold, (zeros + LOWEST, zeros, zeros, zeros), head, chunk)
    if axis_name is not None:
        # pmax may drop a NaN; the sums carry it to every device
        highest = jax.lax.pmax(top, axis_name)
        total, moment, chosen = jax.lax.psum((*shift_sums(total, moment, top - highest), chosen), axis_name)
        top = highest
    lse = top + jnp.log(total)
    entropy = jnp.log(total) - moment / total  # lse - mean of z, but without subtracting two large numbers
    return (chosen - lse, entropy), (hidden, head, targets, temperature, lse, entropy)


def _backward(
    chunk: int, axis_name: str | None, cap: float | None, saved: _Saved, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    hidden, head, targets, temperature, lse, entropy = saved
    if axis_name is not None:  # the results on every device depend on this slice
        gradients = jax.lax.psum(gradients, axis_name)
    d_logprob, d_entropy = (g[:, None] for g in gradients)
    local_targets = targets - _first_row(head, axis_name)

    def slopes(columns: tuple[jax.Array, ...], first: Index) -> jax.Array:
        # d log p_t / dz_j = [j = t] - p_j      dH / dz_j = -p_j (log p_j + H)
        log_p = tile_logits(hidden, columns[0], temperature, cap) - lse[:, None]
        is_target = first + jnp.arange(len(columns[0])) == local_targets[:, None]
        d_z = -jnp.exp(log_p) * (d_logprob + d_entropy * (log_p + entropy[:, None]))
        return d_z + jnp.where(is_target, d_logprob, 0.0)

    return *pull_back(slopes, hidden, (head,), temperature, chunk, cap), None, None


_token_logprobs.defvjp(_forward, _backward)


def _first_row(head: jax.Array, axis_name: str | None) -> Index:
    """Index in the whole vocabulary of the first row of this device's slice."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * len(head)
