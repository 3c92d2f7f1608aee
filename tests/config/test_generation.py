"""Which fields of the section `rollout` a config uses, by what it is read for."""

from __future__ import annotations

import pytest

from areal_jax.config import FIELDS, TrackedConfig, default_config
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.generation import RolloutSection
from tests.config.test_training import make_config

SIMULATED = {'simulation.prices': 'virtual'}
ALONE, OWN, VLLM, SGLANG = ({'rollout.server': name} for name in ('in_process', 'own', 'vllm', 'external'))
SFT = {'loss.objective': 'sft'}
VALUES = {
    'slots': 3, 'decode_steps': 2, 'context_tokens': 32, 'block_tokens': 16, 'cache_tokens': 640,
    'state_snapshots': 5, 'prefill_buckets': (32,), 'attention': 'loops', 'weights': 'int8', 'mla': 'expanded',
    'record_routes': True, 'slow_versions': 2, 'slow_engines': 'spare', 'kv_policy': 'keep', 'server': 'own', 'urls': ('vllm+http://a:1',),
    'max_retries': 2, 'pause_lease_s': 20.0, 'max_mismatch': 0.1, 'workflow': 'program', 'episode_deadline_s': 9.0,
    'group_size': 2, 'max_running_groups': 2, 'max_new_tokens': 8, 'answer_lengths': 'lognormal(4, 1)',
    'ignore_eos': True, 'temperature': 0.5, 'top_k': 2, 'top_p': 0.5,
}  # fmt: skip
OF_ENGINES = {
    *('slots', 'decode_steps', 'context_tokens', 'block_tokens', 'cache_tokens', 'prefill_buckets', 'attention'),
    *('weights', 'mla', 'record_routes', 'kv_policy', 'state_snapshots'),
}
OF_ANSWERS = {
    *('workflow', 'episode_deadline_s', 'max_new_tokens', 'ignore_eos', 'temperature', 'top_k', 'top_p'),
}


def list_unread(fields, purpose=Purpose.TRAINING):
    """The fields of the section that differ from their defaults and are not used."""
    unread = TrackedConfig(make_config(fields), purpose=purpose).unread()
    return {path.removeprefix('rollout.') for path, _ in unread if path.startswith('rollout.')}


@pytest.mark.parametrize(
    ('field', 'unused', 'used'),
    [
        ('decode_steps', VLLM, OWN),
        ('block_tokens', SGLANG, SIMULATED),
        ('cache_tokens', VLLM, SIMULATED | OWN),
        ('prefill_buckets', VLLM, ALONE),
        ('state_snapshots', SIMULATED, OWN),
        ('state_snapshots', VLLM, ALONE),
        ('attention', SIMULATED, OWN),
        ('attention', VLLM, ALONE),
        ('weights', SIMULATED, ALONE),
        ('mla', VLLM, SIMULATED | OWN),
        ('slow_versions', OWN, SIMULATED),
        ('slow_engines', OWN, ALONE),
        ('urls', OWN, SGLANG),
        ('max_retries', ALONE, SIMULATED | OWN),
        ('pause_lease_s', VLLM, OWN),
        ('pause_lease_s', SIMULATED | OWN, OWN),
        ('max_mismatch', ALONE, VLLM),
        ('max_mismatch', SIMULATED | OWN, SGLANG),
        ('episode_deadline_s', {}, {'rollout.workflow': 'agent.py:agent'}),
        ('episode_deadline_s', SIMULATED, SIMULATED | {'simulation.turns': 'constant(2)'}),
        *((field, SFT, ALONE) for field in ('slots', 'context_tokens', 'kv_policy', 'group_size', 'temperature')),
    ],
)
def test_a_field_is_used_or_has_its_default_and_is_named(field, unused, used):
    path, value = f'rollout.{field}', VALUES[field]
    tracked = TrackedConfig(make_config(unused | {path: value}), [path])
    assert getattr(tracked.rollout, field) == FIELDS[path].default
    with pytest.raises(ConfigError, match=f'set but never read: {path}='):
        tracked.require_all_read()
    tracked = TrackedConfig(make_config(used | {path: value}), [path])
    assert getattr(tracked.rollout, field) == value
    tracked.require_all_read()


def test_supervised_training_uses_no_field():
    fields = {f'rollout.{name}': value for name, value in VALUES.items()} | SFT
    assert VALUES.keys() == {path.partition('.')[2] for path in FIELDS if path.startswith('rollout.')}
    assert TrackedConfig(make_config(fields)).rollout == RolloutSection()
    assert list_unread(fields) == VALUES.keys()


@pytest.mark.parametrize(
    ('purpose', 'used'),
    [(Purpose.EVALUATION, OF_ENGINES | OF_ANSWERS), (Purpose.SERVING, OF_ENGINES), (Purpose.SCORING, set())],
)
def test_what_trains_nothing_uses_the_fields_that_are_for_it(purpose, used):
    fields = {f'rollout.{name}': value for name, value in VALUES.items()}
    for objective in ({}, SFT):
        assert list_unread(fields | objective, purpose) == VALUES.keys() - used
        tracked = TrackedConfig(make_config(fields | objective), purpose=purpose)
        assert tracked.rollout == RolloutSection(**VALUES)


def test_a_section_is_read_once():
    tracked = TrackedConfig(default_config())
    assert tracked.rollout is tracked.rollout


@pytest.mark.parametrize(
    ('fields', 'slots', 'beside', 'blocks'),
    [
        ({'context_tokens': 40, 'block_tokens': 16}, 4, False, 12),
        ({'context_tokens': 40, 'block_tokens': 16, 'cache_tokens': 100}, 4, False, 6),
        ({'context_tokens': 40, 'block_tokens': 16, 'cache_tokens': 1000}, 4, True, 12),
    ],
)
def test_a_cache_has_its_tokens_or_a_context_for_each_slot(fields, slots, beside, blocks):
    assert RolloutSection(**fields).count_cache_blocks(slots, beside=beside) == blocks
