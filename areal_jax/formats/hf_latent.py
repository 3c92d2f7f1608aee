"""Fields of latent attention in Hugging Face's config.json (DeepSeek-V3, GLM-4.7-Flash)."""

from __future__ import annotations

import math

from areal_jax.formats.hf_fields import Fields
from areal_jax.models.layer_parts import LatentAttention
from areal_jax.models.ropes import RopeScaling, YarnScaling

_SIZES = {  # fields of config.json by those of LatentAttention
    'rank': 'kv_lora_rank',
    'plain_dim': 'qk_nope_head_dim',
    'rotated_dim': 'qk_rope_head_dim',
    'value_dim': 'v_head_dim',
}


def read_latent(fields: Fields, default: LatentAttention) -> LatentAttention:
    """Latent attention in its expanded form; `head_dim` of the file is not read, since it says other things."""
    sizes = (fields.integer(name, getattr(default, size)) for size, name in _SIZES.items())
    query_rank = 0 if fields.is_null('q_lora_rank') else fields.integer('q_lora_rank', default.query_rank)
    heads = fields.get('num_key_value_heads')
    if heads is not None and heads != fields.get('num_attention_heads', heads):
        raise fields.unsupported('num_key_value_heads', heads, 'num_attention_heads')
    rank, plain, rotated, value = sizes
    return LatentAttention(rank, plain, rotated, value, query_rank, fields.flag('rope_interleave', True))


def latent_scale(latent: LatentAttention, scaling: RopeScaling | None) -> float:
    """The scale of scores: of the size of queries and keys, times the square of YaRN's growth for mscale_all_dim."""
    scale = latent.scale
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def latent_fields(latent: LatentAttention) -> dict[str, object]:
    """The fields of latent attention."""
    sizes = {name: getattr(latent, size) for size, name in _SIZES.items()}
    return {**sizes, 'q_lora_rank': latent.query_rank or None, 'rope_interleave': latent.interleaved}
