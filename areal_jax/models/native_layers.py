"""Layers of the decoder as kernels of native/kernels.cc: `block` computes the same in JAX.

A layer of `block` is ten programs of XLA and five kernels, each of which wakes the threads anew. Here a layer of a
prefill is two kernels around its attention, and a step of decoding one kernel for all layers. The weights are in panels
of quantized.NativeColumns, with activations [d, T], or of quantized.NativeInt8Rows, with activations [T, d]. Layers of
NativeColumns may have experts, whose matrices are read in the published form.
T tokens, B rows, H heads, K kv heads, D head_dim, d model width, V vocabulary, L layers with experts, k choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.block import AttendLayer, Rotation
from areal_jax.models.experts import columns_of_pass
from areal_jax.models.families import ModelConfig
from areal_jax.models.logprobs import VOCABULARY_BLOCK, BlockSums, Ranking
from areal_jax.models.quantized import Quantized, is_in_panels
from areal_jax.models.weights import Params
from areal_jax.native import compiled_library as library
from areal_jax.types import Tree

_DTYPE = jnp.float32  # of matrices that are not in 8 bits
LEAST_COLUMNS = 8  # that every product computes: fewer rows of a step cost as much (CutColumns in native/products.h)
KeysAndValues = tuple[tuple[jax.Array, ...], ...]  # of each layer [blocks, positions, K, D]
_Attributes = dict[str, np.generic | np.ndarray]


class Read(NamedTuple):
    """The places of the cache that a step reads, and where it writes; M blocks of a table row.

    If the layers with a window have a pool of their own, `tables` are [B, 2 M] and `blocks` [B, 2], theirs last.
    """

    tables: jax.Array  # int32 [B, M], the blocks of each row
    lengths: jax.Array  # int32 [B], positions that a row sees, its own included; 0 = none
    blocks: jax.Array  # int32 [B], where the row's token is written
    offsets: jax.Array  # int32 [B], in the block


class Stepped(NamedTuple):
    """The results of a step."""

    cache: KeysAndValues  # with the tokens of the rows, written in place
    logits: jax.Array  # float32 [B, V]
    sums: BlockSums  # of logits / temperature
    live: jax.Array | None  # int32 [L, B, k], the choices of routers; None = no layer has experts

    @property
    def columns(self) -> dict[str, jax.Array]:
        """ModelConfig.columns of the rows, [B, *shape]."""
        return {} if self.live is None else columns_of_pass(self.live)


def can_compute(layer: Params) -> bool:
    """Whether the matrices of a layer are all in panels, without adapters, and its experts in float32.

    A layer with other norms than the two before attention and MLP cannot be computed.
    """
    mlp = layer['mlp']
    if layer.keys() != {'attention_norm', 'attention', 'mlp_norm', 'mlp'}:
        return False
    if 'experts' in mlp and (isinstance(mlp['router']['weight'], Quantized) or mlp['experts']['gate'].dtype != _DTYPE):
        return False
    return all(has_kernel(linear['weight']) and 'lora_a' not in linear for linear in _linears(layer))


def has_kernel(matrix: jax.Array | Quantized) -> bool:
    """Whether a matrix, or the head, is in panels."""
    return matrix.in_panels if isinstance(matrix, Quantized) else is_in_panels(matrix)


def run_layer(
    config: ModelConfig,
    layer: Params,
    x: jax.Array,
    rotation: Rotation,
    attend: AttendLayer,
    wanted: jax.Array,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, Tree, jax.Array | None]:
    """Runs a block.Layer: activations x -> (x, its entry of the cache, the choices of its router, int32 [T, k]).

    Args:
      wanted: int32, only the first `wanted` tokens are computed.
      valid: bool [T], the tokens that reach experts; None = all of these.
    """
    leaves, attributes, tokens = _leaves(config, layer), _attributes(config, [layer]), len(rotation[0])
    names = _name(layer, library.PROJECT, library.BYTE_PROJECT), _name(layer, library.FINISH, library.BYTE_FINISH)
    shape = lambda heads: jax.ShapeDtypeStruct((tokens, heads, config.head_dim), x.dtype)
    project = jax.ffi.ffi_call(names[0], [shape(n) for n in (config.n_heads, *[config.n_kv_heads] * 2)])
    q, k, v = project(x, wanted, *rotation, *leaves, **attributes)
    out, entry = attend(q, k, v)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if 'experts' in layer['mlp']:
        outputs.append(_routes(config, tokens))
        leaves.append(jnp.ones(tokens, jnp.int32) if valid is None else valid.astype(jnp.int32))
    x, *chosen = jax.ffi.ffi_call(names[1], outputs)(x, wanted, out, *leaves, **attributes)
    return x, entry, chosen[0] if chosen else None


def run_step(
    config: ModelConfig,
    layers: Sequence[Params],
    final_norm: jax.Array,
    head: jax.Array | Quantized,
    x: jax.Array,
    rotation: Rotation,
    cache: KeysAndValues,
    read: Read,
    temperature: jax.Array,
) -> Stepped:
    leaves = [leaf for layer in layers for leaf in _leaves(config, layer)] + [final_norm, *_arrays(head)]
    sides = [side for layer in cache for side in layer]
    first = 2 + len(rotation) + len(read) + len(leaves)  # of their arguments
    vocabulary, rows = _outputs(head), len(read.lengths)
    outputs = [
        jax.ShapeDtypeStruct((n, rows), jnp.float32) for n in (vocabulary, *[-(-vocabulary // VOCABULARY_BLOCK)] * 2)
    ]
    if config.n_expert_layers:
        outputs.append(_routes(config, config.n_expert_layers, rows))
    call = jax.ffi.ffi_call(
        _name(layers[0], library.STEP, library.BYTE_STEP),
        [*outputs, *(jax.ShapeDtypeStruct(side.shape, side.dtype) for side in sides)],
        input_output_aliases={first + i: len(outputs) + i for i in range(len(sides))},
    )
    windows = np.array([config.window(i) or 0 for i in range(config.n_layers)], np.int64)
    attributes = _attributes(config, layers)
    results = call(x, *rotation, temperature, *read, *leaves, *sides, **attributes, windows=windows)
    (product, largest, logsumexp, *live), written = results[: len(outputs)], results[len(outputs) :]
    cache = tuple(zip(written[::2], written[1::2], strict=True))
    return Stepped(cache, product.T, BlockSums(largest, logsumexp), live[0] if live else None)


def run_ranking(
    head: jax.Array, x: jax.Array, wanted: jax.Array, targets: jax.Array, temperature: jax.Array, most: int
) -> Ranking:
    """logprobs.rank_tokens of x [d, T] and a head in panels, for the first `wanted` tokens, int32; zeros for others."""
    tokens = x.shape[1]
    number, ranked = jax.ShapeDtypeStruct((tokens,), jnp.float32), (tokens, most)
    rank = jax.ffi.ffi_call(
        library.RANK,
        [number, number, jax.ShapeDtypeStruct(ranked, jnp.float32), jax.ShapeDtypeStruct(ranked, jnp.int32)],
    )
    chosen, logsumexp, values, ids = rank(x, wanted, targets, temperature, head)
    return Ranking(chosen - logsumexp, ids, values - logsumexp[:, None])


def _linears(layer: Params) -> list[Params]:
    attention, mlp = layer['attention'], layer['mlp']
    names = ('router',) if 'experts' in mlp else ('gate', 'up', 'down')
    return [attention[name] for name in ('query', 'key', 'value', 'output')] + [mlp[name] for name in names]


def _leaves(config: ModelConfig, layer: Params) -> list[jax.Array]:
    """The weights of a layer in the order of `Weights::TakeLayer`."""
    linears = _linears(layer)
    arrays = lambda some: [leaf for linear in some for leaf in _arrays(linear['weight'])]
    leaves = [layer['attention_norm'], *arrays(linears[:4]), layer['mlp_norm'], *arrays(linears[4:])]
    if experts := layer['mlp'].get('experts'):
        leaves += [experts[name] for name in ('gate', 'up', 'down')]
    if config.qkv_bias:
        leaves += [linear['bias'] for linear in linears[:3]]
    if config.output_bias:
        leaves.append(linears[3]['bias'])
    if config.qk_norm or config.whole_qk_norm:
        leaves += [layer['attention']['query_norm'], layer['attention']['key_norm']]
    return leaves


def _arrays(matrix: jax.Array | Quantized) -> list[jax.Array]:
    """The arguments that `Weights::TakeMatrix` reads."""
    return [matrix.values, matrix.scales] if isinstance(matrix, Quantized) else [matrix]


def _outputs(head: jax.Array | Quantized) -> int:
    return len(head.scales) if isinstance(head, Quantized) else len(head) * head.shape[2]


def _name(layer: Params, floats: str, quantized: str) -> str:
    """The name of the kernel for the matrices of a layer."""
    return quantized if isinstance(layer['attention']['query']['weight'], Quantized) else floats


def _routes(config: ModelConfig, *tokens: int) -> jax.ShapeDtypeStruct:
    assert config.experts is not None
    return jax.ShapeDtypeStruct((*tokens, config.experts.per_token), jnp.int32)


def _attributes(config: ModelConfig, layers: Sequence[Params]) -> _Attributes:
    experts = config.experts
    return {
        'eps': np.float32(config.rms_eps),
        'head_dim': np.int64(config.head_dim),
        'qkv_bias': np.bool_(config.qkv_bias),
        'output_bias': np.bool_(config.output_bias),
        'qk_norm': np.bool_(config.qk_norm),
        'whole_qk_norm': np.bool_(config.whole_qk_norm),
        'has_experts': np.array(['experts' in layer['mlp'] for layer in layers], np.int64),
        'choices': np.int64(experts.per_token if experts else 0),
        'normalised': np.bool_(experts and experts.normalised),
    }
