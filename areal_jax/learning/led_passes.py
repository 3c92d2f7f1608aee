"""Passes of a learner over several processes: process 0 leads, and each other process repeats them with its rows.

Process 0 gets the groups of a command, packs them once and is the only one that computes with the whole batch: counts,
denominators, advantages, brakes and metrics. For each pass it tells every other process the program, its scalars, and
the rows of the arrays that this process's devices hold, routes and other columns among them. They place these rows as
process 0 places its own, so the programs get the bits that they would get if every process had packed everything.

Process 0 packs and not the controller, because objectives, which compute advantages, need jax, which the controller
does not import, and because the controller is the busiest process of a large run. The devices wait for the rows in
either case. The rows of two processes have nothing in common that a third one could pass on, so they go directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from areal_jax.errors import LostPeerError
from areal_jax.learning.packed_rows import RowShape

BEGIN, STEP, AGREED, DONE, FAILED = 'begin', 'step', 'agreed', 'done', 'failed'
TRAINED_WEIGHTS, REFERENCE_WEIGHTS, TEACHER_WEIGHTS = 'trained', 'reference', 'teacher'


class PassCall(NamedTuple):
    """A pass over the mesh without its rows, or another part of a command that all processes take part in."""

    program: str  # of programs.py, or one of the names above
    weights: str | int = TRAINED_WEIGHTS  # or another name above, or a version in the ring of diagnostics
    denominator: float = 1.0
    version: int = 0
    first: bool = True
    factor: float = 1.0  # of the learning rate; the value of AGREED
    follows: bool | None = None  # whether recorded routes are taken; None = as in training


class PassRows(NamedTuple):
    """The rows of a pass."""

    arrays: Mapping[str, np.ndarray]  # [M, R, ...], or [M, rows of this process, ...]
    shapes: Sequence[RowShape]  # to which each micro-batch is trimmed
    own: np.ndarray | None = None  # int, the indices of the rows that the arrays hold, ascending; None = all


class Told(NamedTuple):
    """What process 0 tells another process. An array is sent once in a command, and then named by its number."""

    call: tuple[object, ...]
    shapes: Sequence[tuple[int, int]] = ()
    numbers: Mapping[str, int] = MappingProxyType({})  # of each array of the rows
    new: Mapping[str, np.ndarray] = MappingProxyType({})  # by number, [M, rows of that process, ...]


class LeaderFailedError(RuntimeError):
    """Process 0 failed at the command that this process repeats; its own error tells why."""


class PassLeader:
    """The side of process 0.

    Args:
      send: sends each of the other processes its own value; raises LostPeerError.
      own: the indices of the rows that each of them holds, in the order of `send`.
    """

    def __init__(self, send: Callable[[Sequence[Told]], None], own: Sequence[np.ndarray]):
        self._send, self._own = send, [_as_slice(rows) for rows in own]
        self._numbers: dict[int, int] = {}  # by the identity of an array in `_kept`
        self._kept: list[np.ndarray] = []

    @contextlib.contextmanager
    def command(self) -> Iterator[None]:
        """Tells the others at the end of the block that the command is done, or that it failed here."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(LostPeerError):
                self.tell(PassCall(FAILED))
            raise
        finally:
            self._numbers.clear()
            self._kept.clear()
        self.tell(PassCall(DONE))

    def tell(self, call: PassCall) -> None:
        self._send([Told(tuple(call))] * len(self._own))

    def share(self, call: PassCall, rows: PassRows) -> None:
        """Sends a pass, and each process its rows of the arrays that it does not have yet."""
        numbers, new = {}, {}
        for name, array in rows.arrays.items():
            if id(array) not in self._numbers:
                self._numbers[id(array)] = len(self._kept)
                self._kept.append(array)
                new[str(self._numbers[id(array)])] = array
            numbers[name] = self._numbers[id(array)]
        shapes = [(shape.tokens, shape.loss_tokens) for shape in rows.shapes]
        cut = lambda own: {number: array[:, own] for number, array in new.items()}
        self._send([Told(tuple(call), shapes, numbers, cut(own)) for own in self._own])

    def agree(self, compute: Callable[[], float]) -> float:
        """A number that only this process can compute, and that all use."""
        value = compute()
        self.tell(PassCall(AGREED, factor=value))
        return value


class PassFollower:
    """The side of every other process.

    Args:
      receive: waits for the next value of process 0; raises LostPeerError.
      own: the indices of the rows that this process holds.
    """

    def __init__(self, receive: Callable[[], Told], own: np.ndarray):
        self._receive, self.own = receive, own

    def calls(self) -> Iterator[tuple[PassCall, PassRows]]:
        """The passes of one command, with this process's rows. Raises LeaderFailedError if process 0 fails."""
        arrays: dict[int, np.ndarray] = {}
        while (call := self._next(told := self._receive())).program != DONE:
            arrays |= {int(number): array for number, array in told.new.items()}
            rows = {name: arrays[number] for name, number in told.numbers.items()}
            yield call, PassRows(rows, [RowShape(*shape) for shape in told.shapes], self.own)

    def agree(self, compute: Callable[[], float]) -> float:
        """The number that process 0 has computed."""
        return self._next(self._receive()).factor

    def _next(self, told: Told) -> PassCall:
        call = PassCall(*told.call)  # type: ignore[arg-type]  # as `PassLeader` made it
        if call.program == FAILED:
            raise LeaderFailedError('process 0 of the learner failed at this command: its own error tells why')
        return call


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """The same rows without a copy, if they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
