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

from areal_jax.native import library


class Activations(Protocol):
    """What of the decoder depends on which axis holds the tokens. T tokens, d features, V vocabulary."""

    features: int  # axis of the features

    def stored(self, matrix: jax.Array) -> jax.Array:
        """A matrix [..., in, out] as `multiply` takes it."""
        ...

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        """Activations times each of the stored matrices."""
        ...

    def by_feature(self, vector: jax.Array) -> jax.Array:
        """A vector [d] that broadcasts against activations."""
        ...

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Activations from rows `tokens` [T] of `table` [V, d]."""
        ...

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        """[T, H, D] of activations with H * D features."""
        ...

    def join_heads(self, x: jax.Array) -> jax.Array:
        """Activations of [T, H, D]."""
        ...

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """float32 [T, V] of activations and a head [V, d]."""
        ...


class Rows:
    """Activations [T, d], matrices [in, out]."""

    features = -1

    def stored(self, matrix: jax.Array) -> jax.Array:
        return matrix

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x @ matrix for matrix in matrices)

    def by_feature(self, vector: jax.Array) -> jax.Array:
        return vector

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    def split_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        return x.reshape(len(x), -1, head_dim)

    def join_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1)

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.einsum('td,vd->tv', x, head, preferred_element_type=jnp.float32)


class Columns:
    """Activations [d, T], matrices [out, in].

    A product that is transposed next has a barrier between: XLA would turn (W x)' into x' W', the slow product.
    """

    features = 0

    def stored(self, matrix: jax.Array) -> jax.Array:
        return matrix.swapaxes(-1, -2)

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
    """Columns with the products of native/kernels.cc where these are faster: float32, on one device, few columns.

    Their order of operations does not depend on the number of columns. library.register has been called.
    """

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        if not _have_native_products(x, *matrices):
            return super().multiply(x, *matrices)
        shapes = [jax.ShapeDtypeStruct((len(matrix), x.shape[1]), x.dtype) for matrix in matrices]
        return tuple(jax.ffi.ffi_call(library.MULTIPLY, shapes)(x, *matrices))

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        if not _have_native_products(x, head):
            return super().logits(x, head)
        return self.multiply(x, head)[0].T


def _have_native_products(x: jax.Array, *matrices: jax.Array) -> bool:
    columns = x.shape[1]
    are_float32 = all(array.dtype == jnp.float32 for array in (x, *matrices))
    return columns % 8 == 0 and columns <= _MOST_NATIVE_COLUMNS and are_float32


_MOST_NATIVE_COLUMNS = 64  # with more, what XLA pays to pack both operands no longer counts

ACTIVATIONS: dict[str, Activations] = {'rows': Rows(), 'columns': Columns(), 'native_columns': NativeColumns()}
