"""A version over sockets, by hand: what its bytes take on links, on hosts and on devices."""

import dataclasses

import pytest

from areal_jax.simulation.stream_prices import StreamCosts, StreamedVersion

COSTS = StreamCosts(
    store_byte_s=1e-10, send_byte_s=3e-10, receive_byte_s=5e-10, frame_s=1e-5, copy_byte_s=1e-10, digest_byte_s=2e-10,
    device_bytes_s=25e9, latency_s=0.1,
)  # fmt: skip
# 64 GB from 16 processes, 4 GB each, to 32 engines on 4 devices of 1 TB/s; hosts have 10 GB/s
VERSION = StreamedVersion(64e9, 16, 32, 1, 4, 1e12, COSTS, 10e9)


def with_(**changes):
    return dataclasses.replace(VERSION, **changes)


def test_three_steps_follow_one_another():
    # 4 GB: 0.16 s from the device at 25 GB/s, 0.4 s into the buffer
    assert VERSION.prepare_s == pytest.approx(0.16 + 0.4)
    # a process sends 32 x 4 GB = 128 GB, 12.8 s; an engine's host receives 64 GB in half of that
    assert (VERSION.sent_bytes, VERSION.received_bytes) == (128e9, 64e9)
    assert VERSION.transfer_s == pytest.approx(12.8 + 0.1)
    # 64 GB: 6.4 s of copying, a quarter to each device 0.64 s, read there for its digest 0.016 s
    assert VERSION.load_s == pytest.approx(6.4 + 0.64 + 0.016)
    assert VERSION.late_s == pytest.approx(0.56 + 12.9 + 7.056)
    assert VERSION.host_digest_s == pytest.approx(12.8)


def test_the_slowest_link_decides():
    """Four engines on a host receive 256 GB there; 128 processes send 16 GB each; 61,035 frames of 1 MiB, 1 ms each."""
    assert with_(engines_of_host=4).transfer_s == pytest.approx(25.6 + 0.1)
    assert with_(processes=128).transfer_s == pytest.approx(6.4 + 0.1)
    slow = dataclasses.replace(COSTS, frame_s=1e-3)
    assert with_(costs=slow).transfer_s == pytest.approx(61.035 + 0.1, rel=1e-5)


def test_cores_are_busy_while_bytes_move():
    assert VERSION.sending_cores == pytest.approx(128 * 0.3 / 12.9)
    assert VERSION.receiving_cores == pytest.approx(64 * 0.5 / 12.9)
