"""Chooses the split of the devices for the next update: by a plan, or by the busy seconds of the lanes.

Pure functions of measurements; reallocation.py measures and moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from areal_jax.config.cluster import DeviceSplit

_WAITS = 0.1  # least share of an update that a learner short of data waits
_SAME = 1e-9  # relative singular value below which steps count as alike
_PARTS = ([0], [0, 1], [0, 2], [1], [2], [1, 2], [0, 1, 2])  # of a step's cost: base, rows, positions
_FULL = 0.9  # least share of its full rows with which an engine counts as full
_MOST_DOUBLINGS = 6  # of the updates before the next move back


class LaneSeconds(NamedTuple):
    """Busy lanes and costs of one update, in clock seconds."""

    period: float  # between the beginnings of two updates
    learner: float  # of its lane
    engines: float  # of the lane of one engine, mean over all engines
    needed: float  # needed by one engine to generate the update's data, see needed_seconds
    step_s: float = 0.0  # of a decode step, independent of its rows
    row_s: float = 1.0  # of each row of a decode step
    full_share: float = 0.0  # a row's share of a step in a full engine: 1 / rows
    open_share: float = 0.0  # likewise, if one engine had all rows that decode at a time
    growth: float = 1.0  # mean tokens of ended answers / mean tokens of the answers that the update took

    @property
    def training(self) -> float:
        """The learner's seconds for answers as long as the ones that end now, which it will train later."""
        return self.learner * self.growth

    def needed_of(self, here: int, there: int) -> float:
        """`needed` with `there` engines instead of `here`.

        Rows are shared among the engines, so more engines run steps of fewer rows: a row costs
        row_s + step_s * max(full_share, engines * open_share).
        """
        cost, later = (self.row_s + self.step_s * max(self.full_share, n * self.open_share) for n in (here, there))
        return self.needed * here / there * (later / cost if cost else 1.0)


class DecodeSums(NamedTuple):
    """Sums over the decode steps of one update and all engines; a step counts with the means of its dispatch."""

    steps: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0  # of each step
    positions: float = 0.0  # seen by the rows of each step
    squared_rows: float = 0.0
    squared_positions: float = 0.0
    rows_positions: float = 0.0
    rows_seconds: float = 0.0
    positions_seconds: float = 0.0

    def add(self, steps: int, rows: int, seconds: float, positions: int) -> DecodeSums:
        """Returns the sums with a further dispatch of `seconds`; its rows saw `positions` in all its steps."""
        seen = positions / steps
        further = (
            *(steps, seconds, steps * rows, positions, steps * rows * rows, seen * positions, rows * positions),
            *(rows * seconds, seen * seconds),
        )
        return DecodeSums(*map(sum, zip(self, further, strict=True)))


class Rung(NamedTuple):
    """A split, with its numbers of devices and engines, for Automatic."""

    split: DeviceSplit
    learner: int  # devices
    engines: int  # engines of equal size


class Choice(Protocol):
    """The choice of splits, which reallocation.py asks before every update."""

    @property
    def is_punctual(self) -> bool:
        """Whether a split is taken at its update even if unprepared; else it is taken once it is prepared."""
        ...

    def ahead(self, update: int, split: DeviceSplit) -> DeviceSplit | None:
        """The next split, to be prepared; None if it is not known."""
        ...

    def choose(self, update: int, split: DeviceSplit, measured: Sequence[LaneSeconds]) -> DeviceSplit:
        """The split of `update`, `split` or another one.

        Args:
          measured: the updates with `split`, oldest first.
        """
        ...

    def note_move(self, before: DeviceSplit, after: DeviceSplit) -> None: ...

    def state(self) -> dict[str, int]:
        """The state for a checkpoint, JSON-able."""
        ...

    def restore(self, state: Mapping[str, int]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Planned:
    """Follows a plan of splits, each from its update on."""

    plan: Mapping[int, DeviceSplit]  # by update, ascending
    is_punctual: ClassVar[bool] = True

    def ahead(self, update: int, split: DeviceSplit) -> DeviceSplit | None:
        return next((later for first, later in self.plan.items() if first > update and later != split), None)

    def choose(self, update: int, split: DeviceSplit, measured: Sequence[LaneSeconds]) -> DeviceSplit:
        begun = [planned for first, planned in self.plan.items() if first <= update]
        return begun[-1] if begun else split

    def note_move(self, before: DeviceSplit, after: DeviceSplit) -> None:
        """Does nothing: the plan is fixed."""

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: Mapping[str, int]) -> None:
        """Does nothing: see `state`."""


class Automatic:
    """Moves to the split with the shortest predicted update if the prediction is clear, else keeps the split.

    Learner and engines work at the same time, so an update takes as long as the busier side. From n to m devices the
    learner's seconds scale with n / m (no losses), and the engines' seconds are `LaneSeconds.needed_of`. The predicted
    update must be shorter by the factor 1 + gain, in each of the last `updates` updates. A move against the direction
    of the previous one needs twice as many updates, the next reversal four times as many, so that noise and wrong
    predictions move devices ever more rarely; a second move in the same direction resets this.

    Args:
      rungs: the smallest learner first.
    """

    is_punctual: ClassVar[bool] = False

    def __init__(self, rungs: Sequence[Rung], *, gain: float, updates: int):
        self._rungs, self._gain, self._updates = tuple(rungs), gain, updates
        self._direction = 0  # of the last move: 1, more devices for the learner, or -1
        self._reversals = 0  # reversals of direction in a row

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
    """The relative excess of the present over the predicted length of an update: 0.25 if 5 s become 4 s.

    An update takes as long as its busier side: the learner, in inverse proportion to its devices, or the engines
    (`LaneSeconds.needed_of`), both for answers as long as the ones that end now.
    """
    now = max(seconds.training, seconds.needed)
    generation = seconds.needed_of(here.engines, there.engines)
    later = max(seconds.training * here.learner / there.learner, generation)
    return now / later - 1.0 if later > 0 else 0.0


def waits(period: float, learner: float) -> bool:
    """Whether the learner is short of data: it waits for a tenth of the update or more."""
    return learner <= (1 - _WAITS) * period


def needed_seconds(period: float, learner: float, full: float, *, taken: int, ended: int) -> float:
    """Seconds in which one engine generates the answers that an update takes.

    If the learner waits for a tenth of the update or more, they are the whole update: the engines are then the limit,
    for example because a group waits for its longest answer. Else they are the seconds that full slots need.

    Args:
      period, learner: as in LaneSeconds.
      full: seconds of one engine, by `full_seconds`.
      taken: number of answers that were trained or dropped.
      ended: number of answers that ended meanwhile; larger while a pipeline fills. Answers are counted and not tokens,
        because answers that end later have more tokens if answers grow.
    """
    needed = period if waits(period, learner) else full
    return needed * taken / ended if ended else needed


class StepCost(NamedTuple):
    """A decode step of n rows takes step_s + row_s * n."""

    step_s: float
    row_s: float


def fit_step(sums: DecodeSums) -> StepCost:
    """Fits step_s + a * rows + b * positions by least squares, all >= 0; row_s is for a row at the mean positions.

    Rows of long answers are few and expensive: without the positions they would look free. If all steps are alike,
    the whole cost is step_s.
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
    better = _SAME * sums.seconds**2 / sums.steps  # of two equally good fits, the first wins
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
    """Rows of a full engine: its slots, or fewer if the KV cache holds fewer rows at their mean positions.

    Positions that rows share count for each row.
    """
    return min(slots, cache_tokens * sums.rows / max(sums.positions, 1.0))


def full_seconds(sums: DecodeSums, cost: StepCost, rows: float) -> float:
    """Seconds in which engines with `rows` rows would decode the tokens of `sums`, at most `sums.seconds`.

    An engine with half-full slots is as busy as a full one, but could do more.
    """
    if not sums.rows or sums.rows / sums.steps >= rows:
        return sums.seconds
    return min(sums.seconds, sums.rows / rows * (cost.step_s + cost.row_s * rows))


def open_rows(before: float, rows: float, full: float, engines: int) -> float:
    """The number of rows that decode at a time in all engines, if that limits decoding; 0 = not known.

    The staleness bound limits the open answers, and few answers of a group that waits for its longest one decode: then
    fewer engines have more rows each.

    Args:
      before: the number known before this update, in which the learner waited.
      rows: mean rows of a step; from a full engine (`full` rows) it is only a lower bound.
    """
    seen = rows * engines
    return seen if rows < _FULL * full else max(before, seen) if before else 0.0


def mean_seconds(measured: Sequence[LaneSeconds]) -> LaneSeconds:
    """The mean over these updates; zeros without updates."""
    if not measured:
        return LaneSeconds(0.0, 0.0, 0.0, 0.0, row_s=0.0)
    return LaneSeconds(*(sum(values) / len(measured) for values in zip(*measured, strict=True)))
