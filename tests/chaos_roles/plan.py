"""Who is struck, how and when: the cells of role, signal and phase, dealt to runs by a seed."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence

from areal_jax.config.cluster import Role

RUNS = 20  # of a complete pass
PROCESSES: Mapping[Role, Sequence[str]] = {  # by their names in the registry
    'controller': ('controller-0',),
    'learner': ('learner-0', 'learner-1'),
    'engine': ('engine-0', 'engine-1'),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PHASES = ('start-up', 'staging', 'swap', 'save', 'end')  # in the order in which a run comes to them
KINDS = (*PROCESSES, *(number.name for number in SIGNALS), *PHASES)  # at least one of each must have been met
_MOST_TRIES = 3  # of a cell whose phase was over too soon


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a complete pass does once."""

    role: Role
    signal: signal.Signals
    phase: str

    @property
    def kinds(self) -> tuple[str, str, str]:
        return self.role, self.signal.name, self.phase


CELLS = tuple(Cell(*parts) for parts in itertools.product(PROCESSES, SIGNALS, PHASES))


@dataclasses.dataclass(frozen=True)
class Strike:
    """One signal to one process."""

    cell: Cell
    process: str  # its name in the registry
    # how late it comes: of the usual length of the start-up or the end of a run, or of its updates
    fraction: float

    def __str__(self) -> str:
        return f'{self.process} {self.cell.signal.name} in {self.cell.phase}'


class Deck:
    """The cells that are still to be met, as strikes of one run after another."""

    def __init__(self, seed: int, runs: int = RUNS):
        self._random = random.Random(f'{seed} strikes')
        self._waiting = order_cells(self._random)
        self._runs_left = runs
        self._tries: collections.Counter[Cell] = collections.Counter()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def draw(self) -> tuple[Strike, ...]:
        """The strikes of the next run in the order of their phases: two as long as there are more cells than runs."""
        drawn = [self._waiting.pop(0)]
        self._runs_left -= 1
        if len(self._waiting) > self._runs_left:
            others = [cell for cell in self._waiting if cell.phase != drawn[0].phase]
            for cell in others[:1]:
                self._waiting.remove(cell)
                drawn.append(cell)
        self._tries.update(drawn)
        return tuple(self._strike(cell) for cell in sorted(drawn, key=lambda cell: PHASES.index(cell.phase)))

    def give_back(self, cell: Cell) -> None:
        """For a cell whose phase was not met; it comes again after all others, unless it was tried often enough."""
        if self._tries[cell] < _MOST_TRIES:
            self._waiting.append(cell)

    def _strike(self, cell: Cell) -> Strike:
        return Strike(cell, self._random.choice(PROCESSES[cell.role]), self._random.random())


def order_cells(chosen: random.Random) -> list[Cell]:
    """All cells, shuffled; those that meet most kinds for the first time come first: few runs then meet every kind."""
    left, met = list(CELLS), set[str]()
    chosen.shuffle(left)
    ordered = []
    while left:
        best = max(left, key=lambda cell: len(set(cell.kinds) - met))  # the first of them in the shuffled order
        left.remove(best)
        ordered.append(best)
        met.update(best.kinds)
    return ordered


def count_cells(met: Iterable[Cell]) -> dict[str, int]:
    """How often each cell was met: 'engine SIGKILL swap'."""
    counts = collections.Counter(met)
    return {' '.join(cell.kinds): counts[cell] for cell in CELLS}


def find_missing(met: Collection[Cell]) -> list[str]:
    """Roles, signals and phases that were not met at all: nothing is known of them."""
    seen = {kind for cell in met for kind in cell.kinds}
    return [kind for kind in KINDS if kind not in seen]
