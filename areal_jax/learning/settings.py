"""Under arrow 7: what an update is, in one value that names config fields when it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.learning import truncation
from areal_jax.learning.advantages import ESTIMATORS
from areal_jax.learning.denominators import DENOMINATORS
from areal_jax.learning.packing import require_known
from areal_jax.learning.proximal import KINDS
from areal_jax.learning.trees import DTYPES
from areal_jax.ranges import ConfigError, require_in_range

OBJECTIVES = ('decoupled_ppo', 'sft')
KL_ESTIMATORS = ('k1', 'k2', 'k3')


@dataclasses.dataclass(frozen=True)
class LearnerSettings:
    """Everything of an update but the weights, the mesh and the optimizer; see config.py for what each field means.

    Raises ValueError, naming the config field, for what cannot work.
    """

    row_tokens: int  # static length of a row; a trajectory must fit one
    row_loss_tokens: int
    rows_per_microbatch: int = 1  # over all devices, a multiple of data * fsdp of the mesh
    n_minibatches: int = 1
    epochs: int = 1
    packing: str = 'shared_prompt'
    fill: str = 'first_fit'
    tail_buckets: int = 0  # shapes of rows for a light last micro-batch, each half the next
    accumulate: str = 'dispatch'
    max_microbatches: int = 1  # 'scan' only: the most of a minibatch for which `warm_up` compiles
    filter_equal_rewards: bool = True
    strategy: str = 'fsdp'
    dtype: str = 'float32'  # of the working copy that passes compute with; masters stay float32
    publish_dtype: str = 'float32'  # of the weights that engines get
    loss_scale: float = 1.0  # multiplies the loss before its gradient is taken, and is divided out in float32
    objective: str = 'decoupled_ppo'
    advantage: str = 'group'
    temperature: float = 1.0
    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None
    proximal: str = 'recompute'
    behavior_weight_cap: float | None = None
    aggregation: str = 'token_mean'
    denominator: str = 'kept'  # 'all': groups that filter_equal_rewards leaves out count too
    truncated_sampling: str = 'refuse'  # tokens that top-k or top-p drew; 'full_softmax' trains them all the same
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0  # of the divergence from the reference model, the weights at the start; 0 = none
    kl_estimator: str = 'k3'
    max_token_age: int | None = None  # with over_age='mask' older tokens leave the loss, not its denominator
    over_age: str = 'off'
    vocab_chunk: int | None = None  # of token_logprobs; None = as many columns as suit
    attention: str = 'auto'  # implementation of packed_attention

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ('learner.accumulate', self.accumulate, ('dispatch', 'scan')),
            ('learner.dtype', self.dtype, DTYPES),
            ('publication.dtype', self.publish_dtype, DTYPES),
            ('loss.objective', self.objective, OBJECTIVES),
            ('loss.proximal', self.proximal, KINDS),
            ('loss.advantage', self.advantage, tuple(ESTIMATORS)),
            ('loss.aggregation', self.aggregation, ('token_mean', 'sequence_mean')),
            ('loss.denominator', self.denominator, DENOMINATORS),
            ('loss.truncated_sampling', self.truncated_sampling, truncation.MODES),
            ('loss.kl_estimator', self.kl_estimator, KL_ESTIMATORS),
            ('staleness.over_age', self.over_age, ('off', 'mask', 'drop')),
        ):
            _require(field, value, allowed)
        require_known(self.packing, self.fill)
        require_in_range(
            {
                'learner.row_tokens': self.row_tokens,
                'learner.row_loss_tokens': self.row_loss_tokens,
                'learner.rows_per_microbatch': self.rows_per_microbatch,
                'learner.n_minibatches': self.n_minibatches,
                'learner.epochs': self.epochs,
                'learner.tail_buckets': self.tail_buckets,
                'learner.loss_scale': self.loss_scale,
                'rollout.temperature': self.temperature,
                'loss.clip_epsilon': self.clip_epsilon,
                'loss.clip_epsilon_high': self.clip_epsilon_high,
                'loss.behavior_weight_cap': self.behavior_weight_cap,
                'loss.entropy_coefficient': self.entropy_coefficient,
                'loss.kl_coefficient': self.kl_coefficient,
                'staleness.max_token_age': self.max_token_age,
            }
        )
        if self.over_age == 'mask' and self.max_token_age is None:
            raise ConfigError(
                "staleness.over_age='mask' needs staleness.max_token_age, which is None: set it or over_age='off'"
            )
        if self.tail_buckets and self.accumulate == 'scan':
            raise ConfigError(
                f'learner.tail_buckets={self.tail_buckets} needs programs of one micro-batch: set '
                "learner.accumulate='dispatch', or learner.tail_buckets=0"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of an update, at most."""
        return self.n_minibatches * self.epochs

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the weights before the update outlive its first step."""
        return self.objective != 'sft' and self.proximal == 'recompute' and self.steps > 1

    @property
    def oldest_age(self) -> int | None:
        """Tokens older than this leave the loss."""
        return self.max_token_age if self.over_age == 'mask' else None


def _require(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f'{field}={value!r} is unknown; use one of {", ".join(allowed)}')
