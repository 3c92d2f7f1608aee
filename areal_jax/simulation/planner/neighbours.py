"""The search for a plan: it begins where closed forms say, and simulates neighbours until none is faster.

A plan is better where its mean age keeps to the bound, then where more tokens are trained a second; within TIE of each
other the one with the smaller eta, or with fewer devices, is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from areal_jax.simulation.planner.plan_setting import Outcome, Plan, Setting, Simulate, fits
from areal_jax.simulation.planner.prediction import Prediction, list_plans, predict, train_s

TIE = 0.01  # of the speed: what a simulation of a few updates does not tell apart
_FULL = 0.98  # of the slots: more answers under way find no place
_WAITING = 0.93  # a side that is busy for less waits for something
_FAR = 0.1  # of the period: a plan that closed forms say is slower by more is not simulated
_STEPS = 16  # the first step is so small a part of the devices
Progress = Callable[[Plan, Outcome], None]
Predict = Callable[[Setting, Plan, float], Prediction]


class Search:
    """Simulates each plan once, at most so many of them.

    Args:
      setting: at the scale of the simulations.
      predict: closed forms of a plan that decide what is worth a simulation.
      most: simulations; the search takes the best of those that it has when they are used up.
    """

    def __init__(
        self,
        setting: Setting,
        simulate: Simulate,
        most: int,
        note: Progress | None = None,
        predict: Predict = predict,
    ):
        self.setting, self.tried = setting, dict[Plan, Outcome]()
        self._simulate, self._most, self._note, self._predict = simulate, most, note, predict

    def run(self, start: Plan) -> Plan:
        """The best plan that engines of their own decode for."""
        best = self._settle_age(self._climb(self._move_by_prediction(start)))
        settled = self._settle_eta(best)
        if settled.eta != best.eta:
            settled = self._climb(settled)
        return self._spare_devices(settled)

    def ask(self, plan: Plan) -> Outcome | None:
        """Its outcome, None where the simulations are used up."""
        if plan not in self.tried:
            if len(self.tried) >= self._most:
                return None
            self.tried[plan] = self._simulate(plan)
            if self._note:
                self._note(plan, self.tried[plan])
        return self.tried[plan]

    def keeps_age(self, plan: Plan) -> bool:
        bound = self.setting.max_age
        return bound is None or self.tried[plan].age_mean <= bound

    def _value(self, plan: Plan) -> tuple[float, float]:
        """Larger is better: (how far above the bound, tokens a second)."""
        outcome = self.tried[plan]
        bound = math.inf if self.setting.max_age is None else self.setting.max_age
        return min(0.0, bound - outcome.age_mean), outcome.tokens_s

    def _is_better(self, plan: Plan, than: Plan, by: float = 0.0) -> bool:
        (over, speed), (other_over, other_speed) = self._value(plan), self._value(than)
        return over > other_over if over != other_over else speed > (1 + by) * other_speed

    # The split.

    def _split(self, plan: Plan, engines: int) -> Plan:
        """The plan with so many engines, and all other devices in the learner."""
        return dataclasses.replace(
            plan, engines=engines, training=self.setting.devices - engines * self.setting.engine_devices
        )

    def _move_by_prediction(self, plan: Plan) -> Plan:
        """Simulates; where engines limit, moves to where closed forms with this slowdown say, and simulates that."""
        for _ in range(2):
            outcome = self.ask(plan)
            if outcome is None or outcome.learner_busy > _WAITING:
                break
            slowdown = outcome.period_s / self._predict(self.setting, plan, 1.0).period_s
            found = min(
                list_plans(self.setting, plan.slots, plan.eta),
                key=lambda one: self._predict(self.setting, one, slowdown).period_s,
            )
            if found in self.tried or self.ask(found) is None:
                break
            plan = found
        return max(self.tried, key=self._value)

    def _climb(self, best: Plan) -> Plan:
        """To a split that has no better neighbour, in steps that become smaller."""
        if self.ask(best) is None:
            return max(self.tried, key=self._value)
        step = max(1, self.setting.devices // self.setting.engine_devices // _STEPS)
        while step:
            around = [self._split(best, best.engines + sign * step) for sign in (1, -1)]
            found = [plan for plan in around if self._is_worth_it(plan, best) and self.ask(plan)]
            better = [plan for plan in found if self._is_better(plan, best)]
            if better:
                best = max(better, key=self._value)
            else:
                step //= 2
        return best

    def _is_worth_it(self, plan: Plan, best: Plan) -> bool:
        """Whether it may be faster: its learner alone does not take longer, if engines do not take part."""
        if not fits(self.setting, plan):
            return False
        outcome = self.tried[best]
        least_s = outcome.learner_busy * outcome.period_s * best.training / plan.training
        return not self.keeps_age(best) or least_s < outcome.period_s

    # eta, slots, and devices left over.

    def _settle_age(self, best: Plan) -> Plan:
        """Within the bound on the age, if there is a plan that keeps it: with a smaller eta, or with fewer slots."""
        bound = self.setting.max_age
        if bound is None:
            return best
        kept: list[Plan] = []
        for change in (self._lower_eta, self._lower_slots):
            plan = best
            while not self.keeps_age(plan) and (lower := change(plan, bound)) and self.ask(lower):
                plan = self._climb(lower)
            kept += [plan]
        return max(kept, key=self._value)

    def _lower_eta(self, plan: Plan, bound: float) -> Plan | None:
        ratio = bound / max(self.tried[plan].age_mean, 1e-9)
        eta = min(plan.eta - 1, math.ceil(plan.eta * ratio))
        return dataclasses.replace(plan, eta=eta) if eta >= 0 else None

    def _lower_slots(self, plan: Plan, bound: float) -> Plan | None:
        slots = plan.slots // 2
        return dataclasses.replace(plan, slots=slots) if slots >= 1 else None

    def _settle_eta(self, best: Plan) -> Plan:
        """More where both sides wait for the gate and it helps; else the least that is as fast."""
        has_room = self._predict(self.setting, best, 1.0).live < _FULL * best.slots
        while self.tried[best].learner_busy < _WAITING and has_room:
            raised = dataclasses.replace(best, eta=min(self.setting.most_eta, best.eta + max(1, best.eta // 2)))
            if raised == best or self.ask(raised) is None or not self._is_better(raised, best, TIE):
                break
            best = raised
        low, high = -1, best.eta  # as fast with `high`, slower with `low`
        floor_speed = (1 - TIE) * self.tried[best].tokens_s
        predicted_s = self._predict(self.setting, best, 1.0).period_s
        while high - low > 1:
            middle = dataclasses.replace(best, eta=(low + high) // 2)
            if self._predict(self.setting, middle, 1.0).period_s > (1 + _FAR) * predicted_s:
                low = middle.eta
                continue
            found = self.ask(middle)
            if found is None:
                break
            if found.tokens_s >= floor_speed and self._value(middle)[0] >= self._value(best)[0]:
                high, best = middle.eta, middle
            else:
                low = middle.eta
        return best

    def _spare_devices(self, best: Plan) -> Plan:
        """With the fewest devices that train as fast: a learner that waits can be smaller."""
        outcome = self.tried[best]
        training = max(self.setting.least_training, math.ceil(best.training * outcome.learner_busy / 0.98))
        smaller = dataclasses.replace(best, training=training)
        if training >= best.training or (found := self.ask(smaller)) is None:
            return best
        is_as_fast = found.tokens_s >= (1 - TIE) * outcome.tokens_s and self._value(smaller)[0] >= self._value(best)[0]
        return smaller if is_as_fast else best


def refine(setting: Setting, small: Setting, plan: Plan, outcome: Outcome) -> Plan:
    """The plan at full size: as many times larger, with the split of whole devices at which both sides keep pace.

    Engines are taken to be as much slower than closed forms as they were in the simulation of `small`. With a bound on
    the age the split stays, since another one has other ages.
    """
    scale = setting.devices / small.devices
    if scale == 1:
        return plan
    if setting.max_age is not None:
        engines, training = (round(scale * count) for count in (plan.engines, plan.training))
        return dataclasses.replace(plan, engines=engines, training=training)
    slowdown = max(1.0, outcome.period_s / predict(small, plan).period_s)
    left_over = round(scale * (small.devices - plan.engines * small.engine_devices - plan.training))
    left_over += setting.devices - round(scale * small.devices)
    around = [round(scale * plan.engines) + offset for offset in range(-round(scale), round(scale) + 1) if plan.engines]
    found: list[Plan] = []
    for engines in around:
        training = setting.devices - left_over - engines * setting.engine_devices
        one = Plan(engines, training, plan.eta, plan.slots)
        if training > 0 and fits(setting, one):
            found.append(one)

    def period_s(one: Plan) -> float:
        share = predict(small, plan, slowdown, engines=one.engines / scale).generation_s
        return max(share, train_s(setting, one.training))

    return min(found, key=period_s)
