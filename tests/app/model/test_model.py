"""Models from another run, and references and teachers from directories."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from areal_jax.app.library import build_run
from areal_jax.app.model.model import Model, build_model, read_given_model, require_same_shape
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import write_hf_directory
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, equal, small_config, to_host
from tests.learning.examples import tiny_decoder
from tests.tasks import hf_directory

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


# References and teachers: directories that hold none, another architecture, another vocabulary.


DECODER = tiny_decoder(n_layers=1)
MODEL = Model(DECODER, None, CharacterTokenizer('abcdefghij'))


def write(directory, decoder=DECODER, seed=1):
    params = jax.device_get(decoder.init(seed))
    write_hf_directory(directory, plan_hf_files(params, decoder.config, separate_head=False))
    return params


def reshaped(**sizes):
    return Decoder(dataclasses.replace(DECODER.config, **sizes))


def read(directory, model=MODEL, field='loss.reference'):
    config = default_config()
    objective = {'loss.reference': 'grpo', 'loss.teacher': 'distillation'}[field]  # which uses the field
    config.update_from_flattened_dict({field: str(directory), 'loss.objective': objective})
    tracked = TrackedConfig(config)
    return read_given_model(tracked, field, model), tracked


def test_the_weights_of_a_directory_are_read_in_the_dtype_of_passes(tmp_path):
    params = write(tmp_path / 'other')
    given, config = read(tmp_path / 'other')
    require_same_shape(given, 'loss.reference', DECODER.config)
    jax.tree.map(np.testing.assert_array_equal, given.load(config, 'float32'), params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(given.load(config, 'bfloat16'))} == {'bfloat16'}


def test_a_directory_that_holds_no_model_is_named_with_its_field(tmp_path):
    with pytest.raises(ConfigError, match=r"loss\.teacher='.*none' is no directory: name hf:ORG/NAME, or a directory"):
        read(tmp_path / 'none', field='loss.teacher')
    with pytest.raises(ConfigError, match=r"loss\.reference='.*': .*config\.json"):
        read(tmp_path)
    write(tmp_path / 'cut')
    (tmp_path / 'cut' / 'model.safetensors').unlink()
    given, config = read(tmp_path / 'cut')
    with pytest.raises(ConfigError, match=r'loss\.reference: .*cut has neither model\.safetensors nor'):
        given.load(config, 'float32')


def test_another_vocabulary_is_refused(tmp_path):
    write(tmp_path / 'wide', reshaped(vocab_size=12))
    with pytest.raises(ConfigError, match=r'has a vocabulary of 12 tokens, and the model that is trained one of 11'):
        read(tmp_path / 'wide')


def test_equally_many_tokens_with_other_ids_are_another_vocabulary(tmp_path):
    hf_directory.write(tmp_path / 'ours')
    tokenizer = HfTokenizer(tmp_path / 'ours')
    decoder = reshaped(vocab_size=tokenizer.vocab_size)
    write(tmp_path / 'theirs', decoder)
    hf_directory.write(tmp_path / 'theirs')
    model = Model(decoder, None, tokenizer)
    read(tmp_path / 'theirs', model)
    file = tmp_path / 'theirs' / 'tokenizer.json'
    text = file.read_text()
    swapped = text.replace('"on": 256', '"on": 257').replace('"Ġ1": 257', '"Ġ1": 256')
    assert swapped != text
    file.write_text(swapped)
    with pytest.raises(ConfigError, match=r"has another vocabulary than .*: 'on' is token 256 here and 257 there"):
        read(tmp_path / 'theirs', model)


@pytest.mark.parametrize('sizes', [{'d_ff': 32}, {'n_layers': 2}, {'rope_theta': 10.0}], ids=str)
def test_another_architecture_is_no_reference_but_may_teach(tmp_path, sizes):
    write(tmp_path / 'other', reshaped(**sizes))
    given, _ = read(tmp_path / 'other')
    ((name, value),) = sizes.items()
    with pytest.raises(ConfigError, match=rf"loss\.reference='.*' has {name}={value}.*: name a directory of the same"):
        require_same_shape(given, 'loss.reference', DECODER.config)
    read(tmp_path / 'other', field='loss.teacher')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'loss.objective': 'distillation'}, r"loss\.objective='distillation' needs loss\.teacher"),
        (
            {'loss.objective': 'dpo', 'loss.reference': 'x', 'lora.rank': 4},
            r"loss\.reference='x' with lora\.rank=4: the frozen weights are kept once",
        ),
        (
            {'loss.objective': 'dpo', 'optimizer.blocks': 3},
            r"optimizer\.blocks=3 with loss\.objective='dpo': a model beside the trained one",
        ),
        ({'loss.objective': 'dpo', 'loss.dpo_beta': 0.0}, r'loss\.dpo_beta=0\.0 must be'),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    config = default_config()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        validate(config)
