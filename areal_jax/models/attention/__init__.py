"""Attention over packed rows for the learner: the backends, how one is chosen, and its check at start-up."""

from areal_jax.models.attention.backends import (
    BACKENDS,
    IMPLEMENTATIONS,
    AttentionError,
    Backend,
    choose_implementation,
    jax_settings,
    local_device,
    shares_prompts,
)
from areal_jax.models.attention.check import choose_checked, self_check
from areal_jax.models.attention.packed import MAX_TILE_TOKENS, packed_attention, packed_rows_attention, tile_tokens

__all__ = [
    'BACKENDS',
    'IMPLEMENTATIONS',
    'MAX_TILE_TOKENS',
    'AttentionError',
    'Backend',
    'choose_checked',
    'choose_implementation',
    'jax_settings',
    'local_device',
    'packed_attention',
    'packed_rows_attention',
    'self_check',
    'shares_prompts',
    'tile_tokens',
]
