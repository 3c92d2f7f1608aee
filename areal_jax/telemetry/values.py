"""The values of metrics: numbers, lists of counts, None for what was not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Value = float | Sequence[float] | None
Line = Mapping[str, Value]  # metrics of one update, by telemetry.names


def number(line: Line, name: str) -> float | None:
    """The metric, None where it is missing or was not finite; raises TypeError for a list."""
    value = line.get(name)
    if isinstance(value, Sequence):
        raise TypeError(f'the metric {name!r} is {value!r}, where a number is expected')
    return value


def counts(line: Line, name: str) -> Sequence[float]:
    """The metric that is a list of counts; empty where it is missing. Raises TypeError for a number."""
    value = line.get(name)
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise TypeError(f'the metric {name!r} is {value!r}, where a list is expected')
    return value
