"""The layer of the decoder as Flax modules, whose parameters are the rows of the table of weights.

`decoder` builds a layer once, under nnx.eval_shape, and merges the static graph with weights inside jax.jit: nothing
else uses nnx. Activations are [T, d] or [d, T], see quantized.Activations. T tokens, H heads, K kv heads, D head_dim, d
model width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from areal_jax.models.delta_rule import DeltaInputs, Projected
from areal_jax.models.experts import Routed, Routing, choose_experts
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import DeltaNet, Experts
from areal_jax.models.quantized import Activations
from areal_jax.models.rotary import rotate
from areal_jax.models.weights import Lora, Nested, WeightSpec
from areal_jax.types import Tree

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine, float32 [T, D/2]
# (q [T, H, D], k [T, K, D], v [T, K, D], of a model with sinks also `sinks` [H]) -> (out [T, H, D], the layer's entry
# of the cache)
AttendLayer = Callable[..., tuple[jax.Array, Tree]]
RecurLayer = Callable[[DeltaInputs], tuple[jax.Array, Tree]]  # -> (out float32 [T, H, Dv], the layer's entry)


class Layer(nnx.Module):
    """Attention or a delta net, and MLP or experts, each added to the residual stream.

    Norms are before each, behind it or both.
    """

    attention_norm: nnx.Param
    attention_out_norm: nnx.Param
    mlp_norm: nnx.Param
    mlp_out_norm: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.eps, self.centred, self.form = c.rms_eps, c.centred_norms, form
        self.has_norm = tuple(name in weights for name in _NORMS)
        self.has_attention = 'attention' in weights
        self.attention: _Attention | _LatentAttention
        if self.has_attention:
            of_attention = _LatentAttention if c.latent else _Attention
            self.attention = of_attention(c, _below(weights, 'attention'), lora, form)
        else:
            assert c.delta is not None
            self.delta = _DeltaNet(c.delta, _below(weights, 'delta'), lora, form, c.rms_eps)
        of_mlp = _below(weights, 'mlp')
        self.mlp: _Experts | _PlainMlp | _Mlp
        if 'experts' in of_mlp:
            assert c.experts is not None
            self.mlp = _Experts(of_mlp, c.experts, c.d_model, form)
        elif c.plain:
            self.mlp = _PlainMlp(of_mlp, lora, form)
        else:
            self.mlp = _Mlp(of_mlp, c.activation, lora, form)

    def __call__(
        self, x: jax.Array, rotation: Rotation, mix: AttendLayer | RecurLayer, routing: Routing
    ) -> tuple[jax.Array, Tree, Routed | None]:
        """Activations x -> (x, the layer's entry of the cache, the choices of its router).

        `mix` computes the attention of a layer that has it, else the rule of its delta net. `routing.recorded` has the
        routes of this layer only, [T, k].
        """
        normal = self._norm(x, 'attention_norm')
        out, entry = self.attention(normal, rotation, mix) if self.has_attention else self.delta(normal, mix)
        x = x + self._norm(out, 'attention_out_norm')
        normal = self._norm(x, 'mlp_norm')
        if not isinstance(self.mlp, _Experts):
            return x + self._norm(self.mlp(normal), 'mlp_out_norm'), entry, None
        y, routed = self.mlp(normal, routing)
        return x + self._norm(y, 'mlp_out_norm'), entry, routed

    def _norm(self, x: jax.Array, name: str) -> jax.Array:
        """The norm of this name, or x if the layer lacks it."""
        if not self.has_norm[_NORMS.index(name)]:
            return x
        scale = self.form.by_feature(getattr(self, name)[...])
        return rms_norm(x, norm_scale(scale, self.centred), self.eps, self.form.features)


_NORMS = ('attention_norm', 'attention_out_norm', 'mlp_norm', 'mlp_out_norm')


class _Attention(nnx.Module):
    query_norm: nnx.Param
    key_norm: nnx.Param
    sinks: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.query, self.key, self.value, self.output = (
            _Linear(_below(weights, name), lora, form) for name in ('query', 'key', 'value', 'output')
        )
        self.is_gated = c.gated_attention
        if self.is_gated:
            self.output_gate = _Linear(_below(weights, 'output_gate'), lora, form)
        self.head_dim, self.eps, self.form = c.head_dim, c.rms_eps, form
        self.qk_norm, self.whole_qk_norm, self.centred = c.qk_norm, c.whole_qk_norm, c.centred_norms
        self.has_sinks = c.sinks
        # every attention scales by 1 / sqrt(D): another scale is brought in by the queries
        self.query_factor = 1.0 if c.score_scale is None else c.score_scale * math.sqrt(c.head_dim)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        projected = _project(x, self.query, self.key, self.value, *([self.output_gate] if self.is_gated else []))
        projected, gate = projected[:3], projected[3:]
        if self.whole_qk_norm:
            norm = lambda y, scale: rms_norm(y, self.form.by_feature(scale[...]), self.eps, self.form.features)
            q, k, v = projected
            projected = norm(q, self.query_norm), norm(k, self.key_norm), v
        q, k, v = (self.form.split_heads(y, self.head_dim) for y in projected)
        if self.qk_norm:
            of_query, of_key = (norm_scale(norm[...], self.centred) for norm in (self.query_norm, self.key_norm))
            q, k = rms_norm(q, of_query, self.eps), rms_norm(k, of_key, self.eps)
        if self.query_factor != 1.0:
            q = (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)
        sinks = {'sinks': self.sinks[...]} if self.has_sinks else {}
        out, entry = attend(rotate(q, *rotation), rotate(k, *rotation), v, **sinks)
        if self.is_gated:
            out = _gate(out, self.form.split_heads(gate[0], self.head_dim), jax.nn.sigmoid)
        [y] = _project(self.form.join_heads(out), self.output)
        return y, entry


_LATENT_EPS = 1e-6  # of the norms of latents, whatever the model's other norms have


class _LatentAttention(nnx.Module):
    """See layer_parts.LatentAttention; m.rank numbers of a latent, N and R the sizes of a key's two parts."""

    query_norm: nnx.Param
    latent_norm: nnx.Param
    key_up: nnx.Param
    value_up: nnx.Param

    def __init__(self, c: ModelConfig, weights: Nested, lora: Lora | None, form: Activations):
        assert c.latent is not None
        assert c.score_scale is not None
        _declare(self, weights)
        self.query, self.latent, self.output = (
            _Linear(_below(weights, name), lora, form) for name in ('query', 'latent', 'output')
        )
        if c.query_latent:
            self.query_latent = _Linear(_below(weights, 'query_latent'), lora, form)
        self.sizes, self.form, self.query_latents = c.latent, form, c.query_latent
        self.query_factor = c.score_scale * math.sqrt(c.head_dim)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: AttendLayer) -> tuple[jax.Array, Tree]:
        m, form = self.sizes, self.form
        [down] = _project(x, self.latent)
        known = form.split_heads(down, m.rank + m.rotated_dim)  # [T, 1, rank + R]
        latent = rms_norm(known[..., : m.rank], self.latent_norm[...], _LATENT_EPS)
        if self.query_latents:
            [down] = _project(x, self.query_latent)
            x = rms_norm(down, form.by_feature(self.query_norm[...]), _LATENT_EPS, form.features)
        [q] = _project(x, self.query)
        q = form.split_heads(q, m.plain_dim + m.rotated_dim)
        q = (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)
        plain, turned = q[..., : m.plain_dim], self._turn(q[..., m.plain_dim :], rotation)
        key = self._turn(known[..., m.rank :], rotation)
        mix = self._attend_absorbed if m.absorbs else self._attend_expanded
        out, entry = mix(plain, turned, latent, key, attend)
        [y] = _project(form.join_heads(out), self.output)
        return y, entry

    def _attend_expanded(
        self, plain: jax.Array, turned: jax.Array, latent: jax.Array, key: jax.Array, attend: AttendLayer
    ) -> tuple[jax.Array, Tree]:
        m = self.sizes
        keys, values = (
            jnp.einsum('tl,lhn->thn', latent[:, 0], self._by_head(up)) for up in (self.key_up, self.value_up)
        )
        keys = jnp.concatenate([keys, jnp.broadcast_to(key, (*keys.shape[:2], m.rotated_dim))], axis=-1)
        q = jnp.concatenate([plain, turned], axis=-1)
        fill = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, m.head_dim - x.shape[-1])))
        out, entry = attend(fill(q), fill(keys), fill(values))
        return out[..., : m.value_dim], entry

    def _attend_absorbed(
        self, plain: jax.Array, turned: jax.Array, latent: jax.Array, key: jax.Array, attend: AttendLayer
    ) -> tuple[jax.Array, Tree]:
        q = jnp.concatenate([jnp.einsum('thn,lhn->thl', plain, self._by_head(self.key_up)), turned], axis=-1)
        known = jnp.concatenate([latent, key], axis=-1)
        out, entry = attend(q, known, known)
        return jnp.einsum('thl,lhv->thv', out[..., : self.sizes.rank], self._by_head(self.value_up)), entry

    def _by_head(self, up: nnx.Param) -> jax.Array:
        """[rank, H, size] of a matrix [rank, H size]."""
        m, matrix = self.sizes, up[...]
        size = m.plain_dim if up is self.key_up else m.value_dim
        return matrix.reshape(m.rank, -1, size)

    def _turn(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        if self.sizes.interleaved:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return rotate(x, *rotation)


def _gate(x: jax.Array, gate: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """x times the activated gate, in float32; the result has the dtype of the gate."""
    return (x.astype(jnp.float32) * activation(gate.astype(jnp.float32))).astype(gate.dtype)


class _DeltaNet(nnx.Module):
    """A gated delta net, see delta_rule (arXiv 2412.06464; decays, norm and gate as in transformers' Qwen3-Next)."""

    query_taps: nnx.Param
    key_taps: nnx.Param
    value_taps: nnx.Param
    log_rate: nnx.Param
    rate_bias: nnx.Param
    norm: nnx.Param

    def __init__(self, delta: DeltaNet, weights: Nested, lora: Lora | None, form: Activations, eps: float):
        _declare(self, weights)
        self.query, self.key, self.value, self.output_gate, self.decay, self.beta, self.output = (
            _Linear(_below(weights, name), lora, form)
            for name in ('query', 'key', 'value', 'output_gate', 'decay', 'beta', 'output')
        )
        self.sizes = (delta.key_dim, delta.key_dim, delta.value_dim)
        self.eps, self.form = eps, form

    def __call__(self, x: jax.Array, recur: RecurLayer) -> tuple[jax.Array, Tree]:
        *mixed, gate, decay, beta = _project(
            x, self.query, self.key, self.value, self.output_gate, self.decay, self.beta
        )
        projected = Projected(*(self.form.split_heads(y, size) for y, size in zip(mixed, self.sizes, strict=True)))
        by_head = lambda y: self.form.split_heads(y, 1)[..., 0].astype(jnp.float32)
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        log_decay = -rate * jax.nn.softplus(by_head(decay) + self.rate_bias[...].astype(jnp.float32))
        leaves = self.query_taps[...], self.key_taps[...], self.value_taps[...]
        taps = Projected(
            *(leaf.reshape(-1, size, leaf.shape[-1]) for leaf, size in zip(leaves, self.sizes, strict=True))
        )
        out, entry = recur(DeltaInputs(*projected, log_decay, jax.nn.sigmoid(by_head(beta)), taps))
        normal = rms_norm(out, self.norm[...].astype(jnp.float32), self.eps)
        y = _gate(normal, self.form.split_heads(gate, self.sizes[-1]), jax.nn.silu)
        [y] = _project(self.form.join_heads(y), self.output)
        return y, entry


class _Mlp(nnx.Module):
    def __init__(self, weights: Nested, activation: str, lora: Lora | None, form: Activations):
        _declare(self, weights)
        self.activation = activation
        self.gate, self.up, self.down = (_Linear(_below(weights, name), lora, form) for name in ('gate', 'up', 'down'))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = _project(x, self.gate, self.up)
        [y] = _project(_ACTIVATIONS[self.activation](gate) * up, self.down)
        return y


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'silu': jax.nn.silu,
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


class _Experts(nnx.Module):
    correction: nnx.Param

    def __init__(self, weights: Nested, experts: Experts, d_model: int, form: Activations):
        _declare(self, weights)
        self.router = _Linear(_below(weights, 'router'), None, form)
        self.experts = _ExpertWeights(_below(weights, 'experts'))
        if experts.d_shared:
            self.shared = _Mlp(_below(weights, 'shared'), 'silu', None, form)
        self.scores_shared = 'shared_score' in weights
        if self.scores_shared:
            self.shared_score = _Linear(_below(weights, 'shared_score'), None, form)
        self.choice, self.d_model, self.form = experts, d_model, form

    def __call__(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, Routed]:
        with jax.default_matmul_precision('float32'):
            router = self.router.weight.get_value().astype(jnp.float32)
            [logits] = self.form.multiply(x.astype(jnp.float32), router)
        rows = lambda y, features: self.form.split_heads(y, features)[:, 0]
        if self.router.has_bias:
            logits = logits + self.form.by_feature(self.router.bias[...].astype(jnp.float32))
        choice = choose_experts(
            rows(logits, self.choice.count), self.choice, routing.valid, routing.recorded, routing.follows,
            self.correction[...] if self.choice.sigmoid else None,
        )  # fmt: skip
        leaves = (leaf.get_value() for leaf in self.experts.leaves())
        y = routing.mix(rows(x, self.d_model), choice.experts, choice.weights, *leaves, swiglu=self.choice.swiglu)
        out = self.form.join_heads(y[:, None])
        if self.choice.d_shared and not self.scores_shared:
            out = out + self.shared(x)
        elif self.choice.d_shared:
            [score] = _project(x, self.shared_score)
            out = out + jax.nn.sigmoid(score.astype(jnp.float32)).astype(x.dtype) * self.shared(x)
        return out, choice.routed


class _ExpertWeights(nnx.Module):
    gate: nnx.Param
    up: nnx.Param
    gate_up: nnx.Param
    gate_up_bias: nnx.Param
    down: nnx.Param
    down_bias: nnx.Param

    def __init__(self, weights: Nested):
        _declare(self, weights)
        self.names = tuple(weights)

    def leaves(self) -> tuple[nnx.Param, ...]:
        """In the order of the table of weights."""
        return tuple(getattr(self, name) for name in self.names)


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
        """Adds bias and adapter to `product`, activations x times the weight."""
        y, multiply = product, self.form.multiply
        if self.has_bias:
            y = y + self.form.by_feature(self.bias[...])
        if self.lora_scale is not None:
            [inner] = multiply(x, self.lora_a[...])
            [adapted] = multiply(inner, self.lora_b[...])
            y = y + adapted * self.lora_scale
        return y


def _project(x: jax.Array, *linears: _Linear) -> tuple[jax.Array, ...]:
    """Applies each linear to activations x; their products are one call of the form."""
    products = linears[0].form.multiply(x, *(linear.weight.get_value() for linear in linears))
    return tuple(linear.complete(x, product) for linear, product in zip(linears, products, strict=True))


def norm_scale(scale: jax.Array, centred: bool) -> jax.Array:
    """The factor of a norm: its weight, or 1 + the weight in float32."""
    return 1.0 + scale.astype(jnp.float32) if centred else scale


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
