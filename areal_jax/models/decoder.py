"""Under arrows 3 and 7: the decoder that generates and is trained, as pure functions of a plain dict of weights."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from areal_jax.models.layers import FORMS, stack_layers
from areal_jax.models.lora import Lora
from areal_jax.models.rotary import rotary, rotate
from areal_jax.models.shape import ModelConfig
from areal_jax.ranges import ConfigError

Params = dict[str, Any]  # nested: {'layers': {'0': {'attention': {'query': {'weight': array}}}}}
# (q [N, H, D], k [N, K, D], v [N, K, D], cache of the layer, window) -> (out [N, H, D], cache of the layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, int | None], tuple[jax.Array, Any]]
Constrain = Callable[[jax.Array], jax.Array]

_SAVED_ATTENTION = ('attention_output', 'attention_lse')  # as the attention backends tag them
# what the backward pass of a layer finds instead of computing it again, beside the layer's input
REMAT: dict[str, Any] = {
    'none': None,  # everything
    'dots': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*_SAVED_ATTENTION),
    ),  # matrix products and attention
    'attention': jax.checkpoint_policies.save_only_these_names(*_SAVED_ATTENTION),
    'full': jax.checkpoint_policies.nothing_saveable,
}


class Decoder:
    """Pure functions of `params` for one shape; holds no weights.

    Weights are float32: matrices [in, out] (activations stand on the left), `embedding` and `head` [V, d], norm
    scales and biases one-dimensional. Activations are two-dimensional, [tokens, d], whatever rows the tokens come from,
    and have the dtype of the weights that `hidden` is given.

    Args:
      layers: 'list', one subtree per layer and a straight program; 'stacked', one subtree whose leaves have a leading
        axis of layers and a loop over it, so that the time to compile does not grow with depth.
      remat: what the gradient keeps of a layer, see REMAT.
      lora: adds adapters beside the projections it names.

    Raises ValueError for an unknown `layers` or `remat`.
    """

    def __init__(self, config: ModelConfig, *, layers: str = 'list', remat: str = 'none', lora: Lora | None = None):
        if layers not in FORMS:
            raise ConfigError(f'learner.layers={layers!r} is unknown; use one of {", ".join(FORMS)}')
        if remat not in REMAT:
            raise ConfigError(f'learner.remat={remat!r} is unknown; use one of {", ".join(REMAT)}')
        self.config, self.layers, self.lora = config, layers, lora
        self._remat = remat
        self._block_graph, block = nnx.split(nnx.eval_shape(lambda: _Layer(config, lora)))
        ends = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: _Ends(config))))
        self._block: Params = nnx.to_pure_dict(block)
        self._ends: Params = ends

    def abstract(self) -> Params:
        """Shape and dtype of every leaf, as jax.ShapeDtypeStruct."""
        n = self.config.n_layers
        if self.layers == 'stacked':
            stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), self._block)
            return {**self._ends, 'layers': stacked}
        return {**self._ends, 'layers': {str(i): jax.tree.map(lambda x: x, self._block) for i in range(n)}}

    def init(self, seed: int, scale: float = 1.0) -> Params:
        """Random weights, a function of (seed, path of the leaf in list form, scale).

        Norms are 1, biases and the second matrix of an adapter 0, matrices normal / sqrt(fan in). The two matrices of a
        layer that write to the residual stream are divided by sqrt(2 n_layers), so that its variance does not grow with
        depth; `scale` multiplies every matrix.
        """
        params = self._random({}, seed, scale)
        return stack_layers(params) if self.layers == 'stacked' else params

    def complete(self, params: Params, seed: int) -> Params:
        """`params`, in list form, with the leaves that it lacks (adapters, a value head) as `init` would make them."""
        return self._random(params, seed, scale=1.0)

    def _random(self, given: Params, seed: int, scale: float) -> Params:
        """In list form; leaves of `given` are taken as they are."""
        key = jax.random.key(seed)

        def leaf(name: str, value: jax.ShapeDtypeStruct) -> jax.Array:
            if name.endswith(('/bias', '/lora_b', 'value_head')):
                return jnp.zeros(value.shape, value.dtype)
            if len(value.shape) == 1:
                return jnp.ones(value.shape, value.dtype)
            fan_in = value.shape[1] if name in ('embedding', 'head') else value.shape[0]
            deviation = scale / math.sqrt(fan_in)
            if name.endswith(('attention/output/weight', 'mlp/down/weight')):
                deviation /= math.sqrt(2 * self.config.n_layers)
            return _normal(jax.random.fold_in(key, zlib.crc32(name.encode())), value.shape, deviation)

        def fill(prefix: str, abstract: Params, given: Params) -> Params:
            filled: Params = {}
            for name, value in abstract.items():
                if isinstance(value, dict):
                    filled[name] = fill(f'{prefix}{name}/', value, given.get(name, {}))
                else:
                    filled[name] = given[name] if name in given else leaf(f'{prefix}{name}', value)
            return filled

        layers = {str(i): self._block for i in range(self.config.n_layers)}
        return fill('', {**self._ends, 'layers': layers}, given)

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Any = None,
        constrain: Constrain = lambda x: x,
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the final norm [N, d], and what `attend` returned as cache, one entry per layer.

        `tokens` and `positions` are int32 [N]. `attend` decides who sees whom: it gets q [N, H, D] and k [N, K, D],
        both rotated, v [N, K, D], its layer's entry of `cache` (None without one) and how many positions the layer
        sees (None = all), and returns out [N, H, D] and the entry's new value. Scaling the scores by 1/sqrt(D) is its
        business. Entries are a tuple in list form and stacked along a leading axis in stacked form. `constrain`
        is applied to the residual stream [N, d] after every layer: where its parts lie on a mesh. Merges static graphs
        with `params`: call it inside jax.jit.
        """
        c = self.config
        rotation = rotary(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        x = constrain(params['embedding'][tokens])
        run = self._run_stacked if self.layers == 'stacked' else self._run_list
        x, written = run(params['layers'], x, rotation, attend, cache, constrain)
        return rms_norm(x, params['final_norm'], c.rms_eps), written

    def head(self, params: Params) -> jax.Array:
        """[V, d]: the embedding when tied."""
        return params['embedding'] if self.config.tie_embeddings else params['head']

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 [N, V] of hidden states [N, d]."""
        return jnp.einsum('nd,vd->nv', hidden, self.head(params), preferred_element_type=jnp.float32)

    def values(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 [N] of hidden states [N, d], from the value head."""
        return jnp.einsum('nd,d->n', hidden, params['value_head'], preferred_element_type=jnp.float32)

    def parameter_count(self) -> int:
        per_layer, ends = (sum(math.prod(x.shape) for x in jax.tree.leaves(t)) for t in (self._block, self._ends))
        return self.config.n_layers * per_layer + ends

    def _run_list(
        self, layers: Params, x: jax.Array, rotation: Any, attend: Attend, cache: Any, constrain: Constrain
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        n = self.config.n_layers
        entries = (None,) * n if cache is None else tuple(cache)
        if len(entries) != n:
            raise ValueError(f'cache has {len(entries)} entries, the decoder {n} layers')
        written = []
        for index, entry in enumerate(entries):
            block = self._layer(rotation, attend, self.config.window(index), constrain)
            x, entry = block(layers[str(index)], x, entry)
            written.append(entry)
        return x, tuple(written)

    def _run_stacked(
        self, layers: Params, x: jax.Array, rotation: Any, attend: Attend, cache: Any, constrain: Constrain
    ) -> tuple[jax.Array, Any]:
        if wrong := [leaf.shape for leaf in jax.tree.leaves(cache) if leaf.shape[:1] != (self.config.n_layers,)]:
            raise ValueError(
                f'stacked cache has a leaf {wrong[0]}; its first axis must be {self.config.n_layers} layers'
            )
        parts = []
        for first, end, window in self._runs():
            block = self._layer(rotation, attend, window, constrain)
            whole = end - first == self.config.n_layers  # slicing would copy
            run = (layers, cache) if whole else jax.tree.map(lambda leaf: leaf[first:end], (layers, cache))
            x, written = jax.lax.scan(lambda x, one: block(one[0], x, one[1]), x, run)
            parts.append(written)
        return x, parts[0] if len(parts) == 1 else jax.tree.map(lambda *p: jnp.concatenate(p), *parts)

    def _runs(self) -> Iterator[tuple[int, int, int | None]]:
        """(first, end, window) of consecutive layers with the same window."""
        first = 0
        for window, run in itertools.groupby(range(self.config.n_layers), self.config.window):
            end = first + len(list(run))
            yield first, end, window
            first = end

    def _layer(self, rotation: Any, attend: Attend, window: int | None, constrain: Constrain) -> Callable[..., Any]:
        """(weights of a layer, x, entry) -> (x, entry)."""

        def block(weights: Params, x: jax.Array, entry: Any) -> tuple[jax.Array, Any]:
            seen = lambda q, k, v: attend(q, k, v, entry, window)
            x, entry_after = nnx.merge(self._block_graph, weights)(x, rotation, seen)
            return constrain(x), entry_after

        if self._remat == 'none':
            return block
        # inside a loop nothing can be shared between forward and backward anyway
        return jax.checkpoint(block, policy=REMAT[self._remat], prevent_cse=self.layers == 'list')


class _Ends(nnx.Module):
    """The leaves outside the layers."""

    def __init__(self, c: ModelConfig):
        self.embedding = _param(c.vocab_size, c.d_model)
        self.final_norm = _param(c.d_model)
        if not c.tie_embeddings:
            self.head = _param(c.vocab_size, c.d_model)
        if c.value_head:
            self.value_head = _param(c.d_model)


class _Layer(nnx.Module):
    def __init__(self, c: ModelConfig, lora: Lora | None):
        self.eps = c.rms_eps
        self.attention_norm = _param(c.d_model)
        self.attention = _Attention(c, lora)
        self.mlp_norm = _param(c.d_model)
        self.mlp = _Mlp(c, lora)

    def __call__(self, x: jax.Array, rotation: Any, attend: Callable[..., Any]) -> tuple[jax.Array, Any]:
        out, entry = self.attention(rms_norm(x, self.attention_norm[...], self.eps), rotation, attend)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), entry


class _Attention(nnx.Module):
    def __init__(self, c: ModelConfig, lora: Lora | None):
        width, kv_width = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.query = _Linear('query', c.d_model, width, c.qkv_bias, lora)
        self.key = _Linear('key', c.d_model, kv_width, c.qkv_bias, lora)
        self.value = _Linear('value', c.d_model, kv_width, c.qkv_bias, lora)
        self.output = _Linear('output', width, c.d_model, c.output_bias, lora)
        self.head_dim, self.eps, self.qk_norm = c.head_dim, c.rms_eps, c.qk_norm
        if c.qk_norm:
            self.query_norm, self.key_norm = _param(c.head_dim), _param(c.head_dim)

    def __call__(self, x: jax.Array, rotation: Any, attend: Callable[..., Any]) -> tuple[jax.Array, Any]:
        q, k, v = (linear(x).reshape(len(x), -1, self.head_dim) for linear in (self.query, self.key, self.value))
        if self.qk_norm:
            q, k = rms_norm(q, self.query_norm[...], self.eps), rms_norm(k, self.key_norm[...], self.eps)
        out, entry = attend(rotate(q, *rotation), rotate(k, *rotation), v)
        return self.output(out.reshape(len(x), -1)), entry


class _Mlp(nnx.Module):
    def __init__(self, c: ModelConfig, lora: Lora | None):
        self.gate = _Linear('gate', c.d_model, c.d_ff, False, lora)
        self.up = _Linear('up', c.d_model, c.d_ff, False, lora)
        self.down = _Linear('down', c.d_ff, c.d_model, False, lora)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class _Linear(nnx.Module):
    def __init__(self, name: str, fan_in: int, fan_out: int, bias: bool, lora: Lora | None):
        self.weight = _param(fan_in, fan_out)
        self.has_bias, self.lora = bias, lora if lora and name in lora.targets else None
        if bias:
            self.bias = _param(fan_out)
        if self.lora:
            self.lora_a, self.lora_b = _param(fan_in, self.lora.rank), _param(self.lora.rank, fan_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...]
        if self.has_bias:
            y = y + self.bias[...]
        if self.lora:
            y = y + (x @ self.lora_a[...]) @ self.lora_b[...] * self.lora.scale
        return y


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (arXiv 1910.07467, Eq. 4)."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normal * scale).astype(x.dtype)


def _param(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32))


@functools.partial(jax.jit, static_argnums=1)  # one program per shape, not one per leaf
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * deviation
