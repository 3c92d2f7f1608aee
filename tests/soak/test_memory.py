"""The slope of memory: Theil and Sen's over medians of windows."""

import pytest

from tests.soak.memory import MemoryTrack, slope, window_medians


def test_one_wild_point_does_not_move_the_slope():
    points = [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (3.0, 600.0), (4.0, 8.0)]
    assert slope(points) == 2.0
    assert slope(points[:1]) is None


def test_windows_have_the_median_of_their_samples():
    assert window_medians([(1.0, 5.0), (2.0, 900.0), (3.0, 6.0), (31.0, 7.0)]) == [(15.0, 6.0), (45.0, 7.0)]


def test_growth_is_that_of_processes_that_live_at_the_end():
    track = MemoryTrack()
    for second in range(600):
        track.add('steady', second, 1e8 + 1e5 * (second % 7))
        track.add('leaks', second, 1e8 + 50e3 * second)
        if second < 100:
            track.add('dead', second, 1e8 * second)
    found = track.megabytes_a_minute(300.0)
    assert found.keys() == {'steady', 'leaks'}
    assert found['steady'] == pytest.approx(0.0, abs=0.1)
    assert found['leaks'] == pytest.approx(3.0)
