"""The model families, and the config of a model.

A new family is a new entry of FAMILIES: rows of `weight_rows` shared with other families, and additional ones.
ModelConfig is the config of a model: the sizes and switches that determine its weights and its computation.
app/model/text_model.py and the readers of formats/ make it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.config.fields import COUNT, NOT_NEGATIVE, POSITIVE, ConfigError
from areal_jax.models.layer_parts import ClampedSwiglu, DeltaNet, Experts, LatentAttention, SigmoidRouter
from areal_jax.models.ropes import Rope, RopeScaling, YarnScaling
from areal_jax.models.weight_rows import (
    BEFORE_MLP,
    BEHIND_MLP,
    COMMON,
    DEEPSEEK_V3,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    MLP,
    OLMO3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    MixerKind,
    Weight,
    experts,
)


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
    normalises: bool = False  # default of that field
    has_dense_layers: bool = False  # by mlp_only_layers and decoder_sparse_step
    # default of first_k_dense_replace, the number of first layers, which are dense; None = no field
    dense_first: int | None = None
    lists_dense: bool = False  # in place of that field by mlp_layer_types; `dense_first` is its default
    d_ff: int | None = None  # of dense layers
    swiglu: ClampedSwiglu | None = None  # default of the fields swiglu_limit and swiglu_alpha; None = SwiGLU
    d_shared: tuple[str, int] | None = None  # width of an expert that every token reaches; None = there is none
    shared: int | None = None  # default of n_shared_experts, the width of that expert in experts; None = no field
    sigmoid: SigmoidRouter | None = None  # defaults of n_group, topk_group and routed_scaling_factor; None = softmax

    @property
    def has_dense(self) -> bool:
        """Whether a layer may have an MLP, of a width of its own."""
        return self.has_dense_layers or self.dense_first is not None


EXPERT_COUNTS = ('num_experts', 'num_local_experts')


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face: its weights, the options of its config.json, and defaults of absent fields."""

    architecture: str
    # the defaults of transformers 5.23
    context_tokens: int
    n_kv_heads: int | None  # None = as many as query heads
    head_dim: int | None  # None = d_model / query heads
    # which biases the attention has: none; q, k and v; by the field attention_bias all or none, or those of q, k and v
    attention_bias: Literal['none', 'qkv', 'field', 'qkv_field'] = 'none'
    biased: bool = False  # default of the field
    qk_norm: bool = False
    qk_norm_field: bool = False  # whether the field use_qk_norm says it; absent = false
    whole_qk_norm: bool = False  # over all heads together
    # which layers may have a sliding window; 'listed': those that layer_types names
    windows: Literal['none', 'all', 'flag', 'some', 'listed'] = 'none'
    full_every: int = 0  # 'listed': without a list, every n-th layer has none
    window: int | None = 4096  # the default if the file has none
    unrotated_every: int = 0  # default of no_rope_layer_interval: every n-th layer has no rotation; 0 = no field
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None  # the default if the file has no rotary fields
    window_theta: float | None = None  # rope_parameters has an object a kind of layer; the default of window layers
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    centred_norms: bool = False
    activation: Literal['silu', 'gelu_tanh'] = 'silu'
    scales_embedding: bool = False  # by sqrt(d_model)
    score_scalar: int | None = None  # default of query_pre_attn_scalar, whose root divides scores; None = no field
    sinks: bool = False
    gated_attention: bool = False
    rotary_fraction: float = 1.0  # default of partial_rotary_factor
    delta: DeltaNet | None = None  # defaults of the linear_* fields of a family with delta nets
    full_attention_every: int = 0  # default of full_attention_interval: other layers have delta nets
    latent: LatentAttention | None = None  # defaults of the fields of latent attention
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # defaults of sizes, by their fields
    experts: ExpertFields | None = None
    weights: tuple[Weight, ...] = COMMON

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of ModelConfig that every model of the family has."""
        return {
            'qkv_bias': self.attention_bias == 'qkv',
            'qk_norm': self.qk_norm,
            'whole_qk_norm': self.whole_qk_norm,
            'centred_norms': self.centred_norms,
            'activation': self.activation,
            'sinks': self.sinks,
            'gated_attention': self.gated_attention,
        }


_QWEN3_5 = Family(
    'Qwen3_5ForCausalLM',
    32768,
    4,
    256,
    'none',
    qk_norm=True,
    centred_norms=True,
    gated_attention=True,
    rotary_fraction=0.25,
    delta=DeltaNet(16, 32, 128, 128),
    full_attention_every=4,
    sizes={
        'vocab_size': 248320,
        'hidden_size': 4096,
        'intermediate_size': 12288,
        'num_hidden_layers': 32,
        'num_attention_heads': 16,
    },
    weights=QWEN3_5,
)

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
        weights=(*BEFORE_MLP, *MLP, *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'), *BEHIND_MLP),
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
        weights=(*BEFORE_MLP, *experts('block_sparse_moe', 'w1', 'w3', 'w2'), *BEHIND_MLP),
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
        weights=(*BEFORE_MLP, *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'), *BEHIND_MLP),
    ),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        2048,
        None,
        None,
        'field',
        whole_qk_norm=True,
        windows='listed',
        full_every=4,
        rope_theta=500000.0,
        window_theta=500000.0,
        rms_eps=1e-5,
        weights=OLMO3,
    ),
    'smollm3': Family(
        'SmolLM3ForCausalLM',
        32768,
        4,
        None,
        'field',
        windows='listed',
        window=None,
        unrotated_every=4,
        rope_theta=2e6,
        tie_embeddings=True,
    ),
    'gemma3_text': Family(
        'Gemma3ForCausalLM',
        131072,
        4,
        256,
        'field',
        qk_norm=True,
        windows='listed',
        full_every=6,
        rope_theta=1e6,
        window_theta=10000.0,
        tie_embeddings=True,
        centred_norms=True,
        activation='gelu_tanh',
        scales_embedding=True,
        score_scalar=256,
        sizes={
            'vocab_size': 262208,
            'hidden_size': 2304,
            'intermediate_size': 9216,
            'num_hidden_layers': 26,
            'num_attention_heads': 8,
        },
        weights=GEMMA3,
    ),
    'gpt_oss': Family(
        'GptOssForCausalLM',
        131072,
        8,
        64,
        'field',
        biased=True,
        windows='listed',
        full_every=2,
        window=128,
        rope_theta=150000.0,
        rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        rms_eps=1e-5,
        sinks=True,
        experts=ExpertFields(
            ('num_local_experts', 128),
            4,
            ('intermediate_size', 2880),
            normalised=True,
            swiglu=ClampedSwiglu(7.0, 1.702),
        ),
        weights=GPT_OSS,
    ),
    'qwen3_5_text': _QWEN3_5,
    'qwen3_5_moe_text': dataclasses.replace(
        _QWEN3_5,
        architecture='Qwen3_5MoeForCausalLM',
        n_kv_heads=2,
        experts=ExpertFields(
            ('num_experts', 256),
            8,
            ('moe_intermediate_size', 512),
            normalised=True,
            d_shared=('shared_expert_intermediate_size', 512),
        ),
        sizes={
            'vocab_size': 248320,
            'hidden_size': 2048,
            'num_hidden_layers': 40,
            'num_attention_heads': 16,
        },
        weights=QWEN3_5_MOE,
    ),
    'qwen3_next': dataclasses.replace(
        _QWEN3_5,
        architecture='Qwen3NextForCausalLM',
        n_kv_heads=2,
        experts=ExpertFields(
            ('num_experts', 512),
            10,
            ('moe_intermediate_size', 512),
            normalises=True,
            has_dense_layers=True,
            d_ff=5632,
            d_shared=('shared_expert_intermediate_size', 512),
        ),
        sizes={
            'vocab_size': 151936,
            'hidden_size': 2048,
            'num_hidden_layers': 48,
            'num_attention_heads': 16,
        },
        weights=QWEN3_NEXT,
    ),
    'glm4_moe': Family(
        'Glm4MoeForCausalLM',
        131072,
        8,
        None,
        'qkv_field',
        qk_norm_field=True,
        rotary_fraction=0.5,
        rms_eps=1e-5,
        experts=ExpertFields(
            ('n_routed_experts', 128),
            8,
            ('moe_intermediate_size', 1408),
            normalises=True,
            d_ff=10944,
            dense_first=1,
            shared=1,
            sigmoid=SigmoidRouter(),
        ),
        sizes={'vocab_size': 151552, 'hidden_size': 4096, 'num_hidden_layers': 46, 'num_attention_heads': 96},
        weights=GLM4_MOE,
    ),
    'deepseek_v3': Family(
        'DeepseekV3ForCausalLM',
        4096,
        None,
        None,
        'field',
        rms_eps=1e-6,
        latent=LatentAttention(512, 128, 64, 128, 1536),
        experts=ExpertFields(
            ('n_routed_experts', 256),
            8,
            ('moe_intermediate_size', 2048),
            normalises=True,
            d_ff=18432,
            dense_first=3,
            shared=1,
            sigmoid=SigmoidRouter(8, 4, 2.5),
        ),
        sizes={'vocab_size': 129280, 'hidden_size': 7168, 'num_hidden_layers': 61, 'num_attention_heads': 128},
        weights=DEEPSEEK_V3,
    ),
    'glm4_moe_lite': Family(
        'Glm4MoeLiteForCausalLM',
        202752,
        None,
        None,
        'field',
        rms_eps=1e-5,
        latent=LatentAttention(512, 192, 64, 256, 768),
        experts=ExpertFields(
            ('n_routed_experts', 64),
            4,
            ('moe_intermediate_size', 1536),
            normalises=True,
            d_ff=10240,
            dense_first=1,
            lists_dense=True,
            shared=1,
            sigmoid=SigmoidRouter(scale=1.8),
        ),
        sizes={'vocab_size': 154880, 'hidden_size': 2048, 'num_hidden_layers': 47, 'num_attention_heads': 20},
        weights=DEEPSEEK_V3,
    ),
}


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The part of a layer that mixes tokens: attention, or a gated delta net."""

    window: int | None = None  # tokens that a token attends to, itself included; None = all before it
    rotates: bool = True  # False: queries and keys have no position
    rope: Rope | None = None  # another one than the model's
    mixer: MixerKind = 'attention'

    def __post_init__(self) -> None:
        if self.mixer == 'delta' and (self.window is not None or self.rotates):
            raise ConfigError('a layer with a delta net has neither a window nor rotary positions')
        if self.window is not None and self.window < 1:
            raise ConfigError(f'window={self.window} must be at least 1, or None for no window')
        if self.rope is not None and not self.rotates:
            raise ConfigError('a layer that rotates nothing has no rope')


DELTA = LayerKind(rotates=False, mixer='delta')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder with RMS norm, rotary positions, grouped queries and a gated MLP, dense or with experts.

    It covers the models of FAMILIES and models distilled into them.

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
    rope_scaling: RopeScaling | None = None
    kinds: tuple[LayerKind, ...] = (LayerKind(),)  # of the layers, in order; one = all layers have this kind
    experts: Experts | None = None
    centred_norms: bool = False  # norms multiply by 1 + their scale
    activation: Literal['silu', 'gelu_tanh'] = 'silu'  # of the MLP's gate
    embedding_factor: float = 1.0  # of the embedded tokens, rounded to the dtype of the weights
    score_scale: float | None = None  # of the products of queries and keys; None = 1 / sqrt(head_dim)
    logit_cap: float | None = None  # logits are cap * tanh(logits / cap)
    sinks: bool = False  # every head has one more logit in the sum of its softmax, which has no value
    gated_attention: bool = False  # attention's output is multiplied by the sigmoid of a projection of its own
    rotary_dim: int | None = None  # the first numbers of a head, which are rotated; None = all
    delta: DeltaNet | None = None  # of the layers whose mixer it is
    latent: LatentAttention | None = None  # of all layers; its rotated_dim is rotary_dim, and score_scale is given

    def __post_init__(self) -> None:
        counts = ('vocab_size', 'd_model', 'n_layers', 'n_heads', 'n_kv_heads', 'head_dim', 'd_ff', 'context_tokens')
        ranges = dict.fromkeys(counts, COUNT)
        ranges |= {'rope_theta': POSITIVE, 'rms_eps': NOT_NEGATIVE, 'embedding_factor': POSITIVE}
        optional = {name: POSITIVE for name in ('score_scale', 'logit_cap') if getattr(self, name) is not None}
        for name, allowed in {**ranges, **optional}.items():
            allowed.require(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f'n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}')
        if self.head_dim % 2:
            raise ConfigError(f'head_dim={self.head_dim} is odd; rotary positions need pairs')
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ConfigError(
                f'rotary_dim={self.rotary_dim} must be even, above 0 and at most head_dim={self.head_dim}'
            )
        if (self.delta is None) == any(kind.mixer == 'delta' for kind in self.kinds):
            raise ConfigError(f'delta={self.delta} does not fit the kinds of the layers: give both or neither')
        if self.latent and (self.head_dim, self.rotary_dim) != (self.latent.head_dim, self.latent.rotated_dim):
            raise ConfigError(
                f'head_dim={self.head_dim} and rotary_dim={self.rotary_dim} must be those of latent={self.latent}'
            )
        if self.family not in FAMILIES:
            raise ConfigError(f'family={self.family!r} is unknown; use one of {", ".join(FAMILIES)}')
        if len(set(self.kinds)) == 1:
            object.__setattr__(self, 'kinds', self.kinds[:1])  # so that equal models compare equal
        elif len(self.kinds) != self.n_layers:
            raise ConfigError(
                f'kinds has {len(self.kinds)} entries: give one, or one for each of {self.n_layers} layers'
            )
        if self.qk_norm and self.whole_qk_norm:
            raise ConfigError('qk_norm and whole_qk_norm are two norms of the same vectors: use one')
        if (self.experts is None) == (FAMILIES[self.family].experts is not None):
            has = 'has experts' if self.experts is None else 'has none'
            raise ConfigError(f'family={self.family!r} {has}, and experts={self.experts} does not fit it')
        own = FAMILIES[self.family].experts
        if self.experts and own and (self.experts.sigmoid is None) != (own.sigmoid is None):
            raise ConfigError(f'experts.sigmoid={self.experts.sigmoid} does not fit family={self.family!r}')
        if self.experts and not all(layer in range(self.n_layers) for layer in self.experts.dense_layers):
            raise ConfigError(f'dense layers {self.experts.dense_layers} must be layers, 0 to {self.n_layers - 1}')

    def cut(self, layers: int) -> ModelConfig:
        """The model with its first `layers` layers only."""
        kinds = self.kinds[:layers] if len(self.kinds) > 1 else self.kinds
        experts = self.experts and dataclasses.replace(
            self.experts, dense_layers=tuple(layer for layer in self.experts.dense_layers if layer < layers)
        )
        delta = self.delta if any(kind.mixer == 'delta' for kind in kinds) else None
        return dataclasses.replace(self, n_layers=layers, kinds=kinds, experts=experts, delta=delta)

    def absorb(self) -> ModelConfig:
        """The model with latent attention in its absorbed form; another model is returned as it is."""
        if self.latent is None:
            return self
        latent = dataclasses.replace(self.latent, absorbs=True)
        return dataclasses.replace(self, latent=latent, head_dim=latent.head_dim, n_kv_heads=1)

    @property
    def caches_latents(self) -> bool:
        """Whether a cache holds latents, one head that is key and value for all heads."""
        return self.latent is not None and self.latent.absorbs

    @property
    def cached_numbers(self) -> int:
        """The numbers that a cache holds of a token in a layer with attention."""
        return self.head_dim * (1 if self.caches_latents else 2 * self.n_kv_heads)

    @property
    def mixed_dim(self) -> int:
        """The mean size of a head's key and value, without the zeros that fill one of them."""
        if self.latent is None or self.latent.absorbs:
            return self.head_dim
        return (self.latent.plain_dim + self.latent.rotated_dim + self.latent.value_dim) // 2

    @property
    def query_latent(self) -> bool:
        return self.latent is not None and self.latent.query_rank > 0

    @property
    def query_latent_bias(self) -> bool:
        return self.query_latent and self.qkv_bias

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer if len(self.kinds) > 1 else 0]

    def mixer(self, layer: int) -> MixerKind:
        return self.kind(layer).mixer

    @property
    def n_delta_layers(self) -> int:
        return sum(self.mixer(layer) == 'delta' for layer in range(self.n_layers))

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in this layer, itself included; None = all before it."""
        return self.kind(layer).window

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of all layers with attention, without repetition."""
        return frozenset(kind.window for kind in self.kinds if kind.mixer == 'attention')

    def rope(self, layer: int) -> Rope | None:
        """The rotary positions of this layer; None = its queries and keys are not rotated."""
        return self.rope_of(self.kind(layer))

    def rope_of(self, kind: LayerKind) -> Rope | None:
        if self.plain or not kind.rotates:
            return None
        return kind.rope or Rope(self.rope_theta, self.rope_scaling)

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


def require_delta_heads(config: ModelConfig, tensor: int, field: str) -> None:
    """Raises ConfigError for delta nets whose heads the devices of `field` cannot share."""
    if config.delta is not None and config.delta.key_heads % tensor:
        raise ConfigError(
            f'tensor={tensor} of {field} does not divide the {config.delta.key_heads} key heads of the delta nets of '
            'the model; use a divisor'
        )


LAYERS_END = 2**10  # more than any model has; an absurd number would run for hours


def default_kinds(family: str, n_layers: int, window: int) -> tuple[LayerKind, ...]:
    """The layers of a model whose file does not list them, one for all if they are equal; `window` is in tokens.

    Raises ConfigError for layers that differ and are too many to be listed.
    """
    has = FAMILIES[family]
    if not (has.full_every or has.unrotated_every or has.full_attention_every):
        return (LayerKind(),)
    if n_layers >= LAYERS_END:
        raise ConfigError(
            f'n_layers={n_layers} must be below {LAYERS_END} for family={family!r}, whose layers differ; lower '
            'model.n_layers'
        )
    ends = lambda number, every: every > 0 and number % every == 0
    if every := has.full_attention_every:
        return tuple(LayerKind() if ends(number, every) else DELTA for number in range(1, n_layers + 1))
    return tuple(
        LayerKind(
            None if not has.full_every or ends(number, has.full_every) else window,
            rotates=not ends(number, has.unrotated_every),
        )
        for number in range(1, n_layers + 1)
    )


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
        sizes |= {'E': c.experts.count, 'M': c.experts.d_expert, 'W': 2 * c.experts.d_expert}
        sizes |= {'S': c.experts.d_shared, 'one': 1}
    if c.delta:
        keys, values = c.delta.key_heads * c.delta.key_dim, c.delta.value_heads * c.delta.value_dim
        sizes |= {'QD': keys, 'VD': values, 'VH': c.delta.value_heads, 'VS': c.delta.value_dim, 'N': c.delta.taps}
    if m := c.latent:
        sizes |= {'QR': m.query_rank, 'L': m.rank, 'LR': m.rank + m.rotated_dim}
        each = {'HQ': m.plain_dim + m.rotated_dim, 'HN': m.plain_dim, 'HV': m.value_dim}
        sizes |= {letter: c.n_heads * size for letter, size in each.items()}
    return {**sizes, 'H': c.n_heads, 'D': c.head_dim, 'HD': heads, 'KD': kv_heads}


def layers_of(row: Weight, config: ModelConfig) -> tuple[int, ...]:
    """The layers that have the weight, ascending; () = it is in no layer."""
    if not row.path.startswith(LAYERS):
        return ()
    has: dict[str, Callable[[int], bool]] = {
        'all': lambda layer: True,
        'dense': lambda layer: not config.has_experts(layer),
        'experts': config.has_experts,
        'attention': lambda layer: config.mixer(layer) == 'attention',
        'delta': lambda layer: config.mixer(layer) == 'delta',
    }
    return tuple(filter(has[row.layers], range(config.n_layers)))


def count_parameters(config: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """(row, its parameters in all layers together) of each row that the model has."""
    sizes = letter_sizes(config)
    for row in rows_of(config):
        yield row, math.prod(sizes[letter] for letter in row.shape.split()) * (len(layers_of(row, config)) or 1)


def _exists(row: Weight, config: ModelConfig) -> bool:
    if row.path.startswith(LAYERS) and not layers_of(row, config):
        return False
    return (not row.when or getattr(config, row.when)) and not (row.unless and getattr(config, row.unless))
