"""The speed of a server: tokens of an open request a second, over a time that holds its pauses."""

from __future__ import annotations

import pytest

from areal_jax.rollout.servers.speed import SpeedMeter


def generate(meter: SpeedMeter, requests: int, start_s: float, seconds: float, every_s: float, rate: float) -> float:
    """Tokens at `rate` a second and request, delivered every `every_s`; returns when it ends."""
    now_s = start_s
    while now_s < start_s + seconds:
        now_s += every_s
        meter.note_generated(round(requests * rate * every_s), now_s)
    return now_s


def test_the_time_that_requests_wait_counts():
    meter = SpeedMeter()
    meter.note_requests(2, 0.0)
    assert meter.tokens_per_s() is None
    meter.note_generated(100, 5.0)
    assert meter.tokens_per_s() == 10.0
    meter.note_requests(2, 5.0)
    meter.note_generated(100, 10.0)
    assert meter.tokens_per_s() == pytest.approx(200 / 30)


def test_a_server_that_rebuilds_its_cache_is_not_slow():
    """256 requests at 30 tokens a second; 8 seconds without tokens, as after new weights, are a part of its time."""
    meter = SpeedMeter()
    meter.note_requests(256, 0.0)
    now_s = generate(meter, 256, 0.0, 200.0, 1.0, 30.0)
    assert meter.tokens_per_s() == pytest.approx(30.0, rel=1e-3)
    meter.note_requests(1, now_s + 8.0)
    speed = meter.tokens_per_s()
    assert speed is not None
    assert speed > 0.7 * 30.0


def test_a_server_that_gets_slow_is_known_for_it():
    meter = SpeedMeter()
    meter.note_requests(16, 0.0)
    now_s = generate(meter, 16, 0.0, 200.0, 1.0, 30.0)
    now_s = generate(meter, 16, now_s, 400.0, 1.0, 10.0)
    assert meter.tokens_per_s() == pytest.approx(10.0, rel=0.1)
