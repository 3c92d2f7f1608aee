"""The weights that models have, each declared once as a row; models/families.py says which family has which.

A row has a weight's place in the tree, its shape, its logical axes, its initial values and its names in files of
Hugging Face and GGUF. `weights` fills in the sizes of a model; initial weights, sharding, loading and export read the
table from there.

Sizes are letters: V vocabulary, O tokens that are predicted, C context tokens, d model width, F width of the MLP, D
head_dim, H heads, HD all heads, KD all kv heads, E experts, M width of an expert, W twice that, S width of the shared
expert. Of delta nets: QD all key heads, VH value heads, VD all of them, VS size of one, N taps of the convolution. Of
latent attention: QR numbers of a query's latent, L of a latent, LR with its rotated key, HQ all queries, HN all keys
without their rotated part, HV all values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Literal


class Init(enum.Enum):
    """Initial values. Matrices are normal with standard deviation 1 / sqrt(fan in), times the caller's scale."""

    ONES = 'ones'
    ZEROS = 'zeros'
    MATRIX = 'matrix'  # [..., in, out]
    TABLE = 'table'  # [V, d], whose fan in is d
    LOOKUP = 'lookup'  # TABLE of which a token reads one row: times `embedding_scale` as well
    RESIDUAL = 'residual'  # MATRIX that writes to the residual stream: divided by sqrt(2 n_layers)
    TAPS = 'taps'  # [channels, N] of a convolution by channel, whose fan in is N; the caller's scale does not apply
    LOG_RATE = 'log_rate'  # log of a number that is uniform between 0 and 16, as transformers draws A_log


MixerKind = Literal['attention', 'delta']
LayersOf = Literal['all', 'dense', 'experts', 'attention', 'delta']


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
    layers: LayersOf = 'all'  # which layers have it, by their MLP or their mixer
    part: str | None = None  # the leaf is this part of the tensor's rows, see formats/hf_layouts; None = all of it


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
    layers: LayersOf = 'all',
    part: str | None = None,
) -> Weight:
    """A matrix [in, out] of layers; files hold it as [out, in]."""
    gguf_name = gguf_name and f'blk.*.{gguf_name}.weight'
    hf_name = f'model.layers.*.{hf_name}.weight'
    return Weight(f'layers/*/{path}/weight', shape, axes, init, hf_name, True, gguf_name, when, unless, layers, part)


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
_EMBEDDING = (
    Weight('embedding', 'V d', 'vocab embed', Init.LOOKUP, 'model.embed_tokens.weight', gguf_name='token_embd.weight'),
    Weight('positions', 'C d', 'features embed', Init.LOOKUP, when='plain'),
)
_ATTENTION = (
    projection('attention/query', 'd HD', 'embed heads', 'self_attn.q_proj', 'attn_q'),
    bias('attention/query', 'HD', 'self_attn.q_proj', when='qkv_bias'),
    projection('attention/key', 'd KD', 'embed kv_heads', 'self_attn.k_proj', 'attn_k'),
    bias('attention/key', 'KD', 'self_attn.k_proj', when='qkv_bias'),
    projection('attention/value', 'd KD', 'embed kv_heads', 'self_attn.v_proj', 'attn_v'),
    bias('attention/value', 'KD', 'self_attn.v_proj', when='qkv_bias'),
    norm('attention/query_norm', 'D', 'self_attn.q_norm', 'attn_q_norm', when='qk_norm'),
    norm('attention/query_norm', 'HD', 'self_attn.q_norm', when='whole_qk_norm'),
    norm('attention/key_norm', 'D', 'self_attn.k_norm', 'attn_k_norm', when='qk_norm'),
    norm('attention/key_norm', 'KD', 'self_attn.k_norm', when='whole_qk_norm'),
    Weight('layers/*/attention/sinks', 'H', 'features', Init.ZEROS, 'model.layers.*.self_attn.sinks', when='sinks'),
    projection(
        'attention/output', 'HD d', 'heads embed', 'self_attn.o_proj', 'attn_output', Init.RESIDUAL, unless='plain'
    ),
    projection('attention/output', 'HD d', 'heads embed', 'self_attn.o_proj', when='plain'),
    bias('attention/output', 'd', 'self_attn.o_proj', when='output_bias'),
)
BEFORE_MLP = (
    *_EMBEDDING,
    norm('attention_norm', 'd', 'input_layernorm', 'attn_norm'),
    *_ATTENTION,
    norm('mlp_norm', 'd', 'post_attention_layernorm', 'ffn_norm'),
)
MLP = (
    projection('mlp/gate', 'd F', 'embed mlp', 'mlp.gate_proj', 'ffn_gate', unless='plain', layers='dense'),
    projection('mlp/up', 'd F', 'embed mlp', 'mlp.up_proj', 'ffn_up', layers='dense'),
    projection(
        'mlp/down', 'F d', 'mlp embed', 'mlp.down_proj', 'ffn_down', Init.RESIDUAL, unless='plain', layers='dense'
    ),
    projection('mlp/down', 'F d', 'mlp embed', 'mlp.down_proj', when='plain', layers='dense'),
)
BEHIND_MLP = (
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
COMMON = (*BEFORE_MLP, *MLP, *BEHIND_MLP)


def _centre(rows: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The rows of a model whose norms multiply by 1 + their scale."""
    return tuple(dataclasses.replace(row, init=Init.ZEROS) if row.init is Init.ONES else row for row in rows)


OLMO3 = (
    *_EMBEDDING,
    *_ATTENTION,
    norm('attention_out_norm', 'd', 'post_attention_layernorm'),
    *MLP,
    norm('mlp_out_norm', 'd', 'post_feedforward_layernorm'),
    *BEHIND_MLP,
)
GEMMA3 = _centre(
    (
        *_EMBEDDING,
        norm('attention_norm', 'd', 'input_layernorm', 'attn_norm'),
        *_ATTENTION,
        norm('attention_out_norm', 'd', 'post_attention_layernorm', 'post_attention_norm'),
        norm('mlp_norm', 'd', 'pre_feedforward_layernorm', 'ffn_norm'),
        *MLP,
        norm('mlp_out_norm', 'd', 'post_feedforward_layernorm', 'post_ffw_norm'),
        *BEHIND_MLP,
    )
)


def fused_experts(name: str, shape: str, axes: str, init: Init) -> Weight:
    """A leaf of all experts of a layer that is one tensor in files, not transposed."""
    hf_name = f'model.layers.*.mlp.experts.{name}'
    leaf = name.replace('_proj', '')
    return Weight(f'layers/*/mlp/experts/{leaf}', shape, axes, init, hf_name, layers='experts')


GPT_OSS = (
    *BEFORE_MLP,
    projection('mlp/router', 'd E', 'embed routes', 'mlp.router', layers='experts'),
    bias('mlp/router', 'E', 'mlp.router'),
    fused_experts('gate_up_proj', 'E d W', 'experts embed mlp', Init.MATRIX),
    fused_experts('gate_up_proj_bias', 'E W', 'experts mlp', Init.ZEROS),
    fused_experts('down_proj', 'E M d', 'experts mlp embed', Init.RESIDUAL),
    fused_experts('down_proj_bias', 'E d', 'experts embed', Init.ZEROS),
    *BEHIND_MLP,
)


# Gated delta nets (Qwen3.5, Qwen3-Next). Each leaf has one component, so that devices take whole heads of each; in
# files several components share a tensor.


def shared_expert(module: str, score: str | None = None) -> tuple[Weight, ...]:
    """An expert that every token reaches; with `score` times the sigmoid of a score of its own."""
    of_experts = functools.partial(projection, layers='experts')
    rows = (
        of_experts('mlp/shared/gate', 'd S', 'embed mlp', f'{module}.gate_proj'),
        of_experts('mlp/shared/up', 'd S', 'embed mlp', f'{module}.up_proj'),
        of_experts('mlp/shared/down', 'S d', 'mlp embed', f'{module}.down_proj', init=Init.RESIDUAL),
    )
    return (*rows, of_experts('mlp/shared_score', 'd one', 'embed features', score)) if score else rows


def _gate(rows: tuple[Weight, ...]) -> Iterator[Weight]:
    """Attention whose output is multiplied by the sigmoid of another projection, which files have with the queries."""
    for row in rows:
        is_query = row.path.endswith('attention/query/weight')
        yield dataclasses.replace(row, layers='attention', part='query' if is_query else None)
        if is_query:
            yield projection(
                'attention/output_gate', 'd HD', 'embed heads', 'self_attn.q_proj', layers='attention', part='gate'
            )


def _delta_net(qkv: str, z: str, beta: str, decay: str) -> tuple[Weight, ...]:
    """A gated delta net, by the names of the tensors that have its projections."""
    module = 'model.layers.*.linear_attn.'
    own = functools.partial(projection, layers='delta')

    def taps(name: str, shape: str, axis: str) -> Weight:
        hf_name = f'{module}conv1d.weight'
        return Weight(
            f'layers/*/delta/{name}_taps', f'{shape} N', f'{axis} features', Init.TAPS, hf_name, layers='delta',
            part=name,
        )  # fmt: skip

    def vector(name: str, shape: str, init: Init, hf_name: str) -> Weight:
        return Weight(f'layers/*/delta/{name}', shape, 'features', init, f'{module}{hf_name}', layers='delta')

    return (
        own('delta/query', 'd QD', 'embed key_heads', f'linear_attn.{qkv}', part='query'),
        own('delta/key', 'd QD', 'embed key_heads', f'linear_attn.{qkv}', part='key'),
        own('delta/value', 'd VD', 'embed value_heads', f'linear_attn.{qkv}', part='value'),
        own('delta/output_gate', 'd VD', 'embed value_heads', f'linear_attn.{z}', part='gate' if z == qkv else None),
        own('delta/beta', 'd VH', 'embed value_heads', f'linear_attn.{beta}', part='beta' if beta == decay else None),
        own(
            'delta/decay', 'd VH', 'embed value_heads', f'linear_attn.{decay}', part='decay' if beta == decay else None
        ),
        taps('query', 'QD', 'key_heads'),
        taps('key', 'QD', 'key_heads'),
        taps('value', 'VD', 'value_heads'),
        vector('log_rate', 'VH', Init.LOG_RATE, 'A_log'),
        vector('rate_bias', 'VH', Init.ONES, 'dt_bias'),
        vector('norm', 'VS', Init.ONES, 'norm.weight'),
        own('delta/output', 'VD d', 'value_heads embed', 'linear_attn.out_proj', init=Init.RESIDUAL),
    )


def _hybrid(delta_net: tuple[Weight, ...], *mlp: Weight) -> tuple[Weight, ...]:
    """A model whose norms are centred, except for those of the delta nets."""
    return (
        *_centre((*_EMBEDDING, norm('attention_norm', 'd', 'input_layernorm', 'attn_norm'), *_gate(_ATTENTION))),
        *delta_net,
        *_centre((norm('mlp_norm', 'd', 'post_attention_layernorm', 'post_attention_norm'), *mlp, *BEHIND_MLP)),
    )


_QWEN_EXPERTS = (
    *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'),
    *shared_expert('mlp.shared_expert', 'mlp.shared_expert_gate'),
)
_DELTA_3_5 = _delta_net('in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a')
_DELTA_NEXT = _delta_net('in_proj_qkvz', 'in_proj_qkvz', 'in_proj_ba', 'in_proj_ba')
QWEN3_5 = _hybrid(_DELTA_3_5, *MLP)
QWEN3_5_MOE = _hybrid(_DELTA_3_5, *_QWEN_EXPERTS)
QWEN3_NEXT = _hybrid(_DELTA_NEXT, *MLP, *_QWEN_EXPERTS)

# Sigmoid routers: see families.SigmoidRouter.
SIGMOID_EXPERTS = (
    *experts('mlp', 'gate_proj', 'up_proj', 'down_proj'),
    Weight(
        'layers/*/mlp/correction', 'E', 'features', Init.ZEROS, 'model.layers.*.mlp.gate.e_score_correction_bias',
        layers='experts',
    ),
    *shared_expert('mlp.shared_experts'),
)  # fmt: skip
# Latent attention: see layer_parts.LatentAttention. The matrices of keys and of values share a tensor, and are no
# projections: they are multiplied with latents or with queries and outputs, by head.
_LATENT_ATTENTION = (
    projection('attention/query_latent', 'd QR', 'embed features', 'self_attn.q_a_proj', when='query_latent'),
    bias('attention/query_latent', 'QR', 'self_attn.q_a_proj', when='query_latent_bias'),
    norm('attention/query_norm', 'QR', 'self_attn.q_a_layernorm', when='query_latent'),
    projection('attention/query', 'QR HQ', 'embed heads', 'self_attn.q_b_proj', when='query_latent'),
    projection('attention/query', 'd HQ', 'embed heads', 'self_attn.q_proj', unless='query_latent'),
    projection('attention/latent', 'd LR', 'embed features', 'self_attn.kv_a_proj_with_mqa'),
    bias('attention/latent', 'LR', 'self_attn.kv_a_proj_with_mqa', when='qkv_bias'),
    norm('attention/latent_norm', 'L', 'self_attn.kv_a_layernorm'),
    *(
        Weight(
            f'layers/*/attention/{name}_up', f'L {shape}', 'embed heads', Init.MATRIX,
            'model.layers.*.self_attn.kv_b_proj.weight', True, part=name,
        )
        for name, shape in (('key', 'HN'), ('value', 'HV'))
    ),
    projection('attention/output', 'HV d', 'heads embed', 'self_attn.o_proj', init=Init.RESIDUAL),
    bias('attention/output', 'd', 'self_attn.o_proj', when='output_bias'),
)  # fmt: skip
DEEPSEEK_V3 = (
    *_EMBEDDING,
    norm('attention_norm', 'd', 'input_layernorm'),
    *_LATENT_ATTENTION,
    norm('mlp_norm', 'd', 'post_attention_layernorm'),
    *MLP,
    *SIGMOID_EXPERTS,
    *BEHIND_MLP,
)
GLM4_MOE = (*BEFORE_MLP, *MLP, *SIGMOID_EXPERTS, *BEHIND_MLP)

# leaves that choose experts: no gradient reaches them, and no optimizer changes them
STATE_LEAVES = ('correction',)
# these, and leaves that are exponentiated and multiplied over thousands of tokens: float32 in every copy of the weights
FLOAT32_LEAVES = ('log_rate', 'rate_bias', *STATE_LEAVES)
