"""Products of a mixture of experts: the outputs of each token's chosen experts, summed with the token's weights.

    y[t] = sum over j of weights[t, j] * (silu(x[t] gate[e]) * (x[t] up[e])) down[e],   e = experts[t, j]

With a ClampedSwiglu (limit L, factor a) gate and up are the even and odd columns of one matrix, all have biases, and

    y[t] = sum over j of weights[t, j] * ((up + 1) gate sigmoid(a gate) down[e] + down_bias[e]),
    gate = min(x[t] gate[e] + bias, L), up = x[t] up[e] + bias between -L and L

Three functions compute it, for processors with and without a compiler and for accelerators; `mixers_for` has those that
can be used. No function drops a choice. The sum runs in the order of j, so a token's output does not depend on the
other tokens.

T tokens, k choices of each, N = T k, E experts, d model width, F width of an expert; B rows of a block. All take

    x [T, d]; experts int32 [T, k], distinct in a token, E = none: such a choice adds nothing and touches no expert;
    weights float32 [T, k]; gate and up [E, d, F]; down [E, F, d], in the dtype of x; or for a ClampedSwiglu, which is
    the keyword `swiglu`: gate_up [E, d, 2 F], gate_up_bias [E, 2 F], down [E, F, d], down_bias [E, d]

and return y [T, d] in the dtype of x. They are differentiable in all but `experts`. The gradient of an expert that no
token chose is exactly 0, and so are the gradients of x and weights of a token that chose no expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from areal_jax.models.grouped.products import Hardware, kernels_for, multiply
from areal_jax.models.layer_parts import ClampedSwiglu
from areal_jax.native import compiled_library as library

BLOCK_ROWS = 32  # the order of sums in XLA's products may depend on it, so it is the same for all batches
_ROUNDED = 32  # kRounded of native/experts.h
Mixer = Callable[..., jax.Array]  # (x, experts, weights, *leaves, swiglu=None) -> y
_Gradients = tuple[jax.Array, None, jax.Array, jax.Array, jax.Array, jax.Array]
Multiply = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_Leaves = tuple[jax.Array, ...]


def mix_native(
    x: jax.Array, experts: jax.Array, weights: jax.Array, *leaves: jax.Array, swiglu: ClampedSwiglu | None = None
) -> jax.Array:
    """y by the kernels of native/expert_kernels.h, in float32 on one CPU device; call library.register first.

    The kernels have no ClampedSwiglu: it is computed by mix_blocks.
    """
    if swiglu is not None:
        return mix_blocks(x, experts, weights, *leaves, swiglu=swiglu)
    return _mix_by_kernels(x, experts, weights, *leaves)


@jax.custom_vjp
def _mix_by_kernels(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    return _mix_native(x, experts, weights, gate, up, down)[0]


def _mix_native(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, experts, weights, gate, up, down = inputs
    rounded = -(-gate.shape[2] // _ROUNDED) * _ROUNDED
    products = jax.ffi.ffi_call(library.EXPERT_PRODUCTS, _floats(experts.size, 2 * rounded))(x, experts, gate, up)
    # two calls: if the layer is recomputed for its gradient, the second one is not needed and left out
    outputs = [_floats(*x.shape), _floats(experts.size, rounded)]
    y, _ = jax.ffi.ffi_call(library.EXPERT_MIX, outputs)(products, experts, weights, down)
    return y, (*inputs, products)


def _mix_native_back(kept: tuple[jax.Array, ...], dy: jax.Array) -> _Gradients:
    x, experts, weights, gate, up, down, products = kept
    shapes = [leaf.shape for leaf in (x, weights, gate, up, down, products)]
    outputs = [*(_floats(*shape) for shape in shapes), _floats(len(products), products.shape[1] // 2)]
    call = jax.ffi.ffi_call(library.EXPERT_GRADIENT, outputs, input_output_aliases={6: 5})
    dx, d_weights, d_gate, d_up, d_down, *_ = call(x, experts, weights, gate, up, down, products, dy)
    return dx, None, d_weights, d_gate, d_up, d_down


_mix_by_kernels.defvjp(_mix_native, _mix_native_back)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class _Blocks(NamedTuple):
    """Choices sorted by expert, the rows of each expert padded to whole blocks: rows [M B]."""

    used: jax.Array  # int32 [E], experts, the ones that have rows first
    n_used: jax.Array  # int32, the number of experts that have rows
    ends: jax.Array  # int32 [E + 1], the first block of each expert
    token: jax.Array  # int32 [M B], T = padding
    weight: jax.Array  # float32 [M B], 0 in padding
    row: jax.Array  # int32 [T, k], the row of each choice; M B = none


def mix_blocks(
    x: jax.Array, experts: jax.Array, weights: jax.Array, *leaves: jax.Array, swiglu: ClampedSwiglu | None = None
) -> jax.Array:
    """y in plain JAX, for every platform and dtype: products of BLOCK_ROWS rows and the expert that they chose."""
    return _mix_by_blocks(swiglu, x, experts, weights, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix_by_blocks(
    swiglu: ClampedSwiglu | None, x: jax.Array, experts: jax.Array, weights: jax.Array, leaves: _Leaves
) -> jax.Array:
    return _mix_blocks(swiglu, x, experts, weights, leaves)[0]


def _mix_blocks(
    swiglu: ClampedSwiglu | None, x: jax.Array, experts: jax.Array, weights: jax.Array, leaves: _Leaves
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, _Leaves]]:
    blocks = _cut_blocks(experts, weights, len(leaves[0]))

    def run_expert(i: jax.Array, parts: jax.Array) -> jax.Array:
        expert = blocks.used[i]
        own = [_take(leaf, expert) for leaf in leaves]

        def run_block(block: jax.Array, parts: jax.Array) -> jax.Array:
            rows = _take_rows(x, blocks, block)
            product = _multiply(rows, *own) if swiglu is None else _multiply_clamped(swiglu, rows, *own)
            weighted = _take_block(blocks.weight, block)[:, None] * product
            return _put_block(parts, block, weighted.astype(x.dtype))

        return lax.fori_loop(blocks.ends[expert], blocks.ends[expert + 1], run_block, parts)

    parts = jnp.zeros((len(blocks.token), x.shape[1]), x.dtype)
    parts = lax.fori_loop(0, blocks.n_used, run_expert, parts)
    return _sum_choices(parts, blocks.row), (x, experts, weights, leaves)


def _mix_blocks_back(
    swiglu: ClampedSwiglu | None, kept: tuple[jax.Array, jax.Array, jax.Array, _Leaves], dy: jax.Array
) -> tuple[jax.Array, None, jax.Array, _Leaves]:
    x, experts, weights, leaves = kept
    blocks = _cut_blocks(experts, weights, len(leaves[0]))
    differentiate = _differentiate if swiglu is None else functools.partial(_differentiate_clamped, swiglu)

    def run_expert(i: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        expert = blocks.used[i]
        own = [_take(leaf, expert) for leaf in leaves]

        def run_block(block: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            parts, d_weight, *sums = found
            weight = _take_block(blocks.weight, block)
            rows, d_rows = _take_rows(x, blocks, block), _take_rows(dy, blocks, block)
            part, d_own, products = differentiate(rows, d_rows, weight, *own)
            sums = [total + product for total, product in zip(sums, products, strict=True)]
            return _put_block(parts, block, part), _put_block(d_weight, block, d_own), *sums

        begin, end = blocks.ends[expert], blocks.ends[expert + 1]
        none = [jnp.zeros(leaf.shape, jnp.float32) for leaf in own]
        parts, d_weight, *sums = lax.fori_loop(begin, end, run_block, (*found[:2], *none))
        written = [
            lax.dynamic_update_index_in_dim(total, one.astype(total.dtype), expert, 0)
            for total, one in zip(found[2:], sums, strict=True)
        ]
        return parts, d_weight, *written

    rows = len(blocks.token)
    start = (jnp.zeros((rows, x.shape[1]), x.dtype), jnp.zeros(rows), *(jnp.zeros_like(leaf) for leaf in leaves))
    parts, d_weight, *d_leaves = lax.fori_loop(0, blocks.n_used, run_expert, start)
    return _sum_choices(parts, blocks.row), None, _take_filled(d_weight, blocks.row), tuple(d_leaves)


_mix_by_blocks.defvjp(_mix_blocks, _mix_blocks_back)


def _multiply(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The output of an expert for rows [B, d], float32."""
    _, _, inner = _activate(rows @ gate, rows @ up)
    return jnp.matmul(inner.astype(rows.dtype), down, preferred_element_type=jnp.float32)


def _multiply_clamped(
    swiglu: ClampedSwiglu, rows: jax.Array, gate_up: jax.Array, gate_up_bias: jax.Array, down: jax.Array,
    down_bias: jax.Array,
) -> jax.Array:  # fmt: skip
    inner = _activate_clamped(swiglu, rows @ gate_up, gate_up_bias)
    return jnp.matmul(inner.astype(rows.dtype), down, preferred_element_type=jnp.float32) + down_bias


def _differentiate(
    rows: jax.Array, d_rows: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(gradient of the rows [B, d], of their weights [B], of the three matrices in float32) of a block."""
    dtype = rows.dtype
    h, u = (rows @ matrix for matrix in (gate, up))
    sigmoid, silu, inner = _activate(h, u)
    back = (d_rows @ down.T).astype(jnp.float32)
    weighted = weight[:, None] * back
    d_h = (weighted * u * (sigmoid + silu * (1 - sigmoid))).astype(dtype)
    d_u = (weighted * silu).astype(dtype)
    products = [_outer(rows, d_h), _outer(rows, d_u), _outer((weight[:, None] * inner).astype(dtype), d_rows)]
    return d_h @ gate.T + d_u @ up.T, (back * inner).sum(axis=1), products


def _differentiate_clamped(
    swiglu: ClampedSwiglu, rows: jax.Array, d_rows: jax.Array, weight: jax.Array, gate_up: jax.Array,
    gate_up_bias: jax.Array, down: jax.Array, down_bias: jax.Array,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:  # fmt: skip
    """`_differentiate` for the leaves of a clamped expert."""
    dtype = rows.dtype
    inner, pull = jax.vjp(lambda z: _activate_clamped(swiglu, z, gate_up_bias), (rows @ gate_up).astype(jnp.float32))
    back = (d_rows @ down.T).astype(jnp.float32)
    [d_z] = pull(weight[:, None] * back)
    d_out = weight[:, None] * d_rows.astype(jnp.float32)
    products = [
        _outer(rows, d_z.astype(dtype)),
        d_z.sum(axis=0),
        _outer((weight[:, None] * inner).astype(dtype), d_rows),
        d_out.sum(axis=0),
    ]
    d_weight = (back * inner).sum(axis=1) + jnp.sum(d_rows.astype(jnp.float32) * down_bias, axis=1)
    return d_z.astype(dtype) @ gate_up.T, d_weight, products


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum('ba,bo->ao', a, b, preferred_element_type=jnp.float32)


def _activate(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sigmoid(h), silu(h), silu(h) * u) in float32."""
    h, u = h.astype(jnp.float32), u.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(h)
    return sigmoid, h * sigmoid, h * sigmoid * u


def _activate_clamped(swiglu: ClampedSwiglu, product: jax.Array, bias: jax.Array) -> jax.Array:
    """(up + 1) gate sigmoid(alpha gate) of products [B, 2 F], of which even columns are gates; float32 [B, F]."""
    z = product.astype(jnp.float32) + bias
    gate = jnp.minimum(z[:, ::2], swiglu.limit)
    up = jnp.clip(z[:, 1::2], -swiglu.limit, swiglu.limit)
    return (up + 1) * gate * jax.nn.sigmoid(swiglu.alpha * gate)


def _cut_blocks(experts: jax.Array, weights: jax.Array, n_experts: int) -> _Blocks:
    chosen = _without_others(experts, n_experts)
    order, first, sizes = _sort_choices(chosen, n_experts)
    most = (chosen.size + (BLOCK_ROWS - 1) * min(n_experts, chosen.size)) // BLOCK_ROWS  # blocks
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-sizes // BLOCK_ROWS), dtype=jnp.int32)])
    expert = chosen[order]
    own = ends[expert] * BLOCK_ROWS + jnp.arange(chosen.size, dtype=jnp.int32) - first[expert]
    row = jnp.where(expert < n_experts, own, most * BLOCK_ROWS)
    choice = jnp.full(most * BLOCK_ROWS, chosen.size, jnp.int32).at[row].set(order, mode='drop')
    return _Blocks(
        used=jnp.argsort(sizes == 0, stable=True),
        n_used=(sizes > 0).sum(dtype=jnp.int32),
        ends=ends,
        token=choice // experts.shape[1],
        weight=_take_filled(weights.reshape(-1), choice),
        row=jnp.zeros(chosen.size, jnp.int32).at[order].set(row).reshape(experts.shape),
    )


def _without_others(experts: jax.Array, n_experts: int) -> jax.Array:
    """int32 [N], with E in place of every number that is not an expert's."""
    flat = experts.reshape(-1)
    return jnp.where((flat >= 0) & (flat < n_experts), flat, n_experts)


def _sort_choices(chosen: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(choices sorted by expert [N], the first of each expert [E + 1], the number of each [E])."""
    order = jnp.argsort(chosen, stable=True)
    first = jnp.searchsorted(chosen[order], jnp.arange(n_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    return order, first, first[1:] - first[:-1]


def _sum_choices(parts: jax.Array, row: jax.Array) -> jax.Array:
    """sum over j of parts[row[t, j]], in order, in float32; rows after the last one count as zeros.

    The parts are weighted already: whether XLA fused a product here with its sum would depend on the number of tokens.
    """
    total = jnp.zeros((len(row), parts.shape[1]), jnp.float32)
    for j in range(row.shape[1]):
        total += _take_filled(parts, row[:, j])
    return total.astype(parts.dtype)


def _take_filled(array: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(array, index, axis=0, mode='fill', fill_value=0)


def _take(matrix: jax.Array, expert: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(matrix, expert, keepdims=False)


def _take_rows(x: jax.Array, blocks: _Blocks, block: jax.Array) -> jax.Array:
    return _take_filled(x, _take_block(blocks.token, block))


def _take_block(rows: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, block * BLOCK_ROWS, BLOCK_ROWS)


def _put_block(rows: jax.Array, block: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(rows, values, block * BLOCK_ROWS, 0)


def mix_grouped(
    multiply: Multiply,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *leaves: jax.Array,
    swiglu: ClampedSwiglu | None = None,
) -> jax.Array:
    """y by three products of all choices, sorted by expert, for accelerators.

    Args:
      multiply: (rows [N, K], matrices [E, K, M], sizes [E]) -> [N, M], differentiable, see grouped/products.py.
    """
    sizes, rows, expert = sort_rows(experts, len(leaves[0]))
    used = (rows.choice < experts.size)[:, None]
    # a kernel leaves anything in rows without a group, and in their gradients
    product = lambda left, matrix: jnp.where(used, multiply(left, matrix, sizes), 0)
    weight = _take_filled(weights.reshape(-1), rows.choice)
    left = spread(x, rows)
    if swiglu is None:
        gate, up, down = leaves
        inner = _weigh(product(left, gate), product(left, up), weight)
        return collect(product(inner, down), rows)
    gate_up, gate_up_bias, down, down_bias = leaves
    own = lambda bias: _take_filled(bias, expert)
    inner = weight[:, None] * _activate_clamped(swiglu, product(left, gate_up), own(gate_up_bias))
    out = product(inner.astype(x.dtype), down) + weight[:, None] * own(down_bias)
    return collect(out.astype(x.dtype), rows)


class Rows(NamedTuple):
    """Where each choice is among the rows that are sorted by expert."""

    choice: jax.Array  # int32 [N], of each row; N = the row is not used
    place: jax.Array  # int32 [T, k], the row of each choice; N = none


def sort_rows(experts: jax.Array, n_experts: int) -> tuple[jax.Array, Rows, jax.Array]:
    """(rows of each expert [E], their choices, the expert of each row [N])."""
    chosen = _without_others(experts, n_experts)
    order, first, sizes = _sort_choices(chosen, n_experts)
    row = jnp.arange(chosen.size, dtype=jnp.int32)
    used = row < first[-1]
    place = jnp.zeros_like(order).at[order].set(jnp.where(used, row, chosen.size), unique_indices=True)
    rows = Rows(jnp.where(used, order, chosen.size).astype(jnp.int32), place.reshape(experts.shape).astype(jnp.int32))
    return sizes, rows, chosen[order]


@jax.custom_vjp
def spread(x: jax.Array, rows: Rows) -> jax.Array:
    """The token of each row, [N, d]; its gradient is the sum of a token's rows, in order and float32."""
    return _take_filled(x, rows.choice // rows.place.shape[1])


@jax.custom_vjp
def collect(parts: jax.Array, rows: Rows) -> jax.Array:
    """The sum of a token's rows, [T, d]; the mirror image of spread."""
    return _sum_choices(parts, rows.place)


spread.defvjp(lambda x, rows: (spread(x, rows), rows), lambda rows, d_rows: (collect(d_rows, rows), None))
collect.defvjp(lambda parts, rows: (collect(parts, rows), rows), lambda rows, dy: (spread(dy, rows), None))


@jax.checkpoint  # keeps the products in their dtype, not what is computed from them in float32
def _weigh(h: jax.Array, u: jax.Array, weight: jax.Array) -> jax.Array:
    _, _, inner = _activate(h, u)
    return (weight[:, None] * inner).astype(h.dtype)


def mixers_for(hardware: Hardware, dtype: str, sizes: tuple[int, ...]) -> dict[str, Mixer]:
    """The mixers that can be used by name, the fastest first; those of accelerators must be checked.

    Args:
      dtype: of x and leaves.
      sizes: d and F.
    """
    if hardware.platform == 'cpu':
        has_kernels = dtype == 'float32' and library.is_available()
        return {'native': mix_native} if has_kernels else {'blocks': mix_blocks}
    found = kernels_for(hardware, dtype, sizes)
    grouped: dict[str, Mixer] = {
        name: functools.partial(mix_grouped, functools.partial(multiply, kernels)) for name, kernels in found.items()
    }
    return grouped | {'blocks': mix_blocks}
