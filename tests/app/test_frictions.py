"""Runs with frictions on: what is logged, that a resumed and a replayed run have the same ones, what is refused."""

from __future__ import annotations

import pathlib

import pytest

from areal_jax import main_check_log, main_replay
from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.library import build_run
from areal_jax.config import validate
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, resume_killed, small_config

ON = {
    'friction__actor_share': 0.4, 'friction__reward_share': 0.3, 'friction__unrewarded_share': 0.3,
    'learner__filter_equal_rewards': False,
}  # fmt: skip
ACTORS = {
    'constant': {'friction__actor_token': 1},
    'logprobs': {'friction__actor': 'logprobs', 'friction__actor_nats': 0.5},
    'temperature': {'friction__actor': 'temperature', 'friction__actor_temperature': 0.5},
}


def find(events, kind):
    return [event for event in events if event['kind'] == kind]


@pytest.mark.whole
@pytest.mark.parametrize(
    'actor',
    [pytest.param('constant', marks=pytest.mark.slow), 'logprobs', pytest.param('temperature', marks=pytest.mark.slow)],
)
def test_a_killed_run_goes_on_with_the_same_frictions(tmp_path: pathlib.Path, actor: str):
    fields = {**ON, **ACTORS[actor], 'checkpoint__every': 2}
    whole, resumed = resume_killed(tmp_path, **fields)
    of_answers = lambda run: {(e['draw'], e['sample'], e['friction']): (e['before'], e['after']) for e in run}
    assert of_answers(find(resumed.events, 'friction')) == of_answers(find(whole.events, 'friction'))
    assert main_check_log.main([str(tmp_path / 'whole' / 'events.jsonl')]) == ExitCode.FINISHED


@pytest.mark.whole
def test_both_values_are_logged_and_the_learner_gets_the_second(tmp_path: pathlib.Path, capsys):
    run = SmallRun(tmp_path, **ON, **ACTORS['constant']).train()
    assert 'friction is on: actor constant 0.4, reward 0.3, unrewarded 0.3' in capsys.readouterr().err
    events = find(run.events, 'friction')
    trained = {(g.draw, t.sample): t for groups in run.batches for g in groups for t in g.trajectories}
    verified = {(e['draw'], e['sample']): e['value'] for e in find(run.events, 'reward')}
    rewards = {**verified}
    for event in events:
        place = event['draw'], event['sample']
        if event['friction'] == 'constant':
            assert event['after'] == [0.0] * len(event['tokens'])
            assert min(event['before']) < 0
        else:
            assert event['before'] == [rewards[place]]  # of several frictions the last one counts
            rewards[place] = event['after'][0]
    constant = {(e['draw'], e['sample']) for e in events if e['friction'] == 'constant'}
    for place, trajectory in trained.items():
        assert trajectory.reward == rewards[place]
        disturbed = (trajectory.answer_tokens == 1).all() and not trajectory.behavior_logprobs.any()
        assert disturbed == (place in constant)
    lines = read_metrics(tmp_path / 'metrics.jsonl')
    hit = [place in constant for place in trained]
    assert sum(line['friction/actor'] for line in lines) == sum(hit) > 0
    for name in ('reward', 'unrewarded'):
        count = sum(e['friction'] == name for e in events)
        assert sum(line[f'friction/{name}'] for line in lines) == count > 0
    assert run.report['warnings'][0].startswith('Friction is on (section `friction`): answers that were disturbed on')
    assert f'actor {sum(hit)}, ' in (tmp_path / 'report.md').read_text()


@pytest.mark.whole
def test_a_replay_of_a_run_on_the_real_clock_has_the_same_frictions(tmp_path: pathlib.Path):
    run = SmallRun(tmp_path / 'run', run__clock='real', run__steps=3, **ON, **ACTORS['logprobs']).train()
    assert find(run.events, 'friction')
    assert main_replay.main([f'--workdir={tmp_path / "run"}', f'--out={tmp_path / "again"}']) == ExitCode.FINISHED


def test_evaluation_has_no_friction(tmp_path: pathlib.Path):
    config = small_config(friction__unrewarded_share=0.5, evaluation__problems=2)
    message = r'^friction\.unrewarded_share=0\.5 is a friction of training, .*: set friction\.unrewarded_share=0$'
    with pytest.raises(ConfigError, match=message):
        evaluate_model(config, tmp_path)


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'rollout__top_k': 2, 'loss__truncated_sampling': 'full_softmax'}, r'and rollout\.top_k=2, rollout\.top_p=1'),
        (
            {
                'friction__actor': 'temperature', 'rollout__server': 'own', 'run__clock': 'real',
                'publication__channel': 'files',
            },
            "these servers report log-probs at the temperature that they draw at; use rollout.server='in_process'",
        ),
        (
            {
                'friction__actor_token': 2, 'model__family': 'plain', 'model__outputs': 'symbols',
                'rollout__ignore_eos': True,
            },
            r"friction\.actor_token=2: a model with model\.outputs='symbols' answers with the first task\.symbols=2",
        ),
        ({'friction__actor_share': 1.5}, r'friction\.actor_share=1\.5 must lie in \[0, 1\]'),
    ],
)  # fmt: skip
def test_what_a_friction_does_not_go_with(fields, words):
    with pytest.raises(ConfigError, match=words):
        validate(small_config(**{'friction__actor_share': 0.1, **fields}))


def test_a_token_that_the_model_lacks_is_named(tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match=r'^friction\.actor_token=99 is no token of the model, which has 4'):
        SmallRun(tmp_path, friction__actor_share=0.1, friction__actor_token=99)


def test_a_field_of_another_actor_is_refused(tmp_path: pathlib.Path):
    config = small_config(friction__actor_share=0.1, friction__actor_nats=0.5)
    with pytest.raises(ConfigError, match=r'set but never read: friction\.actor_nats=0\.5'):
        build_run(config, tmp_path, overrides=['friction.actor_nats'])
