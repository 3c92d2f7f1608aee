"""The cuDNN backend as far as it can be seen without the device: its offsets, and the call that it lowers to."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import cudnn
from areal_jax.models.attention.flash import RowIds, Setting


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


def program(policy, rows=2, tokens=128, heads=4, key_heads=2, dim=64):
    ids = jnp.ones((rows, tokens), jnp.int32)

    def loss(q, k, v):
        out = cudnn.attend_rows(q, k, v, RowIds(ids, ids, None, 0), Setting(0.125, None))
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    arrays = [jax.ShapeDtypeStruct((rows, tokens, n, dim), jnp.bfloat16) for n in (heads, key_heads, key_heads)]
    gradient = jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2))
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


def test_more_segments_than_fit_are_nan_and_not_wrong(monkeypatch):
    monkeypatch.setattr(cudnn, 'MAX_SEGMENTS', 2)
    monkeypatch.setattr(cudnn, 'attention', lambda q, *rest: q)
    ids = jnp.array([[1, 1, 2, 2], [1, 2, 3, 3]])
    q = jnp.ones((2, 4, 1, 8))
    out = cudnn.attend_rows(q, q, q, RowIds(ids, ids, None, 0), Setting(1.0, None))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
