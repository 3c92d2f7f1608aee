from __future__ import annotations

import pytest

from areal_jax.telemetry.metrics import counts, number

LINE = {'loss': 0.5, 'ages': [3, 1], 'none': None, 'step': 2}


def test_a_metric_that_is_missing_or_not_finite_is_none_or_empty():
    assert [number(LINE, name) for name in ('loss', 'step', 'none', 'other')] == [0.5, 2, None, None]
    assert [list(counts(LINE, name)) for name in ('ages', 'none', 'other')] == [[3, 1], [], []]


def test_a_list_is_no_number_and_a_number_no_list():
    with pytest.raises(TypeError, match=r"the metric 'ages' is \[3, 1\], where a number is expected"):
        number(LINE, 'ages')
    with pytest.raises(TypeError, match=r"the metric 'loss' is 0\.5, where a list is expected"):
        counts(LINE, 'loss')
