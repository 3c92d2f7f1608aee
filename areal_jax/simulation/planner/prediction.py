"""A plan's period by closed forms, in milliseconds of computing: where a search starts, and how its result varies.

Loads as in section `closed_forms`, with what the fluid limit leaves out: the gate bounds the answers under way, a group
holds its place until its longest answer ends, and every version makes engines compute their caches again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from areal_jax.simulation.planner.neighbours import Answers, Plan, Setting, fits, price_age
from areal_jax.simulation.prices import Roofline, step_overhead_s

_ROUNDS = 24  # of the fixed point, which halves its error in each
_TIE = 0.01
_FEWEST_SLOTS = 16


@dataclasses.dataclass(frozen=True)
class Prediction:
    period_s: float
    generation_s: float  # of an update, by all engines
    train_s: float
    publication_s: float  # of a version: no update is shorter
    live: float  # answers that an engine decodes at a time
    age_mean: float


def train_s(setting: Setting, training: float) -> float:
    """Seconds of an update on so many devices: passes and optimizer."""
    answers = setting.answers
    learner = Roofline(setting.chip, setting.shape, setting.costs.reached, 1)
    computed_s = learner.train_s(answers.read_tokens, answers.tokens * answers.live_positions, setting.passes)
    return (computed_s + setting.optimizer_steps * learner.optimizer_s()) / training


def publication_s(setting: Setting, training: float) -> float:
    """Seconds until an engine has a version that so many devices send."""
    learner = Roofline(setting.chip, setting.shape)
    return learner.publication_s(setting.engine_devices, max(1, round(training))) + setting.costs.load_s


def predict(setting: Setting, plan: Plan, slowdown: float = 1.0, engines: float = 0.0) -> Prediction:
    """The period P of max(T, W, p): W is what engines take for an update with as many answers as the gate admits.

    Of the (eta + 1) B answers that the gate admits, B are trained for T of P, B wait for p of P until the gate knows of
    their update, and 1 / M_tail of the others are live.

    Args:
      slowdown: of the engines, against this closed form.
      engines: in place of the plan's, when it is no whole number; the learner has the rest.
    """
    answers = setting.answers
    count = engines or plan.engines
    training = setting.devices - engines * setting.engine_devices if engines else plan.training
    trained_s, published_s = train_s(setting, training), publication_s(setting, training)
    least_s = max(trained_s, published_s)
    engine = _engine(setting)
    period_s, generated_s, live = least_s, 0.0, 1.0
    for _ in range(_ROUNDS):
        admitted = (plan.eta + 1 - (trained_s + published_s) / max(period_s, least_s)) * answers.count
        live = min(plan.slots, max(admitted, 0.05 * answers.count) / (answers.moments.tail * count))
        generated_s = slowdown * _generation_s(engine, answers, live, count)
        generated_s += _rebuild_s(engine, answers, live)
        period_s = 0.5 * (period_s + max(least_s, generated_s))
    open_share = live * count * answers.moments.token_tail / answers.count
    return Prediction(max(least_s, generated_s), generated_s, trained_s, published_s, live, open_share)


def _engine(setting: Setting) -> Roofline:
    overhead_s = max(0.0, step_overhead_s(setting.chip, setting.shape, setting.costs.reached))
    return Roofline(setting.chip, setting.shape, setting.costs.reached, setting.engine_devices, overhead_s)


def _generation_s(engine: Roofline, answers: Answers, live: float, engines: float) -> float:
    """Decoding and first prefills of an update."""
    step_s = engine.step_s(live, live * answers.live_positions)
    prompts_s = answers.groups * engine.prefill_s(answers.prompt, answers.prompt**2 / 2)
    return (answers.tokens * step_s / live + prompts_s) / engines


def _rebuild_s(engine: Roofline, answers: Answers, live: float) -> float:
    """Once a version: the caches of an engine; its weights come while it decodes."""
    tokens = live * answers.live_positions
    return engine.prefill_s(tokens, tokens * answers.live_positions / 2)


def list_plans(setting: Setting, slots: int, eta: int) -> Iterable[Plan]:
    """Every split of all devices."""
    most = (setting.devices - setting.least_training) // setting.engine_devices
    for engines in range(1, most + 1):
        plan = Plan(engines, setting.devices - engines * setting.engine_devices, eta, slots)
        if fits(setting, plan):
            yield plan


def predict_worth(setting: Setting, plan: Plan, found: Prediction) -> float:
    """As `plan_setting.worth`, by closed forms."""
    return price_age(setting, setting.answers.tokens / found.period_s, found.age_mean)


def choose_start(setting: Setting) -> Plan:
    """The best plan by closed forms whose age keeps to the bound; of those as good the least eta, all slots."""
    bound = math.inf if setting.max_age is None else setting.max_age
    best: tuple[float, Plan] | None = None
    for slots in _halve(setting.most_slots) if setting.max_age is not None else [setting.most_slots]:
        for eta in range(setting.most_eta + 1):
            found = [(predict(setting, plan), plan) for plan in list_plans(setting, slots, eta)]
            kept = [
                (predict_worth(setting, plan, one), plan) for one, plan in found if one.age_mean <= bound or eta == 0
            ]
            if kept and (best is None or best[0] < (1 - _TIE) * max(kept)[0]):
                best = max(kept)
    assert best is not None  # engine_size.require_room has seen to it that there is a split
    return best[1]


def _halve(slots: int) -> list[int]:
    """256, 128, ... 16."""
    return [slots, *_halve(slots // 2)] if slots > _FEWEST_SLOTS else [slots]
