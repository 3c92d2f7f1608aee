"""The splash attention kernel of jax for TPUs, for packed rows without shared prompts.

Its modules are imported on first use: the import takes a quarter of a second, which a run without a TPU saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from areal_jax.models.attention.flash import OUTPUT_NAME, RowIds, Setting

_LANES = 128  # tokens and head sizes are padded to multiples
_MAX_BLOCK = 512  # tokens: side of a tile, if it divides the row


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting, sinks: jax.Array | None = None
) -> jax.Array:
    """Causal attention within segments: [R, T, H, D] for q [R, T, H, D], k and v [R, T, K, D]. Reads no other id.

    A window counts tokens of the row. The kernel skips only tiles above the diagonal or before every window. It has no
    scale, so q is scaled first. It saves output and log-sum-exp for the backward pass under one name,
    'attention_output'. A NaN may spread to other segments.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    rows, tokens, heads, dim = q.shape
    more_tokens, more_dim = -tokens % _LANES, -dim % _LANES
    kernel = _kernel(tokens + more_tokens, heads, setting.window, setting.interpret)
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, more_tokens), (0, 0), (0, more_dim))).transpose(0, 2, 1, 3)
        for x in ((q * setting.scale).astype(q.dtype), k, v)
    )
    padding = jnp.broadcast_to(ids.segment.min(axis=1, keepdims=True) - 1, (rows, more_tokens))
    segments = jnp.concatenate([ids.segment, padding], axis=1)
    of_all_rows = () if sinks is None else (_with_gradient_in_its_dtype(sinks),)
    run = jax.vmap(kernel, in_axes=(0,) * 4 + (None,) * len(of_all_rows))
    out = run(q, k, v, splash.SegmentIds(q=segments, kv=segments), *of_all_rows)
    return out.transpose(0, 2, 1, 3)[:, :tokens, :, :dim]


@functools.lru_cache(maxsize=32)
def _kernel(tokens: int, heads: int, window: int | None, interpret: bool) -> Callable[..., jax.Array]:
    """Built once per shape, because building the mask is slow; its arrays are constants even under a jit trace."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(b for b in (_MAX_BLOCK, 256, _LANES) if tokens % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    shape = tokens, tokens
    one = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), offset=0)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            masks.MultiHeadMask([one] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1,
            residual_checkpoint_name=OUTPUT_NAME, interpret=interpret,
        )  # fmt: skip


@jax.custom_vjp
def _with_gradient_in_its_dtype(sinks: jax.Array) -> jax.Array:
    """The kernel gives the gradient of float32 sinks in the dtype of q."""
    return sinks


_with_gradient_in_its_dtype.defvjp(
    lambda sinks: (sinks, jnp.zeros(0, sinks.dtype)), lambda like, d_sinks: (d_sinks.astype(like.dtype),)
)
