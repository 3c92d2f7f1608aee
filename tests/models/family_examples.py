"""A tiny model of each family of 2026, every parameter drawn, and a decoder of it that goes token by token."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import empty_states, run_steps
from areal_jax.models.families import DELTA, FAMILIES, LayerKind, ModelConfig
from areal_jax.models.layer_parts import ClampedSwiglu, DeltaNet, Experts, LatentAttention, SigmoidRouter
from areal_jax.models.ropes import LinearScaling, Rope, YarnScaling

_SHAPE = {
    'vocab_size': 300, 'd_model': 16, 'n_layers': 3, 'n_heads': 4, 'n_kv_heads': 2, 'head_dim': 8, 'd_ff': 24,
    'rope_theta': 1e4,
}  # fmt: skip
_YARN = YarnScaling(4.0, 16, beta_fast=4.0)
WINDOW = 5
FULL, NEAR = LayerKind(), LayerKind(WINDOW)


def tiny(family: str, **fields: object) -> ModelConfig:
    switches = FAMILIES[family].switches
    return ModelConfig(**{**_SHAPE, 'family': family, **switches, **fields})


CONFIGS = {
    'yarn': tiny('qwen3', rope_scaling=_YARN),
    'olmo3': tiny(
        'olmo3', rope_scaling=_YARN, kinds=(LayerKind(WINDOW, rope=Rope(1e4)),) * 2 + (FULL,), tie_embeddings=False
    ),
    'smollm3': tiny('smollm3', kinds=(FULL, LayerKind(WINDOW, rotates=False), FULL)),
    'gemma3': tiny(
        'gemma3_text',
        rope_scaling=LinearScaling(8.0),
        kinds=(LayerKind(WINDOW, rope=Rope(100.0)), FULL, LayerKind(WINDOW, rope=Rope(100.0))),
        embedding_factor=math.sqrt(16),
        score_scale=9**-0.5,
        logit_cap=6.0,
    ),
    'gpt_oss': tiny(
        'gpt_oss',
        rope_scaling=YarnScaling(32.0, 16, beta_fast=4.0, truncate=False),
        kinds=(NEAR, FULL, NEAR),
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        d_ff=12,
        experts=Experts(6, 2, 12, swiglu=ClampedSwiglu(1.5, 1.702)),
    ),
    'qwen3_5': tiny('qwen3_5_text', kinds=(DELTA, FULL, DELTA), delta=DeltaNet(2, 4, 8, 6), rotary_dim=4),
    'qwen3_5_moe': tiny(
        'qwen3_5_moe_text',
        kinds=(DELTA, DELTA, FULL),
        delta=DeltaNet(2, 2, 6, 8),
        rotary_dim=2,
        d_ff=12,
        experts=Experts(6, 2, 12, d_shared=10),
    ),
    'qwen3_next': tiny(
        'qwen3_next',
        kinds=(DELTA, FULL, DELTA),
        delta=DeltaNet(2, 4, 4, 8),
        rotary_dim=4,
        tie_embeddings=False,
        experts=Experts(6, 3, 12, normalised=False, dense_layers=(1,), d_shared=8),
    ),
    'glm4_moe': tiny(
        'glm4_moe',
        qk_norm=True,
        qkv_bias=True,
        rotary_dim=4,
        experts=Experts(6, 2, 12, dense_layers=(0,), d_shared=24, sigmoid=SigmoidRouter(3, 2, 1.5)),
    ),
    'deepseek_v3': tiny(
        'deepseek_v3',
        n_kv_heads=4,
        head_dim=14,
        rotary_dim=4,
        latent=LatentAttention(6, 5, 4, 14, 7),
        score_scale=9**-0.5,
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        experts=Experts(6, 2, 12, dense_layers=(0,), d_shared=12, sigmoid=SigmoidRouter(3, 2, 2.5)),
    ),
    'glm4_moe_lite': tiny(
        'glm4_moe_lite',
        n_kv_heads=4,
        head_dim=10,
        rotary_dim=4,
        latent=LatentAttention(8, 6, 4, 6, 0, interleaved=False),
        score_scale=10**-0.5,
        experts=Experts(6, 2, 12, dense_layers=(1,), d_shared=12, sigmoid=SigmoidRouter()),
    ),
}
HYBRIDS = tuple(name for name, config in CONFIGS.items() if config.delta)
LATENT = tuple(name for name, config in CONFIGS.items() if config.latent)
NAMES = tuple(CONFIGS)
# the quick tests take a family of each kind: windows, sinks and experts, states, corrections, latents
QUICK = ('olmo3', 'gpt_oss', 'qwen3_5', 'glm4_moe', 'deepseek_v3')
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]


def draw(config: ModelConfig, seed: int = 0, scale: float = 1.5) -> dict:
    """Random weights as nested dicts of numpy arrays: also norms, biases and sinks, which would begin as constants."""
    rng = np.random.default_rng(seed)

    def change(leaf):
        leaf = np.asarray(leaf)
        is_constant = leaf.size and np.all(leaf == leaf.flat[0])
        return leaf + rng.normal(0, 0.3, leaf.shape).astype(np.float32) if is_constant else leaf

    return jax.tree.map(change, Decoder(config).init(seed, scale=scale))


class TokenByToken:
    """Logits of sequences whose tokens go through weights of different versions, each over the keys of those before."""

    def __init__(self, config: ModelConfig, tokens: int):
        self.decoder, self.tokens = Decoder(config), tokens
        self.known = ()  # of the last sequence: (token, version) and the keys and values behind each
        self.logits = []

    def next_logits(self, weights, tokens, versions):
        """float64 [V] behind `tokens`; token t goes through `weights[versions[t]]`, its keys and values included."""
        steps = list(zip(tokens, versions, strict=True))
        kept = 0
        while kept < min(len(steps), len(self.known)) and self.known[kept][0] == steps[kept]:
            kept += 1
        known, logits = [*self.known[:kept]], None
        c = self.decoder.config
        empty = tuple(
            empty_states(1, c.delta, jnp.float32)
            if c.mixer(layer) == 'delta'
            else (jnp.zeros((self.tokens, c.n_kv_heads, c.head_dim)),) * 2
            for layer in range(c.n_layers)
        )
        for position, (token, version) in enumerate(steps[kept:], start=kept):
            cache = known[-1][1] if known else empty
            params = weights[version]
            logits, cache = _step(self.decoder, params, jnp.int32(token), jnp.int32(position), cache)
            known.append(((token, version), cache, logits))
        self.known = known
        return np.asarray(known[len(steps) - 1][2], np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _step(decoder, params, token, position, cache):
    def attend(q, k, v, entry, window, sinks=None):
        keys, values = (side.at[position].set(new[0]) for side, new in zip(entry, (k, v), strict=True))
        groups = q.shape[1] // k.shape[1]
        back = position - jnp.arange(len(keys))
        seen = (back >= 0) & (back < (window or len(keys)))
        scores = jnp.einsum('hd,shd->hs', q[0], jnp.repeat(keys, groups, axis=1)) * q.shape[-1] ** -0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, sinks[:, None]], axis=1)
        weights = jax.nn.softmax(scores, axis=-1)[:, : len(keys)]
        return jnp.einsum('hs,shd->hd', weights, jnp.repeat(values, groups, axis=1))[None], (keys, values)

    recur = lambda inputs, entry: run_steps(inputs, entry, jnp.zeros(1, jnp.int32), position[None] == 0)
    hidden, cache = decoder.hidden(params, token[None], position[None], attend, cache, recur=recur)
    return decoder.logits(params, hidden)[0], cache
