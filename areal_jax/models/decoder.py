"""The decoder that generates and is trained, as pure functions of a plain dict of weights.

The decode engine and the learner run it, each with its own attention; `weights` lists its weights, `block` computes a
layer. Shapes: T tokens, H heads, K kv heads, D head_dim, d model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from areal_jax.config.fields import ConfigError
from areal_jax.models import native_layers
from areal_jax.models import weights as initial
from areal_jax.models.block import AttendLayer, Layer, RecurLayer, Rotation, norm_scale, rms_norm
from areal_jax.models.delta_rule import Recur
from areal_jax.models.experts import Routed, Routing, follow_choice
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.logprobs import Ranking, cap_logits, effective_temperature, rank_tokens
from areal_jax.models.native_layers import KeysAndValues, Read, Stepped
from areal_jax.models.quantized import ACTIVATIONS, QUANTIZED, Activations, Quantized, rank_logits
from areal_jax.models.ropes import Rope
from areal_jax.models.rotary import no_rotation, rotary
from areal_jax.models.weight_rows import MixerKind
from areal_jax.models.weights import FORMS, Lora, Params, leaf_at, map_matrices, nest, stack_layers, weight_table
from areal_jax.types import Tree

# (q [T, H, D], k [T, K, D], v [T, K, D], cache of the layer, window, of a model with sinks also `sinks` [H]) ->
# (out [T, H, D], cache of the layer)
Attend = Callable[..., tuple[jax.Array, Tree]]
Constrain = Callable[[jax.Array], jax.Array]
_Written = tuple[Tree, Routed | None]  # the entry of the cache of a layer, and the choices of its router
# (weights, x, entry of the cache, recorded routes [T, k]) of a layer -> (x, the new entry and choices)
_Block = Callable[[Params, jax.Array, Tree, jax.Array | None], tuple[jax.Array, _Written]]
_Kind = tuple[LayerKind, bool]  # of a layer: how it mixes tokens, and whether it has experts
_Graph = tuple[MixerKind, bool]  # the modules of a layer follow from these
_Rotations = Mapping[Rope | None, Rotation]  # by the rope of a layer
_MakeBlock = Callable[[_Kind], _Block]

_TOKENS = {**ACTIVATIONS, **QUANTIZED}
_SAVED_ATTENTION = ('attention_output', 'attention_lse')  # as the attention backends tag them
# which intermediates of a layer are saved for the backward pass; the others are computed again from the layer's input
REMAT: dict[str, Callable[..., bool] | None] = {
    'none': None,  # all are saved
    'dots': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*_SAVED_ATTENTION),
    ),  # matrix products and attention
    'attention': jax.checkpoint_policies.save_only_these_names(*_SAVED_ATTENTION),
    'full': jax.checkpoint_policies.nothing_saveable,
}


class Decoder:
    """Pure functions of `params` for one shape; holds no weights.

    Weights are float32: matrices [in, out], `embedding` and `head` [V, d], norm scales and biases one-dimensional.
    `hidden` takes them as `prepare` returns them. Activations have the tokens of all rows in one axis, and the dtype of
    the weights that `hidden` is given.

    Args:
      layers: 'list' has one subtree per layer and an unrolled program. 'stacked' has one subtree, whose leaves have a
        leading axis of layers, and scans over that axis: the time to compile does not grow with depth.
      remat: which intermediates of a layer are saved for the backward pass, see REMAT.
      lora: adds adapters to the projections it names.
      tokens: 'rows' has activations [T, d], 'columns' [d, T], see quantized.Activations. Results differ by rounding.
        'int8_rows' computes with weights and activations in 8 bits, see `quantized`.

    Raises ValueError for an unknown `layers`, `remat` or `tokens`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: str = 'list',
        remat: str = 'none',
        lora: Lora | None = None,
        tokens: str = 'rows',
    ):
        if layers not in FORMS:
            raise ConfigError(f'learner.layers={layers!r} is unknown; use one of {", ".join(FORMS)}')
        if remat not in REMAT:
            raise ConfigError(f'learner.remat={remat!r} is unknown; use one of {", ".join(REMAT)}')
        if tokens not in _TOKENS:
            raise ConfigError(f'tokens={tokens!r} is unknown; use one of {", ".join(_TOKENS)}')
        self.config, self.layers, self.lora, self.tokens = config, layers, lora, tokens
        self._remat, self._form = remat, _TOKENS[tokens]
        self._table = weight_table(config, lora)
        self._kinds = [(config.kind(layer), config.has_experts(layer)) for layer in range(config.n_layers)]
        graphs = {_graph_of(kind) for kind in self._kinds}
        self._layer_graphs = {graph: _layer_graph(config, lora, self._form, *graph) for graph in graphs}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decoder) and self._form_of_all == other._form_of_all

    def __hash__(self) -> int:
        return hash(self._form_of_all)

    @property
    def _form_of_all(self) -> tuple[ModelConfig, str, str, Lora | None, str]:
        return self.config, self.layers, self._remat, self.lora, self.tokens

    def without_adapters(self) -> Decoder:
        """The decoder for weights without adapters, of the same shape and form."""
        if self.lora is None:
            return self
        return Decoder(self.config, layers=self.layers, remat=self._remat, tokens=self.tokens)

    @property
    def token_axis(self) -> int:
        """The axis of tokens in the states that `hidden` returns."""
        return 0 if self._form.features == -1 else 1

    def abstract(self) -> Params:
        """Shape and dtype of every leaf, as jax.ShapeDtypeStruct."""
        stacked = self.layers == 'stacked'
        leaves: list[tuple[str, jax.ShapeDtypeStruct]] = []
        for spec in self._table.values():
            shape = (len(spec.layers), *spec.shape) if stacked and spec.in_layers else spec.shape
            leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
            leaves += [(path, leaf) for path in ([spec.stacked_path] if stacked else spec.paths)]
        return nest(leaves)

    def init(self, seed: int, scale: float = 1.0, embedding_scale: float = 1.0) -> Params:
        """Random weights: each leaf is a function of (seed, its path in list form, its scale) alone, see
        weight_rows.Init.

        `scale` multiplies the standard deviation of every matrix, `embedding_scale` only of embedding and positions.
        """
        params = self.complete({}, seed, scale, embedding_scale)
        return stack_layers(params) if self.layers == 'stacked' else params

    def complete(self, params: Params, seed: int, scale: float = 1.0, embedding_scale: float = 1.0) -> Params:
        """`params`, in list form, completed with the leaves that it lacks (adapters) as `init` would make them."""
        return initial.complete(self._table, params, self.config.n_layers, seed, scale, embedding_scale)

    def prepare(self, params: Params) -> Params:
        """Published weights in the form that `hidden` and `logits` need; inside jax.jit or outside."""
        prepared = map_matrices(self._table, params, self._form.stored)
        head = 'embedding' if self.config.tie_embeddings else 'head'
        return {**prepared, head: self._form.stored_table(prepared[head])}

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Tree = None,
        constrain: Constrain = lambda x: x,
        wanted: jax.Array | None = None,
        routing: Routing | None = None,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, Tree]:
        """Hidden states before the head, and the cache that `attend` returned, one entry per layer.

        The states are [T, d], or [d, T] with tokens as columns.

        Call it inside jax.jit: it merges static graphs with `params`.

        Args:
          tokens, positions: int32 [T].
          attend: computes attention and its mask. It gets q [T, H, D] and k [T, K, D] after the rotation, v [T, K, D],
            the layer's entry of `cache` (None without a cache) and the layer's window in tokens (None = no window), and
            of a model with sinks the layer's, float [H], as `sinks`. It scales the scores by 1/sqrt(D) and returns out
            [T, H, D] and the new entry.
          cache: a tuple of entries in list form; entries stacked along a leading axis in stacked form.
          constrain: sharding constraint of the residual stream, applied to the embedding and after every layer.
          wanted: int32 [], only the first `wanted` tokens count, and the others may be left out; None = all.
          routing: of models with experts.
          recur: computes the rule of delta nets, for models that have them. It gets a layer's projections and its entry
            of `cache`, and returns out float32 [T, H, Dv] and the new entry.
        """
        return self.hidden_and_routes(params, tokens, positions, attend, cache, constrain, wanted, routing, recur)[:2]

    def hidden_and_routes(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Tree = None,
        constrain: Constrain = lambda x: x,
        wanted: jax.Array | None = None,
        routing: Routing | None = None,
        recur: Recur | None = None,
    ) -> tuple[jax.Array, Tree, Routed | None]:
        """The results of `hidden`, and the choices of the routers (None for a model without experts)."""
        c = self.config
        x, rotations = self._enter(params, tokens, positions)
        x = constrain(x)
        run = self._run_list
        if self.layers == 'stacked':
            run = self._run_stacked if len(self._layer_graphs) == 1 else self._run_periods
        count = jnp.int32(len(tokens)) if wanted is None else wanted
        routing = routing or Routing()
        if wanted is not None:
            first = jnp.arange(len(tokens)) < wanted
            routing = dataclasses.replace(routing, valid=first if routing.valid is None else routing.valid & first)
        make = functools.partial(self._make_block, rotations, attend, recur, constrain, count, routing)
        x, written, routed = run(params['layers'], x, cache, make, routing.recorded)
        if not c.plain:
            scale = norm_scale(self._form.by_feature(params['final_norm']), c.centred_norms)
            x = rms_norm(x, scale, c.rms_eps, self._form.features)
        return x, written, routed

    def can_step(self, params: Params) -> bool:
        """Whether `step` supports these prepared weights: its layers have one rotation."""
        layers = params['layers'].values() if self.layers == 'list' and len(self._ropes) == 1 else ()
        return bool(layers) and all(map(self._is_native, layers)) and native_layers.has_kernel(self.head(params))

    def step(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KeysAndValues,
        read: Read,
        temperature: jax.Array,
    ) -> Stepped:
        """Runs `hidden` and `logits` for one token per row, over the cache of rollout/decode/attention, as one kernel.

        Args:
          tokens, positions: int32 [B].
          read: the part of the cache that attention sees, and where it writes. A row that sees none reaches no expert.
          temperature: float32 [B].
        """
        c = self.config
        layers = [params['layers'][str(i)] for i in range(c.n_layers)]
        x, rotations = self._enter(params, tokens, positions)
        [rotation] = rotations.values()
        return native_layers.run_step(
            c, layers, params['final_norm'], self.head(params), x, rotation, cache, read,
            effective_temperature(temperature),
        )  # fmt: skip

    @property
    def _ropes(self) -> list[Rope | None]:
        """The ropes of the layers, without repetition."""
        return list(dict.fromkeys(self.config.rope_of(kind) for kind in self.config.kinds))

    def _enter(self, params: Params, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, _Rotations]:
        """The embedded tokens, and the rotations of their queries and keys."""
        c = self.config
        size = c.rotary_dim or c.head_dim
        rotations = {
            rope: no_rotation(positions, size) if rope is None else rotary(positions, size, rope)
            for rope in self._ropes
        }
        x = self._form.embed(params['embedding'], tokens)
        if c.embedding_factor != 1.0:
            x = x * jnp.asarray(c.embedding_factor, x.dtype)
        if c.plain:
            x = x + self._form.embed(params['positions'], positions)
        return x, rotations

    def _is_native(self, layer: Params) -> bool:
        c = self.config
        whole_norm = c.whole_qk_norm and self.tokens != 'native_columns'  # the 8-bit kernels lack this norm
        # nor have the kernels these
        other = (
            c.plain or c.centred_norms or c.activation != 'silu' or c.score_scale or c.logit_cap or c.sinks or c.delta
            or c.rotary_dim or (c.experts and c.experts.sigmoid)
        )  # fmt: skip
        return self.tokens.startswith('native') and not (whole_norm or other) and native_layers.can_compute(layer)

    def head(self, params: Params) -> Tree:
        """The stored head [V, d], or [output_size, d]: the embedding when tied."""
        return params['embedding'] if self.config.tie_embeddings else params['head']

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits float32 [T, V] of the states that `hidden` returned."""
        return cap_logits(self._form.logits(hidden, self.head(params)), self.config.logit_cap)

    def rank(
        self,
        params: Params,
        hidden: jax.Array,
        targets: jax.Array,
        temperature: jax.Array,
        most: int,
        wanted: jax.Array,
    ) -> Ranking:
        """Log-probs of the targets after the tokens of `hidden`, and of the `most` likeliest tokens there.

        Args:
          hidden: states of T tokens in the form in which `hidden` returns them.
          targets: int32 [T].
          temperature: float32 [T], 0 counts as 1.
          wanted: int32 [], only the first `wanted` tokens count; values of the others mean nothing.
        """
        head, cap = self.head(params), self.config.logit_cap
        if isinstance(head, Quantized) or (cap is not None and self.tokens == 'native_columns'):
            return rank_logits(self.logits(params, hidden), targets, temperature, most)
        if self.tokens == 'native_columns' and native_layers.has_kernel(head):
            return native_layers.run_ranking(head, hidden, wanted, targets, effective_temperature(temperature), most)
        rows = hidden if self.token_axis == 0 else hidden.T
        return rank_tokens(rows, head, targets, temperature, most, cap=cap)

    def parameter_count(self) -> int:
        return sum(len(spec.paths) * math.prod(spec.shape) for spec in self._table.values())

    def _run_list(
        self, layers: Params, x: jax.Array, cache: Tree, make: _MakeBlock, recorded: jax.Array | None
    ) -> tuple[jax.Array, tuple[Tree, ...], Routed | None]:
        n = self.config.n_layers
        entries = (None,) * n if cache is None else tuple(cache)
        if len(entries) != n:
            raise ValueError(f'cache has {len(entries)} entries, the decoder {n} layers')
        # one function for all layers of a kind: jax.checkpoint traces and differentiates it once
        blocks = {kind: make(kind) for kind in set(self._kinds)}
        written: list[Tree] = []
        routed: list[Routed] = []
        for index, (kind, entry) in enumerate(zip(self._kinds, entries, strict=True)):
            route = None if recorded is None or not kind[1] else recorded[len(routed)]
            x, (entry, chosen) = blocks[kind](layers[str(index)], x, entry, route)
            written.append(entry)
            if chosen is not None:
                routed.append(chosen)
        return x, tuple(written), jax.tree.map(lambda *parts: jnp.stack(parts), *routed) if routed else None

    def _run_stacked(
        self, layers: Params, x: jax.Array, cache: Tree, make: _MakeBlock, recorded: jax.Array | None
    ) -> tuple[jax.Array, Tree, Routed | None]:
        if wrong := [leaf.shape for leaf in jax.tree.leaves(cache) if leaf.shape[:1] != (self.config.n_layers,)]:
            raise ValueError(
                f'stacked cache has a leaf {wrong[0]}; its first axis must be {self.config.n_layers} layers'
            )
        parts = []
        for first, end, kind in _runs(self._kinds):
            block = make(kind)
            whole = end - first == self.config.n_layers  # slicing would copy
            inputs = layers, cache, recorded
            run = inputs if whole else jax.tree.map(lambda leaf: leaf[first:end], inputs)
            x, written = jax.lax.scan(lambda x, one: block(one[0], x, *one[1:]), x, run)
            parts.append(written)
        joined = parts[0] if len(parts) == 1 else jax.tree.map(lambda *p: jnp.concatenate(p), *parts)
        return x, *joined

    def _run_periods(
        self, layers: Params, x: jax.Array, cache: Tree, make: _MakeBlock, recorded: jax.Array | None
    ) -> tuple[jax.Array, Tree, Routed | None]:
        """Scans over periods of layers, such as three delta nets and an attention, whose leaves differ."""
        assert cache is None, 'an engine has its layers listed'
        size = _find_period(self._kinds)
        repeats, pattern = self.config.n_layers // size, self._kinds[:size]
        fold = lambda leaf: leaf.reshape(repeats, len(leaf) // repeats, *leaf.shape[1:])
        blocks = {kind: make(kind) for kind in set(pattern)}
        specs = [spec for spec in self._table.values() if spec.in_layers]

        def run(x: jax.Array, period: tuple[Params, jax.Array | None]) -> tuple[jax.Array, list[Routed]]:
            weights, routes = period
            routed: list[Routed] = []
            for number, kind in enumerate(pattern):
                own = nest(
                    (spec.path_in_layer, leaf_at(weights, spec.path_in_layer)[spec.layers.index(number)])
                    for spec in specs
                    if number in spec.layers
                )
                x, (_, chosen) = blocks[kind](
                    own, x, None, None if routes is None or not kind[1] else routes[len(routed)]
                )
                routed += [] if chosen is None else [chosen]
            return x, routed

        x, routed = jax.lax.scan(run, x, jax.tree.map(fold, (layers, recorded)))
        if not routed:
            return x, None, None
        in_order = lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
        return x, None, jax.tree.map(in_order, *routed)

    def _make_block(
        self,
        rotations: _Rotations,
        attend: Attend,
        recur: Recur | None,
        constrain: Constrain,
        wanted: jax.Array,
        routing: Routing,
        kind: _Kind,
    ) -> _Block:
        mixer, _ = kind
        rotation = rotations[self.config.rope_of(mixer)]

        def block(weights: Params, x: jax.Array, entry: Tree, recorded: jax.Array | None) -> tuple[jax.Array, _Written]:
            # most attentions know nothing of sinks: only models that have them pass some
            seen: AttendLayer | RecurLayer = lambda q, k, v, **sinks: attend(q, k, v, entry, mixer.window, **sinks)
            if mixer.mixer == 'delta':
                assert recur is not None, 'a model with delta nets needs their rule'
                seen = lambda inputs: recur(inputs, entry)
            if self._is_native(weights) and recorded is None:
                x, entry_after, live = native_layers.run_layer(
                    self.config, weights, x, rotation, seen, wanted, routing.valid
                )
                experts = self.config.experts
                routed = None if live is None or experts is None else follow_choice(live, experts, routing.valid)
                return constrain(x), (entry_after, routed)
            layer = nnx.merge(self._layer_graphs[_graph_of(kind)], weights)
            own = dataclasses.replace(routing, recorded=recorded)
            x, entry_after, routed = layer(x, rotation, seen, own)
            return constrain(x), (entry_after, routed)

        if self._remat == 'none':
            return block
        # prevent_cse stops XLA from reusing forward results in the backward pass; a scan already separates the two
        return jax.checkpoint(block, policy=REMAT[self._remat], prevent_cse=self.layers == 'list')


def _graph_of(kind: _Kind) -> _Graph:
    return kind[0].mixer, kind[1]


def _find_period(kinds: Sequence[_Kind]) -> int:
    """The least number of layers whose kinds repeat to the end; all layers if they do not repeat."""
    fits = lambda size: len(kinds) % size == 0 and all(kinds[i] == kinds[i % size] for i in range(len(kinds)))
    return next(size for size in range(1, len(kinds) + 1) if fits(size))


def _runs(kinds: Sequence[_Kind]) -> Iterator[tuple[int, int, _Kind]]:
    """(first, end, kind) of consecutive layers of the same kind."""
    first = 0
    for kind, run in itertools.groupby(kinds):
        end = first + len(list(run))
        yield first, end, kind
        first = end


@functools.lru_cache(maxsize=64)
def _layer_graph(
    config: ModelConfig, lora: Lora | None, form: Activations, mixer: MixerKind, has_experts: bool
) -> nnx.GraphDef:
    """The static part of a layer; immutable, so equal decoders of a process share it."""
    kinds = ((config.kind(layer), config.has_experts(layer)) for layer in range(config.n_layers))
    layer = next(layer for layer, kind in enumerate(kinds) if _graph_of(kind) == (mixer, has_experts))
    specs = nest((spec.path_in_layer, spec) for spec in weight_table(config, lora).values() if layer in spec.layers)
    return nnx.split(nnx.eval_shape(lambda: Layer(config, specs, lora, form)))[0]
