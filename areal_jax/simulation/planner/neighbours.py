"""The search for a plan: starts from closed forms, and simulates neighbours until no neighbour is better.

A plan that keeps the bound on the mean age is better than one that does not; otherwise the one with the larger worth is
better: tokens a second less the price of their age. Among plans within TIE of the best, the search takes the one with
the smaller eta, or with fewer devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from areal_jax.simulation.drawn_answers import GroupMoments
from areal_jax.simulation.prices import Chip, ModelShape, Reached, Roofline, step_overhead_s

MOST_ETA = 32  # twice the largest finite bound that arXiv 2505.24298 trained with


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers of an update and their lengths, after the cut at the limit."""

    text: str  # simulation.answers
    count: int  # of an update
    group_size: int
    moments: GroupMoments
    longest: float  # expected length of the longest answer of an update, tokens
    prompt: float  # mean tokens
    limit: int  # rollout.max_new_tokens
    context: int  # rollout.context_tokens

    @property
    def groups(self) -> int:
        return self.count // self.group_size

    @property
    def live_positions(self) -> float:
        """The mean number of positions in a slot, its prompt included."""
        return self.moments.live_position + self.prompt

    @property
    def tokens(self) -> float:
        """The tokens that an update generates and trains."""
        return self.count * self.moments.mean

    @property
    def read_tokens(self) -> float:
        """The tokens that an update computes; each prompt is read once for its group."""
        return self.tokens + self.groups * self.prompt


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs that are known only within a range: shares of the peaks, and fixed seconds of a publication."""

    reached: Reached = dataclasses.field(default_factory=Reached)
    load_s: float = 2.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The devices, model, answers and bounds for which a plan is made."""

    devices: int
    chip: Chip
    shape: ModelShape
    answers: Answers
    engine_devices: int  # tensor parallel
    most_slots: int  # of an engine, that fit its memory
    least_training: int  # devices whose memory holds the training state
    costs: Costs = dataclasses.field(default_factory=Costs)
    passes: float = 4.0  # forward passes of a trained token
    optimizer_steps: int = 4  # of an update
    most_eta: int = MOST_ETA
    max_age: float | None = None  # bound on the mean age of a trained token, versions; None = none
    # share of the speed that is given up for a mean age of one version less; the cost of a version in learning depends
    # on objective, learning rate and task, so no published number can be a default
    age_price: float = 0.0

    def shrink(self, divisor: int) -> Setting:
        """Divides devices and answers by `divisor`; the time of an update stays the same."""
        answers = dataclasses.replace(self.answers, count=self.answers.count // divisor)
        least = math.ceil(self.least_training / divisor)
        return dataclasses.replace(self, devices=self.devices // divisor, answers=answers, least_training=least)


@dataclasses.dataclass(frozen=True, order=True)
class Plan:
    """The decisions of a plan. Engines that share the learner's devices take turns with it, with eta 0."""

    engines: int
    training: int  # devices
    eta: int
    slots: int  # of an engine
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a simulated run, after its warm-up. Shares are of time; ages are of trained tokens, in versions."""

    period_s: float  # of an update
    tokens_s: float  # generated, and all trained in time
    engines_busy: float
    learner_busy: float
    age_mean: float
    age_p95: float
    updates: int = 0  # measured
    trained_s: float = 0.0  # tokens a second of the updates themselves, which varies with their lengths
    scatter: float = 0.0  # standard deviation of `trained_s` over a few updates in a row, as a share of its mean


Simulate = Callable[[Plan], Outcome]


def price_age(setting: Setting, tokens_s: float, age: float) -> float:
    """The tokens a second of equal worth at age 0: each version of mean age costs a share `age_price` of the rest."""
    return tokens_s * (1 - setting.age_price) ** age


def worth(setting: Setting, outcome: Outcome) -> float:
    """The value by which plans that keep the bound on the age are compared."""
    return price_age(setting, outcome.tokens_s, outcome.age_mean)


def fits(setting: Setting, plan: Plan) -> bool:
    """Whether a plan keeps to the devices and to the memory."""
    if plan.shared:
        return plan.engines >= 1 and plan.training >= setting.least_training
    used = plan.engines * setting.engine_devices + plan.training
    return plan.engines >= 1 and plan.training >= setting.least_training and used <= setting.devices


# A plan's period by closed forms, computed in milliseconds: the start of a search, and the variation of its result.
#
# Loads as in closed_forms.py, with the effects that the fluid limit omits: the gate bounds the answers under way, a
# group holds its place until its longest answer ends, and every version makes engines recompute their caches.


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
    """Seconds of an update on `training` devices: passes and optimizer."""
    answers = setting.answers
    learner = Roofline(setting.chip, setting.shape, setting.costs.reached, 1)
    computed_s = learner.train_s(answers.read_tokens, answers.tokens * answers.live_positions, setting.passes)
    return (computed_s + setting.optimizer_steps * learner.optimizer_s()) / training


def publication_s(setting: Setting, training: float) -> float:
    """Seconds until an engine has a version that `training` devices send."""
    learner = Roofline(setting.chip, setting.shape)
    return learner.publication_s(setting.engine_devices, max(1, round(training))) + setting.costs.load_s


def predict(setting: Setting, plan: Plan, slowdown: float = 1.0, engines: float = 0.0) -> Prediction:
    """Predicts the period P = max(T, W, p); W is the engines' time for an update with the answers that the gate admits.

    Of the (eta + 1) B answers that the gate admits, B are trained for T of P, B wait for p of P until the gate knows of
    their update, and 1 / M_tail of the others are live.

    Args:
      slowdown: of the engines, against this closed form.
      engines: replaces the plan's number of engines, and may be fractional; the learner has the other devices.
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
    """Seconds of decoding and first prefills for an update."""
    step_s = engine.step_s(live, live * answers.live_positions)
    prompts_s = answers.groups * engine.prefill_s(answers.prompt, answers.prompt**2 / 2)
    return (answers.tokens * step_s / live + prompts_s) / engines


def _rebuild_s(engine: Roofline, answers: Answers, live: float) -> float:
    """Seconds, once a version, to rebuild an engine's caches; its weights arrive while it decodes."""
    tokens = live * answers.live_positions
    return engine.prefill_s(tokens, tokens * answers.live_positions / 2)


def list_plans(setting: Setting, slots: int, eta: int) -> Iterable[Plan]:
    """Yields every split of all devices."""
    most = (setting.devices - setting.least_training) // setting.engine_devices
    for engines in range(1, most + 1):
        plan = Plan(engines, setting.devices - engines * setting.engine_devices, eta, slots)
        if fits(setting, plan):
            yield plan


def predict_worth(setting: Setting, plan: Plan, found: Prediction) -> float:
    """The `worth` of a plan, by closed forms."""
    return price_age(setting, setting.answers.tokens / found.period_s, found.age_mean)


def choose_start(setting: Setting) -> Plan:
    """The best plan by closed forms that keeps the bound on the age; of equally good ones, least eta and most slots."""
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
    assert best is not None  # question.require_room has checked that there is a split
    return best[1]


def _halve(slots: int) -> list[int]:
    """Lists ever smaller numbers of slots: 256, 128, ... 16."""
    return [slots, *_halve(slots // 2)] if slots > _FEWEST_SLOTS else [slots]


TIE = 0.01  # of the worth: a difference that a simulation cannot resolve
_WAITING = 0.93  # a side that is busy for less of the time is waiting
_FAR = 0.1  # of the worth: a smaller eta is not simulated if closed forms predict a larger loss
_FAR_SPLIT = 0.25  # the same for another split, which closed forms predict less well
_STEPS = 16  # the first step is 1 / _STEPS of the engines that all devices would make
_NEIGHBOURS_ROUNDS = 3  # rounds that alternate between eta and split
Progress = Callable[[Plan, Outcome], None]
Predict = Callable[[Setting, Plan, float], Prediction]


class Search:
    """Simulates each plan at most once, and at most `most` plans.

    Args:
      setting: at the scale of the simulations.
      predict: closed forms of a plan, which decide whether it is worth a simulation.
      most: simulations; when they are used up, the search takes the best plan so far.
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
        """Finds the best plan whose engines have separate devices."""
        best = self._settle_age(self._climb(self._move_by_prediction(start)))
        for _ in range(_NEIGHBOURS_ROUNDS):
            moved = self._climb_eta(best)
            if moved.eta == best.eta:
                break
            best = self._climb(moved)
        return self._spare_devices(self._lower_to_least_eta(self.best))

    def ask(self, plan: Plan) -> Outcome | None:
        """Returns the outcome of a plan; None if the simulations are used up."""
        if plan not in self.tried:
            if len(self.tried) >= self._most:
                return None
            self.tried[plan] = self._simulate(plan)
            if self._note:
                self._note(plan, self.tried[plan])
        return self.tried[plan]

    @property
    def best(self) -> Plan:
        """The best of the plans that were simulated."""
        return max(self.tried, key=self._value)

    def keeps_age(self, plan: Plan) -> bool:
        bound = self.setting.max_age
        return bound is None or self.tried[plan].age_mean <= bound

    def _value(self, plan: Plan) -> tuple[float, float]:
        """Larger is better: (0, or minus the excess of the age over the bound; worth)."""
        outcome = self.tried[plan]
        bound = math.inf if self.setting.max_age is None else self.setting.max_age
        return min(0.0, bound - outcome.age_mean), worth(self.setting, outcome)

    def _is_as_good(self, plan: Plan) -> bool:
        """Whether a plan is within TIE of the best plan so far, so that small losses cannot add up over many steps."""
        over, found = self._value(plan)
        best_over, best = max(map(self._value, self.tried))
        return over >= best_over and found >= (1 - TIE) * best

    def _predict_worth(self, plan: Plan) -> float:
        return predict_worth(self.setting, plan, self._predict(self.setting, plan, 1.0))

    # The split.

    def _split(self, plan: Plan, engines: int) -> Plan:
        """The plan with `engines` engines, and all other devices in the learner."""
        return dataclasses.replace(
            plan, engines=engines, training=self.setting.devices - engines * self.setting.engine_devices
        )

    def _move_by_prediction(self, plan: Plan) -> Plan:
        """Simulates a plan; if engines limit it, simulates the split that closed forms prefer with that slowdown."""
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
        return self.best

    def _climb(self, best: Plan) -> Plan:
        """Moves to a split that has no better neighbour, in ever smaller steps."""
        if self.ask(best) is None:
            return self.best
        step = max(1, self.setting.devices // self.setting.engine_devices // _STEPS)
        while step:
            around = [self._split(best, best.engines + sign * step) for sign in (1, -1)]
            if (moved := self._move(best, around, self._is_worth_it)) == best:
                step //= 2
            best = moved
        return best

    def _move(self, best: Plan, around: Sequence[Plan], is_worth_it: Callable[[Plan, Plan], bool]) -> Plan:
        """Returns the best of a plan and of its neighbours that are worth a simulation."""
        return max([best, *(plan for plan in around if is_worth_it(plan, best) and self.ask(plan))], key=self._value)

    def _is_worth_it(self, plan: Plan, best: Plan) -> bool:
        """Whether a split may be better: its learner is faster than the best period, and its prediction is near."""
        if not fits(self.setting, plan):
            return False
        outcome = self.tried[best]
        least_s = outcome.learner_busy * outcome.period_s * best.training / plan.training
        is_near = self._predict_worth(plan) > (1 - _FAR_SPLIT) * self._predict_worth(best)
        return not self.keeps_age(best) or (is_near and least_s < outcome.period_s)

    # eta, slots, and devices left over.

    def _settle_age(self, best: Plan) -> Plan:
        """Moves to a plan that keeps the bound on the age, if there is one: with a smaller eta, or with fewer slots."""
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

    def _climb_eta(self, best: Plan) -> Plan:
        """Moves to an eta without a better neighbour, in steps from half of eta to an eighth; less changes little."""
        step = max(1, best.eta // 2)
        while step >= max(1, best.eta // 8):
            etas = {min(self.setting.most_eta, best.eta + step), max(0, best.eta - step)} - {best.eta}
            around = [self._at_eta(best, eta) for eta in sorted(etas, reverse=True)]
            if (moved := self._move(best, around, self._may_be_better)) == best:
                step //= 2
            best = moved
        return best

    def _at_eta(self, plan: Plan, eta: int) -> Plan:
        """The plan with another eta, and with the change in the number of engines that closed forms predict."""
        slots = plan.slots
        now, then = (
            max(list_plans(self.setting, slots, one), key=self._predict_worth).engines for one in (plan.eta, eta)
        )
        moved = dataclasses.replace(self._split(plan, plan.engines + then - now), eta=eta)
        return moved if fits(self.setting, moved) else dataclasses.replace(plan, eta=eta)

    def _may_be_better(self, plan: Plan, best: Plan) -> bool:
        """Whether another eta is not clearly worse by closed forms, which vary less with eta than simulations."""
        if self.setting.max_age is not None and plan.eta > best.eta:
            return False
        return self._predict_worth(plan) > (1 - TIE) * self._predict_worth(best)

    def _lower_to_least_eta(self, best: Plan) -> Plan:
        """Finds the least eta that is as good."""
        low, high = -1, best.eta  # as good with `high`, worse with `low`
        least = (1 - _FAR) * self._predict_worth(best)
        while high - low > 1:
            middle = dataclasses.replace(best, eta=(low + high) // 2)
            if self._predict_worth(middle) >= least and self.ask(middle) and self._is_as_good(middle):
                high, best = middle.eta, middle
            else:
                low = middle.eta
        return best

    def _spare_devices(self, best: Plan) -> Plan:
        """Takes as few devices as are as good: a learner that waits can be smaller."""
        outcome = self.tried[best]
        training = max(self.setting.least_training, math.ceil(best.training * outcome.learner_busy / 0.98))
        smaller = dataclasses.replace(best, training=training)
        if training >= best.training or self.ask(smaller) is None:
            return best
        return smaller if self._is_as_good(smaller) else best


def refine(setting: Setting, small: Setting, plan: Plan, outcome: Outcome) -> Plan:
    """Scales a plan to full size, with the split into whole devices at which both sides keep pace.

    Engines are assumed to be slower than closed forms by the same factor as in the simulation of `small`. With a bound
    on the age the split stays, since another split has other ages.
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
