import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.control.gate import HeldTimes, StalenessGate


def gate(groups_per_update=4, eta=0.0, max_running=1000, buffer_capacity=1000, max_admitted=10**9):
    return StalenessGate(
        groups_per_update=groups_per_update, eta=eta, max_running=max_running, buffer_capacity=buffer_capacity,
        max_admitted=max_admitted,
    )  # fmt: skip


def admit_all(g):
    count = 0
    while g.is_open():
        g.admit()
        count += 1
    return count


@pytest.mark.parametrize(('eta', 'totals'), [(0, [4, 8, 12]), (1, [8, 12, 16]), (4, [20, 24, 28])])
def test_admissible_totals_of_equation_3(eta, totals):
    g = gate(eta=eta)
    seen = []
    for version in range(3):
        if version:
            g.publish(version)
        admit_all(g)
        seen.append(g.admitted)
    assert seen == totals


def test_hand_trace_with_a_bound_on_running():
    # B = 2, eta = 1, at most 3 running: capacity = min(3 - running, (v + 2) * 2 - N)
    g = gate(groups_per_update=2, eta=1, max_running=3)
    assert admit_all(g) == 3
    g.buffer()
    assert admit_all(g) == 1  # N = 4 = (0 + 2) * 2
    g.buffer()
    assert not g.is_open()  # 2 running, but N is at the bound
    g.consume(2)
    g.publish(1)
    assert admit_all(g) == 1  # 3 running
    g.drop_running()
    assert (g.admitted, g.running) == (4, 2)
    assert admit_all(g) == 1


def test_a_drop_before_the_batch_gives_its_place_back_and_a_filtered_group_does_not():
    g = gate(groups_per_update=1, eta=0)
    g.admit()
    g.buffer()
    g.drop_buffered()
    assert g.is_open()
    g.admit()
    g.buffer()
    g.consume(1)  # trained or filtered inside the batch: the place is used
    assert not g.is_open()
    g.publish(1)
    assert g.is_open()


def test_a_full_buffer_closes_admission_also_for_infinite_eta():
    g = gate(eta=math.inf, max_running=3, buffer_capacity=5)
    for _ in range(4):
        admit_all(g)
        while g.running:
            g.buffer()
    assert (g.buffered, g.running) == (5, 0)
    assert not g.is_open()
    with pytest.raises(RuntimeError, match=r'admission is closed.*buffered=5/5'):
        g.admit()


@given(
    st.integers(1, 5), st.integers(0, 4), st.integers(1, 9),
    st.lists(st.sampled_from(['admit', 'buffer', 'drop', 'batch']), max_size=200),
)  # fmt: skip
def test_the_bound_of_equation_3_holds_after_every_admission(groups_per_update, eta, max_running, actions):
    g = gate(groups_per_update, eta, max_running, buffer_capacity=10)
    for action in actions:
        if action == 'admit' and g.is_open():
            g.admit()
            assert math.floor((g.admitted - 1) / groups_per_update) <= g.version + eta
        elif action == 'buffer' and g.running:
            g.buffer()
        elif action == 'drop' and g.running:
            g.drop_running()
        elif action == 'batch' and g.buffered >= groups_per_update:
            g.consume(groups_per_update)
            g.publish(g.version + 1)
        assert 0 <= g.running <= max_running
        assert 0 <= g.buffered <= 10


def test_a_closed_gate_names_the_bound():
    g = gate(groups_per_update=2, eta=1, max_running=3, buffer_capacity=4, max_admitted=7)
    assert (admit_all(g), g.closed_by()) == (3, 'max_running_groups')
    g.buffer()
    assert (admit_all(g), g.closed_by()) == (1, 'eta')  # N = 4 = (0 + 2) * 2; the buffer is full too
    g.publish(1)
    assert g.closed_by() == 'max_running_groups'
    g.buffer()
    assert g.closed_by() == 'buffer_capacity'  # 2 running + 2 buffered
    g.consume(2)
    g.buffer()
    g.buffer()
    g.publish(2)
    g.publish(3)
    assert (admit_all(g), g.closed_by()) == (2, 'buffer_capacity')
    g.consume(2)
    assert (admit_all(g), g.closed_by()) == (1, 'steps')
    assert not g.is_open()


def test_held_times_by_hand():
    # closed by eta 1..4, open 4..6, by max_running_groups 6..7, by eta 7..10, taken at 9
    held = HeldTimes()
    for bound, now in (('eta', 1.0), (None, 4.0), ('max_running_groups', 6.0), ('eta', 7.0)):
        held.note(bound, now)
    assert held.take(9.0) == {'eta': 5.0, 'max_running_groups': 1.0}
    later = HeldTimes()
    later.restore(held.state(9.5))
    assert later.take(10.0) == {'eta': 1.0}
    assert later.take(10.0) == {}


def test_weighted_held_times_by_hand():
    # eta holds 3 slots idle 1..4, 1 of them 4..6, none 6..7; admission open 7..8; the buffer 2 from 8; saved at 9
    idle = HeldTimes()
    notes = (('eta', 1.0, 3), ('eta', 4.0, 1), ('eta', 6.0, 0), (None, 7.0, 5), ('buffer_capacity', 8.0, 2))
    for bound, now, slots in notes:
        idle.note(bound, now, slots)
    later = HeldTimes()
    later.restore(idle.state(9.0))
    assert later.take(9.5) == {'eta': 11.0, 'buffer_capacity': 3.0}
