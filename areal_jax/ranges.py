"""The numbers that the fields of a config may hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from areal_jax.errors import UserError


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message names the fields, their values and the fix."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field may hold; NaN lies in none."""

    low: float
    high: float
    rule: str  # the same in words: what the value must do
    or_none: bool = False  # None is a value too

    def __contains__(self, value: float | None) -> bool:
        return self.or_none if value is None else self.low <= value <= self.high

    def require(self, field: str, value: float | None) -> None:
        """Raises ConfigError where `value` lies outside."""
        if value not in self:
            raise ConfigError(f'{field}={value} must {self.rule}{", or be None" if self.or_none else ""}')


# programs compute in float32: what it rounds to 0, to 1 or to infinity counts as that
_LEAST, _BELOW_ONE, _MOST = 2.0**-126, 1 - 2.0**-24, (2 - 2.0**-23) * 2.0**127

_INT32 = 2**31 - 1
COUNT = Range(1, _INT32, 'be at least 1 and below 2^31')
COUNT_OR_OFF = Range(0, _INT32, 'not be negative, and be below 2^31')
THREADS = Range(1, 1024, 'be at least 1 and at most 1024')
SECONDS = Range(_LEAST, 1e6, 'be above 0 and at most 1e6 (11 days)')  # threading.TIMEOUT_MAX is above
POSITIVE = Range(_LEAST, _MOST, 'be above 0 and finite, in float32')
NOT_NEGATIVE = Range(0, _MOST, 'not be negative, infinite or NaN, in float32')
SHARE = Range(0, 1, 'lie in [0, 1]')
SHARE_ABOVE_ZERO = Range(_LEAST, 1, 'lie in (0, 1]')
DECAY = Range(0, _BELOW_ONE, 'lie in [0, 1), in float32')

# the number that every numeric field may be
RANGES: Mapping[str, Range] = {
    'run.seed': Range(0, _INT32, 'lie in [0, 2^31 - 1]'),
    'run.steps': COUNT,
    'run.stall_timeout_s': SECONDS,
    'run.compilation_budget': COUNT_OR_OFF,
    **dict.fromkeys((f'model.{name}' for name in ('n_layers', 'd_model', 'd_ff', 'n_heads', 'n_kv_heads')), COUNT),
    'model.head_dim': COUNT,
    'model.rope_theta': POSITIVE,
    'model.init_scale': POSITIVE,
    'task.held_out_fraction': SHARE,
    'task.symbols': COUNT,
    'task.length': COUNT,
    'task.verifier_workers': THREADS,
    'task.verifier_deadline_s': SECONDS,
    'task.verifier_attempts': COUNT,
    'task.verifier_memory_mb': Range(0, 2**40, 'lie in [0, 2^40]'),
    'task.max_failed_groups': COUNT,
    **dict.fromkeys((f'rollout.{name}' for name in ('slots', 'decode_steps', 'context_tokens')), COUNT),
    **dict.fromkeys((f'rollout.{name}' for name in ('group_size', 'max_running_groups', 'max_new_tokens')), COUNT),
    'rollout.temperature': POSITIVE,  # training needs a sampled policy
    'rollout.top_k': COUNT_OR_OFF,
    'rollout.top_p': SHARE_ABOVE_ZERO,
    'staleness.eta': Range(0, math.inf, 'be at least 0; 0 is synchronous'),
    'staleness.max_token_age': dataclasses.replace(COUNT_OR_OFF, or_none=True),
    'buffer.capacity': COUNT,
    **dict.fromkeys((f'learner.{name}' for name in ('groups_per_update', 'n_minibatches', 'epochs')), COUNT),
    **dict.fromkeys((f'learner.{name}' for name in ('row_tokens', 'row_loss_tokens', 'rows_per_microbatch')), COUNT),
    'learner.tail_buckets': COUNT_OR_OFF,
    'learner.loss_scale': Range(_LEAST, 2.0**32, 'lie in (0, 2^32]'),  # beyond, what it is divided out by rounds to 0
    'lora.rank': COUNT_OR_OFF,
    'lora.alpha': POSITIVE,
    'loss.clip_epsilon': SHARE_ABOVE_ZERO,
    'loss.clip_epsilon_high': dataclasses.replace(POSITIVE, or_none=True),
    'loss.behavior_weight_cap': dataclasses.replace(POSITIVE, or_none=True),
    'loss.entropy_coefficient': NOT_NEGATIVE,
    'loss.kl_coefficient': NOT_NEGATIVE,
    'optimizer.learning_rate': NOT_NEGATIVE,
    'optimizer.final_ratio': SHARE,
    'optimizer.b1': DECAY,
    'optimizer.b2': DECAY,
    'optimizer.eps': POSITIVE,
    'optimizer.weight_decay': NOT_NEGATIVE,
    'optimizer.clip_norm': NOT_NEGATIVE,
    'optimizer.warmup_steps': COUNT_OR_OFF,
    'distributed.processes': COUNT,
    'distributed.command_deadline_s': SECONDS,
    'checkpoint.every': COUNT_OR_OFF,
    'checkpoint.keep': COUNT,
    'sft.evaluate_every': COUNT_OR_OFF,
    'evaluation.problems': COUNT_OR_OFF,
    'evaluation.samples': COUNT_OR_OFF,
    **dict.fromkeys((f'virtual.{name}_s' for name in ('decode_step', 'prefill_token', 'train_token')), NOT_NEGATIVE),
    **dict.fromkeys((f'virtual.{name}_s' for name in ('publish', 'reward', 'save')), NOT_NEGATIVE),
}


def require_in_range(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first of {'learner.loss_scale': 1.0, ...} that RANGES does not allow."""
    for path, value in values.items():
        RANGES[path].require(path, value)
