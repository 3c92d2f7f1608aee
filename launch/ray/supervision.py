"""Keeps the groups of a run on a Ray cluster until its controller ends: lost ones are placed anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from areal_jax.app.process.ending import Wakeups
from areal_jax.errors import ExitCode, UserError

from ..programs import say
from .actor import State
from .plan import Group

CONTROLLER, LEARNER = 'controller', 'learner'
LOOK_S = 1.0  # between two looks at the roles
RESERVE_S = 0.05  # between looks at a group that is placed for the first time


class LostGroupError(Exception):
    """A node of a group is gone, or an actor of it."""


class Placed(Protocol):
    """A group on the cluster (placement.PlacedGroup); no method waits for room."""

    def is_reserved(self) -> bool: ...

    def is_placed(self) -> bool: ...

    def look(self) -> list[State]: ...

    def stop(self) -> None: ...

    def remove(self) -> None: ...


class Kept:
    """A group that is placed again when it is lost, within a budget."""

    def __init__(self, group: Group, place: Callable[[Group], Placed], restarts: int, wait_s: float):
        self.group, self._place, self._left = group, place, restarts
        self._wait_s, self._since_s = wait_s, time.monotonic()
        self._was_placed = self._has_roles = False  # ever; now
        self._is_told = False  # to stop
        self.placed: Placed | None = place(group)
        self.code: int | None = None  # with which it ended for good
        self._starts = [0] * len(group.processes)

    def is_reserved(self, describe_shortage: Callable[[Group], str]) -> bool:
        """Whether its place is reserved for the first time. Raises UserError after `wait_s`."""
        assert self.placed is not None
        if self.placed.is_reserved():
            return True
        self._note_waiting(describe_shortage)
        return False

    def look(self, describe_shortage: Callable[[Group], str]) -> None:
        """Notices what has changed. Raises UserError where it cannot be placed for the first time."""
        if self.placed is None or self.code is not None:
            return
        try:
            if not self.placed.is_placed():
                self._note_waiting(describe_shortage)
                return
            self._was_placed = self._has_roles = True
            states = self.placed.look()
        except LostGroupError as error:
            self._replace(str(error))
            return
        for index, state in enumerate(states):
            if state.starts > self._starts[index] > 0:
                say(f'{self.group.processes[index].name} was started again: start {state.starts}')
            self._starts[index] = state.starts
        self._note_end(states)

    def stop(self) -> None:
        """SIGTERM to its roles; a group that is not placed has none and ends at once. It is not placed again."""
        self._is_told = True
        if self.code is not None:
            return
        if self._has_roles and self.placed is not None:
            self.placed.stop()
        else:
            self.code = ExitCode.STOPPED

    def _note_end(self, states: Sequence[State]) -> None:
        codes = [state.code for state in states]
        failed = [state for state in states if state.code]
        if failed or (codes and None not in codes):
            self.code = failed[0].code if failed else ExitCode.FINISHED
            say(f'{self.group.name} ended with code {self.code}')
            if failed and self.code != ExitCode.STOPPED:
                say(failed[0].tail)

    def _replace(self, reason: str) -> None:
        assert self.placed is not None
        self.placed.remove()
        if self._is_told:
            self.code = ExitCode.STOPPED
            say(f'{self.group.name} is lost ({reason})')
            return
        if self._left == 0:
            self.code = ExitCode.STOPPED
            say(f'{self.group.name} is lost ({reason}), and was placed as often as --restarts allows')
            return
        self._left -= 1
        say(f'{self.group.name} is lost ({reason}): it is placed again')
        self._starts = [0] * len(self.group.processes)
        self._since_s, self._has_roles = time.monotonic(), False
        self.placed = self._place(self.group)

    def _note_waiting(self, describe_shortage: Callable[[Group], str]) -> None:
        """At the start, and for the learner, too few nodes end the run; an engine is waited for while others serve."""
        if time.monotonic() - self._since_s < self._wait_s:
            return
        sentence = describe_shortage(self.group)
        if not self._was_placed:
            raise UserError(sentence)
        if self.group.name in (CONTROLLER, LEARNER):
            say(sentence)
            self.code = ExitCode.STOPPED


def supervise(
    groups: Sequence[Group],
    place: Callable[[Group], Placed],
    describe_shortage: Callable[[Group], str],
    *,
    restarts: int,
    wait_s: float,
    grace_s: float,
) -> int:
    """Runs the groups until the controller has ended, or a role for good; returns the exit code of the run.

    The first stop signal tells all roles to save their state, a second one ends them at once.
    """
    kept: list[Kept] = []
    with Wakeups() as wakeups:
        try:
            is_told = False
            for group in groups:  # one after the other: an engine must not take a host of the learner's slice
                kept.append(Kept(group, place, restarts, wait_s))
                while not is_told and not kept[-1].is_reserved(describe_shortage):
                    is_told = bool(wakeups.wait(RESERVE_S)[0])
                if is_told:
                    break
            while (code := _find_end(kept)) is None and not is_told:
                is_told = bool(wakeups.wait(LOOK_S)[0])
                for one in kept if not is_told else ():
                    one.look(describe_shortage)
            if is_told:
                say('the run saves its state')
            _drain(kept, wakeups, describe_shortage, grace_s)
            code = _find_end(kept) if code is None else code
            return ExitCode.STOPPED if code is None else code  # without one the controller has not saved
        finally:
            for one in kept:
                if one.placed is not None:
                    one.placed.remove()


def _find_end(kept: Sequence[Kept]) -> int | None:
    """The code with which the run ends: of its controller, of a learner that failed, of an engine's wrong config."""
    for one in kept:
        if one.code is None:
            continue
        if one.group.name == CONTROLLER or (one.group.name == LEARNER and one.code) or one.code == ExitCode.USER_ERROR:
            return one.code
    return None


def _drain(kept: Sequence[Kept], wakeups: Wakeups, describe_shortage: Callable[[Group], str], grace_s: float) -> None:
    """SIGTERM to all roles; returns when they have ended, at the next signal, or after `grace_s`."""
    end_s = time.monotonic() + grace_s
    for one in kept:
        one.stop()
    while any(one.code is None for one in kept) and time.monotonic() < end_s:
        if wakeups.wait(LOOK_S)[0]:
            break
        for one in kept:
            one.look(describe_shortage)
