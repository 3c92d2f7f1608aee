"""Who is struck, how and when: the cells of role, signal and phase, dealt to runs by a seed; phases in files."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from areal_jax.config.cluster import Role
from checks.chaos_roles.state import Event, State

RUNS = 20  # of a complete pass
PROCESSES: Mapping[Role, Sequence[str]] = {  # by their names in the registry
    'controller': ('controller-0',),
    'learner': ('learner-0', 'learner-1'),
    'engine': ('engine-0', 'engine-1'),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PHASES = ('start-up', 'staging', 'swap', 'save', 'end')  # in the order in which a run comes to them
KINDS = (*PROCESSES, *(number.name for number in SIGNALS), *PHASES)  # at least one of each must have been met
_LATEST = 0.7  # of the updates: later there may be no further save
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


def engine_of(process: str) -> str:
    """'engine-1' in the registry is 'engine/1' in the log."""
    return process.replace('-', '/')


_ENGINES = tuple(map(engine_of, PROCESSES['engine']))


def has_begun(events: Sequence[Event]) -> bool:
    """Whether the controller that runs now has asked for an answer."""
    for event in reversed(events):
        if event['kind'] == 'route':
            return True
        if event['kind'] == 'log':  # the first event of each start
            return False
    return False


def is_serving(engine: str, events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] == 'engine_state' and event['engine'] == engine:
            return bool(event['state'] == 'serving')
        if event['kind'] == 'log':
            return False
    return False


def is_starting(strike: Strike, state: State) -> bool:
    """The process was started and has not yet done anything for the run."""
    if not state.starts.get(strike.process) or has_begun(state.events):
        return False
    return strike.cell.role != 'engine' or not is_serving(engine_of(strike.process), state.events)


def is_staging(strike: Strike, state: State) -> bool:
    """A version is being written by the learner processes, or is being fetched by the engine that is to be struck."""
    if strike.cell.role == 'engine':
        return _stages(engine_of(strike.process), state.events)
    return state.is_writing_version and _is_under_way('publish', state.events)


def is_sending(strike: Strike, state: State) -> bool:
    """The learner processes send their parts of a version, which leave nothing on the disk."""
    return _is_under_way('publish', state.events)


def is_updating(strike: Strike, state: State) -> bool:
    return _is_under_way('train', state.events)


def is_looping(strike: Strike, state: State) -> bool:
    return has_begun(state.events)


def is_swapping(strike: Strike, state: State) -> bool:
    """An engine, which is the one to be struck if one is, has fetched a version and has not said that it uses it."""
    struck = (engine_of(strike.process),) if strike.cell.role == 'engine' else _ENGINES
    return any(_swaps(engine, state.events) for engine in struck)


def is_saving(strike: Strike, state: State) -> bool:
    return state.is_writing_checkpoint


def is_ending(state: State, steps: int) -> bool:
    """The last version is published: the evaluation, the last checkpoint, the report and the export are left."""
    return _last_version(state) == steps


def _last_version(state: State) -> int:
    return next((int(event['version']) for event in reversed(state.events) if event['kind'] == 'publish'), 0)


def in_phase(strike: Strike, state: State, steps: int) -> bool:
    """Whether now is the time for the strike; the strikes of start-up and end come some time after it has begun."""
    if strike.cell.phase == 'start-up':
        return is_starting(strike, state)
    if strike.cell.phase == 'end':
        return is_ending(state, steps)
    return _last_version(state) >= int(_LATEST * strike.fraction * steps) and _IN_LOOP[strike.cell.phase](strike, state)


_IN_LOOP: Mapping[str, Callable[[Strike, State], bool]] = {
    'staging': is_staging, 'swap': is_swapping, 'save': is_saving,
    'sending': is_sending, 'update': is_updating, 'loop': is_looping,  # of publications.py
}  # fmt: skip


def _is_under_way(work: str, events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] in ('run_start', 'run_done') and event['work'] == work:
            return bool(event['kind'] == 'run_start')
        if event['kind'] == 'log':
            return False
    return False


def _stages(engine: str, events: Sequence[Event]) -> bool:
    """A version is published, and the engine has not yet fetched it."""
    for event in reversed(events):
        if event['kind'] == 'publish':
            return is_serving(engine, events)
        if event['kind'] == 'log' or (event['kind'] == 'stage' and event['engine'] == engine):
            return False
    return False


def _swaps(engine: str, events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] == 'log':
            return False
        if event.get('engine') == engine and event['kind'] in ('stage', 'load', 'engine_state', 'leave'):
            return bool(event['kind'] == 'stage' and event['phase'] != 'acknowledge' and event['outcome'] == 'done')
    return False
