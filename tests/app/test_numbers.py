"""Whole runs whose numbers go wrong, and what is left of them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from areal_jax.app.library import build_run
from areal_jax.app.model.model import build_model
from areal_jax.app.parts.learner_builder import build_learner_settings, build_optimizer
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.formats.hf_config import HfError
from areal_jax.learning.weights import NonFiniteError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import export_hf
from areal_jax.publication.versions import PublicationError
from areal_jax.rollout.stream import LogprobError
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, small_config
from tests.app.test_session import logprob_gaps
from tests.tasks import hf_directory


def poison(learner, value=np.nan):
    """The learner as after a step that went wrong."""
    learner.state.params = learner.state.params | {'embedding': learner.state.params['embedding'].at[0, 0].set(value)}


def poison_update(learner, number):
    update = learner.update

    def poisoned(groups, version):
        metrics = update(groups, version)
        if version + 1 == number:
            poison(learner)
        return metrics

    learner.update = poisoned


def newest(workdir):
    """(step, its arrays) of the newest checkpoint."""
    step, arrays, _ = CheckpointStore(workdir / 'checkpoints').restore_latest()
    return step, jax.tree.map(np.asarray, arrays)


def test_a_directory_with_broken_weights_is_named(tmp_path):
    path = tmp_path / 'model'
    shape = ModelConfig(
        vocab_size=512, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=1e4
    )
    params = Decoder(shape).init(3)
    up = params['layers']['0']['mlp']['up']
    up['weight'] = up['weight'].at[0, :3].set(np.inf)
    export_hf(path, params, shape, dtype='float32')
    hf_directory.write(path)
    config = default_config()
    config.model.source, config.model.path = 'hf', str(path)
    tensor = r'model\.layers\.0\.mlp\.up_proj\.weight'
    expected = rf'^{path}/model\.safetensors: 3 values of {tensor} are NaN or infinite; get'
    with pytest.raises(HfError, match=expected):
        build_model(TrackedConfig(config))


@pytest.mark.parametrize('config', [small_config, sft_config])
def test_a_run_from_broken_weights_does_not_begin(tmp_path, monkeypatch, config):
    def broken_model(tracked, announce):
        model = build_model(tracked, announce)
        model.params['final_norm'] = model.params['final_norm'].at[1].set(np.nan)
        return model

    monkeypatch.setattr('areal_jax.app.run.own_site.build_model', broken_model)
    expected = r"weights drawn with model\.init_scale=1: 1 of the \d+ values of 'final_norm' are NaN or infinite; lower"
    with pytest.raises(UserError, match=expected):
        build_run(config(), tmp_path)


def test_training_that_turns_non_finite_keeps_the_last_finite_checkpoint(tmp_path):
    fields = {'checkpoint__every': 2, 'run__steps': 6}
    run = SmallRun(tmp_path, **fields)
    poison_update(run.session.site.learner, 4)  # whose checkpoint would replace that of update 2
    expected = r"weights of version 4: 1 of the \d+ values of 'embedding' are NaN or infinite: lower optimizer"
    with pytest.raises(PublicationError, match=expected):
        run.train()
    step, arrays = newest(tmp_path)
    assert step == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays))
    assert [e['version'] for e in run.events if e['kind'] == 'publish'] == [1, 2, 3]
    resumed = SmallRun(tmp_path, resume=True, **fields).train()
    assert resumed.report['steps'] == 6


def test_a_stop_after_training_turned_non_finite_saves_nothing(tmp_path):
    run = SmallRun(tmp_path)
    poison_update(run.session.site.learner, 2)
    stop = run.session.program.parts.controller.stop_requested
    log = run.session.program.parts.host.log
    log.listeners.append(lambda e: stop.set() if (e['kind'], e.get('update')) == ('consume', 2) else None)
    with pytest.raises(PublicationError, match='version 2'):
        run.train()
    assert list((tmp_path / 'checkpoints').glob('step_*')) == []


def test_steps_that_overflow_the_weights_end_the_run(tmp_path):
    # decay 10 of norms of 1 at a rate of 3e38 gives 3e39, beyond float32
    fields = {'optimizer__learning_rate': 3e38, 'optimizer__weight_decay': 10.0}
    with pytest.raises(PublicationError, match=r'weights of version 1: .* lower optimizer\.learning_rate'):
        SmallRun(tmp_path, **fields).train()


def test_finite_weights_whose_pass_overflows_end_the_run(tmp_path):
    # Adam's first step moves every weight by the rate; a score has two norms and two matrices in it: (1e15)^4
    with pytest.raises(
        LogprobError, match=r'^engine/0, request \S+, version 1: the log-prob .* is nan; lower optimizer'
    ):
        SmallRun(tmp_path, optimizer__learning_rate=1e15).train()


@pytest.mark.slow
def test_a_publication_dtype_that_cannot_hold_the_weights_is_named(tmp_path):
    run = SmallRun(tmp_path, publication__dtype='float16')
    learner = run.session.site.learner
    update = learner.update
    learner.update = lambda groups, version: (update(groups, version), poison(learner, 1e5))[0]  # float16 ends at 65504
    expected = r"version 1: 1 of .* 'embedding' .* or use publication\.dtype='float32' if float16 cannot hold them"
    with pytest.raises(PublicationError, match=expected):
        run.train()


@pytest.mark.parametrize('tree', [pytest.param('params', marks=pytest.mark.slow), 'optimizer'])
def test_a_checkpoint_of_broken_numbers_is_refused_at_resume(tmp_path, tree):
    run = SmallRun(tmp_path, checkpoint__every=2, run__steps=3)
    save = run.session.site.learner.save

    def broken():
        saved = save()
        leaves, structure = jax.tree.flatten(saved[tree])
        index = next(i for i, leaf in enumerate(leaves) if leaf.ndim == 2)
        leaves[index] = np.where(np.arange(leaves[index].size).reshape(leaves[index].shape) == 3, np.nan, leaves[index])
        return saved | {tree: jax.tree.unflatten(structure, leaves)}

    run.session.site.learner.save = broken
    run.train()
    with pytest.raises(CheckpointError, match=r'checkpoints: the checkpoint: 1 of the \d+ values of .* remove it'):
        SmallRun(tmp_path, resume=True, checkpoint__every=2, run__steps=4)


def test_supervised_training_that_turns_non_finite_keeps_the_last_finite_checkpoint(tmp_path):
    session = build_run(sft_config(checkpoint__every=2), tmp_path)
    poison_update(session.site.learner, 4)
    with pytest.raises(
        NonFiniteError, match=r"^the trained weights: 1 of the \d+ values of 'embedding'.*; lower optim"
    ):
        session.train()
    step, arrays = newest(tmp_path)
    assert step == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays))


def test_supervised_training_that_turns_non_finite_exports_nothing(tmp_path):
    session = build_run(sft_config(evaluation__problems=0), tmp_path)
    poison_update(session.site.learner, 6)
    with pytest.raises(NonFiniteError, match=r'^the trained weights: 1 of'):
        session.train()
    assert not (tmp_path / 'export').exists()


def test_a_held_out_likelihood_that_is_no_number_ends_the_run(tmp_path):
    session = build_run(sft_config(sft__evaluate_every=1), tmp_path)
    poison_update(session.site.learner, 1)
    with pytest.raises(NonFiniteError, match='the held-out likelihood is nan nats a token'):
        session.train()


@pytest.fixture(scope='module')
def cut(tmp_path_factory):
    """A run that draws from 80% of the softmax, or a little more."""
    fields = {'rollout__top_p': 0.8, 'loss__truncated_sampling': 'full_softmax', 'checkpoint__every': 2}
    return SmallRun(tmp_path_factory.mktemp('cut'), **fields).train()


def test_a_cut_softmax_records_the_logprobs_that_the_learner_computes(cut):
    gaps, _ = logprob_gaps(cut)
    assert gaps.max() < 1e-5
    lines = [json.loads(line) for line in (cut.workdir / 'metrics.jsonl').read_text().splitlines()]
    compared = [line for line in lines if line['mismatch/n']]
    assert compared
    assert max(line['mismatch/max_abs'] for line in compared) < 1e-5


def test_the_kept_mass_is_reported(cut):
    lines = [json.loads(line) for line in (cut.workdir / 'metrics.jsonl').read_text().splitlines()]
    masses = [line for line in lines if 'sampling/kept_mass_mean' in line]
    assert masses
    for line in masses:
        assert 0.8 - 1e-6 <= line['sampling/kept_mass_min'] <= line['sampling/kept_mass_mean'] <= 1 + 1e-6
    assert min(line['sampling/kept_mass_mean'] for line in masses) < 0.99
    segments = [s for groups in cut.batches for g in groups for t in g.trajectories for s in t.segments]
    mass = np.exp(np.concatenate([s.behavior_logprobs - s.columns['sampling_logprobs'] for s in segments]))
    assert mass.min() >= 0.8 - 1e-5  # top-p keeps at least that much


@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'loss__truncated_sampling': 'full_softmax'}, r"loss\.truncated_sampling='full_softmax'"),
        ({'loss__denominator': 'all', 'learner__filter_equal_rewards': False}, r"loss\.denominator='all'"),
        ({'optimizer__decay': 'matrices'}, r"optimizer\.decay='matrices'"),
    ],
)
def test_a_choice_that_nothing_depends_on_is_refused(tmp_path, fields, field):
    with pytest.raises(ConfigError, match=f'set but never read: {field}'):
        build_run(small_config(**fields), tmp_path, overrides=[name.replace('__', '.') for name in fields])


def test_the_choices_reach_the_learner(tmp_path):
    config = TrackedConfig(
        small_config(loss__denominator='all', optimizer__decay='matrices', optimizer__weight_decay=0.1)
    )
    assert build_learner_settings(config).loss.denominator == 'all'
    gradients = {'final_norm': np.zeros(2), 'layers': {'0': {'mlp': {'up': {'weight': np.zeros((2, 2))}}}}}
    params = jax.tree.map(np.ones_like, gradients)
    optimizer = build_optimizer(config)
    stepped, _, _ = optimizer.apply(params, optimizer.init(params), gradients, np.float32(1))
    assert float(stepped['final_norm'][0]) == 1
    assert float(stepped['layers']['0']['mlp']['up']['weight'][0, 0]) == pytest.approx(0.9)
