"""benchmarks/admission.py: its answers have the lengths that were drawn, and groups by need fill the slots."""

import math

from benchmarks.admission import SMALL, simulate


def test_groups_by_need_fill_the_slots_that_a_fixed_number_leaves_idle():
    by_need, fixed = (simulate(SMALL, groups, seed=0) for groups in (math.inf, SMALL.engines * SMALL.slots // 4))
    assert by_need['occupancy'] > 0.9 > fixed['occupancy']
    assert by_need['tokens_s'] > 1.2 * fixed['tokens_s']
    assert fixed['idle/max_running_groups'] > 0.2
    assert 'idle/slots' not in by_need  # where the slots are full none is idle
