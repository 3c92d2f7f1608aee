"""Explains a plan in words and numbers: its limit, the next limit, watts, and when to train synchronously."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from areal_jax.simulation.planner.cluster_load import MEASURED, HostCosts, Layout, Load, Pace, choose_pieces
from areal_jax.simulation.planner.neighbours import Costs, Outcome, Plan, Setting, predict, publication_s, worth
from areal_jax.simulation.planner.question import MOST_SLOTS
from areal_jax.simulation.prices import Reached
from areal_jax.telemetry.energy_meters import DECODE, IDLE, POWER, TRAIN, Energy, Phase, decode_activity, joules

DRAWS = 200
DEVIATIONS = 2.0  # standard deviations of a normal number, which one in twenty exceeds
LEAST_SCATTER = 0.02  # for a simulation that saw less: its own result is that uncertain


@dataclasses.dataclass(frozen=True)
class Range:
    """The lowest and the highest published value."""

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
    """Returns (low, high) tokens a second: the range of a few updates in a row, nineteen times out of twenty.

    It covers two uncertainties: costs known within a range, by the 5th and 95th percentile of DRAWS in `find_factors`;
    and lengths, by DEVIATIONS times the scatter of the simulated run to either side.
    """
    low, high = find_factors(setting, plan, seed)
    room = DEVIATIONS * max(found.scatter, LEAST_SCATTER)
    return low * max(0.0, 1 - room) * found.tokens_s, high * (1 + room) * found.tokens_s


def find_factors(setting: Setting, plan: Plan, seed: int = 0) -> tuple[float, float]:
    """Returns (low, high): factors on the speed of a plan, low <= 1 <= high.

    The constants with which a plan is simulated are low ends of most ranges, so `low` is often 1.

    The closed forms with each draw are compared with the closed forms with the setting's own constants; the simulation
    is assumed to differ from them by the same factor for all draws. Ranges are drawn uniformly and independently.
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
        # E[L^2] = exp(sigma^2) E[L]^2 of a lognormal: the factor for another sigma within the range
        factor = float(np.exp(found['sigma'] ** 2 - PUBLISHED['sigma'].high ** 2))
        second = max(answers.moments.mean**2, answers.moments.second * factor)
        answers = dataclasses.replace(answers, moments=dataclasses.replace(answers.moments, second=second))
    costs = Costs(reached, setting.costs.load_s)
    return dataclasses.replace(setting, costs=costs, answers=answers)


_BUSY = 0.93  # of the time: a lane that is busy for more sets the pace
_FILLED = 0.9  # of the slots: an engine with fewer answers could decode more
_NEAR = 0.5  # of a limit: a larger use of it is mentioned
_AS_FAST = 0.99
_HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The sentences on a plan, in addition to its numbers."""

    binding: str  # 'learner', 'publication', 'engines', 'memory', 'max_eta', 'max_age', 'age_price' or 'eta'
    binds: str  # one sentence on `binding`
    breaks_next: str  # one sentence
    asynchrony: str  # one sentence on training in turns
    trains_in_turns: bool  # training in turns is as fast or faster, or no asynchronous plan keeps the age


@dataclasses.dataclass(frozen=True)
class Trade:
    """A plan that is better if `Setting.age_price` is `price` or more."""

    price: float
    plan: Plan
    outcome: Outcome


def advise(
    setting: Setting, plan: Plan, outcome: Outcome, load: Load, live: float, in_turns: Outcome | None, why_not: str
) -> Advice:
    """Makes the advice on a plan.

    Args:
      live: answers that an engine decodes at a time.
      in_turns: outcome of the same devices with engines that share them with the learner; None = `why_not`.
    """
    binding = find_binding(setting, plan, outcome, live)
    binds, breaks_next = describe_binding(setting, plan, outcome, live, binding), describe_next(load)
    if in_turns is None:
        return Advice(binding, binds, breaks_next, why_not, False)
    max_age = setting.max_age
    ratio = worth(setting, outcome) / worth(setting, in_turns)
    too_old = max_age is not None and outcome.age_mean > max_age
    numbers = (
        f'{in_turns.tokens_s:,.0f} tokens a second with eta 0 on shared devices, {outcome.tokens_s:,.0f} with these'
    )
    if too_old:
        sentence = f'no asynchronous plan keeps the mean age to {max_age:g}: train synchronously ({numbers})'
    elif ratio <= 1 / _AS_FAST:
        sentence = f'asynchrony does not pay here: train synchronously ({numbers})'
    else:
        sentence = f'asynchrony pays {ratio:.2f} times ({numbers}; changing roles costs nothing there)'
    return Advice(binding, binds, breaks_next, sentence, too_old or ratio <= 1 / _AS_FAST)


def find_binding(setting: Setting, plan: Plan, outcome: Outcome, live: float) -> str:
    """Returns the limit on the pace: a side, a publication, or the bound of the gate, which leaves slots empty."""
    if outcome.learner_busy >= _BUSY:
        return 'learner'
    if publication_s(setting, plan.training) >= _BUSY * outcome.period_s:
        return 'publication'
    if outcome.engines_busy >= _BUSY and live >= _FILLED * plan.slots and plan.slots == setting.most_slots:
        return 'engines' if plan.slots >= MOST_SLOTS else 'memory'
    if setting.max_age is not None:
        return 'max_age'
    if plan.eta >= setting.most_eta:
        return 'max_eta'
    return 'age_price' if setting.age_price else 'eta'


def describe_binding(setting: Setting, plan: Plan, outcome: Outcome, live: float, binding: str) -> str:
    """Returns the sentence on the limit that `find_binding` found."""
    engines, learner = f'{100 * outcome.engines_busy:.0f}%', f'{100 * outcome.learner_busy:.0f}%'
    shares = f'engines are busy {engines} of the time, the learner {learner}'
    of_devices = {
        'learner': f'the learner binds: {shares}',
        'publication': f'the publication binds, which takes {publication_s(setting, plan.training):.1f} s: {shares}',
        'engines': f'the engines bind: {shares}, with {live:.0f} of {plan.slots} slots filled',
        'memory': f'the memory of the engines binds: {shares}, and more than {plan.slots} answers do not fit',
    }
    if binding in of_devices:
        return of_devices[binding]
    of_gate = {
        'max_eta': f'--max_eta={setting.most_eta}',
        'max_age': f'--max_age={setting.max_age}',
        'age_price': f'--age_price={setting.age_price:g}: a larger eta is faster, and not worth its age',
        'eta': 'a larger eta is no faster',
    }
    waits = outcome.engines_busy < _BUSY
    filled = 'both wait for it' if waits else f'{live:.0f} of {plan.slots} slots are filled'
    return f'the staleness bound binds ({of_gate[binding]}): {shares}, and {filled}'


def list_trades(tried: Mapping[Plan, Outcome], plan: Plan) -> list[Trade]:
    """Returns the plans in `tried` that a higher price of age would choose, each with the least such price."""
    trades: list[Trade] = []
    while True:
        now = tried[plan]
        younger = [
            Trade(max(0.0, 1 - (one.tokens_s / now.tokens_s) ** (1 / (now.age_mean - one.age_mean))), other, one)
            for other, one in tried.items()
            if one.age_mean < now.age_mean
        ]
        if not younger:
            return trades
        trades.append(min(younger, key=lambda trade: trade.price))
        plan = trades[-1].plan


def describe_next(load: Load) -> str:
    """Returns a sentence on the limit, other than the accelerators, that is used the most."""
    name, share = max(load.shares().items(), key=lambda item: item[1])
    used = f'{100 * share:,.0f}% of {name} is used'
    if share > 1:
        return f'{used}: this pace is not reached until that is changed (docs/cluster/plan.md)'
    return f'{used}: {"this breaks next" if share > _NEAR else "nothing beside the accelerators is near its limit"}'


def make_load(setting: Setting, layout: Layout, plan: Plan, tokens_s: float, costs: HostCosts = MEASURED) -> Load:
    """Makes the load at the simulated pace, with the smallest pieces of answers that the controller can process."""
    answers = setting.answers
    return choose_pieces(Load(layout, Pace(tokens_s, answers.moments.mean, answers.live_positions, plan.slots), costs))


def count_running_groups(setting: Setting, plan: Plan) -> int:
    """Groups that are open at a time: each holds its place until its longest answer ends."""
    live = predict(setting, plan).live
    return math.ceil(live * plan.engines * setting.answers.moments.tail / setting.answers.group_size)


def device_hours(setting: Setting, plan: Plan, tokens_s: float) -> float:
    """Device-hours for a million trained tokens; devices that the plan leaves unused do not count."""
    return 1e6 / tokens_s * count_devices(setting, plan) / _HOUR_S


def count_devices(setting: Setting, plan: Plan) -> int:
    return plan.training + (0 if plan.shared else plan.engines * setting.engine_devices)


def joules_a_token(setting: Setting, plan: Plan, outcome: Outcome, live: float) -> Energy | None:
    """The energy of a trained token, by the published watts of the chip; None without watts, and for shared devices.

    Boards alone, without host, network and cooling. Prefill counts as decoding, and unused devices do not count.
    """
    power = POWER.get(setting.chip.name)
    if power is None or plan.shared:
        return None
    engines = [
        Phase(DECODE, outcome.engines_busy, decode_activity(live)),
        Phase(IDLE, max(0.0, 1 - outcome.engines_busy)),
    ]
    learner = [Phase(TRAIN, outcome.learner_busy), Phase(IDLE, max(0.0, 1 - outcome.learner_busy))]
    a_second = joules(engines, power, plan.engines * setting.engine_devices) + joules(learner, power, plan.training)
    return Energy(*(value / outcome.tokens_s for value in (a_second.low, a_second.mid, a_second.high)))
