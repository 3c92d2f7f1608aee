"""Builds the settings of a run's parts from a config. Each function reads only the fields that its part uses.

Modules that need jax are imported inside the functions that use them: a controller without a learner calls the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ml_collections import config_dict

from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit, parse_engines, parse_learner
from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.config.fields import ConfigError
from areal_jax.config.generation import cuts_softmax, uses_servers
from areal_jax.config.objectives import find_objective
from areal_jax.config.splits import OFF, initial_split, list_splits, parse_split, plan_file, read_plan
from areal_jax.config.training import client_seed
from areal_jax.control.buffer import SUCCESS_RATE, GroupFilter, equal_rewards, success_rate
from areal_jax.control.controller import LoopSettings
from areal_jax.control.gate import StalenessGate
from areal_jax.control.lock_step import CopyVersion, Schedule, VersionRing, parse_schedule
from areal_jax.control.split_choice import Automatic, Choice, Planned, Rung
from areal_jax.publication.shard_versions import Everywhere, ShardVersions
from areal_jax.rollout import pool
from areal_jax.rollout.pool import Requirement
from areal_jax.telemetry.devices import DeviceRates, peak_flops
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import SamplingParams

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from areal_jax.sharding.rules import Allocation


def build_mesh(config: TrackedConfig) -> Mesh:
    """Builds the learner's mesh; `build_allocation` contains the same one."""
    from areal_jax.sharding.rules import mesh_of

    return mesh_of(parse_learner(config.cluster.learner))


def build_allocation(config: TrackedConfig, split: DeviceSplit | None = None) -> Allocation:
    """Returns the devices of the learner and of each engine in this process; `split` is given if devices move."""
    from areal_jax.sharding.rules import Allocation, allocate

    if uses_servers(config):
        return Allocation(build_mesh(config), ())
    if split is not None:
        return allocate(*parse_split(split), from_end=True)
    return allocate(parse_learner(config.cluster.learner), parse_engines(config.cluster.engines))


def build_shard_versions(config: TrackedConfig, everywhere: Everywhere) -> ShardVersions:
    """Builds what leads the versions that every process of a learner sends; `everywhere` calls the processes."""
    publication = config.publication
    base_every = publication.base_every if publication.delta else 1
    return ShardVersions(everywhere, name=publication.channel, delta=publication.delta, base_every=base_every)


def moves_devices(config: TrackedConfig) -> bool:
    """Whether engines move between generation and training."""
    return bool(config.cluster.reallocate != OFF)


def find_initial_split(config: TrackedConfig) -> DeviceSplit:
    return initial_split(config_dict.ConfigDict(config.as_dict()))


def find_splits(config: TrackedConfig) -> list[DeviceSplit]:
    """Returns every split that the run may have; only the config's split if devices do not move."""
    return list_splits(config_dict.ConfigDict(config.as_dict()))


def build_choice(config: TrackedConfig) -> Choice:
    """Builds the rule that chooses the split of an update."""
    if plan_file(text := config.cluster.reallocate) is not None:
        return Planned(read_plan(text))
    rungs = []
    for split in find_splits(config):
        learner, engines = parse_split(split)
        rungs.append(Rung(split, learner.devices, engines.count))
    cluster = config.cluster
    return Automatic(rungs, gain=cluster.reallocate_gain, updates=cluster.reallocate_updates)


def build_requirements(config: TrackedConfig) -> list[Requirement]:
    """Lists the features that this run needs in every engine."""
    rollout, evaluation = config.rollout, config.evaluation
    needed = [
        pool.needs_logprobs('learning from its answers', 'behavior'),
        pool.needs_spans('learning from its answers'),
        pool.needs_update(f'rollout.kv_policy={rollout.kv_policy!r}', rollout.kv_policy),
        pool.needs_pause('taking checkpoints'),
    ]
    if cuts_softmax(config):
        setting = f'rollout.top_k={rollout.top_k}, rollout.top_p={rollout.top_p}'
        needed.append(pool.needs_logprobs(setting, 'sampling'))
    if evaluation.every and not uses_servers(config):  # with servers, evaluation has separate engines
        needed.append(pool.needs_pinned(f'evaluation.every={evaluation.every}'))
    return needed


def build_sampling(config: TrackedConfig, tokenizer: Tokenizer) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_tokens=find_ends(config, tokenizer),
    )


def find_ends(config: TrackedConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that end an answer."""
    return () if config.rollout.ignore_eos else tokenizer.end_ids


def build_sampling_seed(config: TrackedConfig) -> int:
    """Returns the seed of the noise of sampled answers; reads distributed.client only if there are several clients."""
    clients: int = config.distributed.clients
    return client_seed(config.run.seed, clients, 0 if clients == 1 else config.distributed.client)


def build_answer_limits(config: TrackedConfig) -> AnswerLimits:
    rollout = config.rollout
    return AnswerLimits.parse(rollout.answer_lengths, rollout.max_new_tokens, build_sampling_seed(config))


def build_gate(config: TrackedConfig) -> StalenessGate:
    lock_step = config.staleness.schedule != 'natural'
    batch = config.learner.groups_per_update
    return StalenessGate(
        groups_per_update=batch,
        eta=float('inf') if lock_step else config.staleness.eta,
        max_running=config.rollout.max_running_groups or math.inf,
        buffer_capacity=config.buffer.capacity,
        max_admitted=config.run.steps * batch,
    )


def build_schedule(config: TrackedConfig) -> Schedule | None:
    """Parses staleness.schedule; None for 'natural'. Raises ConfigError for an invalid schedule or schedule file."""
    text = config.staleness.schedule
    try:
        return parse_schedule(text, config.run.seed)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a number of thousands of digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f'staleness.schedule={text!r}: the file or number cannot be read ({reason})') from error


def build_ring(config: TrackedConfig, copy: CopyVersion) -> VersionRing | None:
    """Builds the ring of versions that a lock-step schedule may still ask for; None without such a schedule."""
    schedule = build_schedule(config)
    return VersionRing(schedule, copy) if schedule else None


def build_group_filter(config: TrackedConfig) -> GroupFilter | None:
    """Builds the filter that `task.filter` names; None for 'none'."""
    task = config.task
    if task.filter == 'none':
        return None
    rule = success_rate(task.filter_low, task.filter_high) if task.filter == SUCCESS_RATE else equal_rewards()
    return GroupFilter(rule, task.max_filtered_groups)


def build_device_rates(config: TrackedConfig, allocation: Allocation) -> DeviceRates:
    """Builds the conversion to rates per device; modelled seconds cannot be compared with a device's peak."""
    learner = allocation.learner.devices
    modelled = find_objective(config.loss.objective).generates and config.run.clock == 'virtual'
    peak = None if modelled else peak_flops(learner.flat[0].device_kind, config.learner.dtype)
    return DeviceRates(learner.size, sum(map(len, allocation.by_devices())), peak)


def build_settings(config: TrackedConfig) -> LoopSettings:
    return LoopSettings(
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        groups_per_update=config.learner.groups_per_update,
        oldest_kept=config.staleness.oldest_kept,
        checkpoint_every=config.checkpoint.every,
        max_failed_groups=config.task.max_failed_groups,
        slots=config.rollout.slots,
    )
