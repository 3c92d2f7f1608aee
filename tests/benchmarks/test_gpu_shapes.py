"""The arithmetic of the GPU benchmarks: operations, bytes and peaks."""

import dataclasses

import pytest

from areal_jax.models.decoder import Decoder
from benchmarks.gpu_parts import shapes
from benchmarks.gpu_parts.shapes import SHAPES, DecodeCase, train_case

# V 10, d 2, 1 layer, 1 head of 4 and as many keys, F 3
SMALL = dataclasses.replace(
    shapes.TINY, vocab_size=10, d_model=2, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, d_ff=3
)


def test_operations_by_hand():
    # a layer has q, k, v, o of 2 * 4 and gate, up, down of 2 * 3: 32 + 18 = 50; 6 * 50 for each of 3 + 2 tokens
    # the head 10 * 2: 6 * 20 for each of 4 loss tokens; pairs 1 + 2 + 3 and 1 + 2, 12 * 4 each
    assert shapes.train_flops(SMALL, [3, 2], 4) == 6 * 50 * 5 + 6 * 20 * 4 + 12 * 4 * 9
    assert shapes.attention_flops(SMALL, [3, 2]) == 12 * 4 * 9


@pytest.mark.parametrize(('name', 'parameters'), [('0.5b', 494e6), ('1.5b', 1.544e9), ('3b', 3.086e9)])
def test_shapes_have_the_published_sizes(name, parameters):
    assert Decoder(SHAPES[name]).parameter_count() == pytest.approx(parameters, rel=1e-3)


def test_bytes_of_a_decode_step_by_hand():
    # 5 slots that see 3 + 1 / 2 positions; keys and values of a token: 2 * 1 layer * 1 head * 4 * 2 bytes = 16
    case = DecodeCase(SMALL, slots=5, context_tokens=8, prompt_tokens=3, new_tokens=2, decode_steps=1, prefill_tokens=8)
    weights = 2 * Decoder(SMALL).parameter_count()
    assert shapes.mean_positions(case) == 3.5
    assert shapes.decode_bytes(case, 3.5) == weights + 5 * 3.5 * 16


def test_the_rows_are_full():
    for name in SHAPES:
        case = train_case(name, tiny=False)
        work = case.workload
        inputs = work.answer_tokens + work.groups * work.group_size * (work.prompt_tokens - 1)
        assert 0.99 * case.row_tokens < inputs <= case.row_tokens
        assert case.row_loss_tokens >= work.answer_tokens


def test_remat_is_what_fits_the_memory():
    large, middle = train_case('3b', tiny=False), train_case('1.5b', tiny=False)
    kept = {remat: shapes.activation_bytes(large.model, remat, 16_384) for remat in ('dots', 'attention', 'full')}
    assert kept['dots'] > kept['attention'] > kept['full']
    # 3b keeps 39 GB beside 43 GB of state, 1.5b 24 beside 31; H100 has 80 GB, H200 141, of which jax gets 92%
    h100, h200 = int(0.92 * 80e9), int(0.92 * 141e9)
    chosen = {
        (case.model.n_layers, limit): shapes.choose_remat(case, limit)
        for case in (large, middle)
        for limit in (h100, h200)
    }
    assert chosen == {(36, h100): 'attention', (36, h200): 'dots', (28, h100): 'dots', (28, h200): 'dots'}
    assert shapes.choose_remat(large, int(40e9)) == 'full'
    assert shapes.choose_remat(large, None) == 'dots'


@pytest.mark.parametrize(
    ('kind', 'bandwidth'),
    [('NVIDIA H100 80GB HBM3', 3.35e12), ('NVIDIA H100 PCIe', 2.0e12), ('NVIDIA H200', 4.8e12), ('cpu', None)],
)
def test_peaks_are_found_by_device_kind(kind, bandwidth):
    peak = shapes.find_peak(kind)
    assert (peak and peak.bytes_per_second) == bandwidth
