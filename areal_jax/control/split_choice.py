"""Which split of the devices the next update has: as a plan says, or by the seconds that lanes were busy.

Pure functions of what was measured; reallocation.py measures, and moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from areal_jax.config.cluster import DeviceSplit

_WAITS = 0.1  # share of an update from which on the learner is short of data
_SAME = 1e-9  # of singular values, below which steps are alike
_PARTS = ([0], [0, 1], [0, 2], [1], [2], [1, 2], [0, 1, 2])  # of a step's cost: base, rows, positions
_FULL = 0.9  # of the rows of an engine from which on it is taken to be full
_MOST_DOUBLINGS = 6  # of the updates before the next move back


class LaneSeconds(NamedTuple):
    """What one update kept busy, in clock seconds."""

    period: float  # between the beginnings of two updates
    learner: float  # of its lane
    engines: float  # of the lane of one engine, the mean over all
    needed: float  # what one engine needs for what the update took, see needed_seconds
    step_s: float = 0.0  # of a decode step, whatever its rows
    row_s: float = 1.0  # and of each row
    full_share: float = 0.0  # of a step that a row takes where an engine is full: 1 / rows
    open_share: float = 0.0  # likewise, where one engine has all the rows that decode at a time
    growth: float = 1.0  # mean tokens of the answers that ended over those of the answers that the update took

    @property
    def training(self) -> float:
        """What the learner would need for answers as long as those that end now, which it trains later."""
        return self.learner * self.growth

    def needed_of(self, here: int, there: int) -> float:
        """`needed` with `there` engines in place of `here`.

        Rows are shared among the engines, so more engines run steps of fewer rows: a row costs
        row_s + step_s * max(full_share, engines * open_share).
        """
        cost, later = (self.row_s + self.step_s * max(self.full_share, n * self.open_share) for n in (here, there))
        return self.needed * here / there * (later / cost if cost else 1.0)


class DecodeSums(NamedTuple):
    """The decode steps of one update, over all engines: sums over steps, each as the mean of its dispatch."""

    steps: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0  # of each step
    positions: float = 0.0  # that the rows of each step saw
    squared_rows: float = 0.0
    squared_positions: float = 0.0
    rows_positions: float = 0.0
    rows_seconds: float = 0.0
    positions_seconds: float = 0.0

    def add(self, steps: int, rows: int, seconds: float, positions: int) -> DecodeSums:
        """With a further dispatch, which took `seconds` and whose rows saw `positions` in all its steps."""
        seen = positions / steps
        further = (
            *(steps, seconds, steps * rows, positions, steps * rows * rows, seen * positions, rows * positions),
            *(rows * seconds, seen * seconds),
        )
        return DecodeSums(*map(sum, zip(self, further, strict=True)))


class Rung(NamedTuple):
    """A split as 'auto' counts it."""

    split: DeviceSplit
    learner: int  # devices
    engines: int  # engines of equal size


class Choice(Protocol):
    """What reallocation.py asks before every update."""

    @property
    def is_punctual(self) -> bool:
        """Whether a split is taken at its update, prepared or not; else when it is prepared."""
        ...

    def ahead(self, update: int, split: DeviceSplit) -> DeviceSplit | None:
        """The next split as far as it is known, to be prepared; None where none is."""
        ...

    def choose(self, update: int, split: DeviceSplit, measured: Sequence[LaneSeconds]) -> DeviceSplit:
        """The split of `update`, `split` or another one.

        Args:
          measured: the updates with `split`, the latest last.
        """
        ...

    def note_move(self, before: DeviceSplit, after: DeviceSplit) -> None: ...

    def state(self) -> dict[str, int]:
        """JSON-able, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, int]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Planned:
    """The splits of a plan, each from its update on."""

    plan: Mapping[int, DeviceSplit]  # by update, ascending
    is_punctual: ClassVar[bool] = True

    def ahead(self, update: int, split: DeviceSplit) -> DeviceSplit | None:
        return next((later for first, later in self.plan.items() if first > update and later != split), None)

    def choose(self, update: int, split: DeviceSplit, measured: Sequence[LaneSeconds]) -> DeviceSplit:
        begun = [planned for first, planned in self.plan.items() if first <= update]
        return begun[-1] if begun else split

    def note_move(self, before: DeviceSplit, after: DeviceSplit) -> None:
        """Nothing: the plan is fixed."""

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: Mapping[str, int]) -> None:
        """Nothing: see `state`."""


class Automatic:
    """Moves devices to the split with the shortest update when that is predicted to pay, and keeps them otherwise.

    Learner and engines work at the same time, so an update takes as long as the busier of both. From n to m devices the
    learner's seconds go with n / m (no losses), and those of engines are `LaneSeconds.needed_of`. That bound must fall
    by the factor 1 + gain, and it must have done so in each of the last `updates` updates. A move in the direction
    opposite to the one before waits twice as long, the next such one four times, so that noise and a prediction that
    does not come true move devices ever more rarely; a move that goes on in the same direction starts afresh.

    Args:
      rungs: the smallest learner first.
    """

    is_punctual: ClassVar[bool] = False

    def __init__(self, rungs: Sequence[Rung], *, gain: float, updates: int):
        self._rungs, self._gain, self._updates = tuple(rungs), gain, updates
        self._direction = 0  # of the last move: 1, more devices for the learner, or -1
        self._reversals = 0  # moves in a row that each went back

    def ahead(self, update: int, split: DeviceSplit) -> DeviceSplit | None:
        return None

    def choose(self, update: int, split: DeviceSplit, measured: Sequence[LaneSeconds]) -> DeviceSplit:
        at = [rung.split for rung in self._rungs].index(split)
        here, mean = self._rungs[at], mean_seconds(measured[-self._updates :])
        best = max(self._rungs, key=lambda rung: predict_gain(mean, here, rung))
        direction, needed = (1 if best.learner > here.learner else -1), self._updates
        if direction == -self._direction:
            needed <<= min(self._reversals + 1, _MOST_DOUBLINGS)
        pays = [predict_gain(seconds, here, best) >= self._gain for seconds in measured[-needed:]]
        return best.split if len(pays) == needed and all(pays) else split

    def note_move(self, before: DeviceSplit, after: DeviceSplit) -> None:
        order = [rung.split for rung in self._rungs]
        direction = 1 if order.index(after) > order.index(before) else -1
        self._reversals = self._reversals + 1 if direction == -self._direction else 0
        self._direction = direction

    def state(self) -> dict[str, int]:
        return {'direction': self._direction, 'reversals': self._reversals}

    def restore(self, state: Mapping[str, int]) -> None:
        self._direction, self._reversals = state['direction'], state['reversals']


def predict_gain(seconds: LaneSeconds, here: Rung, there: Rung) -> float:
    """By which share of its later length an update is longer now: 0.25 where 5 s become 4 s.

    The length of an update is that of its busier side: of the learner in inverse proportion to its devices, or what
    engines need (`LaneSeconds.needed_of`), both for answers as long as those that end now.
    """
    now = max(seconds.training, seconds.needed)
    generation = seconds.needed_of(here.engines, there.engines)
    later = max(seconds.training * here.learner / there.learner, generation)
    return now / later - 1.0 if later > 0 else 0.0


def waits(period: float, learner: float) -> bool:
    """Whether the learner is short of data in an update: it waits for a tenth of it or more."""
    return learner <= (1 - _WAITS) * period


def needed_seconds(period: float, learner: float, full: float, *, taken: int, ended: int) -> float:
    """Seconds in which one engine generates what an update takes.

    All of the update where the learner waits for a tenth of it or more: whatever keeps the engines from more is theirs,
    such as a group that waits for its longest answer. Else the seconds that full slots need.

    Args:
      period, learner: of LaneSeconds.
      full: seconds of one engine, by `full_seconds`.
      taken: answers that were trained or dropped.
      ended: answers in the same time; while a pipeline fills they are more. Tokens would not do: those of answers that
        end later are more where answers grow.
    """
    needed = period if waits(period, learner) else full
    return needed * taken / ended if ended else needed


class StepCost(NamedTuple):
    """A decode step of n rows takes step_s + row_s * n."""

    step_s: float
    row_s: float


def fit_step(sums: DecodeSums) -> StepCost:
    """Least squares of step_s + a * rows + b * positions, none below 0; row_s is of a row that sees the mean positions.

    Rows of long answers are few and dear: without the positions they would look free. Steps that are all alike are all
    base.
    """
    if not sums.rows:
        return StepCost(0.0, 0.0)
    products = np.array(
        [
            [sums.steps, sums.rows, sums.positions],
            [sums.rows, sums.squared_rows, sums.rows_positions],
            [sums.positions, sums.rows_positions, sums.squared_positions],
        ]
    )
    against = np.array([sums.seconds, sums.rows_seconds, sums.positions_seconds])
    unit = np.sqrt(np.diag(products)) + (np.diag(products) == 0)  # positions are a million times the steps
    products, against = products / np.outer(unit, unit), against / unit
    better = _SAME * sums.seconds**2 / sums.steps  # of two fits as good, the one that comes first
    best, least = np.zeros(3), math.inf
    for parts in _PARTS:
        found = np.zeros(3)
        found[parts] = np.linalg.lstsq(products[np.ix_(parts, parts)], against[parts], rcond=_SAME)[0]
        error = found @ products @ found - 2 * found @ against
        if found.min() >= 0 and error < least - better:
            best, least = found / unit, error
    step_s, row_s, position_s = map(float, best)
    return StepCost(step_s, row_s + position_s * sums.positions / sums.rows)


def full_rows(sums: DecodeSums, slots: int, cache_tokens: int) -> float:
    """Rows of a full engine: its slots, or as many as the KV cache holds at the positions that a row saw on average.

    Positions that rows share count for each.
    """
    return min(slots, cache_tokens * sums.rows / max(sums.positions, 1.0))


def full_seconds(sums: DecodeSums, cost: StepCost, rows: float) -> float:
    """Seconds in which engines with so many rows decode what took `sums.seconds`, at most that.

    An engine whose slots are half full is as busy as a full one, and could do more.
    """
    if not sums.rows or sums.rows / sums.steps >= rows:
        return sums.seconds
    return min(sums.seconds, sums.rows / rows * (cost.step_s + cost.row_s * rows))


def open_rows(before: float, rows: float, full: float, engines: int) -> float:
    """Rows that decode at a time in all engines if they are the bound; 0 = not known.

    The staleness bound limits the open answers, and of a group that waits for its longest answer few decode: fewer
    engines have more rows each.

    Args:
      before: what was known before this update, in which the learner waited.
      rows: of a step, the mean; a full engine (`full`) says only that there are at least as many.
    """
    seen = rows * engines
    return seen if rows < _FULL * full else max(before, seen) if before else 0.0


def mean_seconds(measured: Sequence[LaneSeconds]) -> LaneSeconds:
    """Over these updates; zeros where there are none."""
    if not measured:
        return LaneSeconds(0.0, 0.0, 0.0, 0.0, row_s=0.0)
    return LaneSeconds(*(sum(values) / len(measured) for values in zip(*measured, strict=True)))
