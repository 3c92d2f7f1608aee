"""A run that is only described: shapes and shardings of its leaves, what a device would hold, and whether it fits."""

import re

import pytest

from areal_jax import main_train
from areal_jax.aot.topology import describe_accelerator
from areal_jax.app.command_line import load_config
from areal_jax.app.parts import dry_run
from areal_jax.app.parts.dry_run import Verdict, count_sent_bytes, describe_run, judge, plan_run, render_verdicts
from areal_jax.app.process.ending import Interrupts
from areal_jax.config import validate
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.models.decoder import Decoder
from tests.app.small import small_config


def rows_of(text):
    return {line.split('  ')[0]: ' '.join(line.split()) for line in text.splitlines()}


def test_qwen3_30b_is_cut_over_experts_and_fsdp_and_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(Decoder, 'init', lambda *_: pytest.fail('weights were drawn'))
    config = load_config('configs/clusters/qwen3_30b_a3b_h100.py')
    config.model.path = 'configs/shapes/qwen3_30b_a3b'
    config.cluster.learner, config.cluster.engines = 'hosts=1 x fsdp=2,expert=2', '1 x expert=4'
    config.rollout.server = 'own'
    config.learner.rows_per_microbatch = 4
    rows = rows_of(text := describe_run(plan_run(config)))
    assert '30.53 billion weights, a token reaches 3.35 billion; learner fsdp=2, expert=2, 1 engines' in text
    assert rows['layers/*/mlp/experts/down'].endswith('48 [128, 768, 2048] expert, -, fsdp [64, 768, 1024]')
    assert rows['layers/*/mlp/router/weight'].endswith('48 [2048, 128] fsdp [1024, 128]')
    experts = 48 * 128 * 3 * 2048 * 768  # cut by four, all else by two
    size = 4 * (experts / 4 + (30.532e9 - experts) / 2) / 1e9
    assert rows['weights'] == f'weights {size:.4g} GB'
    assert rows['optimizer'] == f'optimizer {2 * size:.4g} GB'
    # 48 layers, keys and values of 4 heads of 128 in bfloat16, 160 sequences of 8,192 and one block for padding
    assert rows['KV cache'] == f'KV cache {2 * 48 * 4 * 128 * 2 * (160 * 8192 + 128) / 1e9:.4g} GB'


def test_servers_of_others_are_not_described():
    config = load_config('configs/clusters/qwen3_8b_h100_sglang.py')
    config.model.path = 'configs/shapes/qwen3_8b'
    assert 'learner fsdp=8, 0 engines' in describe_run(plan_run(config))


def test_a_dense_model_that_learns_from_data_has_no_engines():
    config = load_config('configs/sft_tiny.py')
    text = describe_run(plan_run(config))
    assert 'learner 1 device, 0 engines' in text
    assert 'engine, of a device' not in text
    assert rows_of(text)['layers/*/mlp/gate/weight'].endswith('2 [64, 128] - [64, 128]')


# A verdict for an accelerator that is not here.


def plan_recipe(name, accelerator, **fields):
    """A recipe with the shape of its model, on described devices: (its config, its plan, its verdicts by role)."""
    config = load_config(f'configs/clusters/{name}.py')
    config.model.path = 'configs/shapes/qwen3_8b'
    config.update_from_flattened_dict(fields)
    topology = describe_accelerator(accelerator, dry_run.count_devices(config))
    planned = plan_run(config, topology.devices)
    return config, planned, {one.role: one for one in judge(planned, topology.memory_bytes)}


def test_a_recipe_fits_its_hardware_and_not_a_smaller_one_role_by_role():
    _, planned, roles = plan_recipe('qwen3_8b_v5p64', 'v5p:2x4x4')
    assert (roles['learner'].fits, roles['engine'].fits) == (True, True)
    assert planned.allocation.learner.size == 16
    assert sum(roles['learner'].parts.values()) == sum(planned.sizes.learner.values())  # no device has both
    config, _, roles = plan_recipe('qwen3_8b_v5p64', 'v6e')
    assert (roles['learner'].fits, roles['engine'].fits) == (True, False)
    learner, engine = render_verdicts(list(roles.values()), config, '32 x TPU v6e').splitlines()[1:]
    assert learner == 'learner  fits: 15.08 GB'
    assert engine.startswith('engine  DOES NOT FIT: 56.76 GB: KV cache 48.32 GB, publication 8.192 GB, ')
    assert '. To fit, lower rollout.cache_tokens or cluster.engines' in engine


def test_engines_of_described_devices_keep_no_second_copy_for_cpus():
    _, planned, _ = plan_recipe('qwen3_8b_h100', 'H100')
    assert planned.sizes.engines['transposed weights'] == 0
    assert len(planned.allocation.engines) == 8


def test_roles_on_the_same_devices_count_each_other():
    planned = plan_run(small_config(), describe_accelerator('H100', 1).devices)
    together = sum(planned.sizes.learner.values()) + sum(planned.sizes.engines.values())
    assert [sum(one.parts.values()) for one in judge(planned, 1e9)] == [together, together]


def test_engines_of_unequal_size_have_a_verdict_each():
    config = small_config(cluster__engines='1 x tensor=1 + 1 x tensor=2', model__n_kv_heads=2)
    found = judge(plan_run(config, describe_accelerator('4 x H100', 0).devices), 1e9)
    assert [one.role for one in found] == ['learner', 'engine of 1 device', 'engine of 2 devices']


def test_the_verdict_is_that_of_a_run():
    assert Verdict('learner', {'weights': 94, 'rows': 1}, 100).fits
    assert not Verdict('learner', {'weights': 95, 'rows': 1}, 100).fits


def test_too_few_devices_are_refused_by_the_layout():
    with pytest.raises(ConfigError, match=r"needs 8, 16 together; the platform 'H100 SXM' has 8: lower a size"):
        plan_recipe('qwen3_8b_h100', '8 x H100')


def test_processes_of_a_learner_that_send_their_shards_have_their_bytes_a_link():
    """8,190,735,360 weights of 16 bits, divided among 4 processes with 16 devices each, go to each of 12 engines."""
    fields = {
        'cluster.learner': 'hosts=4 x data=2,fsdp=8,tensor=4', 'cluster.strategy': 'fsdp_tensor',
        'cluster.engines': '8 x tensor=4 + 4 x tensor=8', 'publication.channel': 'stream',
        'learner.rows_per_microbatch': 16,
    }  # fmt: skip
    config, planned, _ = plan_recipe('qwen3_8b_h100', 'H100', **fields)
    validate(config)
    sent = count_sent_bytes(planned)
    assert sum(sent.values()) == 2 * 8_190_735_360
    assert [*sent.values()] == pytest.approx([16.381e9 / 4] * 4, rel=1e-3)
    of_link, of_ends = describe_run(planned).splitlines()[-2:]
    assert of_link == 'a whole version: at most 4.095 GB from each of 4 learner processes to each of 12 engines'
    assert re.fullmatch(r'learner process \d sends most, 49\.14 GB; each engine receives 16\.38 GB', of_ends)
    for changes in ({'publication.channel': 'files'}, {'cluster.learner': 'hosts=1 x data=2,fsdp=8,tensor=4'}):
        _, other, _ = plan_recipe('qwen3_8b_h100', 'H100', **fields | changes)
        assert count_sent_bytes(other) == {}
        assert 'a whole version' not in describe_run(other)


@pytest.fixture
def in_process(monkeypatch):
    """The command changes how the memory of its process is freed."""
    monkeypatch.setattr('areal_jax.app.process.setup.set_up_process', lambda: None)


TINY = ['areal-train', '--config=configs/tiny_cpu.py', '--dry_run']


@pytest.mark.parametrize(
    ('accelerator', 'gigabytes', 'code', 'said'),
    [
        ('H200', 141, ExitCode.FINISHED, '1 x H200 SXM of 141 GB, of which 133.9 GB may be used\nlearner  fits: '),
        ('v5e:2x2', 1e-3, ExitCode.USER_ERROR, 'learner  DOES NOT FIT: '),
    ],
)
@pytest.mark.usefixtures('in_process')
def test_the_exit_code_is_that_of_the_verdict(accelerator, gigabytes, code, said, monkeypatch, capsys):
    monkeypatch.setattr('areal_jax.aot.topology.Topology.memory_bytes', gigabytes * 1e9)
    assert main_train.main([*TINY, f'--accelerator={accelerator}'], Interrupts()) == code
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures('in_process')
def test_without_an_accelerator_there_is_no_verdict(capsys):
    assert main_train.main(TINY, Interrupts()) == ExitCode.FINISHED
    assert 'fits' not in capsys.readouterr().out.lower()


def test_an_accelerator_is_for_the_dry_run_alone(tmp_path):
    with pytest.raises(UserError, match="--accelerator='H200' is for --dry_run"):
        main_train.main([*TINY[:2], f'--workdir={tmp_path}', '--accelerator=H200'], Interrupts())
