"""A plan for a question: the search on a part of the cluster, the plan at full size, and what is to be said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from areal_jax.app.simulate.planning import list_fields, simulate_plan
from areal_jax.config.cluster import MOST_ENGINES
from areal_jax.config.ranges import ConfigError
from areal_jax.simulation.planner.advice import (
    Advice,
    Trade,
    advise,
    find_interval,
    joules_a_token,
    list_trades,
    make_load,
)
from areal_jax.simulation.planner.cluster_load import NODE, Layout, Load
from areal_jax.simulation.planner.neighbours import (
    Outcome,
    Plan,
    Search,
    Setting,
    Simulate,
    choose_start,
    fits,
    predict,
    refine,
)
from areal_jax.telemetry.energy.meters import Energy

MOST_SIMULATIONS = 24
_DIVISORS = (8, 4, 2)
_WHOLE = 16  # devices that are simulated as they are
_FEWEST_PARTS, _FEWEST_GROUPS = 8, 8  # engines' sizes in the devices, and groups of an update, at least, of a part
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with what its simulation found, at full size."""

    setting: Setting
    divisor: int  # devices and answers of the search were divided by it
    plan: Plan
    outcome: Outcome  # tokens a second of all devices
    interval: tuple[float, float]  # tokens a second, of planning.WINDOW updates in a row
    in_turns: Outcome | None  # of synchronous training on the same devices
    load: Load
    advice: Advice
    fields: Mapping[str, object]  # of the config; of the synchronous run where that is the better one
    tried: Mapping[Plan, Outcome]  # all that was simulated for it, on a part of the devices
    trades: Sequence[Trade]  # on the same part; tokens a second of all devices
    full: Outcome | None = None  # simulated once at full size
    is_stopped: bool = False  # the search was, with this as the best so far

    @property
    def simulations(self) -> int:
        return len(self.tried) + (self.in_turns is not None)


def find_plan(
    setting: Setting, *, seed: int, prompts: str, is_full: bool, note: Note, most: int = MOST_SIMULATIONS
) -> Planned:
    """Returns the best plan; where a KeyboardInterrupt ends the search, the best of what was simulated until then.

    Args:
      note: is told the plan of closed forms, in the first second, and then each plan that was simulated.

    Raises ConfigError for a plan that cannot be (no memory, too many engines), and KeyboardInterrupt before the first
    simulation has ended.
    """
    divisor = choose_divisor(setting)
    small = setting.shrink(divisor)

    def simulate(plan: Plan) -> Outcome:
        return simulate_plan(small, plan, seed=seed, prompts=prompts)

    def tell(plan: Plan, outcome: Outcome) -> None:
        note(
            f'{plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots: '
            f'{divisor * outcome.tokens_s:,.0f} tokens a second, mean age {outcome.age_mean:.1f}'
        )

    start = choose_start(small)
    note(_tell_start(small, start, divisor))
    search, is_stopped = Search(small, simulate, most, tell), False
    try:
        best = search.run(start)
        in_turns, why_not = _simulate_in_turns(small, simulate)
    except KeyboardInterrupt:
        if not search.tried:
            raise
        best, is_stopped = search.best, True
        in_turns, why_not = None, 'synchronous training was not simulated: the search was stopped'
    plan = refine(setting, small, best, search.tried[best])
    if plan.engines > MOST_ENGINES:
        raise ConfigError(f'the plan has {plan.engines} engines, and cluster.engines takes {MOST_ENGINES}: plan a part')
    outcome = _enlarge(search.tried[best], divisor)
    if divisor > 1:
        note(f'at full size: {plan.engines} engines, learner on {plan.training}')
    full = simulate_plan(setting, plan, seed=seed, prompts=prompts) if is_full and not is_stopped else None
    shown = full or outcome
    in_turns = in_turns and _enlarge(in_turns, divisor)
    load = make_load(setting, _layout(setting, plan), plan, shown.tokens_s)
    advice = advise(setting, plan, shown, load, predict(small, best).live, in_turns, why_not)
    interval = find_interval(setting, plan, shown)
    shared = plan_in_turns(setting) if advice.trains_in_turns else None
    fields = list_fields(setting, shared or plan, load.decode_steps)
    trades = [
        dataclasses.replace(one, outcome=_enlarge(one.outcome, divisor)) for one in list_trades(search.tried, best)
    ]
    return Planned(
        setting, divisor, plan, outcome, interval, in_turns, load, advice, fields, search.tried, trades, full,
        is_stopped,
    )  # fmt: skip


def _tell_start(setting: Setting, plan: Plan, divisor: int) -> str:
    tokens_s = divisor * setting.answers.tokens / predict(setting, plan).period_s
    part = f' (1/{divisor} of the devices)' if divisor > 1 else ''
    return (
        f'by closed forms: {plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots'
        f'{part}: about {tokens_s:,.0f} tokens a second; simulations refine it, and Ctrl-C prints the best so far'
    )


def choose_divisor(setting: Setting) -> int:
    """8, or less where a part would have too few engines or groups; 1 up to 16 devices."""
    for divisor in _DIVISORS:
        parts = setting.devices / divisor / setting.engine_devices
        groups = setting.answers.groups / divisor
        is_even = setting.devices % divisor == 0 and setting.answers.groups % divisor == 0
        if setting.devices > _WHOLE and is_even and parts >= _FEWEST_PARTS and groups >= _FEWEST_GROUPS:
            return divisor
    return 1


def plan_in_turns(setting: Setting) -> Plan | None:
    """Engines on all devices, which train as well; None where no engines of equal size share them."""
    for engines in range(setting.devices // setting.engine_devices, 0, -1):
        plan = Plan(engines, setting.devices, 0, setting.most_slots, shared=True)
        if setting.devices % engines == 0 and fits(setting, plan):
            return plan
    return None


def _simulate_in_turns(setting: Setting, simulate: Simulate) -> tuple[Outcome | None, str]:
    """(its outcome, '') or (None, why there is none)."""
    plan = plan_in_turns(setting)
    if plan is None:
        return None, 'synchronous training is not simulated: no engines of equal size share these devices'
    return simulate(plan), ''


def _enlarge(outcome: Outcome, scale: int) -> Outcome:
    return dataclasses.replace(outcome, tokens_s=scale * outcome.tokens_s)


def _layout(setting: Setting, plan: Plan) -> Layout:
    """With the learner on whole nodes where that goes, as roles have it."""
    fields = list_fields(setting, plan)
    hosts = plan.training // NODE if plan.training % NODE == 0 else 1
    learner = str(fields['cluster.learner'])
    return Layout(setting.shape, f'hosts={hosts} x {learner}', str(fields['cluster.engines']), setting.answers.count)


def energy_of(planned: Planned) -> Energy | None:
    """Joules a trained token; None without published watts."""
    live = predict(planned.setting, planned.plan).live
    return joules_a_token(planned.setting, planned.plan, planned.full or planned.outcome, live)
