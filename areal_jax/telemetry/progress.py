"""Progress on the terminal: one line per update, and the parts of the work before the first update."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


def format_number(value: float | None) -> str:
    """Formats with three significant digits, whole numbers and values of 100 or more without decimals; '-' for None."""
    if value is None:
        return '-'
    return f'{value:.0f}' if float(value).is_integer() or abs(value) >= 100 else f'{value:.3g}'


def format_percent(share: float | None) -> str:
    """Formats as '47%'; '-' for None."""
    return '-' if share is None else f'{share:.0%}'


def format_duration(seconds: float | None) -> str:
    """Formats as '45s', '1m40s', '2h05m'; '-' for None or a value that is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return '-'
    whole = max(0, round(seconds))
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m{whole % 60:02}s'
    return f'{whole // 3600}h{whole % 3600 // 60:02}m'


def format_bytes(size: int) -> str:
    """Formats as '47.2 MB', '1.5 GB'."""
    return f'{size / 1e9:.4g} GB' if size >= 1e8 else f'{size / 1e6:.3g} MB'


def format_gibibytes(size: int) -> str:
    """Formats as '7.92 GiB'."""
    return f'{size / 2**30:.2f} GiB'


# A bar with the time left, at the bottom of a terminal. Text that is printed meanwhile appears above the bar.
#
# There is no bar in a pipe, a file, a notebook, a terminal without cursor movement (TERM=dumb), or if CI is set.


_AFTER_S = 0.5  # a shorter part gets no bar, which would flash
_PER_SECOND = 8
_MEGABYTE = 1e6


def can_show_bar(stream: TextIO) -> bool:
    """Whether the stream is an interactive terminal that can move its cursor."""
    return stream.isatty() and os.environ.get('TERM', 'dumb') != 'dumb' and not os.environ.get('CI')


class Bar:
    """Shows the parts of the work one after the other; shows nothing if a bar is not possible.

    The cursor stays visible, on an empty line below the bar: a process may end at any moment, and the shell continues
    there.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self.is_possible = can_show_bar(self._stream)
        self._live: Live | None = None
        self._doing, self._began = '', 0.0
        self._done, self._total, self._unit, self._counted = 0.0, 0.0, '', 0.0

    def begin(self, doing: str) -> None:
        """Begins a part, such as 'loading model.gguf', with nothing counted yet."""
        self._doing, self._began = doing.rstrip(':'), time.monotonic()
        self._done, self._total, self._unit = 0.0, 0.0, ''
        if self.is_possible and self._live is None:
            self._live = self._open()

    def count(self, done: float, total: float, unit: str) -> None:
        """Notes that `done` of `total` units of the part are done: 5 of 11 'programs'."""
        self._done, self._total, self._unit, self._counted = done, total, unit, time.monotonic()

    def count_bytes(self, done: int, total: int) -> None:
        """Notes that `done` of `total` bytes are read or written."""
        self.count(done / _MEGABYTE, total / _MEGABYTE, 'MB')

    def end(self) -> None:
        """Removes the bar until `begin`."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _open(self) -> Live:
        """Starts to draw, from a separate thread."""
        from rich.console import Console  # imported here: it takes 0.1 s, which a pipe need not pay
        from rich.live import Live

        class Terminal(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return True  # a killed process could not show it again

        live = Live(
            get_renderable=self._render,
            console=Terminal(file=self._stream),
            refresh_per_second=_PER_SECOND,
            transient=True,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # not if stderr is a file
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
        """'5 of 11 programs, 1m40s left', or the time spent on the part if nothing is counted.

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


HEADER = (
    'reward: mean of the batch | age: versions behind of the trained tokens | gen, train: tokens per second | '
    'interrupts: since the last update'
)
EVERY_S = 5.0  # between two lines of the start


class Progress:
    """Prints a header and then one line per update; the lines are plain, so they suit a file or a pipe too."""

    def __init__(self, steps: int, stream: TextIO | None = None, first_step: int = 0, first_time: float = 0.0):
        """`first_step` and `first_time`: update and clock seconds at which a resumed run continues."""
        self._steps, self._stream = steps, stream
        self._first_step, self._first_time = first_step, first_time
        self._has_header = False

    def restart(self, time: float) -> None:
        """Bases estimates of the time left on the time since `time`, so that an evaluation before it does not count."""
        self._first_time = time

    def update(self, step: int, metrics: Line) -> None:
        """Prints the line of one update."""
        if not self._has_header:
            self._print(HEADER)
            self._has_header = True
        done, seconds = step - self._first_step, number(metrics, names.TIME)
        left = None if seconds is None or done < 1 else (seconds - self._first_time) / done * (self._steps - step)
        self._print(format_line(step, self._steps, metrics, left))

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)


class StartProgress:
    """Prints the parts of a run before and after its updates: a line as each part begins, then one every few seconds.

    On a terminal a bar takes the place of the repeated lines. A thread prints, because a single step may take minutes.
    `end` stops the thread, `begin` starts it again.
    """

    def __init__(
        self,
        shown: bool,
        stream: TextIO | None = None,
        every_s: float = EVERY_S,
        check: Callable[[], None] = lambda: None,
    ):
        """Makes the progress of the start of one run.

        Args:
          shown: telemetry.progress; if False, nothing is printed.
          check: called before each part and each program; its exceptions end the start there.
        """
        self._check = check
        self._shown, self._stream, self._every_s = shown, stream, every_s
        self._bar = Bar(stream)
        self._doing, self._detail, self._began = '', '', 0.0
        self._programs: dict[str, tuple[int, int]] = {}  # (done, total) by `of`
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, doing: str) -> None:
        """Begins a part, for example 'loading model.gguf'."""
        self._check()
        self._doing, self._detail, self._began = doing, '', time.monotonic()
        self._programs.clear()
        if not self._shown:
            return
        self._bar.end()
        self._print(doing)
        self._bar.begin(doing)
        if self._thread is None and not self._bar.is_possible:
            self._ended.clear()
            self._thread = threading.Thread(target=self._repeat, name='start progress', daemon=True)
            self._thread.start()

    def begin_silently(self, doing: str) -> None:
        """Begins a part that only a terminal shows, by a bar."""
        self.end()
        if self._shown:
            self._bar.begin(doing)

    def count_programs(self, done: int, total: int, of: str = '') -> None:
        """Notes that `done` of `total` programs are compiled; `of` names the group of programs of a parallel thread."""
        self._check()
        self._programs[of] = done, total
        done, total = (sum(numbers) for numbers in zip(*self._programs.copy().values(), strict=True))
        self._detail = f' program {done + 1} of {total}'
        self._bar.count(done, total, 'programs')

    def count_answers(self, done: int, total: int) -> None:
        """Notes that `done` of `total` answers are scored."""
        left = (time.monotonic() - self._began) / done * (total - done)
        self._detail = f': {done} of {total} answers, {format_duration(left)} left'
        self._bar.count(done, total, 'answers')

    def count_bytes(self, done: int, total: int) -> None:
        """Notes that `done` of `total` bytes of weights are read or written; only a bar shows it."""
        self._bar.count_bytes(done, total)

    def end(self) -> None:
        """Stops printing until `begin`."""
        self._bar.end()
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            if (seconds := time.monotonic() - self._began) >= self._every_s:
                self._print(f'{self._doing}{self._detail} ({seconds:.0f} s)')

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)


def format_line(step: int, steps: int, metrics: Line, left_seconds: float | None) -> str:
    """Formats one update as one line; `-` for a value that is missing or not finite."""
    width = len(str(steps))
    skipped = describe_skipped_steps(metrics)
    parts = [
        f'step {step:>{width}}/{steps}',
        f'reward {_number(metrics, names.REWARD_MEAN, "4.2f")}',
        f'age {_number(metrics, names.TOKEN_AGE_MEAN, "3.1f")} (max {_number(metrics, names.TOKEN_AGE_MAX, ".0f")})',
        f'gen {_number(metrics, names.GENERATE_RATE, "3.0f")} tok/s',
        f'train {_number(metrics, names.TRAIN_RATE, "3.0f")} tok/s',
        f'interrupts {_number(metrics, names.INTERRUPTIONS, ".0f")}',
        *([skipped] if skipped else []),
        f'left {format_duration(left_seconds)}',
    ]
    return '  '.join(parts)


def describe_skipped_steps(metrics: Line) -> str:
    """The part of a line on skipped optimizer steps; '' without any, so that it is noticed when it appears."""
    skipped, applied = number(metrics, names.SKIPPED_STEPS) or 0, number(metrics, names.OPTIMIZER_STEPS) or 0
    return f'skipped {skipped:.0f} of {skipped + applied:.0f} steps (gradient not finite)' if skipped else ''


def _number(metrics: Line, name: str, form: str) -> str:
    value = number(metrics, name)
    if value is None or not math.isfinite(value):
        return '-'.rjust(int(form.split('.')[0] or 0))
    return format(value, form)
