"""simulation/prices.py: prices against numbers worked out by hand."""

import dataclasses

import pytest

from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.simulation.prices import (
    H800,
    QWEN3_8B,
    R1_DISTILL_1_5B,
    R1_DISTILL_7B,
    ModelShape,
    Reached,
    Roofline,
    shape_of,
    step_overhead_s,
)
from areal_jax.types import Work

FULL = Reached(1.0, 1.0, 1.0)
PEAK = Roofline(H800, R1_DISTILL_1_5B, FULL)
PEAK_7B = Roofline(H800, R1_DISTILL_7B, FULL)
# 4 layers of 100 parameters in products, a head of 20; a step of one row of no context: 2 * 120 bytes
TOY = ModelShape('toy', 140, 120, 20, 1, 8, 4, 8)
MIXTURE = dataclasses.replace(TOY, product_parameters=180, expert_parameters=80, experts=4, experts_per_token=1)


@pytest.mark.parametrize(
    ('engine', 'rows', 'context', 'milliseconds', 'thousands_a_second'),
    [(PEAK, 256, 4500, 10.78, 23.7), (PEAK, 256, 7100, 16.48, 15.5), (PEAK_7B, 220, 4500, 21.17, 10.4)],
)
def test_a_step_of_many_rows_reads_weights_and_cache(engine, rows, context, milliseconds, thousands_a_second):
    step_s = engine.step_s(rows, rows * context)
    assert 1e3 * step_s == pytest.approx(milliseconds, abs=0.01)
    assert rows / step_s / 1e3 == pytest.approx(thousands_a_second, abs=0.05)


@pytest.mark.parametrize(('engine', 'slots'), [(PEAK, 530), (PEAK_7B, 220)])
def test_answers_of_4500_positions_that_fit(engine, slots):
    assert engine.cache_tokens() / 4500 == pytest.approx(slots, abs=0.5)


def test_a_step_that_computes_more_than_it_reads_takes_what_it_computes():
    products = R1_DISTILL_1_5B.product_parameters
    assert PEAK.step_s(4096, 0) == pytest.approx(2 * products * 4096 / 989e12)
    half = dataclasses.replace(PEAK, reached=Reached(1.0, 0.5))
    assert half.step_s(4096, 0) == pytest.approx(2 * PEAK.step_s(4096, 0))


def test_the_rebuild_of_a_full_engine():
    """256 answers of 6,640 tokens whose tokens see 5,900 positions each, at half of the flops."""
    half = dataclasses.replace(PEAK, reached=Reached(1.0, 0.5))
    tokens = 256 * 6640
    assert half.prefill_s(tokens, tokens * 5900) == pytest.approx(12.5, abs=0.05)


def test_the_price_of_a_dispatch_is_that_of_its_steps():
    prices = PEAK.prices()
    work = Work('decode', 16, size={'rows': 4, 'positions': 400})
    assert prices['decode']('engine/0', work) == pytest.approx(
        sum(PEAK.step_s(4, 400 + 4 * step) for step in range(16))
    )
    assert prices['load']('engine/0', Work('load')) == pytest.approx(2 * R1_DISTILL_1_5B.parameters / 50e9)


def test_an_overhead_is_paid_in_every_step():
    slow = dataclasses.replace(PEAK, step_overhead_s=0.002)
    assert slow.step_s(1, 10) - PEAK.step_s(1, 10) == pytest.approx(0.002)


def test_a_step_of_one_row_with_the_published_overhead_reaches_the_published_share():
    """Of 8 billion parameters: 27% of the bandwidth, times 1.26."""
    reached = Reached(bandwidth=0.6)
    engine = Roofline(H800, QWEN3_8B, reached, step_overhead_s=step_overhead_s(H800, QWEN3_8B, reached))
    ideal_s = 2 * QWEN3_8B.product_parameters / H800.bytes_s
    assert ideal_s / engine.step_s(1, 0) == pytest.approx(0.27 * 1.26)


def test_devices_divide_a_step_and_add_its_all_reduces():
    """28 layers, 2 each, of 256 x 1536 numbers of 2 bytes; a ring of 4 sends 3/2 of them, at 200 GB/s one way."""
    four = dataclasses.replace(PEAK, devices=4)
    reduced_s = 28 * 2 * 256 * 1536 * 2 * 1.5 / 200e9
    assert four.step_s(256, 256 * 4500) == pytest.approx(PEAK.step_s(256, 256 * 4500) / 4 + reduced_s)
    tokens_s = 28 * 2 * 1000 * 1536 * 2 * 1.5 / 200e9
    assert four.prefill_s(1000, 500_000) == pytest.approx(PEAK.prefill_s(1000, 500_000) / 4 + tokens_s)
    assert four.cache_tokens() - PEAK.cache_tokens() == pytest.approx(3 * 0.9 * 80e9 / 28672, abs=1)


def test_layers_with_a_window_hold_one_and_a_half_windows_of_a_row():
    """Two of three layers have a window of 16: of 96 positions they hold 24, and all of rows up to 24."""
    config = ModelConfig(64, 16, 3, 2, 1, 8, 16, 1e4, kinds=(LayerKind(16), LayerKind(), LayerKind(16)))
    shape = shape_of('windows', config)
    assert (shape.window, shape.kv_bytes, shape.window_kv_bytes) == (16, 3 * 2 * 8 * 2, 2 * 2 * 8 * 2)
    assert shape.held_kv_bytes(96) == 32 + 64 * 24 / 96
    assert shape.held_kv_bytes(24) == shape.held_kv_bytes(0) == shape.kv_bytes
    engine = Roofline(H800, shape)
    assert engine.cache_tokens(96) == pytest.approx(2 * engine.cache_tokens(), abs=2)
    assert PEAK.cache_tokens(4500) == PEAK.cache_tokens()


def test_experts_are_read_where_a_row_reaches_them_and_computed_for_each_row():
    """100 parameters of layers and head, 4 experts of 20: one row reads 1 of them, two rows 1.75 on average."""
    engine = Roofline(dataclasses.replace(H800, bytes_s=1.0, flops=1e9), MIXTURE, FULL)
    assert engine.step_s(1, 0) == pytest.approx(2 * (100 + 20))
    assert engine.step_s(2, 0) == pytest.approx(2 * (100 + 35))
    computing = Roofline(dataclasses.replace(H800, bytes_s=1e9, flops=1.0), MIXTURE, FULL)
    assert computing.step_s(2, 0) == pytest.approx(2 * 2 * (100 + 20))
    assert computing.prefill_s(2, 0) == pytest.approx(2 * 2 * (100 + 20 - 20))


def test_training_pays_products_and_attention_in_every_pass():
    """One token at position 10 of the toy: 2 * 120 + 4 * 1 * 8 * 10 flops a pass."""
    learner = Roofline(dataclasses.replace(H800, flops=1.0), TOY, Reached(mfu=0.4), devices=5)
    assert learner.train_s(1, 10, passes=4) == pytest.approx(4 * (240 + 320) / (0.4 * 5))


def test_the_row_of_128_gpus_needs_196_teraflops_of_each_that_trains():
    """8,192 answers of 9,670 tokens in 213 s on 32 of them: four forward passes, 6,642 positions a token on average."""
    tokens = 8192 * 9670
    learner = Roofline(H800, R1_DISTILL_1_5B, FULL, devices=32)
    assert 989 * learner.train_s(tokens, tokens * 6642, passes=4) / 213 == pytest.approx(196, abs=1)


def test_the_optimizer_touches_its_state_once():
    assert PEAK_7B.optimizer_s() == pytest.approx(28 * R1_DISTILL_7B.parameters / 3.35e12)
    assert dataclasses.replace(PEAK_7B, devices=8).optimizer_s() == pytest.approx(PEAK_7B.optimizer_s() / 8)


@pytest.mark.parametrize(('receiver', 'senders', 'networks'), [(1, 32, 1), (4, 32, 4), (8, 2, 2)])
def test_a_version_goes_as_fast_as_the_slower_side(receiver, senders, networks):
    transfer_s = 2 * R1_DISTILL_1_5B.parameters / 50e9
    assert PEAK.publication_s(receiver, senders) == pytest.approx(transfer_s / networks)
    assert PEAK.publication_s(receiver, senders, changed=0.02) == pytest.approx(0.02 * transfer_s / networks)
