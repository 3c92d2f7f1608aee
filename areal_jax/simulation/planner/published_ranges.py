"""Ranges that are published of what a prediction depends on, and the interval that follows for the speed of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from areal_jax.simulation.planner.neighbours import Costs, Outcome, Plan, Setting, predict
from areal_jax.simulation.prices import Reached

DRAWS = 200
DEVIATIONS = 2.0  # of a normal number, beyond which one of twenty lies
LEAST_SCATTER = 0.02  # of a simulation that saw little of it, and is itself as uncertain


@dataclasses.dataclass(frozen=True)
class Range:
    """Lowest and highest value that is published."""

    low: float
    high: float
    source: str

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


PUBLISHED: Mapping[str, Range] = {
    'bandwidth': Range(0.6, 0.85, 'served engines'),
    'prefill': Range(0.5, 0.73, 'MaxText on 8 H100; ragged paged attention on TPU'),
    'mfu': Range(0.39, 0.46, 'arXiv 2505.24298, figure 6a, packed, H800'),
    'load_s': Range(1.2, 7.2, 'publications of whole weights, 67B to 1T'),
    'sigma': Range(0.6, 0.75, 'of the logarithm of a length: a guess, see the constants of benchmarks/simulation'),
}


def find_interval(setting: Setting, plan: Plan, found: Outcome, seed: int = 0) -> tuple[float, float]:
    """Returns tokens a second, (low, high): what a few updates in a row of this plan train, nineteen times of twenty.

    Two things are in it. What is known within a range: the 5th and 95th percentile of DRAWS through `find_factors`. And
    what lengths do: DEVIATIONS times the scatter of the simulated run to either side.
    """
    low, high = find_factors(setting, plan, seed)
    room = DEVIATIONS * max(found.scatter, LEAST_SCATTER)
    return low * max(0.0, 1 - room) * found.tokens_s, high * (1 + room) * found.tokens_s


def find_factors(setting: Setting, plan: Plan, seed: int = 0) -> tuple[float, float]:
    """(low, high): factors on the speed of a plan; 1 lies between.

    The constants that a plan is simulated with are low ends of most ranges, so `low` is often 1.

    Each draw goes through the closed forms and is compared with the setting's own constants: what the simulation adds
    to them is taken to be the same for all draws. Ranges are drawn uniformly and independently.
    """
    drawn = np.random.default_rng(seed)
    base = predict(setting, plan).period_s
    factors = [base / predict(_draw(setting, drawn), plan).period_s for _ in range(DRAWS)]
    low, high = np.percentile(factors, (5, 95))
    return min(1.0, float(low)), max(1.0, float(high))


def _draw(setting: Setting, drawn: np.random.Generator) -> Setting:
    found = {name: float(drawn.uniform(one.low, one.high)) for name, one in PUBLISHED.items()}
    reached = Reached(found['bandwidth'], found['prefill'], found['mfu'])
    answers = setting.answers
    if answers.text.startswith('lognormal'):
        # E[L^2] = exp(sigma^2) E[L]^2 of a lognormal: what another sigma within the range does to it
        factor = float(np.exp(found['sigma'] ** 2 - PUBLISHED['sigma'].high ** 2))
        second = max(answers.moments.mean**2, answers.moments.second * factor)
        answers = dataclasses.replace(answers, moments=dataclasses.replace(answers.moments, second=second))
    costs = Costs(reached, setting.costs.load_s)
    return dataclasses.replace(setting, costs=costs, answers=answers)
