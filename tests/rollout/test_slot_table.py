"""Slots and the queue before them."""

import dataclasses

import numpy as np

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.events import EventLog
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.slot_table import SlotTable
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


def test_free_slots_are_filled_first_come_first_served_and_the_lowest_first():
    table, requests = table_of(2, 4)
    assert [(slot, one.request.sample) for slot, one in table.fill()] == [(0, 0), (1, 1)]
    table.free(requests[0])
    assert [(slot, one.request.sample) for slot, one in table.fill()] == [(0, 2)]
    assert (samples(table.open_requests()), table.waiting) == ([2, 1, 3], 1)
    assert table.take_dead() == []  # the backend has stopped by itself


def test_a_removed_request_leaves_a_slot_that_must_be_released_once():
    table, requests = table_of(2, 4)
    table.fill()
    assert table.remove(requests[1].request_id) is requests[1]
    assert table.remove(requests[3].request_id) is requests[3]  # it waited: no slot
    assert table.remove(requests[3].request_id) is None
    assert samples(table.open_requests()) == [0, 2]
    assert (table.take_dead(), table.take_dead()) == ([1], [])


def test_requeued_requests_come_first_in_slot_order():
    table, requests = table_of(3, 5)
    table.fill()
    table.remove(requests[1].request_id)
    table.fill()
    table.requeue()
    assert samples(table.open_requests()) == [0, 3, 2, 4]  # slots 0, 1, 2 and the one that waited
    assert table.take_dead() == [0, 1, 2]
    assert [(slot, one.request.sample) for slot, one in table.fill()] == [(0, 0), (1, 3), (2, 2)]


def test_a_prefix_is_awaited_while_a_request_waits_for_it():
    table, requests = table_of(2, 3)
    other = running(0, draw=7)
    table.add(other)
    assert table.is_awaited(requests[0].prefix_key)
    table.fill()
    assert table.is_awaited(requests[0].prefix_key)  # sample 2
    table.remove(requests[2].request_id)
    assert not table.is_awaited(requests[0].prefix_key)
    assert table.is_awaited(other.prefix_key)
    table.requeue()
    assert table.is_awaited(requests[0].prefix_key)


def test_slots_hold_requests_of_one_version_at_a_time():
    table = SlotTable(3)
    requests = [pinned(sample, version) for sample, version in enumerate((2, 2, 4, 2, 4))]
    for one in requests:
        table.add(one)
    assert (table.version(), samples(r for _, r in table.fill())) == (2, [0, 1])  # 2 is next, and of another version
    table.free(requests[0])
    assert (table.version(), table.fill()) == (2, [])
    table.free(requests[1])
    assert (table.version(), samples(r for _, r in table.fill())) == (4, [2])
    table.free(requests[2])
    assert (table.version(), samples(r for _, r in table.fill())) == (2, [3])
    assert not table.is_empty
    table.free(requests[3])
    table.fill()
    table.free(requests[4])
    assert table.is_empty
