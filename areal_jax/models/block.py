"""The layer of the decoder as Flax modules, whose parameters are the rows of the table of weights.

`decoder` builds a layer once, under nnx.eval_shape, and merges the static graph with weights inside jax.jit: nothing
else uses nnx. Activations are [T, d] or [d, T], see `activations`. T tokens, H heads, K kv heads, D head_dim, d model
width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from areal_jax.models.activations import Activations
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

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.eps, self.form = c.rms_eps, form
        self.attention = _Attention(c, _below(weights, 'attention'), lora, form)
        self.mlp = (_PlainMlp if c.plain else _Mlp)(_below(weights, 'mlp'), lora, form)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        """Activations x -> (x, the layer's entry of the cache)."""
        out, entry = self.attention(self._norm(x, self.attention_norm[...]), rotation, attend)
        x = x + out
        return x + self.mlp(self._norm(x, self.mlp_norm[...])), entry

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, self.form.by_feature(scale), self.eps, self.form.features)


class _Attention(nnx.Module):
    query_norm: nnx.Param
    key_norm: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.query, self.key, self.value, self.output = (
            _Linear(_below(weights, name), lora, form) for name in ('query', 'key', 'value', 'output')
        )
        self.head_dim, self.eps, self.qk_norm, self.form = c.head_dim, c.rms_eps, c.qk_norm, form

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        projected = _project(x, self.query, self.key, self.value)
        q, k, v = (self.form.split_heads(y, self.head_dim) for y in projected)
        if self.qk_norm:
            q, k = rms_norm(q, self.query_norm[...], self.eps), rms_norm(k, self.key_norm[...], self.eps)
        out, entry = attend(rotate(q, *rotation), rotate(k, *rotation), v)
        [y] = _project(self.form.join_heads(out), self.output)
        return y, entry


class _Mlp(nnx.Module):
    def __init__(self, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.gate, self.up, self.down = (_Linear(_below(weights, name), lora, form) for name in ('gate', 'up', 'down'))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = _project(x, self.gate, self.up)
        [y] = _project(jax.nn.silu(gate) * up, self.down)
        return y


class _PlainMlp(nnx.Module):
    def __init__(self, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.up, self.down = (_Linear(_below(weights, name), lora, form) for name in ('up', 'down'))

    def __call__(self, x: jax.Array) -> jax.Array:
        [up] = _project(x, self.up)
        [y] = _project(jax.nn.relu(up), self.down)
        return y


class _Linear(nnx.Module):
    weight: nnx.Param
    bias: nnx.Param
    lora_a: nnx.Param
    lora_b: nnx.Param

    def __init__(self, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.has_bias, self.form = 'bias' in weights, form
        self.lora_scale = lora.scale if lora and 'lora_a' in weights else None

    def complete(self, x: jax.Array, product: jax.Array) -> jax.Array:
        """Activations x times the weight, with bias and adapter."""
        y, multiply = product, self.form.multiply
        if self.has_bias:
            y = y + self.form.by_feature(self.bias[...])
        if self.lora_scale is not None:
            [inner] = multiply(x, self.lora_a[...])
            [adapted] = multiply(inner, self.lora_b[...])
            y = y + adapted * self.lora_scale
        return y


def _project(x: jax.Array, *linears: _Linear) -> tuple[jax.Array, ...]:
    """Activations x through each; their products are one call of the form."""
    products = linears[0].form.multiply(x, *(linear.weight.get_value() for linear in linears))
    return tuple(linear.complete(x, product) for linear, product in zip(linears, products, strict=True))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over one axis, in float32 (arXiv 1910.07467, Eq. 4); scale broadcasts to x."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axis, keepdims=True) + eps)
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
