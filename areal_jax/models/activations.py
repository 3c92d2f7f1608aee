"""The forms of activations: tokens as rows, which the learner trains with, or as columns, for decoding on CPUs.

With tokens as rows, activations are [T, d] and a matrix [in, out] is multiplied from the right. With tokens as columns,
activations are [d, T] and the matrix is stored [out, in] and multiplied from the left: XLA's CPU product reads a left
operand in place, but packs a right one anew in every call, which costs more than the product when T is small. The
layer (`block`) is written once, on the operations below; attention sees [T, H, D] in all forms. `NativeColumns` has
products of its own where they are faster than XLA's.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from areal_jax.native import compiled_library as library
from areal_jax.native.arrays import PANEL_ROWS, host_view, pack_panels
from areal_jax.types import Tree


class Activations(Protocol):
    """What of the decoder depends on which axis holds the tokens. T tokens, d features, V vocabulary.

    What is stored is an array, or the arrays of a matrix in 8 bits (`quantized`).
    """

    features: int  # axis of the features

    def __hash__(self) -> int: ...

    def stored(self, matrix: jax.Array) -> Tree:
        """A matrix [..., in, out] as `multiply` takes it."""
        ...

    def stored_table(self, table: jax.Array) -> Tree:
        """A table [V, d] as `embed` and `logits` take it."""
        ...

    def multiply(self, x: jax.Array, *matrices: Tree) -> tuple[jax.Array, ...]:
        """Activations times each of the stored matrices."""
        ...

    def by_feature(self, vector: jax.Array) -> jax.Array:
        """A vector [d] that broadcasts against activations."""
        ...

    def embed(self, table: Tree, tokens: jax.Array) -> jax.Array:
        """Activations from rows `tokens` [T] of a table, stored or as it was."""
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

    A product that is transposed next has a barrier between: XLA would turn (W x)' into x' W', the slow product.
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
    """Columns with the products of native/kernels.cc, for float32 on one device. library.register has been called.

    A matrix is stored in panels of 8 rows [out / 8, in, 8], and the head likewise; one that cannot be cut so, or of
    another dtype, is stored and multiplied as by Columns. The order of operations of a product does not depend on the
    number of columns.
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
    """[..., in, out], or with `by_rows` [..., out, in], as [..., out / 8, in, 8] where this is possible.

    Outside jax.jit no program of XLA runs: it would wait for the update of a learner in the same process.
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
