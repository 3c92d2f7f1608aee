"""Interruptible generation against waiting for the longest answer: figure 6b, and a curve over how often weights come.

One engine is simulated beside a learner that is never the bound, so that an update comes whenever enough answers have
ended. The figure says neither the context nor the split, so no point of the curve is known to be its own.

Closed form 3.9 takes a step to last as long however few rows it has: it is judged with prices of that kind, and shown
beside the curve, whose steps get faster while an engine drains.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from areal_jax.simulation.closed_forms import useful_share_of_interrupted, useful_share_of_waiting
from areal_jax.simulation.drawn_answers import rests
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, lanes
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.simulated import Simulations

WITHIN = 0.15  # of closed form 3.9
GROUPS = (8, 16, 32, 64, 128)  # of an update, for one engine
_ANSWERS, _FEWEST = 2048, 4  # measured, and updates at least
_LEARNER = 64  # devices: training takes next to no time
_GRID = 4000


def setting_of(model: str, groups: int, kv_policy: str) -> Setting:
    enough = max(_FEWEST, _ANSWERS // (groups * rows.TABLE_1_BATCH.group_size))
    return Setting(
        model, 1 + _LEARNER, groups, float('inf'), generating=1, kv_policy=kv_policy, updates=enough
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """Of an engine that is always full: closed_forms.py, and the same with steps that get faster."""

    answer_s: float  # g, the mean time of an answer
    batch_s: float  # an update's tokens at the full speed
    rebuild_s: float
    drain_s: float  # what is lost while a full engine waits for its longest answer, at the pace of a full engine
    faster_drain_s: float  # the same where steps of fewer answers take less time

    @property
    def gain(self) -> float:
        """Of interrupting over waiting, each in the period that results."""
        return self._ratio(self.drain_s)

    @property
    def faster_gain(self) -> float:
        return self._ratio(self.faster_drain_s)

    def _ratio(self, drain_s: float) -> float:
        interrupted, waiting = self.batch_s + self.rebuild_s, self.batch_s + drain_s
        useful = useful_share_of_interrupted(0.0, self.rebuild_s, 1.0, interrupted)
        return useful / useful_share_of_waiting(drain_s, 1.0, 0.0, waiting) - 1


def closed_form(setting: Setting) -> ClosedForm:
    engine, slots, mean = setting.engine, setting.slots, setting.moments.mean
    prompt = setting.context - setting.moments.live_position
    lengths = _grid(setting)
    squares = (lengths**3).mean() / (3 * mean) + 2 * prompt * setting.moments.live_position + prompt**2
    mean_rest, longest_rest = rests(setting.lengths, slots)
    at = np.arange(0.0, lengths.max(), lengths.max() / _GRID)
    live = slots * np.array([np.maximum(lengths - t, 0).mean() for t in at]) / mean
    seen = slots * np.array([np.maximum(lengths**2 - t**2, 0).mean() for t in at]) / (2 * mean) + prompt * live
    until = at <= longest_rest
    steps = np.array([engine.step_s(float(n), float(c)) for n, c in zip(live[until], seen[until], strict=True)])
    lost = (steps - live[until] / slots * setting.step_s).sum() * (at[1] - at[0])
    return ClosedForm(
        answer_s=mean * setting.step_s,
        batch_s=setting.groups * setting.batch.group_size * mean * setting.step_s / slots,
        rebuild_s=engine.prefill_s(slots * setting.context, slots * float(squares) / 2),
        drain_s=setting.step_s * (longest_rest - mean_rest),
        faster_drain_s=float(lost),
    )


def _grid(setting: Setting) -> np.ndarray:
    """float64 [n]: lengths of equal probability."""
    normal = statistics.NormalDist()
    of = setting.lengths
    return np.array([of.cut(of.start.quantile(normal.inv_cdf((i + 0.5) / _GRID))) for i in range(_GRID)], np.float64)


@dataclasses.dataclass(frozen=True)
class Point:
    """Of the curve."""

    period: float  # seconds an update over the mean time of an answer, interrupted
    gain: float


def compare_even(simulations: Simulations, model: str, groups: int) -> Comparison | None:
    """Updates a second with steps that all take as long, as closed form 3.9 has them; None where there was no time.

    Not tokens generated a second, as in the curve: between two swaps an engine that waits generates an answer for each
    slot, which may be more than an update takes.
    """
    settings = [
        dataclasses.replace(setting_of(model, groups, policy), even_steps=True) for policy in ('recompute', 'wait')
    ]
    interrupted, waiting = map(simulations.find, settings)
    if interrupted is None or waiting is None:
        return None
    form = closed_form(settings[0])
    return Comparison(
        f'even steps, {model}, an update every {interrupted.update_s / form.answer_s:.2f} mean answers: '
        'updates over waiting, closed form 3.9', 'times', 1 + form.gain, waiting.update_s / interrupted.update_s,
        WITHIN, '', '', min(map(simulations.seeds_of, settings)),
    )  # fmt: skip


def compare_interruption(simulations: Simulations, updates: int) -> Result:
    found: list[Comparison] = []
    lying: dict[str, object] = {}
    for row in rows.FIGURE_6B:
        curve: list[Point] = []
        for groups in GROUPS:
            settings = [setting_of(row.model, groups, policy) for policy in ('recompute', 'wait')]
            interrupted, waiting = map(simulations.find, settings)
            if interrupted is None or waiting is None:
                continue
            form = closed_form(settings[0])
            point = Point(
                interrupted.update_s / form.answer_s, interrupted.generated_tokens_s / waiting.generated_tokens_s - 1
            )
            curve.append(point)
            seeds = min(map(simulations.seeds_of, settings))
            name = f'interruption, {row.model}, an update every {point.period:.2f} mean answers'
            both = f'interrupted: {lanes(interrupted)}; waiting: {lanes(waiting)}'
            found += [
                Comparison(
                    f'{name}: speed over waiting, closed form 3.9', 'times', 1 + form.gain, 1 + point.gain, None,
                    both, 'a draining engine keeps the pace of a full one in 3.9', seeds,
                ),
                Comparison(
                    f'{name}: the same with steps that get faster as answers end', 'times', 1 + form.faster_gain,
                    1 + point.gain, None, '', '', seeds,
                ),
            ]  # fmt: skip
            if even := compare_even(simulations, row.model, groups):
                found.append(even)
        gain = row.interrupted / row.waiting - 1
        lying[f'{row.model}: +{gain:.0%} of figure 6b'] = place(gain, curve)
        lying[f'{row.model}: curve'] = [[round(point.period, 2), round(point.gain, 3)] for point in curve]
    judged = [one for one in found if one.bar is not None]
    met = bool(judged) and all(one.is_met for one in judged)
    bar = (
        'a curve over period / mean answer, where figure 6b lies on it; closed form 3.9 within '
        f'{WITHIN:.0%} with even steps'
    )
    return Result('interruption', bar, lying, met, found)


def place(gain: float, curve: Sequence[Point]) -> str:
    """Where a gain lies on a curve that falls with the period, in mean answers."""
    for before, after in itertools.pairwise(curve):
        if min(before.gain, after.gain) <= gain <= max(before.gain, after.gain) and before.gain != after.gain:
            share = (before.gain - gain) / (before.gain - after.gain)
            return f'at an update every {before.period + share * (after.period - before.period):.1f} mean answers'
    return 'nowhere on the simulated curve'
