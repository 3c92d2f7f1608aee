"""A published run as the config of a simulation: its devices and batch divided alike, constants of constants.py."""

from __future__ import annotations

import dataclasses
import functools
import math

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.app.model.text_model import describe_text_model
from areal_jax.config.drawn_lengths import Lengths, parse_lengths
from areal_jax.simulation.drawn_answers import GroupMoments, group_moments
from areal_jax.simulation.prices import H800, Chip, ModelShape, Reached, Roofline, find_shape, shape_of, step_overhead_s
from benchmarks.simulation import constants
from benchmarks.simulation.published_rows import GENERATING, PROMPT_CAP, TABLE_1_BATCH, Batch

SNOWBALL = 'Snowball'  # a model whose shape is assumed: constants.SNOWBALL_FIELDS
REACHED = Reached(constants.BANDWIDTH.value, constants.PREFILL.value, constants.MFU.value)
_BUFFER = 8192  # groups: never the bound
_WORKERS = 1024  # of the verifier: all answers are rewarded in parallel
_LEAST_WARM_UP = 5  # updates


@dataclasses.dataclass(frozen=True)
class Setting:
    """One simulation; devices and groups are those that are simulated."""

    model: str
    devices: int
    groups: int  # of an update
    eta: float
    batch: Batch = TABLE_1_BATCH  # of which the size of a group, the cap and the minibatches count
    answers: str = constants.R1_LENGTHS.value
    reward: str = constants.MATH_REWARD.value
    generating: int | None = None  # devices; None = GENERATING of them
    in_turns: bool = False  # all devices generate, then all train
    kv_policy: str = 'recompute'
    updates: int = constants.UPDATES.value  # measured
    chip: Chip = H800
    even_steps: bool = False  # a decode step takes as long with few rows as with all slots full

    @property
    def shape(self) -> ModelShape:
        return snowball_shape() if self.model == SNOWBALL else find_shape(self.model)

    @property
    def tensor(self) -> int:
        """Devices of an engine: the least power of two whose weights take WEIGHTS_SHARE of its memory at most."""
        weights = constants.WEIGHTS.value * self.shape.parameters
        needed = weights / (constants.WEIGHTS_SHARE.value * self.chip.memory_bytes)
        return 1 << max(0, math.ceil(math.log2(needed)))

    @property
    def engines(self) -> int:
        if self.in_turns:
            return self.devices // self.tensor
        return (self.generating or round(GENERATING * self.devices)) // self.tensor

    @property
    def learner(self) -> int:
        """Devices."""
        return self.devices if self.in_turns else self.devices - self.engines * self.tensor

    @property
    def lengths(self) -> Lengths:
        return parse_lengths(self.answers, self.batch.cap)

    @property
    def moments(self) -> GroupMoments:
        return group_moments(self.lengths, self.batch.group_size)

    @property
    def engine(self) -> Roofline:
        overhead_s = max(0.0, step_overhead_s(self.chip, self.shape, REACHED))
        return Roofline(self.chip, self.shape, REACHED, self.tensor, overhead_s)

    @property
    def context(self) -> float:
        """Mean positions of a running answer, prompt included."""
        return parse_lengths(constants.PROMPT.value, PROMPT_CAP).start.quantile(0.0) + self.moments.live_position

    @property
    def slots(self) -> int:
        """Of an engine: MOST_SLOTS, or as many answers as fit its KV cache on average."""
        return min(constants.MOST_SLOTS.value, int(self.engine.cache_tokens() / self.context))

    @property
    def step_s(self) -> float:
        """A decode step of an engine with all slots full."""
        return self.engine.step_s(self.slots, self.slots * self.context)

    @property
    def warm_up(self) -> int:
        """Updates: WARM_UP times (open answers / answers of an update). Open are a slot each, as far as eta allows."""
        answers = self.groups * self.batch.group_size
        open_answers = min(self.engines * (self.slots + self.batch.group_size), (self.eta + 1) * answers)
        return max(_LEAST_WARM_UP, math.ceil(constants.WARM_UP.value * open_answers / answers))

    def describe(self) -> dict[str, object]:
        """For a result: what was simulated."""
        return {
            'model': self.model, 'engines': self.engines, 'tensor': self.tensor, 'slots': self.slots,
            'learner': self.learner, 'in_turns': self.in_turns, 'groups': self.groups,
            'group_size': self.batch.group_size, 'cap': self.batch.cap, 'answers': self.answers,
            'reward': self.reward, 'eta': self.eta if math.isfinite(self.eta) else 'inf',
            'kv_policy': self.kv_policy, 'even_steps': self.even_steps,
            'warm_up': self.warm_up, 'updates': self.updates,
        }  # fmt: skip


def build_config(setting: Setting, seed: int) -> config_dict.ConfigDict:
    """The run does not end by itself before the measured updates are over, and the engines drain only behind them."""
    config = schema.default_config()
    answers = setting.groups * setting.batch.group_size
    behind = 1 + math.ceil(setting.engines * (setting.slots + 4 * setting.batch.group_size) / answers)
    ahead = math.ceil(setting.eta) if math.isfinite(setting.eta) else setting.warm_up + setting.updates
    fields: dict[str, object] = {
        'run.seed': seed, 'run.steps': setting.warm_up + setting.updates + 8 * behind + ahead,
        'simulation.prices': 'roofline', 'simulation.chip': setting.chip.name, 'simulation.model': setting.model,
        'simulation.answers': setting.answers, 'simulation.prompts': constants.PROMPT.value,
        'simulation.group_share': constants.GROUP_SHARE.value, 'simulation.verifier': in_milliseconds(setting.reward),
        'simulation.bandwidth': REACHED.bandwidth, 'simulation.prefill': REACHED.prefill, 'simulation.mfu': REACHED.mfu,
        'simulation.passes': constants.PASSES.value, 'simulation.update_s': constants.UPDATE_S.value,
        'simulation.load_s': constants.LOAD_S.value,
        'simulation.switch_s': constants.SWITCH_S.value if setting.in_turns else 0.0,
        'task.verifier_workers': _WORKERS,
        'cluster.learner': f'data={setting.learner}',
        'cluster.engines': f'{setting.engines} x {"shared" if setting.in_turns else f"tensor={setting.tensor}"}',
        'rollout.slots': setting.slots, 'rollout.max_running_groups': 0, 'rollout.kv_policy': setting.kv_policy,
        'rollout.group_size': setting.batch.group_size, 'rollout.max_new_tokens': setting.batch.cap,
        'rollout.context_tokens': setting.batch.cap + PROMPT_CAP, 'rollout.block_tokens': 256,
        'rollout.prefill_buckets': (2048, constants.PREFILL_TOKENS.value),
        'rollout.decode_steps': constants.DECODE_STEPS.value,
        'learner.groups_per_update': setting.groups, 'learner.n_minibatches': setting.batch.minibatches,
        'learner.rows_per_microbatch': setting.learner, 'learner.row_tokens': 32768,
        'learner.row_loss_tokens': 32768, 'learner.filter_equal_rewards': False,
        'staleness.eta': float(setting.eta), 'buffer.capacity': _BUFFER, 'checkpoint.every': 0,
        'evaluation.problems': 0, 'telemetry.plots': False, 'telemetry.progress': False, 'telemetry.tensorboard': False,
    }  # fmt: skip
    if setting.model == SNOWBALL:
        fields |= {'simulation.model': '', **constants.SNOWBALL_FIELDS}
    if setting.even_steps:
        fields |= even_prices(setting)
    config.update_from_flattened_dict(fields)
    return config


@functools.cache
def snowball_shape() -> ModelShape:
    config = schema.default_config()
    config.update_from_flattened_dict(constants.SNOWBALL_FIELDS)
    return shape_of(SNOWBALL, describe_text_model(schema.TrackedConfig(config)).shape)


def even_prices(setting: Setting) -> dict[str, object]:
    """Fields for work that costs the same a step or token whatever is beside it; training and publication are free."""
    context = int(setting.context)
    return {
        'simulation.prices': 'virtual',
        'virtual.decode_step_s': setting.step_s,
        'virtual.prefill_token_s': setting.engine.prefill_s(context, context**2 / 2) / context,
        **dict.fromkeys(('virtual.train_token_s', 'virtual.publish_s', 'virtual.reward_s', 'virtual.save_s'), 0.0),
    }


def in_milliseconds(seconds: str) -> str:
    """'exponential(2)' seconds -> 'exponential(2000)', as simulation.verifier is written."""
    form, _, value = seconds.rstrip(')').partition('(')
    return f'{form}({1000 * float(value):g})'
