from __future__ import annotations

import pytest

from areal_jax.telemetry.progress import format_duration, format_number, format_percent


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (None, '-'),
        (40.0, '40'),
        (7, '7'),
        (1234567, '1234567'),
        (1234.5, '1234'),
        (12.345, '12.3'),
        (4.5e-8, '4.5e-08'),
    ],
)
def test_numbers(value: float | None, text: str):
    assert format_number(value) == text


def test_percent():
    assert (format_percent(0.475), format_percent(None)) == ('48%', '-')


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(0, '0s'), (59.4, '59s'), (59.6, '1m00s'), (100, '1m40s'), (7500, '2h05m'), (-1, '0s'), (float('inf'), '-')],
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text
