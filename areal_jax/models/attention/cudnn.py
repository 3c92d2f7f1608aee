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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from areal_jax.models.attention.flash import LSE_NAME, OUTPUT_NAME, RowIds, Setting, add_sinks, sink_gradient

MAX_SEGMENTS = 64  # of a row, padding included; the saved log-sum-exp holds this many rows of [H, T]
GROUPED_KEYS_FROM = (0, 11, 1)  # version of jax


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting, sinks: jax.Array | None = None
) -> jax.Array:
    """Causal attention within segments: [R, T, H, D] for q [R, T, H, D], k and v [R, T, K, D]. Reads no other id.

    bfloat16 or float16. A window counts tokens of the row. A row with more than MAX_SEGMENTS segments gives NaN instead
    of wrong values; the learner packs no such row. A NaN may spread to other segments.
    """
    if jax.__version_info__ < GROUPED_KEYS_FROM:
        repeats = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    lengths, offsets, count = packed_offsets(ids.segment)
    placed = None if sinks is None else place_sinks(sinks, ids.segment)
    out = attention(q, k, v, placed, lengths, offsets, float(setting.scale), setting.window)
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


class Sinks(NamedTuple):
    """Sinks, and where cuDNN's log-sum-exp [R * S, H, T] holds the one of each token."""

    logits: jax.Array  # [H]
    segment: jax.Array  # int32 [R, T], in the list of the segments of all rows
    token: jax.Array  # int32 [R, T], in its segment

    def of_tokens(self, lse: jax.Array) -> jax.Array:
        """The log-sum-exp of each token, [R, T, H]."""
        return lse[self.segment, :, self.token]


def place_sinks(sinks: jax.Array, segment_ids: jax.Array) -> Sinks:
    """Sinks [H] for the tokens of segment_ids [R, T].

    cuDNN joins the segments of all rows into one list, and its log-sum-exp, other than its output, has an axis of
    segments, each of which begins at token 0. What follows the end of a segment is undefined.
    """
    starts_here = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    in_row = jnp.minimum(jnp.cumsum(starts_here, axis=1, dtype=jnp.int32), MAX_SEGMENTS)  # from 1 on
    earlier_rows = jnp.cumsum(in_row[:, -1:], axis=0, dtype=jnp.int32) - in_row[:, -1:]
    token = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    start = jax.lax.cummax(jnp.where(starts_here, token, 0), axis=1)
    return Sinks(sinks, earlier_rows + in_row - 1, token - start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks | None, lengths: jax.Array, offsets: jax.Array,
    scale: float, window: int | None,
) -> jax.Array:  # fmt: skip
    """Calls cuDNN, with its gradient; `packed_offsets` gives `lengths` and `offsets`.

    cuDNN's own sum has no sinks: they are added to its output and log-sum-exp, which its backward pass then reads.
    """
    return _forward(q, k, v, sinks, lengths, offsets, scale, window)[0]


_Saved = tuple[tuple[jax.Array, ...], Sinks | None]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks | None, lengths: jax.Array, offsets: jax.Array,
    scale: float, window: int | None,
) -> tuple[jax.Array, _Saved]:  # fmt: skip
    unused = jnp.zeros(0, q.dtype)
    arrays = {
        **{'query': q, 'key': k, 'value': v, 'bias': unused, 'page_table_k': unused, 'page_table_v': unused},
        **{'q_seqlen': lengths, 'kv_seqlen': lengths, 'q_offsets': offsets, 'kv_offsets': offsets},
    }
    # the private rule returns the log-sum-exp, so that it can be saved by name and the forward pass not run twice
    out, saved = _call_rule(cudnn_module()._dot_product_attention_fwd_rule, scale, window, arrays)
    *inputs, lse, out = saved
    if sinks is not None:
        out, of_tokens = add_sinks(out, sinks.of_tokens(lse), sinks.logits)
        lse = lse.at[sinks.segment, :, sinks.token].set(of_tokens, unique_indices=True)
    out, lse = checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, ((*inputs, lse, out), sinks)


def _backward(
    scale: float, window: int | None, saved: _Saved, d_out: jax.Array
) -> tuple[jax.Array | Sinks | None, ...]:
    residuals, sinks = saved
    arrays = {'res': residuals, 'grad_output': d_out}
    d_q, d_k, d_v, *_ = _call_rule(cudnn_module()._dot_product_attention_bwd_rule, scale, window, arrays)
    *_, lse, out = residuals
    return d_q, d_k, d_v, None if sinks is None else _sinks_gradient(sinks, lse, out, d_out), None, None


def _sinks_gradient(sinks: Sinks, lse: jax.Array, out: jax.Array, d_out: jax.Array) -> Sinks:
    overlap = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)  # [R, T, H]
    by_token = sink_gradient(sinks.logits, sinks.of_tokens(lse), overlap)
    return Sinks._make((by_token.sum(axis=(0, 1)).astype(sinks.logits.dtype), None, None))  # integers have none


attention.defvjp(_forward, _backward)


def _call_rule(rule: Callable[..., Any], scale: float, window: int | None, arrays: Mapping[str, object]) -> Any:
    """Calls a private rule by the names of its arguments, which differ between versions of jax in number and order."""
    module = cudnn_module()
    values = {
        'scale': scale,
        'seed': 0,
        'dropout_rate': 0.0,
        'variadic_args': (False, False),  # a bias, and its gradient
        'mask_type': module.MaskType.PADDING_CAUSAL,
        'layout': module.AttentionLayout.BTNH.value,
        'sliding_window_length': window,  # of the last tokens, the query's own among them
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
