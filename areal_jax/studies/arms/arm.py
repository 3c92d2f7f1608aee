"""Arms: the fields in which arms of one program may differ, and the errors for arms that cannot join it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ml_collections import config_dict

from areal_jax.config import flatten, validate
from areal_jax.config.fields import ConfigError, Value
from areal_jax.config.objectives import DECOUPLED_PPO, is_policy, resolve
from areal_jax.plugins import is_own


@dataclasses.dataclass(frozen=True)
class Arm:
    """The name and the config of one run; main_train takes the same config."""

    name: str
    config: config_dict.ConfigDict


VARIES = (
    *('run.seed', 'model.init_scale', 'model.embedding_scale', 'staleness.schedule', 'optimizer.learning_rate'),
    'rollout.temperature',
    *('loss.clip_epsilon', 'loss.clip_epsilon_high', 'loss.proximal', 'loss.behavior_weight_cap'),
    *('loss.dual_clip', 'loss.sapo_positive', 'loss.sapo_negative', 'loss.quadratic_weight', 'loss.oapl_beta'),
    *('loss.delight_temperature', 'loss.delight_mix', 'loss.correction_low', 'loss.correction_high'),
    *('loss.gate_threshold', 'loss.advantage', 'loss.aggregation', 'loss.length_constant', 'loss.entropy_coefficient'),
    *('loss.denominator', 'learner.filter_equal_rewards'),
    *('friction.actor', 'friction.actor_share', 'friction.actor_token', 'friction.actor_nats'),
    *('friction.actor_temperature', 'friction.reward_share', 'friction.unrewarded_share'),
)  # each becomes an array over the arms
# how a single run is computed, shown and saved; these fields change the weights by rounding at most
_IDLE = (
    *('run.clock', 'run.stall_timeout_s', 'run.compilation_', 'run.export', 'run.mirror'),
    *('task.verifier', 'task.max_failed_groups'),
    *('rollout.slots', 'rollout.decode_steps', 'rollout.context_tokens', 'rollout.block_tokens'),
    *('rollout.cache_tokens', 'rollout.state_snapshots', 'rollout.prefill_buckets', 'rollout.attention'),
    *('rollout.kv_policy', 'rollout.max_running_groups', 'buffer.', 'learner.packing', 'learner.fill', 'learner.row'),
    *('learner.tail_buckets', 'learner.accumulate', 'learner.layers', 'learner.remat', 'learner.attention'),
    *('cluster.', 'publication.channel', 'publication.directory', 'publication.verify', 'checkpoint.', 'evaluation.'),
    *('server.', 'telemetry.', 'virtual.'),
)  # prefixes
_ONLY: Mapping[str, Value] = {
    'task.name': 'token_reversal',
    'task.reward': '',
    'task.filter': 'none',
    'model.source': 'random',
    'rollout.answer_lengths': '',
    'rollout.ignore_eos': True,
    'rollout.server': 'in_process',
    'rollout.workflow': 'single_turn',
    'rollout.weights': 'published',
    'rollout.top_k': 0,
    'rollout.top_p': 1.0,
    'staleness.over_age': 'off',
    'learner.dtype': 'float32',
    'learner.loss_scale': 1.0,
    'publication.dtype': 'float32',
    'lora.rank': 0,
    'optimizer.blocks': 1,
    'loss.truncated_answers': 'trained',
    'loss.reward_bias': 0.0,
    'loss.reward_scale': 1.0,
    'loss.reward_clip': None,
}  # the values that the program can compute; other values need a separate run
# choices that need a separate pass, or data that only the host has
_REFUSED: Mapping[str, tuple[Value, ...]] = {
    'delight_gate': ('bernoulli',),
    'aggregation': ('token_sum',),
}
ADVANTAGES = (
    *('group', 'group_mean', 'rloo', 'reward', 'max_rl', 'length_baseline', 'optimal_value', 'optimal_baseline'),
)  # the advantages that arm_update.py computes
_OFF = ('kl_coefficient', 'overlong_tokens', 'entropy_clamp')
_ALONE = 'train it by itself, with main_train'


def require_one_program(arms: Sequence[Arm]) -> None:
    """Raises ConfigError, naming arm, field and values, if one program cannot train the arms."""
    if not arms:
        raise ConfigError('there is no arm to train; give at least one')
    names = [arm.name for arm in arms]
    if double := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f'arm {double[0]!r} is there twice; give each a name of its own')
    for arm in arms:
        require_trainable(arm)
    first, wanted = arms[0], _shared_fields(arms[0])
    for arm in arms[1:]:
        for path, value in _shared_fields(arm).items():
            if value != wanted[path]:
                raise ConfigError(
                    f'arm {arm.name!r} has {path}={value!r} and arm {first.name!r} {wanted[path]!r}, but arms of one '
                    f'program can differ in {", ".join(VARIES)} only: {_ALONE} or in a program of its own'
                )


def require_trainable(arm: Arm) -> None:
    """Raises ConfigError for a config that is invalid, or that no program of arms can compute."""
    try:
        validate(arm.config)
    except ConfigError as error:
        raise ConfigError(f'arm {arm.name!r}: {error}') from error
    fields = dict(flatten(arm.config.copy_and_resolve_references()))
    where = f'arm {arm.name!r}: '
    for path, only in _ONLY.items():
        if fields[path] != only:
            raise ConfigError(f'{where}{path}={fields[path]!r}, but a program of arms has {path}={only!r}: {_ALONE}')
    schedule, length = fields['staleness.schedule'], fields['task.length']
    if not schedule.startswith(('fixed(', 'every(')):
        raise ConfigError(
            f'{where}staleness.schedule={schedule!r}, but a program of arms has one delay or one period for all '
            f'batches of an arm: use fixed(k) or every(L), or {_ALONE}'
        )
    if fields['rollout.max_new_tokens'] != length:
        raise ConfigError(
            f'{where}rollout.max_new_tokens={fields["rollout.max_new_tokens"]} with task.length={length}, but answers '
            f'of a program of arms are as long as the prompt: set rollout.max_new_tokens={length}, or {_ALONE}'
        )
    objective = fields['loss.objective']
    if not is_policy(objective):
        raise ConfigError(
            f'{where}loss.objective={objective!r}, but a program of arms has the named objectives that learn from '
            f'answers: use {DECOUPLED_PPO.name!r}, or {_ALONE}'
        )
    for name, value in resolve(arm.config.loss).items():
        uncomputed = name == 'advantage' and not is_own(value) and value not in ADVANTAGES
        if uncomputed or value in _REFUSED.get(name, ()) or (name in _OFF and value):
            raise ConfigError(
                f'{where}loss.{name}={value!r}, but a program of arms does not compute it: {_ALONE}, or set another'
            )
    if is_own(fields['loss.advantage']):
        raise ConfigError(
            f'{where}loss.advantage={fields["loss.advantage"]!r}, but a program of arms calls no function of your own: '
            f'use group, group_mean or rloo, or {_ALONE}'
        )


def partition(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Splits arms into the fewest lists such that one program can train each, in the order of their first arms.

    Raises ConfigError for an arm that no program can train.
    """
    programs: dict[tuple[tuple[str, str], ...], list[Arm]] = {}
    for arm in arms:
        require_trainable(arm)
        key = tuple((path, repr(value)) for path, value in _shared_fields(arm).items())
        programs.setdefault(key, []).append(arm)
    return list(programs.values())


def _shared_fields(arm: Arm) -> dict[str, Value]:
    """The fields in which arms of one program must agree."""
    varies: Callable[[str], bool] = lambda path: path in VARIES or path.startswith(_IDLE)
    return {path: value for path, value in flatten(arm.config.copy_and_resolve_references()) if not varies(path)}
