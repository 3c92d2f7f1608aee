"""benchmarks/roofline.py: prices of decoding, prefill and transfer against numbers worked out by hand."""

import dataclasses

import pytest

from areal_jax.types import Work
from benchmarks.roofline import H800, R1_DISTILL_1_5B, Reached, Roofline

PEAK = Roofline(H800, R1_DISTILL_1_5B, Reached(1.0, 1.0))


@pytest.mark.parametrize(('positions', 'milliseconds'), [(4500, 10.78), (7100, 16.48)])
def test_a_step_of_256_rows_reads_weights_and_cache(positions, milliseconds):
    assert 1e3 * PEAK.step_s(256, 256 * positions) == pytest.approx(milliseconds, abs=0.01)


def test_a_step_that_computes_more_than_it_reads_takes_what_it_computes():
    assert PEAK.step_s(4096, 0) == pytest.approx(2 * 1.54e9 * 4096 / 989e12)


def test_the_rebuild_of_a_full_engine():
    """256 answers of 6,640 tokens whose tokens see 5,900 positions each, at half of the flops."""
    half = dataclasses.replace(PEAK, reached=Reached(1.0, 0.5))
    tokens = 256 * 6640
    assert half.prefill_s(tokens, tokens * 5900) == pytest.approx(12.5, abs=0.05)


def test_the_price_of_a_dispatch_is_that_of_its_steps():
    prices = PEAK.prices()
    work = Work('decode', 16, size={'rows': 4, 'positions': 400})
    assert prices['decode'](work) == pytest.approx(sum(PEAK.step_s(4, 400 + 4 * step) for step in range(16)))
    assert prices['load'](Work('load')) == pytest.approx(2 * 1.78e9 / 50e9)


def test_an_overhead_is_paid_in_every_step():
    slow = dataclasses.replace(PEAK, step_overhead_s=0.002)
    assert slow.step_s(1, 10) - PEAK.step_s(1, 10) == pytest.approx(0.002)
