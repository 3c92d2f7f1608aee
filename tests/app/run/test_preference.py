"""Runs on pairs and with a teacher: the tiny recipes, a resumed run to the bit, a reference of its own, bad pairs."""

from __future__ import annotations

import importlib.util
import json

import jax
import pytest

from areal_jax.app.library import build_run
from areal_jax.app.model.model import build_model
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.publication.export import write_hf_directory
from areal_jax.tasks.task import TaskError
from checks.mutations import ROOT
from tests.app.run.test_supervised import final, kill_in_update, sft_config
from tests.app.small import equal


def recipe(name, size, **fields):
    path = ROOT / 'configs' / 'recipes' / f'{name}.py'
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(size)
    config.telemetry.tensorboard = config.telemetry.plots = config.telemetry.progress = False
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return config


def write_start(directory, config):
    """A Hugging Face directory with the weights that a drawn model of this config starts with."""
    model = build_model(TrackedConfig(config))
    write_hf_directory(directory, plan_hf_files(jax.device_get(model.params), model.decoder.config))


def pairs_config(**fields):
    return sft_config(loss__objective='dpo', learner__row_tokens=64, **fields)


def train(config, workdir):
    session = build_run(config, workdir)
    return session, session.train()


@pytest.mark.whole
def test_two_updates_on_pairs_are_measured_and_reported(tmp_path):
    _, report = train(recipe('dpo', 'tiny', run__steps=2, sft__evaluate_every=1), tmp_path)
    assert list(report['held_out_pairs']) == ['0', '1', '2']
    start = report['held_out_pairs']['0']
    assert (start['margin'], start['pair_accuracy'], start['pairs']) == (0.0, 0.5, 61)
    assert report['held_out_nll'] == {}
    assert report['compilations'] == 0
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['held_out/pair_accuracy'] for line in lines] == [
        report['held_out_pairs'][step]['pair_accuracy'] for step in ('1', '2')
    ]
    page = (tmp_path / 'report.md').read_text()
    assert '# Preference training' in page
    assert '| held-out, after 0 updates | 0.5000 | 0.0000 | 0.6931 |' in page
    card = (tmp_path / 'export' / 'README.md').read_text()
    assert 'direct-preference-optimization' in card
    assert 'chosen above rejected after 2 updates' in card


@pytest.mark.whole
def test_a_resumed_run_on_pairs_compares_with_the_start_and_equals_the_uninterrupted_one(tmp_path):
    config = pairs_config(checkpoint__every=2, sft__evaluate_every=3)
    whole, report = train(config, tmp_path / 'whole')
    kill_in_update(build_run(config, tmp_path / 'killed'), 3)
    resumed = build_run(config, tmp_path / 'killed', resume=True)
    assert resumed.program.step == 2
    found = resumed.train()
    assert equal(final(resumed), final(whole))
    assert found['held_out_pairs'] == report['held_out_pairs']
    assert report['held_out_pairs']['6']['margin'] != 0


@pytest.mark.whole
def test_a_reference_directory_with_the_weights_at_the_start_changes_nothing(tmp_path):
    config = pairs_config(run__steps=2)
    write_start(tmp_path / 'start', config)
    session, report = train(config, tmp_path / 'own')
    config.loss.reference = str(tmp_path / 'start')
    given, other = train(config, tmp_path / 'given')
    assert equal(final(given), final(session))
    assert report['held_out_pairs'] == other['held_out_pairs']
    another = pairs_config(run__steps=2, run__seed=1)
    write_start(tmp_path / 'another', another)
    config.loss.reference = str(tmp_path / 'another')
    _, far = train(config, tmp_path / 'far')
    assert far['held_out_pairs']['0']['margin'] != 0


@pytest.mark.whole
def test_a_reward_model_is_measured_resumed_exported_and_begins_a_critic(tmp_path):
    fields = {'run__steps': 2, 'run__export': True, 'checkpoint__every': 1, 'sft__evaluate_every': 1}
    config = recipe('reward_model', 'tiny', **fields)
    whole, report = train(config, tmp_path / 'whole')
    assert report['held_out_pairs']['0']['pair_accuracy'] == 0.5
    assert report['held_out_pairs']['2']['margin'] != 0
    kill_in_update(build_run(config, tmp_path / 'killed'), 1)
    resumed = build_run(config, tmp_path / 'killed', resume=True)
    assert resumed.train()['held_out_pairs'] == report['held_out_pairs']
    assert equal(final(resumed), final(whole))
    export = tmp_path / 'whole' / 'export'
    assert 'reward-model' in (export / 'README.md').read_text()
    policy = recipe('ppo_critic', 'tiny', critic__model=str(export), task__symbols=3)
    critic = build_run(policy, tmp_path / 'policy').site.learner.state.params['critic']
    found = whole.site.learner.state.params
    assert equal(critic['value_head'], found['critic']['value_head'])
    assert equal(critic['layers'], found['layers'])


@pytest.mark.whole
@pytest.mark.parametrize('divergence', ['sampled', pytest.param('forward', marks=pytest.mark.slow)])
def test_two_updates_with_a_teacher(tmp_path, divergence):
    write_start(tmp_path / 'teacher', recipe('distillation', 'tiny', run__seed=7, model__n_layers=1))
    teacher = str(tmp_path / 'teacher')
    config = recipe('distillation', 'tiny', run__steps=2, loss__teacher=teacher, evaluation__problems=0)
    config.loss.divergence = divergence
    config.run.clock = 'virtual'
    _, report = train(config, tmp_path / 'run')
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert all(line['loss/teacher_kl'] > 0 for line in lines)
    assert report['steps'] == 2


def test_what_no_run_can_use_is_one_sentence(tmp_path):
    path = tmp_path / 'pairs.jsonl'
    path.write_text('{"prompt": "ab=", "chosen": "ba", "rejected": NaN}\n')
    with pytest.raises(TaskError, match=r'pairs\.jsonl:1: rejected=nan must be a text that is not empty'):
        build_run(pairs_config(task__name='jsonl', task__path=str(path)), tmp_path / 'a')
    with pytest.raises(ConfigError, match=r"loss\.reference='none' is no directory"):
        build_run(pairs_config(loss__reference='none'), tmp_path / 'b')
    with pytest.raises(ConfigError, match=r"loss\.teacher='none' is no directory"):
        build_run(recipe('distillation', 'tiny', loss__teacher='none'), tmp_path / 'c')
    unread = default_config()
    unread.loss.reference = 'none'
    with pytest.raises(ConfigError, match=r'set but never read: loss\.reference'):
        build_run(unread, tmp_path / 'd', overrides=['loss.reference'])


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize('name', ['dpo', 'reward_model'])
def test_the_tiny_recipes_learn_which_answer_is_better(tmp_path, name, seed):
    _, report = train(recipe(name, 'tiny', run__seed=seed), tmp_path)
    accuracy = [values['pair_accuracy'] for values in report['held_out_pairs'].values()]
    print(name, seed, accuracy)
    assert accuracy[-1] >= accuracy[0] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ('divergence', 'seed'), [('sampled', 1), ('sampled', 2), ('sampled', 3), ('reverse', 1), ('forward', 1)]
)
def test_a_student_comes_nearer_to_its_teacher(tmp_path, divergence, seed):
    path = ROOT / 'configs' / 'sft_tiny.py'
    spec = importlib.util.spec_from_file_location('sft_tiny', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    teacher = module.get_config()
    teacher.telemetry.tensorboard = teacher.telemetry.progress = False
    train(teacher, tmp_path / 'teacher')
    export = str(tmp_path / 'teacher' / 'export')
    fields = {'run__seed': seed, 'loss__teacher': export, 'loss__divergence': divergence}
    train(recipe('distillation', 'tiny', **fields), tmp_path / 'student')
    lines = [json.loads(line) for line in (tmp_path / 'student' / 'metrics.jsonl').read_text().splitlines()]
    kl = [line['loss/teacher_kl'] for line in lines]
    first, last = (sum(part) / 10 for part in (kl[:10], kl[-10:]))
    print(divergence, seed, first, last)
    assert last < first / 2
