"""An engine over several devices, each with a part of heads, MLP and vocabulary, or of the experts of a layer.

app/ brings weights to the engine, sharded as `weight_shardings` says. Attention needs no exchange between devices,
because heads are independent: each device writes and reads the keys and values of its own heads, and XLA adds one sum
over devices behind attention and one behind the MLP. The rows of a dispatch are on every device. Devices that differ
in `expert` share out the experts of every layer alone: each has all else, the cache included, and computes it too.
Shapes: T tokens, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from areal_jax.config.cluster import ENGINES
from areal_jax.config.ranges import ConfigError
from areal_jax.models.decoder import Attend, Decoder
from areal_jax.models.expert_products import Mixer
from areal_jax.models.experts import make_mix, require_experts
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import logical_axes
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention.choose import Demand, choose_checked
from areal_jax.rollout.decode.attention.loops import Cache, CacheAttention, LayerCache
from areal_jax.rollout.decode.decode_rows import CacheSizes, EngineState, empty_cache
from areal_jax.rollout.decode.prefill import RowAttention, choose_row_attention
from areal_jax.sharding.rules import make_mesh, param_shardings, replicated
from areal_jax.types import Tree

_AXIS = 'tensor'  # of the mesh
_HEADS = PartitionSpec(None, _AXIS)  # q, k, v and the output of attention, [T, heads, D]


def require_divides(config: ModelConfig, tensor: int, expert: int = 1) -> None:
    """Raises ConfigError where the heads, or the experts, cannot be shared out evenly."""
    require_experts(config, expert, ENGINES)
    if config.n_heads % tensor or config.n_kv_heads % tensor:
        raise ConfigError(
            f'tensor={tensor} of {ENGINES} does not divide the {config.n_heads} query heads and {config.n_kv_heads} '
            'key heads of the model; use a common divisor'
        )


def weight_shardings(decoder: Decoder, devices: Sequence[jax.Device], expert: int = 1) -> Tree:
    """The sharding of every published weight over the devices of an engine; by the rules of training.

    Args:
      expert: of EngineGroup, a divisor of the number of devices; the rest of it is `tensor`.
    """
    tensor = len(devices) // expert
    require_divides(decoder.config, tensor, expert)
    mesh = make_mesh(expert=expert, tensor=tensor, devices=devices)
    return param_shardings(decoder.abstract(), logical_axes(decoder.config), mesh, _AXIS)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine, and how what its programs take and return is cut over them."""

    decoder: Decoder
    attention: CacheAttention  # of one device
    row_attention: RowAttention  # of packed prefills
    config: ModelConfig  # with the heads of one device
    mesh: Mesh | None  # None = one device
    rows: Sharding  # of all but weights and cache: whole on every device
    published: Tree  # of weights as the engine receives them
    prepared: Sharding | None  # of weights in the form for decoding; None = as they come out of `prepare`
    layer: tuple[PartitionSpec, ...]  # of the arrays of a layer of the cache
    cache: Tree

    @property
    def state(self) -> EngineState:
        """Of an engine's state: columns are whole on every device."""
        return EngineState(self.cache, self.rows)  # type: ignore[arg-type]

    def empty_cache(self, sizes: CacheSizes, dtype: jnp.dtype) -> Cache:
        """Zeros in the layout of each device; inside jax.jit."""
        empty = lambda: empty_cache(self.attention, self.config, sizes, dtype)
        if self.mesh is None:
            return empty()
        specs = (self.layer,) * self.config.n_layers
        return jax.shard_map(empty, mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False)()

    @property
    def platform(self) -> str:
        """Of jax.Device."""
        device: jax.Device = next(iter(self.rows.device_set))
        return str(device.platform)

    @property
    def mix(self) -> Mixer:
        """The product of experts; the tokens are on every device."""
        return make_mix(self.platform, self.mesh)

    def over_heads(self, attend: Attend) -> Attend:
        """`attend` for all heads, which each device computes for its own; inside jax.jit."""
        if self.mesh is None:
            return attend
        in_specs, out_specs = (_HEADS, _HEADS, _HEADS, self.layer), (_HEADS, self.layer)

        def whole(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache, window: int | None
        ) -> tuple[jax.Array, LayerCache]:
            own = lambda q, k, v, layer: attend(q, k, v, layer, window)
            # check_vma=False: kernels do not say how their results vary over devices
            run = jax.shard_map(own, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return run(q, k, v, layer)

        return whole


def place(
    decoder: Decoder,
    sizes: CacheSizes,
    dtype: jnp.dtype,
    impl: str,
    devices: Sequence[jax.Device],
    weights: str = 'published',
    expert: int = 1,
) -> tuple[Placement, tuple[str, ...]]:
    """(the decoder and its attention on these devices, why 'auto' rejected faster attentions).

    Args:
      impl: of choose.choose_implementation.
      weights: rollout.weights, the form in which the engine decodes with them.
      expert: of weight_shardings.

    Raises ConfigError where heads or experts cannot be shared out evenly, and AttentionError for what the attention
    lacks.
    """
    tensor = len(devices) // expert
    require_divides(decoder.config, tensor, expert)
    config = dataclasses.replace(
        decoder.config, n_heads=decoder.config.n_heads // tensor, n_kv_heads=decoder.config.n_kv_heads // tensor
    )
    demand = Demand(
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        sizes.block_tokens,
        sizes.table_blocks,
        dtype,
        windows=any(config.window(layer) is not None for layer in range(config.n_layers)),
    )
    attention, rejected = choose_checked(impl, demand, devices[0])
    rows, rejected_rows = choose_row_attention(config, dtype.name)
    rejected += rejected_rows
    # what the decoder of the learner computes, in the form that is fast for few tokens on this hardware
    decoder = Decoder(decoder.config, lora=decoder.lora, tokens=_token_form(devices, weights))
    if len(devices) == 1:
        on = SingleDeviceSharding(devices[0])
        return Placement(decoder, attention, rows, config, None, on, on, on, (), on), rejected
    shardings = weight_shardings(decoder, devices, expert)
    mesh = jax.tree.leaves(shardings)[0].mesh
    layer = _layer_specs(attention, config, sizes.block_tokens)
    cache = (tuple(NamedSharding(mesh, spec) for spec in layer),) * config.n_layers
    return Placement(decoder, attention, rows, config, mesh, replicated(mesh), shardings, None, layer, cache), rejected


def _token_form(devices: Sequence[jax.Device], weights: str) -> str:
    """See models.activations and models.quantized."""
    # XLA does not cut a call of a kernel over devices
    native = devices[0].platform == 'cpu' and len(devices) == 1 and library.is_available()
    if weights == 'int8':
        return 'native_int8_rows' if native else 'int8_rows'
    if devices[0].platform != 'cpu':
        return 'rows'
    return 'native_columns' if native else 'columns'


def _layer_specs(attention: CacheAttention, config: ModelConfig, block_tokens: int) -> tuple[PartitionSpec, ...]:
    """Which axis of each array of a layer holds the heads: the one that grows with their number."""

    def shapes(heads: int) -> list[tuple[int, ...]]:
        empty = lambda: attention.empty(1, heads, block_tokens, config.head_dim, jnp.dtype('float32'))
        return [leaf.shape for leaf in jax.eval_shape(empty)]

    def spec(one: tuple[int, ...], two: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec(*(_AXIS if a != b else None for a, b in zip(one, two, strict=True)))

    return tuple(map(spec, shapes(config.n_kv_heads), shapes(2 * config.n_kv_heads)))
