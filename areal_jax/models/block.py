"""The layer of the decoder as Flax modules, whose parameters are the rows of the table of weights.

`decoder` builds a layer once, under nnx.eval_shape, and merges the static graph with weights inside jax.jit: nobody
else sees nnx. T tokens, H heads, K kv heads, D head_dim, d model width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from areal_jax.models.lora import Lora
from areal_jax.models.rotary import rotate
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Nested, WeightSpec
from areal_jax.types import Tree

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine, float32 [T, D/2]
# (q [T, H, D], k [T, K, D], v [T, K, D]) -> (out [T, H, D], the layer's entry of the cache)
AttendLayer = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Tree]]


class Layer(nnx.Module):
    """Attention and MLP, each with a norm before it and added to the residual stream."""

    attention_norm: nnx.Param
    mlp_norm: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None):
        _declare(self, weights)
        self.eps = c.rms_eps
        self.attention = _Attention(c, _below(weights, 'attention'), lora)
        self.mlp = _Mlp(_below(weights, 'mlp'), lora)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        """x [T, d] -> (x [T, d], the layer's entry of the cache)."""
        out, entry = self.attention(rms_norm(x, self.attention_norm[...], self.eps), rotation, attend)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), entry


class _Attention(nnx.Module):
    query_norm: nnx.Param
    key_norm: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None):
        _declare(self, weights)
        self.query, self.key, self.value, self.output = (
            _Linear(_below(weights, name), lora) for name in ('query', 'key', 'value', 'output')
        )
        self.head_dim, self.eps, self.qk_norm = c.head_dim, c.rms_eps, c.qk_norm

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        q, k, v = (linear(x).reshape(len(x), -1, self.head_dim) for linear in (self.query, self.key, self.value))
        if self.qk_norm:
            q, k = rms_norm(q, self.query_norm[...], self.eps), rms_norm(k, self.key_norm[...], self.eps)
        out, entry = attend(rotate(q, *rotation), rotate(k, *rotation), v)
        return self.output(out.reshape(len(x), -1)), entry


class _Mlp(nnx.Module):
    def __init__(self, weights: Nested, lora: Lora | None):
        _declare(self, weights)
        self.gate, self.up, self.down = (_Linear(_below(weights, name), lora) for name in ('gate', 'up', 'down'))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class _Linear(nnx.Module):
    weight: nnx.Param
    bias: nnx.Param
    lora_a: nnx.Param
    lora_b: nnx.Param

    def __init__(self, weights: Nested, lora: Lora | None):
        _declare(self, weights)
        self.has_bias = 'bias' in weights
        self.lora_scale = lora.scale if lora and 'lora_a' in weights else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...]
        if self.has_bias:
            y = y + self.bias[...]
        if self.lora_scale is not None:
            y = y + (x @ self.lora_a[...]) @ self.lora_b[...] * self.lora_scale
        return y


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (arXiv 1910.07467, Eq. 4)."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normal * scale).astype(x.dtype)


def _declare(module: nnx.Module, weights: Nested) -> None:
    """Gives the module a parameter for each row that belongs to it and not to a module inside it."""
    for name, spec in weights.items():
        if isinstance(spec, WeightSpec):
            setattr(module, name, nnx.Param(jnp.zeros(spec.shape, jnp.float32)))


def _below(weights: Nested, name: str) -> Nested:
    inside = weights[name]
    assert not isinstance(inside, WeightSpec)
    return inside
