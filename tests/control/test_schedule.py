from __future__ import annotations

import pytest

from areal_jax.control.schedule import parse_schedule


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


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'lag\(2\)' is not known; use natural, fixed\(k\)"):
        parse_schedule('lag(2)', seed=0)
