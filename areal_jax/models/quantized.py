"""Forms of activations and matrices, among them products in 8 bits: a scale for each output of a matrix and each token.

A scale is the largest magnitude over 127; the factors are integers from -127 to 127, rounded to the nearest, ties to
even. Their sums are exact, so a product has the same bits on every processor and in every batch. native/bytes.h has the
same arithmetic for CPUs. Activations in 8 bits are [T, d]; T tokens, d features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from areal_jax.models.logprobs import Ranking, scale_logits
from areal_jax.native import compiled_library as library
from areal_jax.native.arrays import BYTE_GROUP, BYTE_ROWS, PANEL_ROWS, host_view, pack_bytes, pack_panels
from areal_jax.types import Tree


class Activations(Protocol):
    """The parts of the decoder that depend on the axis of the tokens. T tokens, d features, V vocabulary.

    A stored matrix is an array or, in 8 bits, a Quantized.
    """

    features: int  # axis of the features

    def __hash__(self) -> int: ...

    def stored(self, matrix: jax.Array) -> Tree:
        """A matrix [..., in, out] in the form that `multiply` takes."""
        ...

    def stored_table(self, table: jax.Array) -> Tree:
        """A table [V, d] in the form that `embed` and `logits` take."""
        ...

    def multiply(self, x: jax.Array, *matrices: Tree) -> tuple[jax.Array, ...]:
        """Activations times each of the stored matrices."""
        ...

    def by_feature(self, vector: jax.Array) -> jax.Array:
        """A vector [d] that broadcasts against activations."""
        ...

    def embed(self, table: Tree, tokens: jax.Array) -> jax.Array:
        """Activations from rows `tokens` [T] of a table, in its stored or original form."""
        ...

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        """[T, H, D] of activations with H * D features."""
        ...

    def join_heads(self, x: jax.Array) -> jax.Array:
        """Activations of [T, H, D]."""
        ...

    def logits(self, x: jax.Array, head: Tree) -> jax.Array:
        """float32 [T, V] of activations and a stored head."""
        ...


class Rows:
    """Activations [T, d], matrices [in, out]."""

    features = -1

    def stored(self, matrix: jax.Array) -> Tree:
        return matrix

    def stored_table(self, table: jax.Array) -> Tree:
        return table

    def multiply(self, x: jax.Array, *matrices: Tree) -> tuple[jax.Array, ...]:
        return tuple(x @ matrix for matrix in matrices)

    def by_feature(self, vector: jax.Array) -> jax.Array:
        return vector

    def embed(self, table: Tree, tokens: jax.Array) -> jax.Array:
        rows: jax.Array = table[tokens]
        return rows

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        return x.reshape(len(x), -1, head_dim)

    def join_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1)

    def logits(self, x: jax.Array, head: Tree) -> jax.Array:
        return jnp.einsum('td,vd->tv', x, head, preferred_element_type=jnp.float32)


class Columns:
    """Activations [d, T], matrices [out, in].

    A barrier separates a product from its transposition: otherwise XLA would turn (W x)' into x' W', the slow product.
    """

    features = 0

    def stored(self, matrix: jax.Array) -> jax.Array:
        return matrix.swapaxes(-1, -2)

    def stored_table(self, table: jax.Array) -> jax.Array:
        return table

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(matrix @ x for matrix in matrices)

    def by_feature(self, vector: jax.Array) -> jax.Array:
        return vector[:, None]

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens].T

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        return lax.optimization_barrier(x).T.reshape(x.shape[1], -1, head_dim)

    def join_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1).T

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        product = jnp.einsum('vd,dt->vt', head, x, preferred_element_type=jnp.float32)
        return lax.optimization_barrier(product).T


class NativeColumns(Columns):
    """Columns with the products of native/kernels.cc, for float32 on one device. Call library.register first.

    A matrix is stored in panels of 8 rows [out / 8, in, 8], and the head likewise; a matrix that cannot be cut this
    way, or has another dtype, is stored and multiplied as in Columns. The order of operations of a product does not
    depend on the number of columns.
    """

    def stored(self, matrix: jax.Array) -> jax.Array:
        return _panels(matrix, by_rows=False)

    def stored_table(self, table: jax.Array) -> jax.Array:
        return _panels(table, by_rows=True)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        if not is_in_panels(table):
            return super().embed(table, tokens)
        return table[tokens // PANEL_ROWS, :, tokens % PANEL_ROWS].T

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        panels = [matrix for matrix in matrices if is_in_panels(matrix)]
        shapes = [jax.ShapeDtypeStruct((len(matrix) * PANEL_ROWS, x.shape[1]), x.dtype) for matrix in panels]
        products = iter(jax.ffi.ffi_call(library.MULTIPLY, shapes)(x, *panels) if panels else ())
        return tuple(next(products) if is_in_panels(matrix) else matrix @ x for matrix in matrices)

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return self.multiply(x, head)[0].T if is_in_panels(head) else super().logits(x, head)


def _panels(matrix: jax.Array, *, by_rows: bool) -> jax.Array:
    """[..., in, out], or with `by_rows` [..., out, in], as [..., out / 8, in, 8] if this is possible.

    Outside jax.jit no program of XLA runs, because it would wait for the update of a learner in the same process.
    """
    rows = matrix.shape[-2 if by_rows else -1]
    if rows % PANEL_ROWS or matrix.dtype != jnp.float32:
        return matrix if by_rows else matrix.swapaxes(-1, -2)
    if matrix.ndim == 2 and isinstance(matrix, jax.Array) and (view := host_view(matrix)) is not None:
        return jax.device_put(pack_panels(view, by_rows=by_rows), matrix.sharding)
    turned = matrix if by_rows else matrix.swapaxes(-1, -2)
    *layers, _, features = turned.shape
    return turned.reshape(*layers, rows // PANEL_ROWS, PANEL_ROWS, features).swapaxes(-1, -2)


def is_in_panels(matrix: jax.Array) -> bool:
    """Whether NativeColumns stored a matrix of a layer, or the head, in panels."""
    return matrix.ndim == 3


ACTIVATIONS: dict[str, Activations] = {'rows': Rows(), 'columns': Columns(), 'native_columns': NativeColumns()}


_LARGEST = 127
_LEAST = 1e-30  # the least divisor
_UNSIGNED = 128  # is added to values in panels
_MOST_FEATURES = (2**31 - 1) // (255 * 127)  # whose sum fits into 32 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix [in, out] in 8 bits; NaN in the weights of an output makes its scale NaN.

    Raises ValueError for more than 66,311 features.
    """

    values: jax.Array  # int8 [..., in, out], or uint8 panels of native/bytes.h, [..., out / 16, in / 4, 16, 4]
    scales: jax.Array  # float32 [..., out]
    features: int = dataclasses.field(metadata={'static': True})  # in

    def __post_init__(self) -> None:
        if self.features > _MOST_FEATURES:
            raise ValueError(f'a product over {self.features} features overflows; {_MOST_FEATURES} fit into 32 bits')

    @property
    def in_panels(self) -> bool:
        return self.values.dtype == jnp.uint8


class Int8Rows(Rows):
    """Activations [T, d] and quantized matrices, with XLA's products. A table [V, d] is a matrix [d, V]."""

    def stored(self, matrix: jax.Array) -> Quantized:
        values, scales = quantize(matrix, axis=-2)
        return Quantized(values, scales[..., 0, :], matrix.shape[-2])

    def stored_table(self, table: jax.Array) -> Quantized:
        return self.stored(table.swapaxes(-1, -2))

    def embed(self, table: jax.Array | Quantized, tokens: jax.Array) -> jax.Array:
        if not isinstance(table, Quantized):
            return table[tokens]
        return _rows_of(table, tokens).astype(jnp.float32) * table.scales[tokens][:, None]

    def multiply(self, x: jax.Array, *matrices: Quantized) -> tuple[jax.Array, ...]:
        values, scales = quantize(x, axis=-1)
        return tuple(_sums(values, matrix.values).astype(jnp.float32) * (matrix.scales * scales) for matrix in matrices)

    def logits(self, x: jax.Array, head: Quantized) -> jax.Array:
        return self.multiply(x, head)[0]


class NativeInt8Rows(Int8Rows):
    """Int8Rows with the products of native/kernels.cc, on one device. Call library.register first."""

    def stored(self, matrix: jax.Array) -> Quantized:
        return _quantized_panels(matrix, by_rows=False)

    def stored_table(self, table: jax.Array) -> Quantized:
        return _quantized_panels(table, by_rows=True)

    def multiply(self, x: jax.Array, *matrices: Quantized) -> tuple[jax.Array, ...]:
        return tuple(byte_product(x, matrix) for matrix in matrices)


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """(int8 values, float32 scales with length 1 along `axis`) of float32 numbers that share a scale along the axis."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    inverse = _LARGEST / jnp.maximum(largest, _LEAST)
    return jnp.round(x * inverse).astype(jnp.int8), largest * jnp.float32(1 / _LARGEST)


def rank_logits(logits: jax.Array, targets: jax.Array, temperature: jax.Array, most: int) -> Ranking:
    """logprobs.rank_tokens of logits float32 [T, V]."""
    z = scale_logits(logits, temperature)
    total = jax.nn.logsumexp(z, axis=-1)
    chosen = jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    largest, ids = lax.top_k(z, most)
    return Ranking(chosen - total, ids, largest - total[:, None])


def _sums(tokens: jax.Array, matrix: jax.Array) -> jax.Array:
    """int32 [T, out] of int8 [T, in] and [in, out]."""
    return lax.dot_general(tokens, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def byte_product(x: jax.Array, matrix: Quantized, way: int = 0) -> jax.Array:
    """float32 [T, rows] of x [T, features]. `way`: 0 = use all instructions of this processor; tests try others."""
    shape = jax.ShapeDtypeStruct((len(x), len(matrix.scales)), jnp.float32)
    product: jax.Array = jax.ffi.ffi_call(library.BYTE_MULTIPLY, shape)(
        x, matrix.values, matrix.scales, way=np.int64(way)
    )
    return product


def _rows_of(table: Quantized, tokens: jax.Array) -> jax.Array:
    """int8 [T, d]: the values of these outputs."""
    if not table.in_panels:
        return table.values[:, tokens].T
    rows = table.values[tokens // BYTE_ROWS, :, tokens % BYTE_ROWS].reshape(len(tokens), -1)
    return (rows[:, : table.features] ^ jnp.uint8(_UNSIGNED)).astype(jnp.int8)


def _quantized_panels(matrix: jax.Array, *, by_rows: bool) -> Quantized:
    """Quantizes [..., in, out], or with `by_rows` [..., out, in]. Outside jax.jit no program runs, see `_panels`."""
    if matrix.ndim == 2 and isinstance(matrix, jax.Array) and (view := host_view(matrix)) is not None:
        packed, scales = pack_bytes(view, by_rows=by_rows)
        put = lambda array: jax.device_put(array, matrix.sharding)
        return Quantized(put(packed), put(scales), view.shape[by_rows])
    rows = matrix if by_rows else matrix.swapaxes(-1, -2)
    values, row_scales = quantize(rows, axis=-1)
    *layers, out, features = rows.shape
    fill = [(0, 0)] * len(layers) + [(0, -out % BYTE_ROWS), (0, -features % BYTE_GROUP)]
    unsigned = jnp.pad(values, fill).astype(jnp.uint8) ^ jnp.uint8(_UNSIGNED)
    cut = unsigned.reshape(*layers, -1, BYTE_ROWS, (features + fill[-1][1]) // BYTE_GROUP, BYTE_GROUP)
    return Quantized(cut.swapaxes(-2, -3), row_scales[..., 0], features)


QUANTIZED: dict[str, Activations] = {'int8_rows': Int8Rows(), 'native_int8_rows': NativeInt8Rows()}
