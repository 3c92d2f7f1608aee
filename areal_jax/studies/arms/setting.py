"""What the arms of a program share, and the constants that each arm has of its own, from their configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.app.model.model import describe_model
from areal_jax.app.parts.part_settings import build_learner_settings, build_optimizer, build_schedule
from areal_jax.config import TrackedConfig
from areal_jax.learning.objective.advantages import ESTIMATORS
from areal_jax.learning.objective.proximal import KINDS
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.arm import Arm

_ADVANTAGES = tuple(ESTIMATORS)


class Constants(NamedTuple):
    """Numbers of one arm, or of all arms with a leading axis."""

    seed: Array  # uint32 [2], high and low word
    delay: Array  # int32, versions between a batch and the weights before its update
    learning_rate: Array  # float32, as all that follow but the last four
    temperature: Array
    clip_epsilon: Array
    clip_epsilon_high: Array
    behavior_weight_cap: Array  # inf = none
    entropy_coefficient: Array
    proximal: Array  # int32, index in proximal.KINDS
    advantage: Array  # int32, index in advantages.ESTIMATORS
    filters: Array  # bool, learner.filter_equal_rewards
    counts_all: Array  # bool, loss.denominator='all'


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a program is compiled for."""

    decoder: Decoder
    optimizer: Optimizer
    updates: int
    groups: int  # B
    group_size: int  # G
    answer_tokens: int  # A
    minibatches: int
    epochs: int
    longest_delay: int
    shortest_delay: int
    recomputes: bool  # whether an arm needs the log-probs of the weights before the update in its later steps
    rewards_entropy: bool  # whether an arm does

    @property
    def minibatch_groups(self) -> int:
        """Most groups of a minibatch."""
        return -(-self.groups // self.minibatches)

    @property
    def ring(self) -> int:
        """Batches that are generated and not trained yet, at most."""
        return self.longest_delay + 1


def make_constants(arms: Sequence[Arm]) -> Constants:
    """Arrays [arms, ...]."""
    return Constants(*(np.stack(values) for values in zip(*(_of_arm(arm) for arm in arms), strict=True)))


def make_setting(arms: Sequence[Arm]) -> Setting:
    """The setting of arms that `require_one_program` has passed."""
    config = TrackedConfig(arms[0].config)
    settings = build_learner_settings(config)
    constants = make_constants(arms)
    return Setting(
        decoder=describe_model(config).decoder,
        optimizer=build_optimizer(config),
        updates=config.run.steps,
        groups=config.learner.groups_per_update,
        group_size=config.rollout.group_size,
        answer_tokens=config.rollout.max_new_tokens,
        minibatches=min(settings.n_minibatches, config.learner.groups_per_update),
        epochs=settings.epochs,
        longest_delay=int(constants.delay.max()),
        shortest_delay=int(constants.delay.min()),
        recomputes=settings.steps > 1 and bool((constants.proximal == KINDS.index('recompute')).any()),
        rewards_entropy=bool((constants.entropy_coefficient > 0).any()),
    )


def _of_arm(arm: Arm) -> Constants:
    config = TrackedConfig(arm.config)
    settings, seed, schedule = build_learner_settings(config), config.run.seed, build_schedule(config)
    assert schedule is not None, 'require_one_program has passed the arm'
    high = settings.clip_epsilon if settings.clip_epsilon_high is None else settings.clip_epsilon_high
    cap = np.inf if settings.behavior_weight_cap is None else settings.behavior_weight_cap
    return Constants(
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        delay=np.int32(schedule.longest),
        learning_rate=np.float32(config.optimizer.learning_rate),
        temperature=np.float32(settings.temperature),
        clip_epsilon=np.float32(settings.clip_epsilon),
        clip_epsilon_high=np.float32(high),
        behavior_weight_cap=np.float32(cap),
        entropy_coefficient=np.float32(settings.entropy_coefficient),
        proximal=np.int32(KINDS.index(settings.proximal)),
        advantage=np.int32(_ADVANTAGES.index(settings.advantage)),
        filters=np.bool_(settings.filter_equal_rewards),
        counts_all=np.bool_(settings.denominator == 'all'),
    )
