"""From a config to the settings of a run's parts. Each function reads the fields that its part uses, and only those."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from areal_jax.config import TrackedConfig
from areal_jax.control.controller import LoopSettings
from areal_jax.control.gate import StalenessGate
from areal_jax.control.schedule import Schedule, VersionRing, parse_schedule
from areal_jax.learning.optimizer import Optimizer, make_optimizer
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.lora import Lora
from areal_jax.ranges import ConfigError
from areal_jax.sharding.mesh import make_mesh
from areal_jax.tasks.tokenizer import Tokenizer
from areal_jax.types import SamplingParams


def build_mesh(config: TrackedConfig) -> Mesh:
    mesh = config.mesh
    return make_mesh(mesh.data, mesh.fsdp, context=mesh.context, tensor=mesh.tensor)


def build_lora(config: TrackedConfig) -> Lora | None:
    lora = config.lora
    return Lora(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None


def build_optimizer(config: TrackedConfig) -> Optimizer:
    optimizer, learner = config.optimizer, config.learner
    own: dict[str, Any] = {}
    if optimizer.name in ('adamw', 'adamw8bit'):
        own = {'b1': optimizer.b1, 'b2': optimizer.b2, 'eps': optimizer.eps}
    if optimizer.name == 'lion':
        own = {'b1': optimizer.b1, 'b2': optimizer.b2}
    if optimizer.name == 'adamw':
        own['moment_dtype'] = optimizer.moment_dtype
    if optimizer.schedule != 'constant':
        steps = config.run.steps * learner.n_minibatches * learner.epochs
        own |= {'total_steps': steps, 'final_ratio': optimizer.final_ratio}
    return make_optimizer(
        optimizer.name,
        **own,
        schedule=optimizer.schedule,
        weight_decay=optimizer.weight_decay,
        decay=optimizer.decay if optimizer.weight_decay else 'all',
        clip_norm=optimizer.clip_norm,
        warmup_steps=optimizer.warmup_steps,
    )


def build_learner_settings(config: TrackedConfig) -> LearnerSettings:
    """What an update is, under either objective."""
    learner, loss = config.learner, config.loss
    supervised = loss.objective == 'sft'
    most_rows = learner.groups_per_update * (1 if supervised else config.rollout.group_size)
    settings = LearnerSettings(
        row_tokens=learner.row_tokens,
        row_loss_tokens=learner.row_loss_tokens,
        rows_per_microbatch=learner.rows_per_microbatch,
        n_minibatches=learner.n_minibatches,
        epochs=learner.epochs,
        packing='ordinary',
        fill=learner.fill,
        tail_buckets=learner.tail_buckets,
        accumulate=learner.accumulate,
        max_microbatches=-(-most_rows // learner.rows_per_microbatch),
        strategy=config.mesh.strategy,
        dtype=learner.dtype,
        loss_scale=learner.loss_scale,
        objective=loss.objective,
        aggregation=loss.aggregation,
        attention=learner.attention,
    )
    return settings if supervised else _add_policy_settings(config, settings)


def _add_policy_settings(config: TrackedConfig, settings: LearnerSettings) -> LearnerSettings:
    loss = config.loss
    return dataclasses.replace(
        settings,
        packing=config.learner.packing,
        filter_equal_rewards=config.learner.filter_equal_rewards,
        publish_dtype=config.publication.dtype,
        advantage=loss.advantage,
        temperature=config.rollout.temperature,
        clip_epsilon=loss.clip_epsilon,
        clip_epsilon_high=loss.clip_epsilon_high,
        proximal=loss.proximal,
        behavior_weight_cap=loss.behavior_weight_cap,
        entropy_coefficient=loss.entropy_coefficient,
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=loss.kl_estimator if loss.kl_coefficient else 'k3',
        denominator=loss.denominator if config.learner.filter_equal_rewards else 'kept',
        truncated_sampling=loss.truncated_sampling if cuts_softmax(config) else 'refuse',
        max_token_age=config.staleness.max_token_age,
        over_age=config.staleness.over_age,
    )


def cuts_softmax(config: TrackedConfig) -> bool:
    """Whether answers are drawn from a part of the softmax only."""
    return config.rollout.top_k > 0 or config.rollout.top_p < 1


def build_sampling(config: TrackedConfig, tokenizer: Tokenizer) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_tokens=(tokenizer.eos_id,),
    )


def build_gate(config: TrackedConfig) -> StalenessGate:
    lock_step = config.staleness.schedule != 'natural'
    batch = config.learner.groups_per_update
    return StalenessGate(
        groups_per_update=batch,
        eta=float('inf') if lock_step else config.staleness.eta,
        max_running=config.rollout.max_running_groups,
        buffer_capacity=config.buffer.capacity,
        max_admitted=config.run.steps * batch,
    )


def build_schedule(config: TrackedConfig) -> Schedule | None:
    """None for staleness.schedule='natural'; raises ConfigError for a schedule or a file of one that is none."""
    text = config.staleness.schedule
    try:
        return parse_schedule(text, config.run.seed)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a number of thousands of digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f'staleness.schedule={text!r}: the file or number cannot be read ({reason})') from error


def build_ring(config: TrackedConfig) -> VersionRing | None:
    """The versions that a lock-step schedule may still ask for; None without one."""
    schedule = build_schedule(config)
    return VersionRing(schedule) if schedule else None


def build_settings(config: TrackedConfig) -> LoopSettings:
    return LoopSettings(
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        groups_per_update=config.learner.groups_per_update,
        max_token_age=config.staleness.max_token_age,
        over_age=config.staleness.over_age,
        checkpoint_every=config.checkpoint.every,
        max_failed_groups=config.task.max_failed_groups,
    )
