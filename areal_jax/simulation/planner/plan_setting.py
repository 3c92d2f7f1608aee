"""What a plan is made for, what it decides, and what a simulation of it found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from areal_jax.simulation.chips import Chip
from areal_jax.simulation.group_moments import GroupMoments
from areal_jax.simulation.roofline import Reached
from areal_jax.simulation.shapes import ModelShape


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
    most_eta: int = 8
    max_age: float | None = None  # bound on the mean age of a trained token, versions; None = none

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
    tokens_s: float  # trained; no answer is left out
    engines_busy: float
    learner_busy: float
    age_mean: float
    age_p95: float
    updates: int = 0  # measured


Simulate = Callable[[Plan], Outcome]


def fits(setting: Setting, plan: Plan) -> bool:
    """Whether a plan keeps to the devices and to the memory."""
    if plan.shared:
        return plan.engines >= 1 and plan.training >= setting.least_training
    used = plan.engines * setting.engine_devices + plan.training
    return plan.engines >= 1 and plan.training >= setting.least_training and used <= setting.devices
