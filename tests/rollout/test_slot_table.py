"""Slots and the queue before them."""

import dataclasses

import numpy as np

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.scheduler import SlotTable
from areal_jax.types import GenerationRequest, SamplingParams


def running(sample, draw=0):
    request = GenerationRequest(draw, sample, 0, np.array([draw, 2], np.int32), SamplingParams(9, 1.0, 0, 1.0, ()))
    return RunningRequest(request, VirtualClock({}, EventLog(), {}), 'engine/0', 11)


def pinned(sample, version):
    one = running(sample)
    one.request = dataclasses.replace(one.request, version=version)
    return one


def samples(requests):
    return [one.request.sample for one in requests]


def table_of(slots, count):
    table, requests = SlotTable(slots), [running(sample) for sample in range(count)]
    for one in requests:
        table.add(one)
    return table, requests


def fill(table):
    """Admits all that can be; their samples."""
    entered = []
    while (one := table.next_waiting()) is not None:
        table.enter(one)
        entered.append(one.request.sample)
    return entered


def by_slot(table):
    return [one and one.request.sample for one in table.slots]


def test_free_slots_are_filled_first_come_first_served_and_the_lowest_first():
    table, requests = table_of(3, 5)
    assert (fill(table), by_slot(table)) == ([0, 1, 2], [0, 1, 2])
    table.leave(requests[2])
    table.leave(requests[0])
    assert (fill(table), by_slot(table)) == ([3, 4], [3, 1, 4])
    assert (samples(table.open_requests()), table.taken, table.waiting) == ([3, 1, 4], 3, 0)
    assert (samples(table.admitted()), table.youngest()) == ([1, 3, 4], requests[4])


def test_a_request_is_removed_wherever_it_is():
    table, requests = table_of(2, 4)
    fill(table)
    assert table.remove(requests[1].request_id) is requests[1]
    assert table.remove(requests[3].request_id) is requests[3]  # it waited
    assert table.remove(requests[3].request_id) is None
    assert (samples(table.open_requests()), by_slot(table)) == ([0, 2], [0, None])
    assert (table.has_slot(requests[0]), table.has_slot(requests[2])) == (True, False)


def test_requeued_requests_come_first_in_slot_order():
    table, requests = table_of(3, 5)
    fill(table)
    table.remove(requests[1].request_id)
    fill(table)
    table.requeue()
    assert samples(table.open_requests()) == [0, 3, 2, 4]  # slots 0, 1, 2 and the one that waited
    assert (fill(table), by_slot(table)) == ([0, 3, 2], [0, 3, 2])


def test_a_request_that_gives_its_slot_up_is_the_next_to_get_one():
    table, _ = table_of(3, 5)
    fill(table)
    for expected in (2, 1):
        assert table.youngest().request.sample == expected
        table.return_to_queue(table.youngest())
    assert samples(table.open_requests()) == [0, 1, 2, 3, 4]
    assert fill(table) == [1, 2]


def test_slots_hold_requests_of_one_version_at_a_time():
    table = SlotTable(3)
    requests = [pinned(sample, version) for sample, version in enumerate((2, 2, 4, 2, 4))]
    for one in requests:
        table.add(one)
    assert (table.version(), fill(table)) == (2, [0, 1])  # 2 is next, and of another version
    table.leave(requests[0])
    assert (table.version(), fill(table)) == (2, [])
    table.leave(requests[1])
    assert (table.version(), fill(table)) == (4, [2])
    table.leave(requests[2])
    assert (table.version(), fill(table)) == (2, [3])
    assert not table.is_empty
    table.leave(requests[3])
    fill(table)
    table.leave(requests[4])
    assert table.is_empty
