"""What a plan is made for, what it decides, and what a simulation of it found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from areal_jax.simulation.drawn_answers import GroupMoments
from areal_jax.simulation.prices import Chip, ModelShape, Reached

MOST_ETA = 32  # twice the largest finite bound that arXiv 2505.24298 trained with


@dataclasses.dataclass(frozen=True)
class Answers:
    """Of an update, and how long they are; lengths are after the limit."""

    text: str  # simulation.answers
    count: int  # of an update
    group_size: int
    moments: GroupMoments
    longest: float  # expected, of the answers of an update, tokens
    prompt: float  # mean tokens
    limit: int  # rollout.max_new_tokens
    context: int  # rollout.context_tokens

    @property
    def groups(self) -> int:
        return self.count // self.group_size

    @property
    def live_positions(self) -> float:
        """Of a slot on average, its prompt included."""
        return self.moments.live_position + self.prompt

    @property
    def tokens(self) -> float:
        """Generated for an update, and trained in it."""
        return self.count * self.moments.mean

    @property
    def read_tokens(self) -> float:
        """That an update computes: a prompt is read once for its group."""
        return self.tokens + self.groups * self.prompt


@dataclasses.dataclass(frozen=True)
class Costs:
    """What is known within a range: shares of the peaks, and seconds of a publication besides its bytes."""

    reached: Reached = dataclasses.field(default_factory=Reached)
    load_s: float = 2.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a plan is made for."""

    devices: int
    chip: Chip
    shape: ModelShape
    answers: Answers
    engine_devices: int  # tensor parallel
    most_slots: int  # of an engine, that fit its memory
    least_training: int  # devices that hold what training needs
    costs: Costs = dataclasses.field(default_factory=Costs)
    passes: float = 4.0  # forward passes of a trained token
    optimizer_steps: int = 4  # of an update
    most_eta: int = MOST_ETA
    max_age: float | None = None  # bound on the mean age of a trained token, versions; None = none
    # share of the speed that is given up for a mean age of one version less; what a version costs in learning depends
    # on objective, rate and task, so that no published number is a default
    age_price: float = 0.0

    def shrink(self, divisor: int) -> Setting:
        """The setting with devices and answers divided alike; what an update takes stays the same."""
        answers = dataclasses.replace(self.answers, count=self.answers.count // divisor)
        least = math.ceil(self.least_training / divisor)
        return dataclasses.replace(self, devices=self.devices // divisor, answers=answers, least_training=least)


@dataclasses.dataclass(frozen=True, order=True)
class Plan:
    """What is decided. Engines that share the learner's devices take turns with it, with eta 0."""

    engines: int
    training: int  # devices
    eta: int
    slots: int  # of an engine
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a simulated run, after its warm-up. Shares are of time, ages in versions of the trained tokens."""

    period_s: float  # of an update
    tokens_s: float  # generated, and all trained in time
    engines_busy: float
    learner_busy: float
    age_mean: float
    age_p95: float
    updates: int = 0  # measured
    trained_s: float = 0.0  # tokens a second of the updates themselves, which swings with their lengths
    scatter: float = 0.0  # standard deviation of that over a few updates in a row, of its mean


Simulate = Callable[[Plan], Outcome]


def price_age(setting: Setting, tokens_s: float, age: float) -> float:
    """Tokens a second that are worth as much at age 0: each version of mean age takes its price from what is left."""
    return tokens_s * (1 - setting.age_price) ** age


def worth(setting: Setting, outcome: Outcome) -> float:
    """What a plan is compared by, where it keeps the bound on the age."""
    return price_age(setting, outcome.tokens_s, outcome.age_mean)


def fits(setting: Setting, plan: Plan) -> bool:
    """Whether a plan keeps to the devices and to the memory."""
    if plan.shared:
        return plan.engines >= 1 and plan.training >= setting.least_training
    used = plan.engines * setting.engine_devices + plan.training
    return plan.engines >= 1 and plan.training >= setting.least_training and used <= setting.devices
