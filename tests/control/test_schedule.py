from __future__ import annotations

import pytest

from areal_jax.control.lock_step import VersionRing, parse_schedule


@pytest.mark.parametrize('content', ['1 two', '1\n-1\n', '0.5', ''])
def test_a_trace_holds_integers(tmp_path, content):
    (tmp_path / 'delays').write_text(content)
    with pytest.raises(ValueError, match=r'staleness.schedule=.*integers >= 0'):
        parse_schedule(f'trace({tmp_path}/delays)', seed=0)


def test_a_trace_repeats_and_names_its_longest_delay(tmp_path):
    (tmp_path / 'delays').write_text('0 3\n1')
    schedule = parse_schedule(f'trace({tmp_path}/delays)', seed=0)
    assert schedule is not None
    assert [schedule.delay(update) for update in range(5)] == [0, 3, 1, 0, 3]
    assert schedule.longest == 3


@pytest.mark.parametrize(('period', 'versions'), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 0, 0, 3, 3, 3])])
def test_engines_that_synchronise_every_l_updates_have_the_delays_0_to_l_minus_1_in_turn(period, versions):
    schedule = parse_schedule(f'every({period})', seed=0)
    assert schedule is not None
    assert [update - schedule.delay(update) for update in range(6)] == versions
    assert schedule.longest == period - 1


@pytest.mark.parametrize(
    ('text', 'needed'),
    [
        ('fixed(2)', [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]),  # update 5 of version 4 asks for 2 + 1
        ('every(3)', [{0}, {0, 1}, {0, 2}, {3}, {3, 4}]),  # update 5 asks for 3: the newest, and one behind it
    ],
)
def test_the_ring_holds_what_a_later_batch_asks_for(text, needed):
    schedule = parse_schedule(text, seed=0)
    assert schedule is not None
    ring = VersionRing(schedule, copy=lambda published: {})
    assert [ring.needed(version) for version in range(5)] == needed


@pytest.mark.parametrize('text', ['every(0)', 'every(-1)', 'every(x)'])
def test_a_period_is_at_least_1(text):
    with pytest.raises(ValueError, match=r'every\(.*is not known; use natural, fixed\(k\), every\(L\)'):
        parse_schedule(text, seed=0)


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'lag\(2\)' is not known; use natural, fixed\(k\)"):
        parse_schedule('lag(2)', seed=0)
