"""Supervised runs of seconds: the likelihood by hand, packing, resume to the bit, signals and bad input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config as schema
from areal_jax.app.library import build_run
from areal_jax.config.fields import ConfigError
from areal_jax.models.attention.backends import packed_attention
from areal_jax.telemetry.rollout_views import read_rollouts
from tests.app.small import equal, to_host
from tests.app.test_main_train import train


def sft_config(**fields):
    """Twelve strings to learn, four to measure; `fields` like learner__epochs=2."""
    config = schema.default_config()
    config.run.steps = 6
    config.loss.objective = 'sft'
    config.model.n_layers, config.model.d_model, config.model.d_ff = 1, 16, 32
    config.model.n_heads, config.model.n_kv_heads, config.model.head_dim = 2, 1, 8
    config.learner.groups_per_update = 5  # no divisor of 12: batches run across epochs
    config.learner.row_tokens = 48
    config.learner.row_loss_tokens = 32
    config.optimizer.learning_rate = 1e-2
    config.telemetry.progress = False
    config.telemetry.tensorboard = False
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return config


def run(workdir, resume=False, **fields):
    session = build_run(sft_config(**fields), workdir, resume=resume)
    return session, session.train()


def final(session):
    return to_host(session.site.learner.save())


def metrics(workdir):
    """Without what a clock says."""
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k != 'time' and not k.startswith(('throughput/', 'learner/'))}
        for line in lines
    ]


def nll_by_hand(session, groups):
    """One sequence at a time through the dense decoder, softmax of the logits in numpy."""
    decoder, params = session.site.model.decoder, session.site.learner.publish(0)

    @jax.jit
    def logits_of(tokens):
        segment = jnp.ones(len(tokens), jnp.int32)

        def attend(q, k, v, cache, window):
            return packed_attention(q, k, v, segment, segment, scale=q.shape[-1] ** -0.5, impl='dense'), cache

        hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend)
        return decoder.logits(params, hidden)

    total = count = 0.0
    for trajectory in (t for group in groups for t in group.trajectories):
        tokens = trajectory.tokens
        logits = np.asarray(logits_of(jnp.asarray(tokens)), np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for t in range(len(trajectory.prompt.tokens), len(tokens)):  # the token before predicts
            total, count = total - logprobs[t - 1, tokens[t]], count + 1
    return total / count, count


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The uninterrupted run."""
    workdir = tmp_path_factory.mktemp('whole')
    return workdir, *run(workdir, checkpoint__every=2, sft__evaluate_every=3)


def test_the_likelihood_of_answers_that_were_not_trained_on_rises(whole):
    workdir, _, report = whole
    held_out = report['held_out_nll']
    assert list(held_out) == ['0', '3', '6']
    assert held_out['6'] < 0.8 * held_out['0']
    assert report['train_nll']['last'] < 0.8 * report['train_nll']['first']
    # 6 updates of 5 demonstrations of 4 letters and an end; 30 draws of 12
    assert (report['trained_tokens'], report['epochs']) == (150, 2.5)
    assert report['compilations'] == 0
    assert 'held-out, after 6 updates' in (workdir / 'report.md').read_text()


def test_metrics_are_those_of_a_supervised_update(whole):
    lines = metrics(whole[0])
    assert [line['step'] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line['step'] for line in lines if 'held_out/nll' in line] == [3, 6]
    assert all(line['loss/nll'] == pytest.approx(line['loss/value']) for line in lines)
    assert not [name for name in lines[0] if name.startswith(('reward/', 'staleness/', 'mismatch/'))]


def test_the_likelihood_is_the_one_computed_by_hand(tmp_path):
    session = build_run(sft_config(), tmp_path)
    groups = [session.program.stream.draw() for _ in range(5)]
    by_hand, tokens = nll_by_hand(session, groups)
    assert session.site.learner.evaluate(groups) == {'nll': pytest.approx(by_hand, rel=1e-5), 'tokens': tokens}
    # an update reports the likelihood under the weights before it
    assert session.site.learner.update(groups, 0)['loss/nll'] == pytest.approx(by_hand, rel=1e-5)
    assert session.site.learner.evaluate(groups)['nll'] < by_hand


@pytest.mark.parametrize(
    'fields',
    [
        {'learner__fill': 'padded', 'learner__row_tokens': 9, 'learner__row_loss_tokens': 5},
        pytest.param(
            {'learner__accumulate': 'scan', 'learner__rows_per_microbatch': 2, 'learner__layers': 'stacked'},
            marks=pytest.mark.slow,
        ),
    ],
    ids=['one at a time', 'scan, stacked'],
)
def test_packing_and_form_do_not_change_what_is_learned(whole, tmp_path, fields):
    session, report = run(tmp_path, sft__evaluate_every=3, **fields)
    for step, nll in whole[2]['held_out_nll'].items():
        assert report['held_out_nll'][step] == pytest.approx(nll, rel=2e-3)
    pairs = zip(jax.tree.leaves(final(session)['params']), jax.tree.leaves(final(whole[1])['params']), strict=True)
    assert max(float(np.abs(a - b).max()) for a, b in pairs) < 5e-3  # adamw moved them by up to 6 * 1e-2


def test_the_export_holds_the_trained_weights(whole):
    from areal_jax.formats.hf_directory import load_hf

    workdir, session, _ = whole
    config, params = load_hf(workdir / 'export')
    assert equal(to_host(params), to_host(session.site.learner.publish(6)))
    assert config.d_model == 16


def end_in_update(session, version, act):
    """`act` happens when the update that starts from `version` begins."""
    update = session.site.learner.update
    session.site.learner.update = lambda groups, at: (act() if at == version else None, update(groups, at))[1]


def kill_in_update(session, version):
    """Trains until that update begins; nothing is saved, as after kill -9."""

    def die():
        raise KeyboardInterrupt

    end_in_update(session, version, die)
    with pytest.raises(KeyboardInterrupt):
        session.train()


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole, tmp_path):
    config = sft_config(checkpoint__every=2, sft__evaluate_every=3)
    kill_in_update(build_run(config, tmp_path), 3)
    stopped = build_run(config, tmp_path, resume=True)
    assert stopped.program.step == 2  # the third update is made again
    end_in_update(stopped, 4, stopped.program.stop_requested.set)
    assert stopped.train() is None
    resumed = build_run(config, tmp_path, resume=True)
    assert resumed.program.step == 5  # the update under way was finished
    report = resumed.train()
    assert equal(final(resumed), final(whole[1]))
    assert resumed.program.stream.state() == whole[1].program.stream.state()
    assert metrics(tmp_path) == metrics(whole[0])
    for field in ('held_out_nll', 'trained_tokens', 'weights_sha256', 'train_nll'):
        assert report[field] == whole[2][field]


def test_a_request_before_the_first_update_saves_the_start(tmp_path):
    session = build_run(sft_config(), tmp_path)
    session.program.stop_requested.set()
    assert session.train() is None
    assert (tmp_path / 'checkpoints' / 'step_00000000').is_dir()


def test_fields_of_the_asynchronous_loop_are_an_error(tmp_path):
    unread = {
        'rollout__group_size': 4,
        'staleness__eta': 2.0,
        'loss__kl_coefficient': 0.1,
        'learner__packing': 'ordinary',
    }
    with pytest.raises(ConfigError, match='set but never read: ') as error:
        build_run(sft_config(**unread), tmp_path, overrides=[field.replace('__', '.') for field in unread])
    assert all(field.replace('__', '.') in str(error.value) for field in unread)


@pytest.mark.slow
def test_the_command_ends_with_a_report_or_one_sentence(tmp_path):
    tiny = {'config': 'configs/sft_tiny.py'}
    done = train(tmp_path / 'good', '--config.run.steps=6', '--config.sft.evaluate_every=0', **tiny)
    assert done.returncode == 0, done.stderr
    assert '# Supervised training: configs/sft_tiny.py' in done.stdout
    assert len(list((tmp_path / 'good' / 'tensorboard').iterdir())) == 1
    missing = train(tmp_path / 'bad', '--config.task.name=jsonl', '--config.task.path=none.jsonl', **tiny)
    assert missing.returncode == 2
    (error,) = [line for line in missing.stderr.splitlines() if line.startswith('error: ')]
    assert "task.path='none.jsonl' cannot be read (No such file or directory)" in error
    assert 'Traceback' not in missing.stderr


def test_demonstrations_are_kept_with_their_likelihood(whole, tmp_path):
    """The mean of the log-probs that are kept is the likelihood that the metrics have."""
    records = read_rollouts(whole[0])
    assert [record['update'] for record in records] == [update for update in range(1, 7) for _ in range(4)]
    assert {answer['label'] for record in records for answer in record['answers']} == {'given'}
    session, _ = run(tmp_path, telemetry__rollouts='all', run__steps=2)
    lines = metrics(tmp_path)
    for step in (1, 2):
        kept = [a for record in read_rollouts(tmp_path) if record['update'] == step for a in record['answers']]
        logprobs = np.concatenate([answer['policy_logprobs'] for answer in kept])
        np.testing.assert_allclose(-logprobs.mean(), lines[step - 1]['loss/nll'], rtol=1e-5)
        decode = session.site.model.tokenizer.decode
        assert [answer['text'] for answer in kept] == [decode(np.array(answer['tokens'])) for answer in kept]
