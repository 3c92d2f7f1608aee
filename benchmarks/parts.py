"""Rows of a table that are measured by themselves, and the exit code of those that were."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.options import Row, show


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of the table.

    Args:
      measure: from the options to value, met, and what else there is to say; raises UserError where it cannot run.
    """

    what: str
    bar: str
    measure: Callable[[Any], Row]


def measure_part(name: str, part: Part, options: Any) -> Row:
    """The row of a part, shown when it is done; `cannot_run` says why it has no numbers."""
    began = time.monotonic()
    row: Row = {'part': name, 'what': part.what, 'bar': part.bar}
    try:
        row |= part.measure(options)
    except UserError as error:
        row |= {'met': False, 'cannot_run': str(error)}
    row['seconds'] = time.monotonic() - began
    show(row)
    return row


def judge(rows: Sequence[Row]) -> int:
    """The exit code."""
    if any(not row['met'] and 'cannot_run' not in row for row in rows):
        return 1
    return 2 if any('cannot_run' in row for row in rows) else 0
