"""Plans that are simulated by the production loop, on few answers."""

import dataclasses
import json
import shlex

import pytest

from areal_jax import main_plan
from areal_jax.app.simulate.planning import (
    build_config,
    choose_divisor,
    count_measured,
    find_plan,
    list_fields,
    list_lines,
    plan_in_turns,
    read_answers,
    render,
    simulate_plan,
)
from areal_jax.config import validate
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.formats.hf_config import hf_config
from areal_jax.models.families import ModelConfig
from areal_jax.simulation.planner.advice import count_devices, describe_lengths, make_setting
from areal_jax.simulation.planner.neighbours import Outcome, Plan, predict
from areal_jax.simulation.prices import H800, QWEN3_0_6B, R1_DISTILL_7B, R1_DISTILL_32B, shape_of
from tests.stub_hub import COMMIT, serving

QWEN3_SHAPE = ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, 1e6, family='qwen3', qk_norm=True)
WORDS = ['--cluster=4 x H800', '--model=Qwen3-0.6B', '--lengths=lognormal(60, 0.5)', '--answers=16', '--group_size=4']


def make(devices=4, answers=16, group_size=4, shape=QWEN3_0_6B, lengths='lognormal(60, 0.5)', **fields):
    return make_setting(devices, H800, shape, describe_lengths(lengths, answers, group_size), **fields)


def test_a_plan_is_measured_in_the_middle_of_a_run(tmp_path, monkeypatch):
    """Tokens of an update over its period, shares within [0, 1], ages within the gate; the directory is gone."""
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    found = simulate_plan(make(), Plan(2, 2, 2, 8))
    assert found.updates == count_measured(Plan(2, 2, 2, 8), 16) == 24
    assert count_measured(Plan(2, 2, 40, 8), 512) == 41
    assert found.tokens_s * found.period_s == pytest.approx(16 * 60, rel=0.2)
    assert 0 < found.learner_busy <= 1
    assert 0 < found.engines_busy <= 1
    assert 0 < found.age_mean <= found.age_p95 <= 4
    assert simulate_plan(make(), Plan(2, 2, 2, 8)) == found
    assert list(tmp_path.iterdir()) == []


def test_training_in_turns_has_no_age():
    found = simulate_plan(make(), plan_in_turns(make()))
    assert found.age_mean == 0
    assert found.engines_busy + found.learner_busy <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ('shape', 'plan'),
    [(QWEN3_0_6B, Plan(3, 5, 2, 8)), (R1_DISTILL_7B, Plan(4, 12, 0, 8)), (R1_DISTILL_32B, Plan(2, 20, 4, 8))],
)
def test_the_lines_of_a_plan_are_a_config(shape, plan):
    setting = make(devices=32, answers=128, group_size=4, shape=shape)
    config = build_config(setting, plan, 3, 1, 'constant(32)')
    validate(config)
    fields = list_fields(setting, plan)
    assert {name: config[name.split('.')[0]][name.split('.')[1]] for name in fields} == fields


@pytest.mark.parametrize(
    ('devices', 'answers', 'divisor'),
    [(16, 4096, 1), (64, 4096, 8), (32, 4096, 4), (512, 128, 4), (24, 4096, 2), (31, 64, 1)],
)
def test_a_search_takes_an_eighth_of_what_is_large_enough(devices, answers, divisor):
    assert choose_divisor(make(devices=devices, answers=answers)) == divisor


@pytest.fixture(scope='module')
def planned():
    return find_plan(make(), seed=1, prompts='constant(32)', is_full=False, note=lambda line: None, most=4)


def test_the_plan_of_a_question(planned):
    assert count_devices(planned.setting, planned.plan) <= 4
    low, high = planned.interval
    assert low <= planned.outcome.tokens_s <= high
    assert planned.in_turns.age_mean == 0
    assert (planned.divisor, planned.simulations <= 5) == (1, True)


def test_the_command_prints_a_plan(planned, monkeypatch, capsys):
    """As JSON, and as text with the lines of the config at its end."""
    monkeypatch.setattr('areal_jax.app.simulate.planning.find_plan', lambda *_, **__: planned)
    assert main_plan.main([*WORDS, '--json']) == ExitCode.FINISHED
    shown = json.loads(capsys.readouterr().out)
    assert shown['plan']['engines'] == planned.plan.engines
    assert shown['fields']['rollout.max_running_groups'] == 0
    assert (shown['max_eta'], shown['age_price']) == (32, 0.0)
    assert shown['binding'] in ('learner', 'publication', 'engines', 'memory', 'max_eta', 'eta')
    assert {one['eta'] for one in shown['tried']} >= {shown['plan']['eta']}
    assert main_plan.main(WORDS) == ExitCode.FINISHED
    text = capsys.readouterr().out
    assert f'split              {planned.plan.engines} engines of 1' in text
    assert f'eta                {planned.plan.eta} of --max_eta=32; ' in text
    assert 'price of age       --age_price=0 of the speed for a version; ' in text
    assert 'in 12 updates in a row' in text
    assert 'no joules: no watts are published of H800 SXM' in text
    assert text.splitlines()[-len(planned.fields) :] == list_lines(planned.fields)


@pytest.mark.parametrize(('in_turns_s', 'engines'), [(1e9, 'x tensor=1'), (1.0, 'x shared')])
def test_a_large_cluster_is_searched_in_part_and_simulated_once_in_full(monkeypatch, in_turns_s, engines):
    """Closed forms in place of simulations: the search is on 8 of 64 devices, and speeds are those of all 64."""
    sizes = []

    def simulate(setting, plan, **_):
        sizes.append(setting.devices)
        found = predict(setting, plan)
        period_s = in_turns_s if plan.shared else found.period_s
        shares = found.generation_s / period_s, found.train_s / period_s
        return Outcome(period_s, setting.answers.tokens / period_s, *shares, found.age_mean, 2.0, 5)

    monkeypatch.setattr('areal_jax.app.simulate.planning.simulate_plan', simulate)
    setting = make(devices=64, answers=8192, group_size=16, shape=R1_DISTILL_7B, lengths='lognormal(9000, 0.75)')
    planned = find_plan(setting, seed=1, prompts='constant(512)', is_full=True, note=lambda line: None)
    assert sizes.count(64) == 1
    assert set(sizes) == {8, 64}
    assert planned.plan.engines + planned.plan.training == 64
    assert planned.outcome.tokens_s == pytest.approx(setting.answers.tokens / planned.outcome.period_s)
    assert planned.full.tokens_s == pytest.approx(planned.outcome.tokens_s, rel=0.1)
    assert engines in planned.fields['cluster.engines']
    assert planned.advice.trains_in_turns == ('shared' in engines)


def by_closed_forms(setting, plan, **_):
    """In place of a simulation."""
    found = predict(setting, plan)
    shares = found.generation_s / found.period_s, found.train_s / found.period_s
    return Outcome(found.period_s, setting.answers.tokens / found.period_s, *shares, found.age_mean, 2.0, 5)


@pytest.mark.parametrize('after', [1, 3])
def test_ctrl_c_gives_the_best_plan_so_far(monkeypatch, after):
    """The plan of closed forms is told before anything is simulated."""
    told, made = [], []

    def simulate(setting, plan, **_):
        assert told
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(plan)
        return by_closed_forms(setting, plan)

    monkeypatch.setattr('areal_jax.app.simulate.planning.simulate_plan', simulate)
    setting = make(devices=8, answers=64, group_size=16, lengths='lognormal(2000, 0.75)')
    planned = find_plan(setting, seed=1, prompts='constant(512)', is_full=True, note=told.append)
    assert planned.is_stopped
    assert planned.plan in made
    assert set(planned.tried) == set(made)
    assert told[0].startswith('by closed forms: ')
    assert len(told) == 1 + after
    assert 'stopped before the search had ended' in render(planned)
    *_, command, _, verdict = render(planned, 80).replace('\\\n', ' ').split('\n')
    words = [word for line in list_lines(planned.fields) for word in shlex.split(line)]
    assert shlex.split(command) == ['areal-train', '--config=FILE', '--workdir=DIR', *words]
    assert verdict.startswith(f'plan: {planned.plan.engines} engines, learner on {planned.plan.training}, eta ')


def test_ctrl_c_before_the_first_simulation_has_ended_gives_no_plan(monkeypatch):
    def simulate(setting, plan, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr('areal_jax.app.simulate.planning.simulate_plan', simulate)
    with pytest.raises(KeyboardInterrupt):
        find_plan(make(), seed=1, prompts='constant(32)', is_full=False, note=lambda line: None)


def test_lines_are_words_of_a_shell():
    fields = {'rollout.slots': 4, 'cluster.engines': '2 x tensor=1', 'rollout.prefill_buckets': (16, 64)}
    words = shlex.split(' '.join(list_lines(fields)))
    assert words == [
        '--config.rollout.slots=4', '--config.cluster.engines=2 x tensor=1', '--config.rollout.prefill_buckets=16,64',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ('changed', 'said'),
    [
        ('--cluster=4 x H801', "the chip 'H801' is not known"),
        ('--cluster=0 x H800', '0 devices are too few'),
        ('--model=Qwen9', "the model 'Qwen9' is not known"),
        ('--model=Qwen9', 'Qwen3-30B-A3B, hf:ORG/NAME or a directory with a config.json'),
        ('--model=R1-distill-32B', 'is too small for R1-distill-Qwen-32B: an engine takes 4'),
        ('--answers=18', '--answers=18 is no multiple of --group_size=4'),
        ('--lengths=nowhere', 'is no distribution'),
        ('--max_age=-1', '--max_age=-1 must be at least 0'),
        ('--max_age=nan', '--max_age=nan must be at least 0'),
        ('--age_price=1', '--age_price=1 must be a share of the speed'),
        ('--max_eta=-1', '--max_eta=-1 must be at least 0'),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(changed, said, capsys):
    name = changed.partition('=')[0]
    words = [word for word in WORDS if not word.startswith(name)]
    assert main_plan.main([*words, changed]) == ExitCode.USER_ERROR
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count('\n') == 1


def test_a_plan_for_a_model_of_the_hub_fetches_its_config_alone(tmp_path, monkeypatch, capsys, planned):
    from huggingface_hub import constants

    shape, asked = json.dumps(hf_config(QWEN3_SHAPE)).encode(), []
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.chdir(tmp_path)

    def plan(setting, **_):
        asked.append(setting)
        return planned

    monkeypatch.setattr('areal_jax.app.simulate.planning.find_plan', plan)
    files = {'config.json': shape, 'tokenizer.json': b'{}', 'model.safetensors': b'weights'}
    with serving({'org/tiny': {COMMIT: files}}) as server:
        monkeypatch.setattr(constants, 'ENDPOINT', server.address)
        monkeypatch.setattr(
            constants, 'HUGGINGFACE_CO_URL_TEMPLATE', server.address + '/{repo_id}/resolve/{revision}/{filename}'
        )
        words = [word for word in WORDS if not word.startswith('--model')]
        for name in ('hf:org/tiny', 'org/tiny'):
            assert main_plan.main([*words, f'--model={name}']) == ExitCode.FINISHED
        read = {path.rpartition('/')[2] for path in server.asked if '/resolve/' in path}
        assert read == {'config.json'}
        assert main_plan.main([*words, '--model=org/missing']) == ExitCode.USER_ERROR
        said = capsys.readouterr().err
        assert "--model='org/missing', which is no file or directory here: the Hub has no model org/missing" in said
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'config.json').write_bytes(shape)
    assert main_plan.main([*words, '--model=a']) == ExitCode.FINISHED
    expected = dataclasses.replace(shape_of('hf:org/tiny', QWEN3_SHAPE), name='')
    assert [dataclasses.replace(setting.shape, name='') for setting in asked] == [expected] * 3


def write_log(run, groups, **fields):
    """Groups of two answers."""
    run.mkdir()
    run.joinpath('config.json').write_text(json.dumps({'rollout': {'max_new_tokens': 50}}))
    events = [{'kind': 'log', 'version': 1}]
    for draw in range(groups):
        for sample in (0, 1):
            event = {'kind': 'finish', 'reason': 'stop', 'draw': draw, 'sample': sample, **fields}
            events += [event, {'kind': 'reward', 'draw': draw, 'sample': sample, 'value': 1.0}]
    lines = [json.dumps({'seq': seq, 'time': 0.0, 'lane': None, **event}) for seq, event in enumerate(events)]
    run.joinpath('events.jsonl').write_text('\n'.join(lines) + '\n')
    return str(run)


def test_the_answers_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr('areal_jax.app.simulate.planning.load_events', read_lines)
    run = write_log(tmp_path / 'run', 3, tokens=40)
    answers = read_answers(run, 6, None, 0, 32)
    assert (answers.group_size, answers.limit, answers.moments.mean) == (2, 50, 40)
    assert answers.text == f'log({run})'
    with pytest.raises(ConfigError, match='has 3 whole groups of 2 answers, and --answers=8 needs 4'):
        read_answers(run, 8, None, 0, 32)
    with pytest.raises(ConfigError, match='has groups of 2; leave it out'):
        read_answers(run, 6, 3, 0, 32)
    with pytest.raises(UserError, match='does not say lengths and rewards of answers'):
        read_answers(write_log(tmp_path / 'bare', 3), 6, None, 0, 32)
    agents = write_log(tmp_path / 'agents', 3, tokens=40, versions=[0, -1, 0], lengths=[20, 10, 10])
    with pytest.raises(ConfigError, match='is a run of agents, which are not planned'):
        read_answers(agents, 6, None, 0, 32)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
