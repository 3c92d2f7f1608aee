"""What the optimizer, its blocks, and clients that average them refuse, and which of its fields are used."""

from __future__ import annotations

import pytest

from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.training import OptimizerSection, StalenessSection, find_client_problems

CLIENTS = {
    'optimizer.blocks': 3,
    'distributed.clients': 2,
    'distributed.client': 1,
    'distributed.average_directory': 'means',
}


def make_config(fields):
    config = default_config()
    config.update_from_flattened_dict(fields)
    return config


@pytest.mark.parametrize('fields', [{'optimizer.blocks': 3}, CLIENTS, CLIENTS | {'distributed.overlap': False}])
def test_what_can_run_is_accepted(fields):
    validate(make_config(fields))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'lora.rank': 4},
            r'optimizer\.blocks=3 with lora\.rank=4: adapters are the leaves .*; use lora\.rank=0, or blocks=1',
        ),
        (
            {'learner.layers': 'stacked'},
            r"learner\.layers='stacked': a stacked leaf has the weights of all layers, .* use learner\.layers='list'",
        ),
        ({'learner.dtype': 'bfloat16'}, r"learner\.dtype='bfloat16': the leaves of other blocks are kept once"),
        ({'loss.kl_coefficient': 0.1}, r'loss\.kl_coefficient=0\.1: the reference model would need'),
        ({'diagnostics.ratio_sample': 0.5}, r'diagnostics\.ratio_sample=0\.5: its ring keeps the trained leaves alone'),
        (
            {'cluster.learner': 'hosts=1 x data=1', 'rollout.server': 'own', 'publication.channel': 'files'},
            r"cluster\.learner='hosts=1 x data=1': processes of a learner write whole versions",
        ),
        ({'optimizer.block_updates': 0}, r'optimizer\.block_updates=0 must be at least 1'),
        ({'optimizer.block_state': 'disk'}, r"optimizer\.block_state='disk' is not known; use one of host, drop"),
    ],
)
def test_blocks_refuse(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config({'optimizer.blocks': 3} | fields))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'distributed.client': 2}, r'distributed\.client=2 must be below distributed\.clients=2'),
        (
            {'distributed.average_directory': ''},
            r'clients=2 needs distributed\.average_directory: a directory',
        ),
        (
            {'optimizer.blocks': 1},
            r'clients=2 with optimizer\.blocks=1: clients average blocks; use optimizer\.bl',
        ),
        ({'loss.objective': 'sft'}, r"clients=2 with loss\.objective='sft': its demonstrations are not divided"),
        (
            {'optimizer.block_updates': 3},
            r'run\.steps=20 must be a multiple of optimizer\.block_updates=3 with distributed\.clients=2',
        ),
        (
            {'distributed.average_deadline_s': 300.0},
            r'distributed\.average_deadline_s=300\.0 must be below run\.stall_timeout_s=300\.0',
        ),
        ({'distributed.clients': 2000}, r'distributed\.clients=2000 must be at least 1 and at most 1024'),
    ],
)
def test_clients_refuse(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(CLIENTS | fields))


def test_clients_in_roles_are_refused():
    roles = {'cluster.learner': 'hosts=1 x data=1', 'rollout.server': 'own', 'publication.channel': 'files'}
    found = [problem for problem in find_client_problems(make_config(CLIENTS | roles)) if 'one process' in problem]
    assert found == [
        "distributed.clients=2 with cluster.learner='hosts=1 x data=1': each client is one process; use "
        "cluster.learner='data=1'"
    ]


def test_a_schedule_that_falls_over_no_step_is_refused():
    fields = {'optimizer.schedule': 'cosine', 'optimizer.warmup_steps': 5, 'run.steps': 5}
    with pytest.raises(ConfigError, match=r"schedule='cosine' falls over 5 optimizer steps .*warmup_steps=5"):
        validate(make_config(fields))
    validate(make_config(fields | {'run.steps': 6}))


@pytest.mark.parametrize(
    ('field', 'value', 'used'),
    [
        ('moment_dtype', 'bfloat16', {'name': 'adamw'}),
        ('b1', 0.5, {'name': 'lion'}),
        ('b2', 0.5, {'name': 'adamw8bit'}),
        ('eps', 0.5, {'name': 'adamw8bit'}),
        ('decay', 'matrices', {'weight_decay': 0.1}),
        ('final_ratio', 0.5, {'schedule': 'linear'}),
        ('brake_base', 0.5, {'brake': 'ess'}),
        ('brake_lag', 0.5, {'brake': 'lag'}),
        ('block_order', 'shuffled', {'blocks': 2}),
        ('block_updates', 2, {'blocks': 2}),
        ('block_state', 'drop', {'blocks': 2}),
    ],
)
def test_a_field_is_used_or_has_its_default_and_is_named(field, value, used):
    path = f'optimizer.{field}'
    unused = make_config({'optimizer.name': 'sgd', path: value})
    tracked = TrackedConfig(unused, [path])
    assert tracked.optimizer == OptimizerSection(name='sgd')
    with pytest.raises(ConfigError, match=f'set but never read: {path}='):
        tracked.require_all_read()
    tracked = TrackedConfig(make_config({path: value} | {f'optimizer.{name}': other for name, other in used.items()}))
    assert getattr(tracked.optimizer, field) == value
    assert tracked.unread() == []


def test_what_trains_nothing_uses_what_it_notes():
    config = make_config({'learner.row_tokens': 512, 'optimizer.learning_rate': 0.5})
    tracked = TrackedConfig(config, purpose=Purpose.SCORING)
    tracked.note_used(('learner.row_tokens',))
    assert tracked.unread() == [('optimizer.learning_rate', 0.5)]


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'learner.row_buckets': (64, 256)},
            r'learner\.row_buckets=\(64, 256\) must lie below learner\.row_tokens=256',
        ),
        (
            {'learner.row_buckets': (64,), 'learner.accumulate': 'scan'},
            r'learner\.row_buckets=\(64,\) needs .* or learner\.row_buckets=\(\)',
        ),
    ],
)
def test_forms_of_rows_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(fields))


def test_a_bound_on_age_drops_groups_or_masks_tokens():
    for over_age, kept, trained in (('drop', 2, None), ('mask', None, 2)):
        section = StalenessSection(max_token_age=2, over_age=over_age)
        assert (section.oldest_kept, section.oldest_trained) == (kept, trained)
