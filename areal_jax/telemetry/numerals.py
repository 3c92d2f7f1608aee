"""Numbers as text for people."""

from __future__ import annotations

import math


def format_number(value: float | None) -> str:
    """Three significant digits, whole numbers and those above 100 without decimals; '-' for None."""
    if value is None:
        return '-'
    return f'{value:.0f}' if float(value).is_integer() or abs(value) >= 100 else f'{value:.3g}'


def format_percent(share: float | None) -> str:
    """'47%'; '-' for None."""
    return '-' if share is None else f'{share:.0%}'


def format_duration(seconds: float | None) -> str:
    """'45s', '1m40s', '2h05m'; '-' for None."""
    if seconds is None or not math.isfinite(seconds):
        return '-'
    whole = max(0, round(seconds))
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m{whole % 60:02}s'
    return f'{whole // 3600}h{whole % 3600 // 60:02}m'


def format_bytes(size: int) -> str:
    """'47.2 MB', '1.5 GB'."""
    return f'{size / 1e9:.4g} GB' if size >= 1e8 else f'{size / 1e6:.3g} MB'


def format_gibibytes(size: int) -> str:
    """'7.92 GiB'."""
    return f'{size / 2**30:.2f} GiB'
