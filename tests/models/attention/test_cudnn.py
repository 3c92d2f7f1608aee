"""The cuDNN backend as far as it can be seen without the device: its offsets, its calls, and what it does with them.

What cuDNN itself computes is seen on a GPU only (benchmarks/gpu_parts/backends.py); here dense math stands in for it.
"""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import cudnn
from areal_jax.models.attention.flash import RowIds, Setting
from tests.models.attention.rows import PACKED, PLACES, SCALE, by_loops, cotangent, ids, seen_by, tensors


@pytest.fixture
def four_segments(monkeypatch):
    monkeypatch.setattr(cudnn, 'MAX_SEGMENTS', 4)


@pytest.mark.usefixtures('four_segments')
def test_offsets_are_the_starts_of_runs():
    # the padding (0) is a run like any other; where all four places are taken no end stands behind them
    rows = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [5, 5, 5, 5, 5, 5, 5, 0]])
    lengths, offsets, count = cudnn.packed_offsets(rows)
    assert lengths.tolist() == [[3, 1, 2, 2], [7, 1, -1, -1]]
    assert offsets.tolist() == [[0, 3, 4, 6, -1], [0, 7, -1, -1, -1]]
    assert count.tolist() == [4, 2]


@pytest.mark.usefixtures('four_segments')
def test_sinks_know_where_the_log_sum_exp_of_a_token_is():
    rows = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0], [5, 5, 5, 5, 5, 5, 5, 0]])
    _, segment, token = cudnn.place_sinks(jnp.zeros(4), rows)
    assert segment.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4]]
    assert token.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0]]
    # a row with more segments than fit (which gives NaN) moves no other row
    many = jnp.stack([jnp.arange(8), jnp.array([1, 1, 1, 1, 2, 2, 2, 2])])
    assert cudnn.place_sinks(jnp.zeros(4), many).segment[1].tolist() == [4, 4, 4, 4, 5, 5, 5, 5]


@pytest.mark.usefixtures('four_segments')
def test_joined_offsets_of_rows_stand_beside_their_lengths():
    # as the module that calls cuDNN joins them: lengths without -1, and offsets from the first row on, without -1
    rows = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0], [5, 5, 5, 5, 5, 5, 5, 0]])
    lengths, offsets, _ = (np.asarray(x) for x in cudnn.packed_offsets(rows))
    from_first = np.where(offsets >= 0, offsets + np.array([[0], [8]]), -1)
    starts, sizes = from_first[from_first >= 0], lengths[lengths >= 0]
    assert starts.tolist() == [0, 3, 6, 8, 15]
    assert (starts + sizes).tolist() == [3, 6, 8, 15, 16]


@pytest.fixture
def pretended_device(monkeypatch):
    module = cudnn.cudnn_module()
    monkeypatch.setattr(module, 'check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(module, 'check_compute_capability', lambda capability: True)


def program(policy, window=None, sinks=False, rows=2, tokens=128, heads=4, key_heads=2, dim=64):
    ids = jnp.ones((rows, tokens), jnp.int32)

    def loss(q, k, v, *sinks):
        out = cudnn.attend_rows(q, k, v, RowIds(ids, ids, None, 0), Setting(0.125, window), *sinks)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    arrays = [jax.ShapeDtypeStruct((rows, tokens, n, dim), jnp.bfloat16) for n in (heads, key_heads, key_heads)]
    arrays += [jax.ShapeDtypeStruct((heads,), jnp.float32)] * sinks
    gradient = jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=range(len(arrays)))
    return jax.jit(gradient).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.usefixtures('pretended_device')
def test_it_lowers_to_packed_causal_calls_with_the_scale_and_repeated_keys():
    policies = jax.checkpoint_policies
    text = program(policies.save_only_these_names('attention_output', 'attention_lse'))
    calls = re.findall(r'custom_call @(__cudnn\S*?)\(.*', text)
    assert calls == ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward']  # the forward pass once
    for setting in ('PADDING_CAUSAL', 'fmha_scale\\": 0.125', f'max_seg_per_batch\\": {cudnn.MAX_SEGMENTS}'):
        assert text.count(setting.replace('\\"', '\\22')) == 2, setting
    forward = next(line for line in text.splitlines() if '@__cudnn$fmhaSoftmax(' in line)
    operands = forward.split(' : (')[1].split(') ->')[0]
    key_heads = 4 if jax.__version_info__ < cudnn.GROUPED_KEYS_FROM else 2  # of 2, repeated for older versions
    queries, keys = (f'tensor<2x128x{heads}x64xbf16>' for heads in (4, key_heads))
    lengths, offsets = 'tensor<2x64xi32>', 'tensor<2x65xi32>'
    assert operands == ', '.join([queries, keys, keys] + [lengths] * 2 + [offsets] * 2)
    assert program(policies.nothing_saveable).count('@__cudnn$fmhaSoftmax(') == 2


@pytest.mark.usefixtures('pretended_device')
def test_sinks_and_windows_take_the_same_two_calls():
    text = program(jax.checkpoint_policies.save_only_these_names('attention_output', 'attention_lse'), 24, sinks=True)
    assert re.findall(r'custom_call @(__cudnn\S*?)\(', text) == ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward']
    assert text.count('sliding_window_length\\22: 24') == 2
    backward = next(line for line in text.splitlines() if '@__cudnn$fmhaSoftmaxBackward(' in line)
    assert 'tensor<128x4x128xf32>' in backward  # 2 rows of 64 segments, 4 heads, 128 tokens: with the sinks in its sums


def of_segments(lengths, offsets, tokens):
    """(segment in the list of all rows, place in it) of each token of rows end to end, as cuDNN reads its arguments."""
    rows = len(lengths)
    starts = np.sort(np.where(offsets >= 0, offsets + np.arange(rows)[:, None] * tokens, rows * tokens).ravel())
    segment = np.searchsorted(starts, np.arange(rows * tokens), side='right') - 1
    place = np.arange(rows * tokens) - starts[segment]
    assert (place < lengths[lengths >= 0][segment]).all()
    return segment, place


def scores_of(query, key, q_seqlen, q_offsets, scale, window):
    """float32 [H, all tokens, all tokens], -inf where not seen, and where the log-sum-exp of a token stands."""
    segment, place = of_segments(np.asarray(q_seqlen), np.asarray(q_offsets), query.shape[1])
    q, k = (x.reshape(-1, *x.shape[2:]) for x in (query, key))
    apart = place[:, None] - place
    seen = (segment[:, None] == segment) & (apart >= 0) & (apart < (window or query.shape[1]))
    scores = jnp.einsum('thd,shd->hts', q, k, precision='highest') * scale
    return jnp.where(seen, scores, -jnp.inf), (segment, slice(None), place)


def stand_in():
    """A module with cuDNN's interface. Its log-sum-exp is NaN where cuDNN's is undefined: behind segments' ends."""

    def forward(query, key, value, q_seqlen, q_offsets, scale, sliding_window_length):
        scores, where = scores_of(query, key, q_seqlen, q_offsets, scale, sliding_window_length)
        lse = jax.nn.logsumexp(scores, axis=-1)
        out = jnp.einsum('hts,shd->thd', jnp.exp(scores - lse[..., None]), value.reshape(-1, *value.shape[2:]))
        shape = q_seqlen.size, query.shape[2], query.shape[1]
        out = out.reshape(query.shape)
        saved = query, key, value, q_seqlen, q_offsets, jnp.full(shape, jnp.nan).at[where].set(lse.T), out
        return out, saved

    def backward(scale, sliding_window_length, res, grad_output):
        query, key, value, q_seqlen, q_offsets, activation, fwd_output = res
        scores, where = scores_of(query, key, q_seqlen, q_offsets, scale, sliding_window_length)
        weights = jnp.exp(scores - activation[where].T[..., None])
        q, k, v, out, d_out = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value, fwd_output, grad_output))
        d_scores = weights * (jnp.einsum('thd,shd->hts', d_out, v) - (d_out * out).sum(axis=-1).T[..., None]) * scale
        d_q, d_k = jnp.einsum('hts,shd->thd', d_scores, k), jnp.einsum('hts,thd->shd', d_scores, q)
        d_v = jnp.einsum('hts,thd->shd', weights, d_out)
        return tuple(x.reshape(query.shape) for x in (d_q, d_k, d_v))

    return types.SimpleNamespace(
        _dot_product_attention_fwd_rule=forward, _dot_product_attention_bwd_rule=backward,
        MaskType=cudnn.cudnn_module().MaskType, AttentionLayout=cudnn.cudnn_module().AttentionLayout,
        check_cudnn_version=lambda: 91000,
    )  # fmt: skip


@pytest.mark.parametrize('window', [None, 13])
def test_sinks_are_one_more_score_of_each_head_around_what_cudnn_computes(monkeypatch, window):
    module, sinks = stand_in(), np.array([-3.0, 0.0, 2.0, 9.0], np.float32)
    monkeypatch.setattr(cudnn, 'cudnn_module', lambda: module)
    monkeypatch.setattr(cudnn, 'GROUPED_KEYS_FROM', (99,))  # the stand-in takes repeated keys
    rows = [PACKED, ids(20, 90, 7)]
    segment = jnp.stack([row[0] for row in rows])
    q, k, v, d_out = (np.stack(x) for x in zip([*tensors(), cotangent()], [*tensors(5), -cotangent()], strict=True))

    def attend(q, k, v, sinks):
        return cudnn.attend_rows(q, k, v, RowIds(segment, segment, None, 0), Setting(SCALE, window), sinks)

    out, pull = jax.vjp(attend, *(jnp.asarray(x) for x in (q, k, v, sinks)))
    found = [np.asarray(x, np.float64) for x in (out, *pull(jnp.asarray(d_out)))]
    one_by_one = [
        by_loops(q[i], k[i], v[i], seen_by(*row, PLACES, window), d_out[i], sinks) for i, row in enumerate(rows)
    ]
    expected = [np.stack(x) for x in zip(*one_by_one, strict=True)]
    expected[4] = expected[4].sum(axis=0)  # over the rows
    for ours, loops in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, loops, atol=1e-6 * np.abs(loops).max())


def test_more_segments_than_fit_are_nan_and_not_wrong(monkeypatch):
    monkeypatch.setattr(cudnn, 'MAX_SEGMENTS', 2)
    monkeypatch.setattr(cudnn, 'attention', lambda q, *rest: q)
    ids = jnp.array([[1, 1, 2, 2], [1, 2, 3, 3]])
    q = jnp.ones((2, 4, 1, 8))
    out = cudnn.attend_rows(q, q, q, RowIds(ids, ids, None, 0), Setting(1.0, None))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
