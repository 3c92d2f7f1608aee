"""How long an answer may take, and whether it was the answer or the machine that took the time."""

from __future__ import annotations

import math
import random
import time

from areal_jax.workers.sandbox.confined_children import ServerLostError
from areal_jax.workers.sandbox.control_group import LOOK_S, Meter

WALL = 3.0  # seconds for a CPU second of a limit
STARVED_WALL = 30.0  # and then the machine is too busy to judge an answer that would run
_SHORTEST_S = 0.02  # between two looks at what waits for a processor


class CheckTime:
    """The time of a check: of the programs that it runs one after the other.

    Args:
      budget_s: wall seconds; an answer that takes more is late if a share of 1 / WALL of them was its own.
    """

    def __init__(self, budget_s: float = math.inf):
        self._budget_s, self._start_s = budget_s, time.monotonic()
        self._kept_s = 0.0
        self._end_s = self._start_s + budget_s

    @property
    def left_s(self) -> float:
        """Until the budget is used up."""
        return self._end_s - time.monotonic()

    def add_kept(self, seconds: float) -> None:
        """What the machine kept from a program that has ended."""
        self._kept_s += seconds

    def judge_budget(self, kept_s: float) -> str:
        """Why the answer is late; '' = it has time left. Raises ServerLostError where the machine is too busy.

        `kept_s`: what the machine kept from the program that runs.
        """
        if self.left_s > 0:
            return ''
        own_s = self._budget_s - self._kept_s - kept_s
        if own_s >= self._budget_s / WALL:
            return f'its whole check took more than {self._budget_s:g} s'
        raise ServerLostError(f'an answer had {own_s:.2f} s of the machine in {self._budget_s:g} s')


class ProgramTime:
    """The time of one program.

    A stretch between two looks, at whose end a process waits for a processor, is the machine's, but for the CPU time
    that the processes used; all other time is the program's own. The looks are at random: code that works for a moment
    whenever it may be looked at, and sleeps in between, would seem to be kept from working.
    """

    def __init__(self, whole: CheckTime, meter: Meter, limit_s: float):
        self._whole, self._meter, self._limit_s = whole, meter, limit_s
        self._start_s = self._looked_s = time.monotonic()
        self._next_s = self._draw_next()
        self._waited_s = self._kept_s = 0.0

    def find_late(self, used_s: float) -> str:
        """Why the program is late after `used_s` of CPU time; '' = it is not.

        Raises ServerLostError where the machine did not let it run.
        """
        if used_s >= self._limit_s or self._has_slept(used_s):
            return f'more than {self._limit_s:g} s'
        passed_s = time.monotonic() - self._start_s
        if passed_s >= STARVED_WALL * self._limit_s:
            raise ServerLostError(f'a program got {used_s:.2f} s of a processor in {passed_s:.0f} s')
        return self._whole.judge_budget(self._kept_s)

    def find_wait_s(self, used_s: float) -> float:
        """Seconds to the next moment at which it can be late, or is to be looked at."""
        now_s = time.monotonic()
        slept_s = self._start_s + self._kept_s + WALL * self._limit_s - now_s
        return min(LOOK_S, self._limit_s - used_s, slept_s, self._next_s - now_s, self._whole.left_s)

    def end(self) -> None:
        """Once: what the machine kept from this program counts in that of the check."""
        self._whole.add_kept(self._kept_s)

    def _has_slept(self, used_s: float) -> bool:
        now_s = time.monotonic()
        is_first = self._looked_s == self._start_s
        if now_s >= self._next_s or (is_first and now_s - self._start_s >= WALL * self._limit_s):
            if self._meter.waits():
                self._waited_s += now_s - self._looked_s
            self._looked_s, self._next_s = now_s, self._draw_next()
        self._kept_s = max(self._waited_s - used_s, 0.0)
        return now_s - self._start_s - self._kept_s >= WALL * self._limit_s

    def _draw_next(self) -> float:
        return time.monotonic() + random.uniform(_SHORTEST_S, LOOK_S)
