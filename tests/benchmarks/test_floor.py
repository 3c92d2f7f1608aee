"""The floor under a table: which steps a schedule has, and what bounds each."""

import numpy as np
import pytest

from benchmarks.floor import Machine, Step, Weights, prefill_seconds, schedule, step_seconds
from benchmarks.workload import Requests

WEIGHTS = Weights(layers=90.0, head=10.0, kv_bytes=8.0)  # 400 bytes


def requests(*lengths: tuple[int, int]) -> Requests:
    return Requests(tuple(np.zeros(p, np.int32) for p, _ in lengths), tuple(n for _, n in lengths))


def test_a_request_takes_the_slot_that_became_free():
    steps = schedule(requests((5, 2), (7, 4), (4, 1), (2, 3)), slots=2)
    assert steps == [Step(2, 6 + 8), Step(2, 9 + 3), Step(2, 10 + 4)]
    assert sum(step.rows for step in steps) == sum(n - 1 for n in (2, 4, 1, 3))


def test_a_step_is_bound_by_the_bytes_or_by_the_products():
    machine = Machine(1, flops=1000.0, bytes_s=400.0)
    assert step_seconds(Step(1, 50), WEIGHTS, machine) == pytest.approx((400 + 400) / 400)
    assert step_seconds(Step(30, 50), WEIGHTS, machine) == pytest.approx(2 * 100 * 30 / 1000)


def test_the_head_is_multiplied_with_the_last_token_of_a_prompt():
    machine = Machine(1, flops=1000.0, bytes_s=1e9)
    assert prefill_seconds([6, 4], WEIGHTS, machine) == pytest.approx((2 * 90 * 10 + 2 * 10 * 2) / 1000)
