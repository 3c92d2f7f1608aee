"""The section `optimizer`: its fields, and the rules that join them with other fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from areal_jax.config.cluster import ONE_DEVICE, parse_learner
from areal_jax.config.fields import Choice, Config, Integer, Real, Settings, declare
from areal_jax.config.objectives import find_objective, is_policy, resolve
from areal_jax.config.ranges import COUNT, COUNT_OR_OFF, DECAY, NOT_NEGATIVE, POSITIVE, SHARE, SHARE_ABOVE_ZERO


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """How gradients become weights."""

    section: ClassVar[str] = 'optimizer'
    title: ClassVar[str] = 'How gradients become weights'

    name: str = declare(
        Choice(
            'adamw',
            ('adamw', 'adamw8bit', 'adafactor', 'lion', 'sgd'),
            'see learning/optimizer/optimizer.py',
            other_names='optim optimizer optimizer_type optimizer_name',
        )
    )
    learning_rate: float = declare(
        Real(
            2e-5,
            NOT_NEGATIVE,
            'after warm-up',
            other_names='lr actor_lr policy_lr actor_learning_rate peak_lr max_lr base_lr step_size',
        ),
        compare=False,  # an argument of programs: those of two rates are equal
    )
    schedule: str = declare(
        Choice(
            'constant',
            ('constant', 'cosine', 'linear'),
            'after warm-up, down to the last step',
            other_names='lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay warmup_style scheduler_type',
        )
    )
    final_ratio: float = declare(
        Real(
            0.0,
            SHARE,
            'cosine, linear: last learning rate / learning_rate',
            used_if=lambda c: c.optimizer.schedule != 'constant',
            other_names='min_lr_ratio min_lr min_lr_rate lr_end',
        )
    )
    moment_dtype: str = declare(
        Choice(
            'float32',
            ('float32', 'bfloat16'),
            'adamw: of both moments',
            used_if=lambda c: c.optimizer.name == 'adamw',
        )
    )
    b1: float = declare(
        Real(
            0.9,
            DECAY,
            'adamw, adamw8bit, lion: decay of the first moment',
            used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit', 'lion'),
            other_names='beta1 adam_beta1 adam_b1',
        )
    )
    b2: float = declare(
        Real(
            0.95,
            DECAY,
            'adamw, adamw8bit: decay of the second moment; lion: of the momentum',
            used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit', 'lion'),
            other_names='beta2 adam_beta2 adam_b2',
        )
    )
    eps: float = declare(
        Real(
            1e-8,
            POSITIVE,
            'adamw, adamw8bit: added to the root of the second moment',
            used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit'),
            other_names='adam_eps adam_epsilon',
        )
    )
    weight_decay: float = declare(Real(0.0, NOT_NEGATIVE, 'decoupled; 0 = off', other_names='wd l2'))
    decay: str = declare(
        Choice(
            'all',
            ('all', 'matrices'),
            "leaves that decay; 'matrices': not norms, biases and the embedding",
            used_if=lambda c: c.optimizer.weight_decay > 0,
        )
    )
    clip_norm: float = declare(
        Real(
            1.0,
            NOT_NEGATIVE,
            'global norm of the gradient; 0 = off',
            other_names='max_grad_norm grad_clip clip_grad gradient_clipping grad_norm max_norm clip_grad_norm',
        )
    )
    warmup_steps: int = declare(
        Integer(
            0,
            COUNT_OR_OFF,
            'optimizer steps of linear warm-up',
            other_names='warmup lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio warmup_steps_proportion',
        )
    )
    brake: str = declare(
        Choice(
            'none',
            ('none', 'ess', 'lag', 'projection'),
            'shortens steps on old data, see docs/staleness_methods.md',
        )
    )
    brake_base: float = declare(
        Real(
            1.0,
            SHARE_ABOVE_ZERO,
            'ess: effective sample size of answers from which on steps are whole',
            used_if=lambda c: c.optimizer.brake == 'ess',
        )
    )
    brake_lag: float = declare(
        Real(
            8.0,
            POSITIVE,
            'lag: age of the data in optimizer steps up to which steps are whole',
            used_if=lambda c: c.optimizer.brake == 'lag',
        )
    )
    blocks: int = declare(
        Integer(1, COUNT, 'an update trains one of so many blocks of leaves, see docs/blockwise.md; 1 = all')
    )
    block_order: str = declare(
        Choice(
            'cyclic',
            ('cyclic', 'shuffled'),
            'of the blocks of a round; shuffled: by run.seed',
            used_if=lambda c: c.optimizer.blocks > 1,
        )
    )
    block_updates: int = declare(
        Integer(1, COUNT, 'updates before the next block', used_if=lambda c: c.optimizer.blocks > 1)
    )
    block_state: str = declare(
        Choice(
            'host',
            ('host', 'drop'),
            'moments of blocks not being trained; drop: begin again at 0',
            used_if=lambda c: c.optimizer.blocks > 1,
        )
    )


def count_steps(c: Config) -> int:
    """The optimizer steps of a run."""
    return int(c.run.steps * c.learner.n_minibatches * c.learner.epochs)


def find_schedule_problems(c: Config) -> Iterator[str]:
    """A sentence for a schedule without a step that it could fall over."""
    ours, steps = c.optimizer, count_steps(c)
    if ours.schedule != 'constant' and steps <= ours.warmup_steps:
        yield (
            f'optimizer.schedule={ours.schedule!r} falls over {steps} optimizer steps (run.steps * '
            f'learner.n_minibatches * learner.epochs), which must be more than optimizer.warmup_steps='
            f'{ours.warmup_steps}: raise run.steps or shorten the warm-up'
        )


def find_schedule_warnings(c: Config) -> Iterator[str]:
    """A sentence for a warm-up that the run does not finish."""
    if c.optimizer.warmup_steps > (steps := count_steps(c)):
        yield (
            f'optimizer.warmup_steps={c.optimizer.warmup_steps} is more than the {steps} optimizer steps of the run '
            '(run.steps * learner.n_minibatches * learner.epochs): the learning rate never reaches its value'
        )


def find_brake_problems(c: Config) -> Iterator[str]:
    """A sentence for a brake on data without an age; for objectives that learn from given answers."""
    if c.optimizer.brake in ('ess', 'lag'):
        yield (
            f'optimizer.brake={c.optimizer.brake!r} with loss.objective={c.loss.objective!r}: given answers have no '
            "age and no log-probs of a policy; use optimizer.brake='none'"
        )


def find_block_problems(c: Config) -> Iterator[str]:
    """What updates that train one block of the leaves do not take; the fix is always to train all leaves."""
    if c.optimizer.blocks == 1:
        return
    hosts = parse_learner(c.cluster.learner).hosts
    for path, value, fix, fits, why in (
        ('lora.rank', c.lora.rank, 0, not c.lora.rank, 'adapters are the leaves that are trained then, in all layers'),
        (
            *('learner.layers', c.learner.layers, 'list', c.learner.layers == 'list'),
            'a stacked leaf has the weights of all layers, and a block those of some',
        ),
        (
            *('learner.dtype', c.learner.dtype, 'float32', c.learner.dtype == 'float32'),
            'the leaves of other blocks are kept once, in float32',
        ),
        (
            *('loss.objective', c.loss.objective, 'decoupled_ppo', not _is_compared(c.loss.objective)),
            'a model beside the trained one is compared with all of its leaves',
        ),
        (
            *('loss.kl_coefficient', find_kl(c), 0.0, not find_kl(c)),
            'the reference model would need the frozen leaves as they were at the start',
        ),
        (
            *('diagnostics.ratio_sample', c.diagnostics.ratio_sample, 0.0, not c.diagnostics.ratio_sample),
            'its ring keeps the trained leaves alone of an earlier version',
        ),
        (
            *('optimizer.brake', c.optimizer.brake, 'none', c.optimizer.brake != 'projection'),
            'consecutive gradients are of different leaves',
        ),
        (
            *('diagnostics.brakes', c.diagnostics.brakes, False, not c.diagnostics.brakes),
            'consecutive gradients are of different leaves',
        ),
        (
            *('cluster.learner', c.cluster.learner, ONE_DEVICE, hosts is None),
            'processes of a learner write whole versions, each its share',
        ),
    ):
        if not fits:
            yield f'optimizer.blocks={c.optimizer.blocks} with {path}={value!r}: {why}; use {path}={fix!r}, or blocks=1'


def _is_compared(objective: str) -> bool:
    """Whether every update reads a model beside the trained one."""
    kind = find_objective(objective)
    return kind.reference or kind.teacher


def find_kl(c: Config) -> float:
    """loss.kl_coefficient, or that of the method."""
    return resolve(c.loss)['kl_coefficient'] if is_policy(c.loss.objective) else 0.0


def find_client_problems(c: Config) -> Iterator[str]:
    """What independent clients that average their blocks need."""
    ours = c.distributed
    if ours.clients == 1:
        return
    setting = f'distributed.clients={ours.clients}'
    if ours.client >= ours.clients:
        yield f'distributed.client={ours.client} must be below {setting}: the clients are numbered from 0'
    if not ours.average_directory:
        yield f'{setting} needs distributed.average_directory: a directory that all clients see'
    if c.optimizer.blocks == 1:
        yield f'{setting} with optimizer.blocks=1: clients average blocks; use optimizer.blocks=2 or more'
    if not find_objective(c.loss.objective).generates:
        objective = f'loss.objective={c.loss.objective!r}'
        yield f'{setting} with {objective}: its demonstrations are not divided; use distributed.clients=1'
    if parse_learner(c.cluster.learner).hosts is not None:
        yield (
            f'{setting} with cluster.learner={c.cluster.learner!r}: each client is one process; use '
            f'cluster.learner={ONE_DEVICE!r}'
        )
    if c.run.clock == 'real' and ours.average_deadline_s >= c.run.stall_timeout_s:
        yield (
            f'distributed.average_deadline_s={ours.average_deadline_s} must be below run.stall_timeout_s='
            f'{c.run.stall_timeout_s}: a client that waits for others completes nothing'
        )
    if c.run.steps % c.optimizer.block_updates:
        yield (
            f'run.steps={c.run.steps} must be a multiple of optimizer.block_updates={c.optimizer.block_updates} with '
            f'{setting}: a block is averaged when all its updates are made'
        )
