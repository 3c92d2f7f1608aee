"""The weights that models have, each declared once as a row; models/families.py says which family has which.

A row has a weight's place in the tree, its shape, its logical axes, its initial values and its names in files of
Hugging Face and GGUF. `weights` fills in the sizes of a model; initial weights, sharding, loading and export read the
table from there.

Sizes are letters: V vocabulary, O tokens that are predicted, C context tokens, d model width, F width of the MLP, D
head_dim, H heads, HD all heads, KD all kv heads, E experts, M width of an expert, W twice that.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal


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
