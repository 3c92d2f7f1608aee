"""cuDNN's fused attention for packed rows without shared prompts, on Hopper and later.

jax exposes packing (sequence lengths and offsets) only in a private module. This file follows that module's source of
jax 0.10, and runs only where `self_check` passes, as it does on an H200 with jax 0.11.2 (docs/gpu.md). Facts about that
module: the scale defaults to 1; only the layout BTNH converts offsets; before jax 0.11.1 it multiplies the offsets of
grouped keys by the number of query heads and silently reads wrong tokens (jax#39521), so keys and values are repeated
here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from areal_jax.models.attention.flash import LSE_NAME, OUTPUT_NAME, RowIds, Setting

MAX_SEGMENTS = 64  # of a row, padding included; the saved log-sum-exp holds this many rows of [H, T]
GROUPED_KEYS_FROM = (0, 11, 1)  # version of jax


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting) -> jax.Array:
    """Causal attention within segments: [R, T, H, D] for q [R, T, H, D], k and v [R, T, K, D]. Reads no other id.

    bfloat16 or float16. A row with more than MAX_SEGMENTS segments gives NaN instead of wrong values; the learner packs
    no such row. A NaN may spread to other segments.
    """
    if jax.__version_info__ < GROUPED_KEYS_FROM:
        repeats = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    lengths, offsets, count = packed_offsets(ids.segment)
    out = attention(q, k, v, lengths, offsets, float(setting.scale))
    return jnp.where((count <= MAX_SEGMENTS)[:, None, None, None], out, jnp.nan)


def packed_offsets(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(lengths [R, S], offsets [R, S + 1], number of segments [R]), int32, of segment_ids [R, T]; -1 = no segment.

    Offsets count tokens from the start of the row. They leave out the end of the last segment, because cuDNN joins the
    offsets of all rows into one list in which every entry is the start of a segment.
    """
    tokens = segment_ids.shape[1]

    def row(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        starts_here = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
        starts = jnp.nonzero(starts_here, size=MAX_SEGMENTS + 1, fill_value=tokens)[0].astype(jnp.int32)
        lengths = jnp.where(starts[:-1] < tokens, starts[1:] - starts[:-1], -1)
        offsets = jnp.where(starts < tokens, starts, -1)
        return lengths, offsets, starts_here.sum(dtype=jnp.int32)

    return jax.vmap(row)(segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, offsets: jax.Array, scale: float
) -> jax.Array:
    """Calls cuDNN, with its gradient; `packed_offsets` gives `lengths` and `offsets`."""
    return _forward(q, k, v, lengths, offsets, scale)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, offsets: jax.Array, scale: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    unused = jnp.zeros(0, q.dtype)
    arrays = {
        **{'query': q, 'key': k, 'value': v, 'bias': unused, 'page_table_k': unused, 'page_table_v': unused},
        **{'q_seqlen': lengths, 'kv_seqlen': lengths, 'q_offsets': offsets, 'kv_offsets': offsets},
    }
    # the private rule returns the log-sum-exp, so that it can be saved by name and the forward pass not run twice
    out, saved = _call_rule(cudnn_module()._dot_product_attention_fwd_rule, scale, arrays)
    *inputs, lse, out = saved
    out, lse = checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (*inputs, lse, out)


def _backward(scale: float, saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    arrays = {'res': saved, 'grad_output': d_out}
    d_q, d_k, d_v, *_ = _call_rule(cudnn_module()._dot_product_attention_bwd_rule, scale, arrays)
    return d_q, d_k, d_v, None, None


attention.defvjp(_forward, _backward)


def _call_rule(rule: Callable[..., Any], scale: float, arrays: Mapping[str, object]) -> Any:
    """Calls a private rule by the names of its arguments, which differ between versions of jax in number and order."""
    module = cudnn_module()
    values = {
        'scale': scale,
        'seed': 0,
        'dropout_rate': 0.0,
        'variadic_args': (False, False),  # a bias, and its gradient
        'mask_type': module.MaskType.PADDING_CAUSAL,
        'layout': module.AttentionLayout.BTNH.value,
        'sliding_window_length': None,
        'score_mod': None,  # a function of the scores, and its arrays: from jax 0.12 on
        'score_mod_args': (),
        'cudnn_version': module.check_cudnn_version(),
        'is_training': True,
        'return_residual': False,  # the log-sum-exp to the caller
        **arrays,
    }
    return rule(**{name: values[name] for name in inspect.signature(rule).parameters})


def cudnn_module() -> ModuleType:
    """A module of jax that has no public name (docs/design/private_names.md)."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
