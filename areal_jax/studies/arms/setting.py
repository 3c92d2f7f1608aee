"""The settings that the arms of a program share, and the constants of each arm, from their configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.model.model import describe_model
from areal_jax.app.parts.learner_builder import build_learner_settings, build_optimizer
from areal_jax.app.parts.part_settings import build_schedule
from areal_jax.config import TrackedConfig
from areal_jax.config.objectives import build_choices
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.policy_loss import KINDS
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.settings import Brake
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.arm import ADVANTAGES, Arm

# numbers of a combination in which arms of one program may differ
NUMBERS = (
    *('clip_epsilon', 'clip_epsilon_high', 'behavior_weight_cap', 'dual_clip', 'sapo_positive', 'sapo_negative'),
    *('quadratic_weight', 'oapl_beta', 'delight_temperature', 'delight_mix', 'correction_low', 'correction_high'),
    'gate_threshold',
)


class Constants(NamedTuple):
    """Numbers of one arm, or of all arms with a leading axis."""

    seed: Array  # uint32 [2], high and low word
    delay: Array  # int32, versions between a batch and the weights before its update
    period: Array  # int32, updates between two versions that generate, of a schedule every(L); 0 = fixed(k)
    learning_rate: Array  # float32, like all fields after it except the last four
    temperature: Array
    numbers: Mapping[str, Array]  # fields of PolicyChoices, see NUMBERS; behavior_weight_cap inf = none
    denominator_factor: Array  # by loss.aggregation, of a mean over tokens
    entropy_coefficient: Array
    proximal: Array  # int32, index in policy_loss.KINDS
    advantage: Array  # int32, index in arm.ADVANTAGES
    filters: Array  # bool, learner.filter_equal_rewards
    counts_all: Array  # bool, loss.denominator='all'


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings for which a program is compiled."""

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
    rewards_entropy: bool  # whether an arm rewards entropy
    choices: PolicyChoices  # without the numbers, which differ between arms
    brake: Brake
    holds_version: bool  # whether an arm generates with an earlier version, see Constants.period
    weighs_gradients: bool  # whether an arm uses the advantage that needs the norms of gradients

    @property
    def minibatch_groups(self) -> int:
        """The largest number of groups in a minibatch."""
        return -(-self.groups // self.minibatches)

    @property
    def ring(self) -> int:
        """The largest number of batches that are generated and not trained yet."""
        return self.longest_delay + 1


def generating_version(constants: Constants, version: Array) -> Array:
    """The version that generates the batch of the update of `version`."""
    held = version - version % jnp.maximum(constants.period, 1)
    return jnp.where(constants.period > 0, held, jnp.maximum(version - constants.delay, 0))


def make_constants(arms: Sequence[Arm]) -> Constants:
    """Makes the constants of all arms, arrays [arms, ...]."""
    of_arms = [_of_arm(arm) for arm in arms]
    return jax.tree.map(lambda *values: np.stack(values), *of_arms)


def make_setting(arms: Sequence[Arm]) -> Setting:
    """Makes the setting of arms that `require_one_program` has accepted."""
    config = TrackedConfig(arms[0].config)
    settings = build_learner_settings(config)
    constants = make_constants(arms)
    choices = build_choices(config.loss, config.rollout.max_new_tokens, config.run.seed)
    without: Any = dict.fromkeys(NUMBERS, 0.0)
    recomputed = constants.proximal == KINDS.index('recompute')
    return Setting(
        decoder=describe_model(config).decoder,
        optimizer=build_optimizer(config),
        updates=config.run.steps,
        groups=config.learner.groups_per_update,
        group_size=config.rollout.group_size,
        answer_tokens=config.rollout.max_new_tokens,
        minibatches=min(settings.learner.n_minibatches, config.learner.groups_per_update),
        epochs=settings.learner.epochs,
        longest_delay=int(constants.delay.max()),
        shortest_delay=int(constants.delay.min()),
        recomputes=settings.steps > 1 and choices.uses_proximal and bool(recomputed.any()),
        choices=dataclasses.replace(choices, **without),
        rewards_entropy=bool((constants.entropy_coefficient > 0).any()),
        brake=settings.brake,
        holds_version=bool((constants.period > 0).any()),
        weighs_gradients=bool((constants.advantage == ADVANTAGES.index('optimal_baseline')).any()),
    )


def _of_arm(arm: Arm) -> Constants:
    config = TrackedConfig(arm.config)
    settings, seed, schedule = build_learner_settings(config), config.run.seed, build_schedule(config)
    choices = build_choices(config.loss, config.rollout.max_new_tokens, config.run.seed)
    assert schedule is not None, 'require_one_program has passed the arm'
    period = schedule.longest + 1 if config.staleness.schedule.startswith('every(') else 0
    return Constants(
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        delay=np.int32(0 if period else schedule.longest),
        period=np.int32(period),
        learning_rate=np.float32(config.optimizer.learning_rate),
        temperature=np.float32(config.rollout.temperature),
        numbers=_numbers(choices),
        denominator_factor=np.float32(_denominator_factor(choices, config.rollout.max_new_tokens)),
        entropy_coefficient=np.float32(choices.entropy_coefficient),
        proximal=np.int32(KINDS.index(choices.proximal)),
        advantage=np.int32(ADVANTAGES.index(choices.advantage)),
        filters=np.bool_(settings.filters),
        counts_all=np.bool_(config.loss.denominator == 'all'),
    )


def _numbers(choices: PolicyChoices) -> dict[str, Array]:
    values = {name: getattr(choices, name) for name in NUMBERS}
    if values['clip_epsilon_high'] is None:
        values['clip_epsilon_high'] = choices.clip_epsilon
    if values['behavior_weight_cap'] is None:
        values['behavior_weight_cap'] = np.inf
    return {name: np.float32(value) for name, value in values.items()}


def _denominator_factor(choices: PolicyChoices, answer_tokens: int) -> float:
    """The loss denominator for answers of equal lengths, over their tokens; see learning/objective/counting.py."""
    factors = {'sequence_sum': 1 / answer_tokens, 'constant': choices.length_constant / answer_tokens}
    return factors.get(choices.aggregation, 1.0)
