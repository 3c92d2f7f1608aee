"""The traced program of `generate`: decodes the rows of a batch step by step, until the last step or no row is live.

Shapes: B rows, S declared steps, M blocks of a table row, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.config.cluster import ENGINES
from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Attend, Decoder, Params
from areal_jax.models.delta_rule import DeltaState, Recur, run_steps, specs_of
from areal_jax.models.expert_products import Mixer
from areal_jax.models.experts import Routing, make_mix, require_experts
from areal_jax.models.families import ModelConfig, require_delta_heads
from areal_jax.models.logprobs import BlockSums, sum_blocks, sum_blocks_over
from areal_jax.models.native_layers import Read
from areal_jax.models.weights import logical_axes
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.attention.choose import Demand, choose_checked
from areal_jax.rollout.decode.attention.loops import Cache, CacheAttention, LayerCache
from areal_jax.rollout.decode.decode_rows import (
    Batch,
    CacheSizes,
    EngineState,
    empty_cache,
    empty_columns,
    write_columns,
)
from areal_jax.rollout.decode.prefill import RowAttention, choose_row_attention
from areal_jax.rollout.decode.sampling import TokenCounts, adjust_logits, count_tokens
from areal_jax.sharding.rules import make_mesh, param_shardings, replicated
from areal_jax.types import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of all steps; fields as in rollout.backend.DecodeOutput."""

    tokens: jax.Array  # int32 [S, B]
    logprobs: jax.Array  # float32 [S, B]
    valid: jax.Array  # bool [S, B]
    # [S, B, *shape]; SAMPLING_LOGPROBS if rows may change the softmax, the model's columns if they are recorded
    columns: dict[str, jax.Array]
    positions_read: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """The state of the rows that a step changes.

    An ended row is computed with the others until the dispatch ends, and its position grows: so the rows stay in
    descending order of position. It writes to the padding block, and its results are never read. The native attention
    needs no order of rows, and reads nothing for an ended row.
    """

    token: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B]
    live: jax.Array  # bool [B]


_Sampled = tuple[jax.Array, jax.Array, jax.Array | None]  # result of sampling.sample_tokens
_Places = tuple[jax.Array, jax.Array]  # of a pool: the blocks of the rows, int32 [B, M], and where they write, [B]
_Carry = tuple[jax.Array, EngineState, _Rows, Outputs]  # the first is the step number


@dataclasses.dataclass(frozen=True)
class Generate:
    """The program for one decoder; its arguments set the batch size.

    Args:
      over_heads: turns attention over the heads of one device into attention over all heads.
      over_states: the same of the rule of delta nets.
      mix: the product of experts.
      sum_blocks: of logits, see sampling.sample_tokens.
      steps: maximum steps of one call, S.
      filtered: whether rows may use top_k, top_p or min_p.
      adjusted: whether logits of rows may be adjusted, see sampling.py.
    """

    decoder: Decoder
    attention: CacheAttention
    over_heads: Callable[[Attend], Attend]
    over_states: Callable[[Recur], Recur]
    mix: Mixer
    sum_blocks: Callable[[jax.Array], BlockSums]
    sizes: CacheSizes
    steps: int
    filtered: bool
    adjusted: bool

    def __call__(
        self, weights: Params, state: EngineState, batch: Batch, steps: jax.Array
    ) -> tuple[EngineState, Outputs]:
        """Decodes up to `steps` tokens for every row; stops early when no row is live."""
        keys = sampling.request_keys(batch.seed[:, :2], batch.seed[:, 2], batch.seed[:, 3])
        counts = self._count(batch)

        def more(carry: _Carry) -> jax.Array:
            return (carry[0] < steps) & jnp.any(carry[2].live)

        def step(carry: _Carry) -> _Carry:
            i, state, rows, outputs = carry
            lengths = self._lengths(batch, rows)
            state, logits, sums, found = self._forward(weights, state, batch, rows, lengths)
            change = lambda z: self._change(z, batch, rows, counts, outputs.tokens, i)
            sampled = self._sample(logits, sums, keys, batch, rows, change)
            read = self.attention.positions_read(lengths, self.sizes.block_tokens)
            outputs = _record(outputs, i, rows.live, sampled, read, found)
            return i + 1, state, _advance(batch, rows, sampled[0]), outputs

        rows = _Rows(batch.token, batch.position, batch.limit > 0)
        outputs = self._no_outputs(batch, bool(state.columns))
        _, state, _, outputs = lax.while_loop(more, step, (jnp.int32(0), state, rows, outputs))
        return state, outputs

    def _no_outputs(self, batch: Batch, records: bool) -> Outputs:
        shape = (self.steps, len(batch.token))
        zeros = jnp.zeros(shape, jnp.float32)
        columns = {SAMPLING_LOGPROBS.name: zeros} if self.filtered or self.adjusted else {}
        if records:
            columns |= empty_columns(self.decoder.config.columns, *shape)
        return Outputs(
            tokens=jnp.zeros(shape, jnp.int32),
            logprobs=zeros,
            valid=jnp.zeros(shape, bool),
            columns=columns,
            positions_read=jnp.int32(0),
        )

    def _lengths(self, batch: Batch, rows: _Rows) -> jax.Array:
        """Returns int32 [B]: positions that a step attends to, the new one included; 0 = the row needs no attention."""
        held = self.sizes.table_blocks * self.sizes.block_tokens
        attends = rows.live if self.attention.name == 'native' else batch.limit > 0
        return jnp.where(attends, jnp.minimum(rows.position + 1, held), 0)

    def _forward(
        self, weights: Params, state: EngineState, batch: Batch, rows: _Rows, lengths: jax.Array
    ) -> tuple[EngineState, jax.Array, BlockSums | None, dict[str, jax.Array]]:
        """Runs the rows' tokens through the model.

        Returns (state with the tokens, logits float32 [B, V], block sums if known, the model's columns [B, *shape]).
        """
        place = jnp.minimum(rows.position // self.sizes.block_tokens, self.sizes.table_blocks - 1)
        block = jnp.take_along_axis(batch.table, place[:, None], axis=1)[:, 0]
        block = jnp.where(rows.live, block, self.sizes.padding_block)
        offset = rows.position % self.sizes.block_tokens
        whole, near = (batch.table, block), self._find_near(batch, rows, place)
        if self.attention.name == 'native' and self.decoder.can_step(weights):
            tables, blocks = _join(whole, near)
            read = Read(tables, lengths, blocks, offset)
            stepped = self.decoder.step(weights, rows.token, rows.position, state.layers, read, batch.temperature)
            columns = write_columns(state, stepped.columns, block, offset)
            return EngineState(stepped.cache, columns), stepped.logits, stepped.sums, stepped.columns

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            layer: LayerCache,
            window: int | None,
            sinks: jax.Array | None = None,
        ) -> tuple[jax.Array, LayerCache]:
            table, at = whole if window is None or near is None else near
            layer = self.attention.write(layer, k, v, at, offset)
            return self.attention.attend(q, layer, table, lengths, window, sinks), layer

        routing = Routing(self.mix, valid=rows.live)
        hidden, layers, routed = self.decoder.hidden_and_routes(
            weights, rows.token, rows.position, self.over_heads(attend), state.layers, routing=routing,
            recur=self._recur(batch, rows),
        )  # fmt: skip
        found = {} if routed is None else routed.columns
        columns = write_columns(state, found, block, offset)
        return EngineState(layers, columns), self.decoder.logits(weights, hidden), None, found

    def _recur(self, batch: Batch, rows: _Rows) -> Recur | None:
        """Returns the rule of delta nets for a token of each row; None if there are none."""
        if batch.state is None or self.sizes.states is None:
            return None
        places = jnp.where(rows.live, batch.state, self.sizes.states.padding)
        step = lambda inputs, states: run_steps(inputs, states, places, rows.position == 0)
        return self.over_states(step)

    def _find_near(self, batch: Batch, rows: _Rows, place: jax.Array) -> _Places | None:
        """Returns the places in the pool of the layers with a window; None if they have none of their own."""
        if batch.window_table is None or self.sizes.windows is None:
            return None
        block = jnp.take_along_axis(batch.window_table, place[:, None], axis=1)[:, 0]
        return batch.window_table, jnp.where(rows.live, block, self.sizes.windows.padding)

    def _count(self, batch: Batch) -> TokenCounts | None:
        adjustments = batch.adjustments
        return None if adjustments is None else count_tokens(adjustments, self.decoder.config.vocab_size)

    def _sample(
        self,
        logits: jax.Array,
        sums: BlockSums | None,
        keys: jax.Array,
        batch: Batch,
        rows: _Rows,
        change: Callable[[jax.Array], jax.Array],
    ) -> _Sampled:
        """Samples one token per row; as cheap as in programs without adjustments if no live row asks for any."""

        def sample(z: jax.Array, changed: jax.Array | None) -> _Sampled:
            return sampling.sample_tokens(z, keys, rows.position + 1, batch.temperature, changed, sums, self.sum_blocks)

        if not (self.filtered or self.adjusted):
            return sample(logits, None)
        asked = _asks_for_cut(batch) if self.filtered else jnp.zeros(len(rows.live), bool)
        if batch.adjustments is not None:
            asked |= batch.adjustments.asked
        # arguments of a branch are stored row by row: logits go in as the decoder stores them, or they would be copied
        turn = (lambda z: z.T) if self.decoder.tokens == 'columns' else (lambda z: z)

        def from_softmax(stored: jax.Array) -> _Sampled:
            tokens, logprobs, _ = sample(turn(stored), None)
            return tokens, logprobs, logprobs

        def from_changed(stored: jax.Array) -> _Sampled:
            return sample(turn(stored), change(turn(stored)))

        return lax.cond(jnp.any(asked & rows.live), from_changed, from_softmax, turn(logits))

    def _change(
        self, logits: jax.Array, batch: Batch, rows: _Rows, counts: TokenCounts | None, generated: jax.Array,
        step: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Returns the logits to draw from, float32 [B, V]; `generated` int32 [S, B] holds `step` tokens per row."""
        adjustments = batch.adjustments
        if adjustments is not None and counts is not None:
            adjust = lambda z: adjust_logits(
                z, adjustments, batch.stop_tokens, rows.position + 1, counts, generated, step
            )
            logits = lax.cond(jnp.any(adjustments.asked & rows.live), adjust, lambda z: z, logits)
        if self.filtered:
            cut = lambda z: sampling.cut_support(z, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
            logits = lax.cond(jnp.any(_asks_for_cut(batch) & rows.live), cut, lambda z: z, logits)
        return logits


def _join(whole: _Places, near: _Places | None) -> _Places:
    """Returns the blocks of the rows in both pools side by side, see native_layers.Read."""
    if near is None:
        return whole
    return jnp.concatenate([whole[0], near[0]], axis=1), jnp.stack([whole[1], near[1]], axis=1)


def _asks_for_cut(batch: Batch) -> jax.Array:
    return (batch.temperature > 0) & ((batch.top_k > 0) | (batch.top_p < 1.0) | (batch.min_p > 0.0))


def _advance(batch: Batch, rows: _Rows, tokens: jax.Array) -> _Rows:
    stopped = jnp.any(batch.stop_tokens == tokens[:, None], axis=-1)
    length = rows.position + 2  # tokens of the sequence with the new one: its input was at `position`
    return _Rows(tokens, rows.position + 1, rows.live & ~stopped & (length < batch.limit))


def _record(
    outputs: Outputs,
    step: jax.Array,
    live: jax.Array,
    sampled: _Sampled,
    positions_read: jax.Array,
    found: dict[str, jax.Array],
) -> Outputs:
    tokens, logprobs, changed = sampled
    new = found if changed is None else found | {SAMPLING_LOGPROBS.name: changed}
    return Outputs(
        tokens=outputs.tokens.at[step].set(tokens),
        logprobs=outputs.logprobs.at[step].set(logprobs),
        valid=outputs.valid.at[step].set(live),
        columns={name: kept.at[step].set(new[name].astype(kept.dtype)) for name, kept in outputs.columns.items()},
        positions_read=outputs.positions_read + positions_read,
    )


# An engine over several devices, each with a part of heads, MLP and vocabulary, or of the experts of a layer.
#
# app/ brings weights to the engine, sharded by `weight_shardings`. Attention needs no exchange between devices,
# because heads are independent: each device writes and reads the keys and values of its heads, and XLA adds one
# all-reduce after attention and one after the MLP. The rows of a dispatch are on every device. Along the `expert` axis
# only the experts of every layer are sharded: everything else, the cache included, is replicated and computed on each
# device. Shapes: T tokens, H heads, K key-value heads, D head size.


_AXIS = 'tensor'  # mesh axis
_HEADS = PartitionSpec(None, _AXIS)  # q, k, v and the output of attention, [T, heads, D]
_DELTA = DeltaState(_HEADS, *(PartitionSpec(None, None, _AXIS),) * 3)  # type: ignore[arg-type]


def require_divides(config: ModelConfig, tensor: int, expert: int = 1) -> None:
    """Raises ConfigError if the heads or the experts cannot be divided evenly."""
    require_experts(config, expert, ENGINES)
    require_delta_heads(config, tensor, ENGINES)
    if config.n_heads % tensor or (config.n_kv_heads % tensor and not config.caches_latents):
        raise ConfigError(
            f'tensor={tensor} of {ENGINES} does not divide the {config.n_heads} query heads and {config.n_kv_heads} '
            'key heads of the model; use a common divisor'
        )


def weight_shardings(decoder: Decoder, devices: Sequence[jax.Device], expert: int = 1) -> Tree:
    """Returns the sharding of every published weight over the devices of an engine, by the rules of training.

    Args:
      expert: EngineGroup.expert, a divisor of the number of devices; the quotient is `tensor`.
    """
    tensor = len(devices) // expert
    require_divides(decoder.config, tensor, expert)
    mesh = make_mesh(expert=expert, tensor=tensor, devices=devices)
    return param_shardings(decoder.abstract(), logical_axes(decoder.config), mesh, _AXIS)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine, and the shardings of its programs' arguments and results."""

    decoder: Decoder
    attention: CacheAttention  # of one device
    row_attention: RowAttention  # of packed prefills
    config: ModelConfig  # with the heads of one device
    mesh: Mesh | None  # None = one device
    rows: Sharding  # of all but weights and cache: replicated
    published: Tree  # of weights as the engine receives them
    prepared: Sharding | None  # of weights in the form for decoding; None = as `prepare` returns them
    layer: tuple[PartitionSpec, ...]  # of the arrays of a layer with attention
    cache: Tree

    @property
    def state(self) -> EngineState:
        """The shardings of an engine's state: columns are replicated."""
        return EngineState(self.cache, self.rows)  # type: ignore[arg-type]

    def empty_cache(self, sizes: CacheSizes, dtype: jnp.dtype) -> Cache:
        """Returns zeros in the layout of each device; call inside jax.jit."""
        empty = lambda: empty_cache(self.attention, self.config, sizes, dtype)
        if self.mesh is None:
            return empty()
        specs = tuple(_DELTA if self.config.mixer(i) == 'delta' else self.layer for i in range(self.config.n_layers))
        return jax.shard_map(empty, mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False)()

    @property
    def platform(self) -> str:
        device: jax.Device = next(iter(self.rows.device_set))
        return str(device.platform)

    @property
    def mix(self) -> Mixer:
        """The product of experts; the tokens are replicated."""
        return make_mix(next(iter(self.rows.device_set)), self.mesh)

    @property
    def sum_blocks(self) -> Callable[[jax.Array], BlockSums]:
        """The sums of blocks of the vocabulary, which is sharded over the devices."""
        return sum_blocks if self.mesh is None else sum_blocks_over(self.mesh, _AXIS, self.config.vocab_size)

    def over_heads(self, attend: Attend) -> Attend:
        """Extends `attend` to all heads: each device computes its heads; call inside jax.jit."""
        if self.mesh is None:
            return attend
        keys = PartitionSpec() if self.config.caches_latents else _HEADS
        in_specs, out_specs = (_HEADS, keys, keys, self.layer, PartitionSpec(_AXIS)), (_HEADS, self.layer)

        def whole(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            layer: LayerCache,
            window: int | None,
            sinks: jax.Array | None = None,
        ) -> tuple[jax.Array, LayerCache]:
            own = lambda q, k, v, layer, sinks: attend(q, k, v, layer, window, sinks)
            # check_vma=False: kernels do not declare how their results vary over devices
            run = jax.shard_map(own, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return run(q, k, v, layer, sinks)

        return whole

    def over_states(self, recur: Recur) -> Recur:
        """Extends `recur` to all heads, like `over_heads`."""
        if self.mesh is None:
            return recur
        inputs = specs_of(_HEADS, PartitionSpec(_AXIS))
        return jax.shard_map(
            recur, mesh=self.mesh, in_specs=(inputs, _DELTA), out_specs=(_HEADS, _DELTA), check_vma=False
        )


def place(
    decoder: Decoder,
    sizes: CacheSizes,
    dtype: jnp.dtype,
    impl: str,
    devices: Sequence[jax.Device],
    weights: str = 'published',
    expert: int = 1,
    mla: str = 'absorbed',
) -> tuple[Placement, tuple[str, ...]]:
    """Returns (the placement of decoder and attention on these devices, why 'auto' rejected faster attentions).

    Args:
      impl: see choose.choose_implementation.
      weights: rollout.weights, the form of the weights for decoding.
      expert: see weight_shardings.
      mla: rollout.mla, the form of latent attention.

    Raises ConfigError if heads or experts cannot be divided evenly, and AttentionError if the attention lacks a
    feature that the model needs.
    """
    tensor = len(devices) // expert
    require_divides(decoder.config, tensor, expert)
    whole = decoder.config.absorb() if mla == 'absorbed' else decoder.config
    config = _share_heads(whole, tensor)
    demand = Demand(
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        sizes.block_tokens,
        sizes.table_blocks,
        dtype,
        windows=config.windows != {None},
        sinks=config.sinks,
        latents=config.caches_latents,
    )
    attention, rejected = choose_checked(impl, demand, devices[0])
    rows, rejected_rows = choose_row_attention(config, dtype.name, devices[0])
    rejected += rejected_rows
    # computes the same as the learner's decoder, in the form that is fast for few tokens on this hardware
    decoder = Decoder(whole, lora=decoder.lora, tokens=_token_form(devices, weights))
    if len(devices) == 1:
        on = SingleDeviceSharding(devices[0])
        return Placement(decoder, attention, rows, config, None, on, on, on, (), on), rejected
    shardings = weight_shardings(decoder, devices, expert)
    mesh = jax.tree.leaves(shardings)[0].mesh
    layer = _layer_specs(attention, config, sizes.block_tokens)
    place_on = functools.partial(jax.tree.map, functools.partial(NamedSharding, mesh))
    cache = tuple(place_on(_DELTA if config.mixer(i) == 'delta' else layer) for i in range(config.n_layers))
    return Placement(decoder, attention, rows, config, mesh, replicated(mesh), shardings, None, layer, cache), rejected


def _share_heads(config: ModelConfig, tensor: int) -> ModelConfig:
    """The config with the heads of one of `tensor` devices."""
    delta = config.delta and dataclasses.replace(
        config.delta,
        key_heads=config.delta.key_heads // tensor,
        value_heads=config.delta.value_heads // tensor,
    )
    kv_heads = 1 if config.caches_latents else config.n_kv_heads // tensor  # latents are on every device
    heads = config.n_heads // tensor
    return dataclasses.replace(config, n_heads=heads, n_kv_heads=kv_heads, delta=delta)


def _token_form(devices: Sequence[jax.Device], weights: str) -> str:
    # XLA does not partition a kernel call over devices
    native = devices[0].platform == 'cpu' and len(devices) == 1 and library.is_available()
    if weights == 'int8':
        return 'native_int8_rows' if native else 'int8_rows'
    if devices[0].platform != 'cpu':
        return 'rows'
    return 'native_columns' if native else 'columns'


def _layer_specs(attention: CacheAttention, config: ModelConfig, block_tokens: int) -> tuple[PartitionSpec, ...]:
    """Returns specs that shard the heads axis of each array of a layer: the axis that grows with their number."""

    def shapes(heads: int) -> list[tuple[int, ...]]:
        empty = lambda: attention.empty(1, heads, block_tokens, config.head_dim, jnp.dtype('float32'))
        return [leaf.shape for leaf in jax.eval_shape(empty)]

    def spec(one: tuple[int, ...], two: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec(*(_AXIS if a != b else None for a, b in zip(one, two, strict=True)))

    if config.caches_latents:
        return (PartitionSpec(),)
    return tuple(map(spec, shapes(config.n_kv_heads), shapes(2 * config.n_kv_heads)))
