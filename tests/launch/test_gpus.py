"""Which process of a run on one machine sees which GPUs."""

import pytest

from areal_jax.app.command_line import load_config
from areal_jax.app.process.accelerator import VISIBLE
from areal_jax.app.roles import sglang_server, vllm_server
from areal_jax.app.roles.server_program import parse_flags
from areal_jax.config.fields import ConfigError
from launch.gpus import share_gpus
from launch.local import plan_servers
from launch.roles import plan_roles


def config_of(learner, engines, server='own'):
    config = load_config('configs/tiny_cpu.py')
    config.cluster.learner, config.cluster.engines, config.rollout.server = learner, engines, server
    return config


@pytest.mark.parametrize(('learner', 'engines', 'server', 'shared'), [
    ('hosts=2 x fsdp=4', '2 x tensor=2', 'own',
     {'learner-0': 'a,b', 'learner-1': 'c,d', 'engine-0': 'e,f', 'engine-1': 'g,h'}),
    ('hosts=1 x expert=2', '1 x expert=2,tensor=2', 'own', {'learner-0': 'a,b', 'engine-0': 'c,d,e,f'}),
    ('fsdp=2', '3 x tensor=1', 'vllm', {'learner-0': 'a,b', 'engine-0': 'c', 'engine-1': 'd', 'engine-2': 'e'}),
    ('fsdp=2', '2 x shared', 'own', {'learner-0': 'a,b', 'engine-0': 'a', 'engine-1': 'a'}),
    ('fsdp=2', '1 x tensor=1 + 2 x tensor=2', 'own',
     {'learner-0': 'a,b', 'engine-0': 'c', 'engine-1': 'd,e', 'engine-2': 'f,g'}),
    ('fsdp=8', '2 x tensor=1', 'external', {'learner-0': 'a,b,c,d,e,f,g,h'}),
])  # fmt: skip
def test_the_learner_comes_first_and_each_engine_has_its_own(learner, engines, server, shared):
    assert share_gpus(config_of(learner, engines, server), 'abcdefgh') == shared


def test_too_few_are_refused_with_both_numbers():
    sentence = r"='fsdp=2' needs 2 GPUs and cluster.engines='2 x tensor=1' needs 2; this machine has 3 \(a,b,c\): lower"
    with pytest.raises(ConfigError, match=sentence):
        share_gpus(config_of('fsdp=2', '2 x tensor=1'), 'abc')
    assert share_gpus(config_of('fsdp=2', '2 x tensor=1'), '') == {}


def test_roles_and_servers_are_started_with_theirs(tmp_path):
    controller, learner, second, engine = plan_roles(config_of('hosts=2 x data=4', '1 x tensor=2'), [], {}, 'abcdef')
    assert (controller.variables, engine.variables) == ({}, {VISIBLE: 'e,f'})
    assert (learner.variables, second.variables) == ({VISIBLE: 'a,b'}, {VISIBLE: 'c,d'})
    servers = plan_servers(config_of('data=1', '2 x tensor=1'), tmp_path, {'engine-1': {VISIBLE: 'c'}})
    assert [server.describe().startswith(f'{VISIBLE}=c ') for server in servers] == [False, True]


def test_servers_of_unequal_size_are_told_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_server, 'has_gpu', lambda python: True)
    engines = '1 x tensor=2 + 1 x tensor=1'
    large, small = (server.describe() for server in plan_servers(config_of('data=1', engines), tmp_path, {}))
    assert "--config.cluster.engines=1 x tensor=2'" in large
    assert "--config.cluster.engines=1 x tensor=1'" in small
    large, small = (server.describe() for server in plan_servers(config_of('data=1', engines, 'vllm'), tmp_path, {}))
    assert '--tensor=2' in large
    assert '--tensor' not in small
    roles = plan_roles(config_of('hosts=1 x data=1', engines), [], {})
    assert [role.variables['XLA_FLAGS'][-2:] for role in roles[2:]] == ['=2', '=1']


@pytest.mark.parametrize(('module', 'server', 'flag'), [
    (vllm_server, 'vllm', '--tensor-parallel-size'), (sglang_server, 'sglang', '--tp-size'),
])  # fmt: skip
def test_a_server_of_others_cuts_its_weights_over_the_devices_of_its_engine(
    tmp_path, monkeypatch, module, server, flag
):
    monkeypatch.setattr(sglang_server, 'has_gpu', lambda python: True)
    words = module.PROGRAM.describe_command(config_of('data=1', '2 x tensor=4', server), tmp_path, 'engine-1')
    assert '--tensor=4' in words
    command = module.build_command('python', tmp_path, 8000, parse_flags(words[2:])).words
    assert command[command.index(flag) + 1] == '4'
