"""Under arrows 3 and 7: the decoder that generates and is trained, as pure functions of a plain dict of weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Params = dict[str, Any]  # nested: {'layers': {'0': {'attention': {'query': array}}}}
# (q [N, H, D], k [N, K, D], v [N, K, D], cache of the layer) -> (out [N, H, D], cache of the layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-type decoder: RMS norm, rotary positions, grouped queries, SwiGLU, no biases."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # divides n_heads
    head_dim: int  # even
    d_ff: int
    rope_theta: float  # base of the rotary wavelengths
    rms_eps: float = 1e-5
    tie_embeddings: bool = True  # the head is the embedding
    context_tokens: int = 8192  # longest sequence the weights were made for

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f'n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}')
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim} is odd; rotary positions need pairs')


class Decoder:
    """Pure functions of `params` for one shape; holds no weights.

    Weights are float32: matrices [in, out] (activations stand on the left), `embedding` and `head` [V, d], norm
    scales [d]. Activations are two-dimensional, [tokens, d], whatever rows the tokens come from.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        module = nnx.eval_shape(lambda: _Stack(config))
        self._graph, state = nnx.split(module)
        self._abstract: Params = nnx.to_pure_dict(state)

    def abstract(self) -> Params:
        """Shape and dtype of every leaf, as jax.ShapeDtypeStruct."""
        return jax.tree.map(lambda leaf: leaf, self._abstract)

    def init(self, seed: int, scale: float = 1.0) -> Params:
        """Random weights, a function of (seed, path of the leaf, scale): norms 1, matrices normal / sqrt(fan in).

        The two matrices of a layer that write to the residual stream are divided by sqrt(2 n_layers), so that its
        variance does not grow with depth; `scale` multiplies every matrix.
        """
        key = jax.random.key(seed)

        def leaf(path: Any, value: jax.ShapeDtypeStruct) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator='/')
            if len(value.shape) == 1:
                return jnp.ones(value.shape, value.dtype)
            fan_in = value.shape[1] if name in ('embedding', 'head') else value.shape[0]
            deviation = scale / math.sqrt(fan_in)
            if name.endswith(('attention/output', 'mlp/down')):
                deviation /= math.sqrt(2 * self.config.n_layers)
            return _normal(jax.random.fold_in(key, zlib.crc32(name.encode())), value.shape, deviation)

        return jax.tree_util.tree_map_with_path(leaf, self._abstract)

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Sequence[Any] | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states after the final norm, float32 [N, d], and what `attend` returned as cache, one per layer.

        `tokens` and `positions` are int32 [N]. `attend` decides who sees whom: it gets q [N, H, D] and k [N, K, D],
        both rotated, v [N, K, D] and its layer's entry of `cache` (None without one), and returns out [N, H, D] and
        the entry's new value. Scaling the scores by 1/sqrt(D) is its business. Merges the static graph with
        `params`: call it inside jax.jit.
        """
        layers = (None,) * self.config.n_layers if cache is None else tuple(cache)
        if len(layers) != self.config.n_layers:
            raise ValueError(f'cache has {len(layers)} entries, the decoder {self.config.n_layers} layers')
        return nnx.merge(self._graph, params)(tokens, positions, attend, layers)

    def head(self, params: Params) -> jax.Array:
        """[V, d]: the embedding when tied."""
        return params['embedding'] if self.config.tie_embeddings else params['head']

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 [N, V] of hidden states [N, d]."""
        return jnp.einsum('nd,vd->nv', hidden, self.head(params), preferred_element_type=jnp.float32)

    def parameter_count(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._abstract))


class _Stack(nnx.Module):
    def __init__(self, c: ModelConfig):
        self.config = c
        self.embedding = _weight(c.vocab_size, c.d_model)
        self.layers = nnx.Dict({str(index): _Layer(c) for index in range(c.n_layers)})
        self.final_norm = _weight(c.d_model)
        if not c.tie_embeddings:
            self.head = _weight(c.vocab_size, c.d_model)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, cache: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        c = self.config
        rotation = rotary(positions, c.head_dim, c.rope_theta)
        x = self.embedding[...][tokens]
        written = []
        for index, entry in enumerate(cache):
            x, entry = self.layers[str(index)](x, rotation, attend, entry)
            written.append(entry)
        return rms_norm(x, self.final_norm[...], c.rms_eps), tuple(written)


class _Layer(nnx.Module):
    def __init__(self, c: ModelConfig):
        self.eps = c.rms_eps
        self.attention_norm = _weight(c.d_model)
        self.attention = _Attention(c)
        self.mlp_norm = _weight(c.d_model)
        self.mlp = _Mlp(c)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend, entry: Any
    ) -> tuple[jax.Array, Any]:
        out, entry = self.attention(rms_norm(x, self.attention_norm[...], self.eps), rotation, attend, entry)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), entry


class _Attention(nnx.Module):
    def __init__(self, c: ModelConfig):
        self.query = _weight(c.d_model, c.n_heads * c.head_dim)
        self.key = _weight(c.d_model, c.n_kv_heads * c.head_dim)
        self.value = _weight(c.d_model, c.n_kv_heads * c.head_dim)
        self.output = _weight(c.n_heads * c.head_dim, c.d_model)
        self.head_dim = c.head_dim

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend, entry: Any
    ) -> tuple[jax.Array, Any]:
        q, k, v = (
            (x @ kernel[...]).reshape(x.shape[0], -1, self.head_dim) for kernel in (self.query, self.key, self.value)
        )
        out, entry = attend(rotate(q, *rotation), rotate(k, *rotation), v, entry)
        return out.reshape(x.shape[0], -1) @ self.output[...], entry


class _Mlp(nnx.Module):
    def __init__(self, c: ModelConfig):
        self.gate = _weight(c.d_model, c.d_ff)
        self.up = _weight(c.d_model, c.d_ff)
        self.down = _weight(c.d_ff, c.d_model)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (arXiv 1910.07467, Eq. 4)."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normal * scale).astype(x.dtype)


def rotary(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [N, D/2], of the angles position * theta^(-2j/D) (arXiv 2104.09864, Eq. 15)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns the pairs (j, j + D/2) of every head of x [N, H, D]; angles are float32, the result has x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def _weight(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32))


@functools.partial(jax.jit, static_argnums=1)  # one program per shape, not one per leaf
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * deviation
