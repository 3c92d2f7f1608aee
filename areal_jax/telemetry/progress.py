"""Progress on the terminal: one line per update, and what the program does before the first one."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number
from areal_jax.telemetry.progress import Bar, format_duration

HEADER = (
    'reward: mean of the batch | age: versions behind of the trained tokens | gen, train: tokens per second | '
    'interrupts: since the last update'
)
EVERY_S = 5.0  # between two lines of the start


class Progress:
    """Prints a header and then a line per update; plain lines, so a file or a pipe reads as well as a terminal."""

    def __init__(self, steps: int, stream: TextIO | None = None, first_step: int = 0, first_time: float = 0.0):
        """`first_step` and `first_time`: update and clock seconds at which a resumed run goes on."""
        self._steps, self._stream = steps, stream
        self._first_step, self._first_time = first_step, first_time
        self._has_header = False

    def restart(self, time: float) -> None:
        """Estimate the time left from this clock time on, so that an evaluation before it does not count."""
        self._first_time = time

    def update(self, step: int, metrics: Line) -> None:
        """Print the line of one update."""
        if not self._has_header:
            self._print(HEADER)
            self._has_header = True
        done, seconds = step - self._first_step, number(metrics, names.TIME)
        left = None if seconds is None or done < 1 else (seconds - self._first_time) / done * (self._steps - step)
        self._print(format_line(step, self._steps, metrics, left))

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)


class StartProgress:
    """Prints what a run does before and after its updates: a line as each part begins, then one every few seconds.

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
        """The start of one run.

        Args:
          shown: telemetry.progress; without it nothing is printed.
          check: called before each part and each program; what it raises ends the start there.
        """
        self._check = check
        self._shown, self._stream, self._every_s = shown, stream, every_s
        self._bar = Bar(stream)
        self._doing, self._detail, self._began = '', '', 0.0
        self._programs: dict[str, tuple[int, int]] = {}  # done and total, by what they are of
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, doing: str) -> None:
        """The part that begins now, for example 'loading model.gguf'."""
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
        """A part of which only a terminal is told, by a bar."""
        self.end()
        if self._shown:
            self._bar.begin(doing)

    def count_programs(self, done: int, total: int, of: str = '') -> None:
        """`done` of `total` programs are compiled; threads that compile side by side say what theirs are `of`."""
        self._check()
        self._programs[of] = done, total
        done, total = (sum(numbers) for numbers in zip(*self._programs.copy().values(), strict=True))
        self._detail = f' program {done + 1} of {total}'
        self._bar.count(done, total, 'programs')

    def count_answers(self, done: int, total: int) -> None:
        """`done` of `total` answers are scored."""
        left = (time.monotonic() - self._began) / done * (total - done)
        self._detail = f': {done} of {total} answers, {format_duration(left)} left'
        self._bar.count(done, total, 'answers')

    def count_bytes(self, done: int, total: int) -> None:
        """`done` of `total` bytes of weights are read or written; the lines of a pipe do not say it."""
        self._bar.count_bytes(done, total)

    def end(self) -> None:
        """Nothing more is printed until `begin`."""
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
    """One update in one line; `-` for a value that is missing or not finite."""
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
    """The part of a line on skipped optimizer steps; '' without any, so that it is seen where there are some."""
    skipped, applied = number(metrics, names.SKIPPED_STEPS) or 0, number(metrics, names.OPTIMIZER_STEPS) or 0
    return f'skipped {skipped:.0f} of {skipped + applied:.0f} steps (gradient not finite)' if skipped else ''


def _number(metrics: Line, name: str, form: str) -> str:
    value = number(metrics, name)
    if value is None or not math.isfinite(value):
        return '-'.rjust(int(form.split('.')[0] or 0))
    return format(value, form)
