"""The model families, and every weight of theirs declared once.

A row has a weight's place in the tree, its shape, its logical axes, its initial values and its names in files of
Hugging Face and GGUF. `weights` fills in the sizes of a model; initial weights, sharding, loading and export read the
table from there. A new family is a new entry of FAMILIES: rows shared with other families, and additional ones.

Sizes are letters: V vocabulary, O tokens that are predicted, C context tokens, d model width, F width of the MLP, D
head_dim, HD all heads, KD all kv heads, E experts, M width of an expert. ModelConfig is the config of a model: the
sizes and switches that determine its weights and its computation. app/model/text_model.py and the readers of formats/
make it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.config.fields import COUNT, COUNT_OR_OFF, NOT_NEGATIVE, POSITIVE, ConfigError


class Init(enum.Enum):
    """Initial values. Matrices are normal with standard deviation 1 / sqrt(fan in), times the caller's scale."""

    ONES = 'ones'
    ZEROS = 'zeros'
    MATRIX = 'matrix'  # [..., in, out]
    TABLE = 'table'  # [V, d], whose fan in is d
    LOOKUP = 'lookup'  # TABLE of which a token reads one row: times `embedding_scale` as well
    RESIDUAL = 'residual'  # MATRIX that writes to the residual stream: divided by sqrt(2 n_layers)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row: a weight as every model of a family declares it."""

    path: str  # in the tree of weights, 'layers/*/attention/query/weight'; '*' in place of the layer's number
    shape: str  # a letter per axis, 'd HD'; a leading E: one matrix an expert
    axes: str  # a logical axis per axis, 'embed heads': sharding.rules cuts by them
    init: Init
    # tensor of Hugging Face, 'model.layers.*.self_attn.q_proj.weight', with a second '*' for the expert's number if
    # each expert has a separate tensor; None = no tensor
    hf_name: str | None = None
    transposed: bool = False  # whether the tensor of Hugging Face is the transpose of the leaf, or of an expert's part
    gguf_name: str | None = None  # tensor of GGUF, 'blk.*.attn_q.weight'
    when: str | None = None  # field of ModelConfig that must be true for the weight to exist
    unless: str | None = None  # field of ModelConfig that must be false
    layers: Literal['all', 'dense', 'experts'] = 'all'  # which layers have it, by their MLP


def projection(
    path: str,
    shape: str,
    axes: str,
    hf_name: str,
    gguf_name: str | None = None,
    init: Init = Init.MATRIX,
    *,
    when: str | None = None,
    unless: str | None = None,
    layers: Literal['all', 'dense', 'experts'] = 'all',
) -> Weight:
    """A matrix [in, out] of layers; files hold it as [out, in]."""
    gguf_name = gguf_name and f'blk.*.{gguf_name}.weight'
    hf_name = f'model.layers.*.{hf_name}.weight'
    return Weight(f'layers/*/{path}/weight', shape, axes, init, hf_name, True, gguf_name, when, unless, layers)


def bias(path: str, shape: str, hf_name: str, when: str | None = None) -> Weight:
    """The bias of a projection of every layer. Vectors are not sharded: that would save nothing."""
    hf_name = f'model.layers.*.{hf_name}.bias'
    return Weight(f'layers/*/{path}/bias', shape, 'features', Init.ZEROS, hf_name, when=when)


def norm(path: str, shape: str, hf_name: str, gguf_name: str | None = None, when: str | None = None) -> Weight:
    """The scale of an RMS norm of every layer."""
    gguf_name = gguf_name and f'blk.*.{gguf_name}.weight'
    hf_name = f'model.layers.*.{hf_name}.weight'
    return Weight(f'layers/*/{path}', shape, 'features', Init.ONES, hf_name, gguf_name=gguf_name, when=when)


def experts(module: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """Router and experts of a layer, by the names of their modules in files of Hugging Face."""

    def one(name: str, shape: str, axes: str, hf_name: str, init: Init = Init.MATRIX) -> Weight:
        hf_name = f'model.layers.*.{module}.experts.*.{hf_name}.weight'
        return Weight(f'layers/*/mlp/experts/{name}', shape, axes, init, hf_name, True, layers='experts')

    return (
        # the axis of the router's outputs is never cut: every device chooses among all experts
        projection('mlp/router', 'd E', 'embed routes', f'{module}.gate', layers='experts'),
        one('gate', 'E d M', 'experts embed mlp', gate),
        one('up', 'E d M', 'experts embed mlp', up),
        one('down', 'E M d', 'experts mlp embed', down, Init.RESIDUAL),
    )


# in the order of the forward pass, which is the order of the tensors in files
_BEFORE_MLP = (
    Weight('embedding', 'V d', 'vocab embed', Init.LOOKUP, 'model.embed_tokens.weight', gguf_name='token_embd.weight'),
    Weight('positions', 'C d', 'features embed', Init.LOOKUP, when='plain'),
    norm('attention_norm', 'd', 'input_layernorm', 'attn_norm'),
    projection('attention/query', 'd HD', 'embed heads', 'self_attn.q_proj', 'attn_q'),
    bias('attention/query', 'HD', 'self_attn.q_proj', when='qkv_bias'),
    projection('attention/key', 'd KD', 'embed kv_heads', 'self_attn.k_proj', 'attn_k'),
    bias('attention/key', 'KD', 'self_attn.k_proj', when='qkv_bias'),
    projection('attention/value', 'd KD', 'embed kv_heads', 'self_attn.v_proj', 'attn_v'),
    bias('attention/value', 'KD', 'self_attn.v_proj', when='qkv_bias'),
    norm('attention/query_norm', 'D', 'self_attn.q_norm', when='qk_norm'),
    norm('attention/query_norm', 'HD', 'self_attn.q_norm', when='whole_qk_norm'),
    norm('attention/key_norm', 'D', 'self_attn.k_norm', when='qk_norm'),
    norm('attention/key_norm', 'KD', 'self_attn.k_norm', when='whole_qk_norm'),
    projection(
        'attention/output', 'HD d', 'heads embed', 'self_attn.o_proj', 'attn_output', Init.RESIDUAL, unless='plain'
    ),
    projection('attention/output', 'HD d', 'heads embed', 'self_attn.o_proj', when='plain'),
    bias('attention/output', 'd', 'self_attn.o_proj', when='output_bias'),
    norm('mlp_norm', 'd', 'post_attention_layernorm', 'ffn_norm'),
)
_MLP = (
    projection('mlp/gate', 'd F', 'embed mlp', 'mlp.gate_proj', 'ffn_gate', unless='plain', layers='dense'),
    projection('mlp/up', 'd F', 'embed mlp', 'mlp.up_proj', 'ffn_up', layers='dense'),
    projection(
        'mlp/down', 'F d', 'mlp embed', 'mlp.down_proj', 'ffn_down', Init.RESIDUAL, unless='plain', layers='dense'
    ),
    projection('mlp/down', 'F d', 'mlp embed', 'mlp.down_proj', when='plain', layers='dense'),
)
_BEHIND_MLP = (
    Weight(
        'final_norm', 'd', 'features', Init.ONES, 'model.norm.weight', gguf_name='output_norm.weight', unless='plain'
    ),
    Weight(
        'head',
        'O d',
        'vocab embed',
        Init.TABLE,
        'lm_head.weight',
        gguf_name='output.weight',
        unless='tie_embeddings',
    ),
)
COMMON = (*_BEFORE_MLP, *_MLP, *_BEHIND_MLP)


@dataclasses.dataclass(frozen=True)
class ExpertFields:
    """The names of a family's fields of experts in config.json, with the defaults of transformers 5.23."""

    count: tuple[
        str, int
    ]  # the field's name as transformers 5 writes it; files of 2025 have the other of EXPERT_COUNTS
    per_token: int
    d_expert: tuple[str, int]
    # whether the chosen scores are divided by their sum; None = by the field norm_topk_prob
    normalised: bool | None = None
    has_dense_layers: bool = False  # by mlp_only_layers and decoder_sparse_step
    d_ff: int | None = None  # of dense layers


EXPERT_COUNTS = ('num_experts', 'num_local_experts')


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face: its weights, the options of its config.json, and defaults of absent fields."""

    architecture: str
    # the defaults of transformers 5.23
    context_tokens: int
    n_kv_heads: int | None  # None = as many as query heads
    head_dim: int | None  # None = d_model / query heads
    # which biases the attention has: none; q, k and v; all or none, by the field attention_bias
    attention_bias: Literal['none', 'qkv', 'field'] = 'none'
    qk_norm: bool = False
    whole_qk_norm: bool = False  # over all heads together
    windows: Literal['none', 'all', 'flag', 'some'] = 'none'  # layers that may have a sliding window
    window: int | None = 4096  # the default if the file has none
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    experts: ExpertFields | None = None
    weights: tuple[Weight, ...] = COMMON

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of ModelConfig that every model of the family has."""
        return {
            'qkv_bias': self.attention_bias == 'qkv',
            'qk_norm': self.qk_norm,
            'whole_qk_norm': self.whole_qk_norm,
        }


FAMILIES = {
    'llama': Family('LlamaForCausalLM', 2048, None, None, 'field'),
    'qwen2': Family('Qwen2ForCausalLM', 32768, 32, None, 'qkv', windows='some'),
    'qwen3': Family('Qwen3ForCausalLM', 32768, 32, 128, 'field', qk_norm=True, windows='some'),
    'mistral': Family('MistralForCausalLM', 131072, 8, None, windows='all'),
    'qwen3_moe': Family(
        'Qwen3MoeForCausalLM',
        32768,
        4,
        None,
        'field',
        qk_norm=True,
        windows='flag',
        experts=ExpertFields(('num_experts', 128), 8, ('moe_intermediate_size', 768), has_dense_layers=True, d_ff=6144),
        weights=(*_BEFORE_MLP, *_MLP, *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'), *_BEHIND_MLP),
    ),
    'mixtral': Family(
        'MixtralForCausalLM',
        131072,
        8,
        None,
        windows='all',
        window=None,
        rope_theta=1e6,
        rms_eps=1e-5,
        experts=ExpertFields(('num_local_experts', 8), 2, ('intermediate_size', 14336), normalised=True),
        weights=(*_BEFORE_MLP, *experts('block_sparse_moe', 'w1', 'w3', 'w2'), *_BEHIND_MLP),
    ),
    'olmoe': Family(
        'OlmoeForCausalLM',
        4096,
        None,
        None,
        'field',
        whole_qk_norm=True,
        rms_eps=1e-5,
        experts=ExpertFields(('num_experts', 64), 8, ('intermediate_size', 2048)),
        weights=(*_BEFORE_MLP, *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'), *_BEHIND_MLP),
    ),
}


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling: long wavelengths are multiplied by `factor`, short ones are kept."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int  # of the model before stretching

    def __post_init__(self) -> None:
        for name in ('factor', 'low_frequency_factor', 'high_frequency_factor'):
            POSITIVE.require(name, getattr(self, name))
        COUNT.require('original_context_tokens', self.original_context_tokens)
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ConfigError(
                f'high_frequency_factor={self.high_frequency_factor} must be above '
                f'low_frequency_factor={self.low_frequency_factor}'
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts that replace the MLP, and how a token chooses among them; see models/experts.py."""

    count: int
    per_token: int  # experts that a token reaches
    d_expert: int  # width of an expert
    normalised: bool = True  # the scores of the chosen experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # ascending; these have an MLP

    def __post_init__(self) -> None:
        for name in ('count', 'per_token', 'd_expert'):
            COUNT.require(f'experts.{name}', getattr(self, name))
        if self.per_token > self.count:
            raise ConfigError(f'a token cannot reach {self.per_token} of {self.count} experts; lower experts_per_token')

    @property
    def route_dtype(self) -> str:
        """The dtype of recorded routes: the smallest integers that hold all experts and one more value, for none."""
        return 'uint8' if self.count <= np.iinfo(np.uint8).max else 'uint16'


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder with RMS norm, rotary positions, grouped queries and SwiGLU, dense or with experts.

    It covers Llama 2 and 3, SmolLM2, Qwen 2, 2.5 and 3, Mistral, Qwen3-MoE, Mixtral, OLMoE and models distilled into
    them.

    `family` decides names in files, see `families`; the computation follows from the other fields alone.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # divides n_heads
    head_dim: int  # even
    d_ff: int  # of the MLP, if a layer has one
    rope_theta: float  # base of the rotary wavelengths
    rms_eps: float = 1e-5
    tie_embeddings: bool = True  # the head is the embedding
    output_size: int | None = None  # rows of a separate head: only the first tokens are predicted; None = all
    context_tokens: int = 8192  # longest sequence the weights were made for
    family: str = 'llama'
    qkv_bias: bool = False  # of the query, key and value projections
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMS norm over every query and key head before its rotation
    whole_qk_norm: bool = False  # RMS norm over all query heads together, and over all key heads
    plain: bool = (
        False  # learned positions (context_tokens of them) and no rotation, ReLU without a gate, no final norm
    )
    rope_scaling: Llama3Scaling | None = None
    sliding_window: int | None = None  # tokens that a token attends to, itself included; None = all before it
    first_window_layer: int = 0  # layers before this one have no window
    experts: Experts | None = None

    def __post_init__(self) -> None:
        counts = ('vocab_size', 'd_model', 'n_layers', 'n_heads', 'n_kv_heads', 'head_dim', 'd_ff', 'context_tokens')
        ranges = dict.fromkeys(counts, COUNT)
        ranges |= {'rope_theta': POSITIVE, 'rms_eps': NOT_NEGATIVE, 'first_window_layer': COUNT_OR_OFF}
        for name, allowed in ranges.items():
            allowed.require(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f'n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}')
        if self.head_dim % 2:
            raise ConfigError(f'head_dim={self.head_dim} is odd; rotary positions need pairs')
        if self.family not in FAMILIES:
            raise ConfigError(f'family={self.family!r} is unknown; use one of {", ".join(FAMILIES)}')
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f'sliding_window={self.sliding_window} must be at least 1, or None for no window')
        if self.qk_norm and self.whole_qk_norm:
            raise ConfigError('qk_norm and whole_qk_norm are two norms of the same vectors: use one')
        if (self.experts is None) == (FAMILIES[self.family].experts is not None):
            has = 'has experts' if self.experts is None else 'has none'
            raise ConfigError(f'family={self.family!r} {has}, and experts={self.experts} does not fit it')
        if self.experts and not set(self.experts.dense_layers) <= set(range(self.n_layers)):
            raise ConfigError(f'dense layers {self.experts.dense_layers} must be layers, 0 to {self.n_layers - 1}')

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in this layer, itself included; None = all before it."""
        return self.sliding_window if layer >= self.first_window_layer else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def n_expert_layers(self) -> int:
        return 0 if self.experts is None else self.n_layers - len(self.experts.dense_layers)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that a pass gives for each token; engines record all (rollout.record_routes) or none."""
        return () if self.experts is None else (self.routes,)

    @property
    def routes(self) -> Column:
        assert self.experts is not None
        return ROUTED_EXPERTS.of_model(self.experts.route_dtype, (self.n_expert_layers, self.experts.per_token))


# The rows of its family's table that a model has, and the sizes of their letters; free of jax.


LAYERS = 'layers/*/'  # prefix of the path of a weight that layers have


def rows_of(config: ModelConfig) -> list[Weight]:
    """The weights that the model has, in the order of the forward pass."""
    return [row for row in FAMILIES[config.family].weights if _exists(row, config)]


def letter_sizes(c: ModelConfig) -> dict[str, int]:
    """The letters of `families`, in numbers."""
    heads, kv_heads = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    sizes = {'V': c.vocab_size, 'O': c.output_size or c.vocab_size, 'C': c.context_tokens, 'd': c.d_model, 'F': c.d_ff}
    if c.experts:
        sizes |= {'E': c.experts.count, 'M': c.experts.d_expert}
    return {**sizes, 'D': c.head_dim, 'HD': heads, 'KD': kv_heads}


def layers_of(row: Weight, config: ModelConfig) -> tuple[int, ...]:
    """The layers that have the weight, ascending; () = it is in no layer."""
    if not row.path.startswith(LAYERS):
        return ()
    kinds = {'all': (False, True), 'dense': (False,), 'experts': (True,)}[row.layers]
    return tuple(layer for layer in range(config.n_layers) if config.has_experts(layer) in kinds)


def count_parameters(config: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """(row, its parameters in all layers together) of each row that the model has."""
    sizes = letter_sizes(config)
    for row in rows_of(config):
        yield row, math.prod(sizes[letter] for letter in row.shape.split()) * (len(layers_of(row, config)) or 1)


def _exists(row: Weight, config: ModelConfig) -> bool:
    if row.path.startswith(LAYERS) and not layers_of(row, config):
        return False
    return (not row.when or getattr(config, row.when)) and not (row.unless and getattr(config, row.unless))
