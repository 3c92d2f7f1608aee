"""model.source='run': a new run from the weights of another, trained by supervision or by rewards."""

import shutil

import jax
import pytest

from areal_jax.app.model.model import build_model
from areal_jax.app.training import build_run
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.ranges import ConfigError
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, equal, small_config, to_host

SHAPE = {'model__n_layers': 1, 'model__d_model': 16, 'model__d_ff': 32, 'model__head_dim': 8}


def supervised(workdir, **fields):
    """The weights that a supervised run of two updates leaves."""
    session = build_run(sft_config(run__steps=2, **fields), workdir)
    session.train()
    return to_host(session.site.learner.publish(2))


@pytest.fixture(scope='module')
def origin(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('origin')
    return workdir, supervised(workdir)


def from_run(path, **fields):
    """A config of the asynchronous loop that sets no shape: that of the other run is taken."""
    config = small_config(model__source='run', model__path=str(path))
    for field in ('d_model', 'd_ff', 'n_heads', 'n_kv_heads', 'head_dim'):
        config.model[field] = sft_config().model[field]
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return config


def weights_of(config):
    return to_host(build_model(TrackedConfig(config)).params)


@pytest.mark.slow
def test_a_run_by_rewards_starts_from_the_weights_of_a_supervised_one(origin, tmp_path):
    workdir, final = origin
    shape = {'model__n_heads': 2, 'model__n_kv_heads': 1, **SHAPE}
    run = SmallRun(tmp_path, model__source='run', model__path=str(workdir), run__steps=1, **shape)
    assert equal(run.weights[0], final)
    run.train()
    assert not equal(run.final, final)
    assert [e['update'] for e in run.events if e['kind'] == 'consume'] == [1]  # its own updates count from 0
    shape['model__path'] = str(tmp_path)  # a run that started from a run itself
    again = SmallRun(tmp_path / 'again', model__source='run', **shape)
    again.session.close()
    assert equal(again.weights[0], run.final)


def test_stacked_and_sharded_weights_are_read_in_list_form(tmp_path):
    final = supervised(
        tmp_path,
        learner__layers='stacked',
        model__n_layers=2,
        cluster__learner='fsdp=2',
        learner__rows_per_microbatch=2,
    )
    assert equal(weights_of(from_run(tmp_path, model__n_layers=2)), final)


def test_adapters_are_merged(tmp_path):
    final = supervised(tmp_path, lora__rank=2)
    assert equal(weights_of(from_run(tmp_path)), final)


def test_the_vocabulary_is_that_of_the_other_run(tmp_path):
    supervised(tmp_path, task__symbols=3, task__length=3)
    model = build_model(TrackedConfig(from_run(tmp_path)))
    assert model.decoder.config.vocab_size == model.tokenizer.vocab_size == 5  # a, b, c, = and the end


def test_a_checkpoint_that_was_replaced_is_noticed_at_the_resume(origin, tmp_path):
    shutil.copytree(origin[0], tmp_path / 'origin')
    fields = {'model__source': 'run', 'model__path': str(tmp_path / 'origin'), 'run__steps': 1, **SHAPE}
    first = SmallRun(tmp_path / 'run', **fields).session
    first.close()
    supervised(tmp_path / 'other', run__seed=1)
    shutil.rmtree(tmp_path / 'origin')
    shutil.copytree(tmp_path / 'other', tmp_path / 'origin')
    with pytest.raises(ConfigError, match=r'are not those that the run in .* started from'):
        SmallRun(tmp_path / 'run', resume=True, **fields)


def test_what_is_no_run_to_start_from_is_named(origin, tmp_path):
    workdir = origin[0]
    with pytest.raises(
        ConfigError,
        match=r"model\.path=.*nowhere' is no run: .* has no config\.json of one\. .*needs model\.source='hf'",
    ):
        build_model(TrackedConfig(from_run(tmp_path / 'nowhere')))
    with pytest.raises(ConfigError, match=r"model\.source='run' needs model\.path"):
        validate(from_run(''))
    with pytest.raises(ConfigError, match=r'model\.d_model=48 is another architecture .* which has 16'):
        build_model(TrackedConfig(from_run(workdir, model__d_model=48, model__d_ff=48)))
    with pytest.raises(
        ConfigError, match=r'is the --workdir itself: .* another --workdir; to go on with it use --resume'
    ):
        SmallRun(workdir, model__source='run', model__path=f'{workdir}/../{workdir.name}')
    shutil.copytree(workdir, tmp_path / 'copy')
    shutil.copyfile(tmp_path / 'copy' / 'config.json', tmp_path / 'config.json')
    with pytest.raises(ConfigError, match=r'holds no checkpoint: let that run end, or stop it with Ctrl-C'):
        build_model(TrackedConfig(from_run(tmp_path)))
    (tmp_path / 'copy' / 'checkpoints' / 'step_00000002' / 'run_state.json').unlink()
    with pytest.raises(CheckpointError, match=r'copy/checkpoints is intact \(step_00000002: .*\); name another run'):
        build_model(TrackedConfig(from_run(tmp_path / 'copy')))
    assert jax.tree.leaves(origin[1])


@pytest.mark.parametrize(
    ('of_origin', 'fields', 'message'),
    [
        ({}, {'run__export': True}, r"model\.family='plain' cannot be written for other programs, .*run\.export=False"),
        ({}, {'publication__channel': 'files'}, r"plain' cannot be written .* use publication\.channel='device'"),
        ({}, {'rollout__context_tokens': 24}, r'learned positions for 16 tokens, and rollout\.context_tokens=24 asks'),
        ({'model__outputs': 'symbols', 'rollout__ignore_eos': True}, {}, r'use rollout\.ignore_eos=True, not False'),
    ],
    ids=['an export', 'a channel of files', 'longer sequences', 'answers that end'],
)
def test_a_plain_model_keeps_its_rules_in_a_run_that_starts_from_it(tmp_path, of_origin, fields, message):
    config = small_config(model__family='plain', **of_origin)
    (tmp_path / 'config.json').write_text(config.to_json_best_effort())
    with pytest.raises(ConfigError, match=message):
        SmallRun(tmp_path / 'run', model__source='run', model__path=str(tmp_path), **fields)
    assert not (tmp_path / 'run').exists()
