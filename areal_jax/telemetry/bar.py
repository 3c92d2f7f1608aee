"""A bar with the time left, at the bottom of a terminal. What is printed meanwhile appears above it.

There is no bar in a pipe, a file, a notebook, a terminal without cursor movement (TERM=dumb), or where CI is set.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from areal_jax.telemetry.progress import format_duration

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_AFTER_S = 0.5  # a part that is shorter gets no bar, which would flash
_PER_SECOND = 8
_MEGABYTE = 1e6


def can_show_bar(stream: TextIO) -> bool:
    """Whether a person looks at the stream, on a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get('TERM', 'dumb') != 'dumb' and not os.environ.get('CI')


class Bar:
    """Shows one part of the work after the other; where no bar can be shown, nothing.

    The cursor stays visible, and rests on an empty line below the bar: a process may end at any moment, and the shell
    goes on there.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self.is_possible = can_show_bar(self._stream)
        self._live: Live | None = None
        self._doing, self._began = '', 0.0
        self._done, self._total, self._unit, self._counted = 0.0, 0.0, '', 0.0

    def begin(self, doing: str) -> None:
        """The part that begins now, 'loading model.gguf', of which nothing is counted yet."""
        self._doing, self._began = doing.rstrip(':'), time.monotonic()
        self._done, self._total, self._unit = 0.0, 0.0, ''
        if self.is_possible and self._live is None:
            self._live = self._open()

    def count(self, done: float, total: float, unit: str) -> None:
        """So much is done of the part: 5 of 11 'programs'."""
        self._done, self._total, self._unit, self._counted = done, total, unit, time.monotonic()

    def count_bytes(self, done: int, total: int) -> None:
        """`done` of `total` bytes are read or written."""
        self.count(done / _MEGABYTE, total / _MEGABYTE, 'MB')

    def end(self) -> None:
        """Removes the bar until `begin`."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _open(self) -> Live:
        """Starts to draw, from a thread of its own."""
        from rich.console import Console  # here: it takes a tenth of a second, which a pipe need not pay
        from rich.live import Live

        class Terminal(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return True  # a process that ends at once could not bring it back

        live = Live(
            get_renderable=self._render,
            console=Terminal(file=self._stream),
            refresh_per_second=_PER_SECOND,
            transient=True,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # else it belongs to a file
        )
        live.start()
        return live

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        if now - self._began < _AFTER_S:
            return Group()
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, overflow='ellipsis')
        row.add_column(ratio=1, min_width=8)
        row.add_column(no_wrap=True)
        bar = ProgressBar(self._total or None, self._done, pulse=not self._total)
        row.add_row(self._doing, bar, self.describe(now))
        return Group(row, Text(''))

    def describe(self, now: float) -> str:
        """'5 of 11 programs, 1m40s left', or how long the part has taken where nothing of it is counted.

        Args:
          now: a reading of time.monotonic().
        """
        if not self._total:
            return format_duration(now - self._began)
        counted = f'{self._done:.0f} of {self._total:.0f} {self._unit}'
        if not self._done:
            return f'{counted}, {format_duration(now - self._began)}'
        left = (self._counted - self._began) / self._done * (self._total - self._done) - (now - self._counted)
        return f'{counted}, {format_duration(max(0.0, left))} left'
