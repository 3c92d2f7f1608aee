"""The settings of an update and of the optimizer; each value names its config field when it refuses.

app/parts/part_settings.py makes them from a config. They have no defaults where a config field decides:
config/declarations.py has the only one, and the meaning of each field.
"""

from __future__ import annotations

import dataclasses

from areal_jax.config.declarations import require_allowed
from areal_jax.config.ranges import ConfigError
from areal_jax.learning.brakes import BrakeSettings
from areal_jax.learning.objective.objective import PROXIMAL, Objective
from areal_jax.learning.packing.packing import require_known

# attributes of LearnerSettings that a config field decides: the path of the field
_LEARNER_FIELDS = {
    name: f'{section}.{name}'
    for section, names in {
        'learner': (
            *('row_tokens', 'row_loss_tokens', 'rows_per_microbatch', 'n_minibatches', 'epochs', 'packing', 'fill'),
            *('tail_buckets', 'row_buckets', 'accumulate', 'filter_equal_rewards', 'dtype', 'loss_scale', 'attention'),
            *('routes', 'router_aux_loss'),
        ),
        'rollout': ('temperature',),
        'staleness': ('max_token_age', 'over_age'),
        'loss': ('denominator', 'truncated_sampling'),
    }.items()
    for name in names
} | {'publish_dtype': 'publication.dtype'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioSettings:
    """Of the split of the importance ratio, see ratio_split.py."""

    sample: float  # share of the trained answers, above 0
    ring_bytes: int  # of the weights of earlier versions
    seed: int  # of the run: part of the names of its answers

    def __post_init__(self) -> None:
        require_allowed({'diagnostics.ratio_sample': self.sample, 'diagnostics.ring_bytes': self.ring_bytes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Of the values that an objective reads, see trained_leaves.py."""

    own_model: bool  # else a head on the policy's trunk
    trunk_gradient: float  # of such a head: what its loss counts for the weights of the policy, in [0, 1]

    def __post_init__(self) -> None:
        require_allowed({'critic.trunk_gradient': self.trunk_gradient})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Everything of an update but the weights, the mesh and the optimizer.

    Raises ConfigError, naming the config fields, for what cannot work.
    """

    row_tokens: int  # static length of a row; a trajectory must fit one
    row_loss_tokens: int
    rows_per_microbatch: int  # over all devices, a multiple of the data shards
    n_minibatches: int
    epochs: int
    packing: str
    fill: str
    tail_buckets: int  # shapes of rows for a light last micro-batch, each half the next
    row_buckets: tuple[int, ...]  # tokens of further shapes, below row_tokens
    accumulate: str
    max_microbatches: int  # 'scan' only: `warm_up` compiles for minibatches of up to so many micro-batches
    filter_equal_rewards: bool
    strategy: str
    dtype: str  # of the working copy that passes compute with; master weights stay float32
    publish_dtype: str  # of the weights that engines get
    # versions are files: each process of a mesh over several gets whole leaves of them to write, and one process on a
    # CPU copies them on the host
    publishes_files: bool
    loss_scale: float  # multiplies the loss before its gradient is taken; gradients are divided by it in float32
    objective: Objective
    temperature: float
    denominator: str  # 'all': groups that filter_equal_rewards leaves out count too
    truncated_sampling: str  # tokens that top-k or top-p drew; 'full_softmax' trains them all the same
    max_token_age: int | None  # with over_age='mask' older tokens leave the loss, not its denominator
    over_age: str
    attention: str  # implementation of packed_attention
    scores: bool  # `warm_up` compiles what SpmdLearner.score runs
    ratio_split: RatioSettings | None  # None: the importance ratio is not split
    quantized: bool  # whether engines decode in 8 bits: an update then measures by how much that differs
    brake: BrakeSettings
    critic: CriticSettings | None  # where the objective trains values
    records_routes: bool  # engines record which experts tokens have reached
    # 'replay': passes of the policy and of the reference reach the recorded ones; an argument of the programs
    routes: str = dataclasses.field(compare=False)
    router_aux_loss: float  # weight of the loss that evens the load of experts

    def __post_init__(self) -> None:
        require_allowed({path: getattr(self, name) for name, path in _LEARNER_FIELDS.items()})
        require_known(self.packing, self.fill)
        if (self.critic is not None) != self.objective.trains_values:
            raise ValueError(f'critic={self.critic} with an objective of which trains_values is not so')
        if self.over_age == 'mask' and self.max_token_age is None:
            raise ConfigError(
                "staleness.over_age='mask' needs staleness.max_token_age, which is None: set it or over_age='off'"
            )
        for name, off in (('tail_buckets', 0), ('row_buckets', ())):
            if (value := getattr(self, name)) and self.accumulate == 'scan':
                raise ConfigError(
                    f'learner.{name}={value} needs programs of one micro-batch: set '
                    f"learner.accumulate='dispatch', or learner.{name}={off}"
                )
        if self.row_buckets and self.row_buckets[-1] >= self.row_tokens:
            raise ConfigError(
                f'learner.row_buckets={self.row_buckets} must lie below learner.row_tokens={self.row_tokens}'
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of an update, at most."""
        return self.n_minibatches * self.epochs

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the weights before the update outlive its first step."""
        return PROXIMAL in self.objective.reads and self.steps > 1

    @property
    def filters(self) -> bool:
        """Whether groups of equal rewards are left out."""
        return self.filter_equal_rewards and self.objective.contrasts

    @property
    def oldest_age(self) -> int | None:
        """Tokens older than this leave the loss."""
        return self.max_token_age if self.over_age == 'mask' else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Everything of the optimizer but the learning rate, which is an argument of every step.

    Raises ConfigError, naming the config fields, for what cannot work.
    """

    name: str
    b1: float
    b2: float
    eps: float
    moment_dtype: str
    weight_decay: float
    decay: str
    clip_norm: float
    warmup_steps: int
    schedule: str
    final_ratio: float  # 'constant' does not read it
    total_steps: int  # optimizer steps of the run; 'constant' does not read it
    compares: bool  # the cosine of consecutive gradients is measured
    projects: bool  # optimizer.brake='projection', with `compares`

    def __post_init__(self) -> None:
        derived = ('total_steps', 'compares', 'projects')
        fields = [field.name for field in dataclasses.fields(self) if field.name not in derived]
        require_allowed({f'optimizer.{name}': getattr(self, name) for name in fields})
        if self.name != 'adamw' and self.moment_dtype != 'float32':
            raise ConfigError(
                f"optimizer.moment_dtype={self.moment_dtype!r} is read by 'adamw' alone, not by optimizer.name="
                f'{self.name!r}: leave it at float32'
            )
        if self.decay != 'all' and not self.weight_decay:
            raise ConfigError(
                f'optimizer.decay={self.decay!r} chooses what optimizer.weight_decay shrinks, which is 0: set '
                "optimizer.weight_decay above 0, or leave optimizer.decay='all'"
            )
        if self.schedule != 'constant' and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f'optimizer.schedule={self.schedule!r} falls over {self.total_steps} optimizer steps (run.steps * '
                f'learner.n_minibatches * learner.epochs), which must be more than optimizer.warmup_steps='
                f'{self.warmup_steps}: raise run.steps or shorten the warm-up'
            )
