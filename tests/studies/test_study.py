"""A study as its user meets it, on toy arms: what runs, what does not run again, refusals, the page."""

import csv

import pytest

from tests.studies.toy_study import STUDY, ToyStudy


def test_all_stages_run_once_and_the_page_has_the_statements(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch) == 0, capsys.readouterr()
    assert set(study.starts().values()) == {1}
    assert {'knee_lag0_0', 'knee_lag0_1', 'lock_step_lag4_0', 'lock_step_lag4_1', 'natural_scores'} <= set(
        study.starts()
    )
    page = study.page()
    assert 'plain 0.003, decoupled 0.003, weighted_pg 0.003' in page  # the knee
    assert page.index('## Controls') < page.index('## Statements') < page.index('## Imposed age')
    assert '| plain PPO is worse than without lag at lags 4 and 8 | **reproduced** |' in page
    assert '| decoupled PPO is as good as without lag at lags 4 and 8 | **reproduced** |' in page
    assert '![plots/curves_and_throughput.png](plots/curves_and_throughput.png)' in page
    rows = list(csv.DictReader((study.workdir / 'arms.csv').open()))
    assert {row['state'] for row in rows} == {'finished'}
    split = {(row['mismatch'], row['drift'], row['split_cost']) for row in rows if row['stage'] == 'natural'}
    assert split == {('1e-06', '0.25', '0.125')}
    assert '| 1e-06 | 0.25 | 0.125 |' in page
    [row] = [
        row
        for row in rows
        if row['stage'] == 'lock_step'
        and (row['method'], row['lag'], row['seed'], row['factor']) == ('plain', '8', '2', '1.0')
    ]
    assert float(row['score']) == pytest.approx(0.9 - 0.16 + 0.002)


@pytest.mark.slow
def test_a_finished_study_runs_nothing_again_and_makes_its_page(tmp_path, monkeypatch):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch) == 0
    before = study.page()
    (study.workdir / 'study.md').unlink()
    assert study.run(monkeypatch) == 0
    assert set(study.starts().values()) == {1}
    assert study.page() == before


@pytest.mark.slow
def test_a_program_that_is_killed_starts_again_and_the_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv('TOY_KILL', 'lock_step_lag4_0')
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch) == 0
    assert {name for name, count in study.starts().items() if count > 1} == {'lock_step_lag4_0'}


@pytest.mark.slow
def test_programs_that_fail_end_no_other_and_are_named(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path, factor=200.0)
    assert study.run(monkeypatch) == 2
    error = capsys.readouterr().err
    assert 'arms have not finished, the first lock_step/lag0_plain_rate0.003_seed0 (with code 2: arm' in error
    assert 'is refused by the toy' in study.page()
    assert study.starts()['natural_scores'] == 1


@pytest.mark.slow
def test_without_a_learning_rate_the_later_stages_wait(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path, rates=(0.003, 0.6))
    assert study.run(monkeypatch) == 2
    assert 'the later stages need the learning rate of every method' in capsys.readouterr().err
    assert not any(name.startswith('pilot') for name in study.starts())


@pytest.mark.slow
def test_a_control_that_fails_is_first_on_the_page_and_fails_the_command(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path, high=0.29)
    assert study.run(monkeypatch) == 2
    assert '1 controls failed, the first: weighted_pg at lag 30' in capsys.readouterr().err
    assert study.page().split('## Controls')[1].splitlines()[4].startswith('| weighted_pg at lag 30')


@pytest.mark.slow
def test_a_lost_report_is_made_again_alone(tmp_path, monkeypatch):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch) == 0
    (study.workdir / 'pilot' / 'lag0_plain_rate0.003_seed100' / 'report.json').unlink()
    assert study.run(monkeypatch) == 0
    assert {name for name, count in study.starts().items() if count > 1} == {'pilot_lag0_0'}


def test_dry_run_prints_what_is_known_and_writes_nothing(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch, '--dry_run') == 0
    said = capsys.readouterr()
    assert not study.workdir.exists()
    assert 'knee_lag0_0/arms.json' in said.out
    assert '--config.staleness.eta=4.0' in said.out
    assert 'pilot and what follows: once the sweep of the learning rate has finished' in said.err


@pytest.mark.parametrize('words', [pytest.param([], marks=pytest.mark.slow), ['--quick']], ids=['full', 'quick'])
def test_every_arm_of_the_study_of_the_project_is_valid(tmp_path, monkeypatch, capsys, words):
    study = ToyStudy(tmp_path)
    study.file = STUDY
    assert study.run(monkeypatch, '--dry_run', *words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8  # programs and runs of the controls, and of the rate
    assert not study.workdir.exists()


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        (['--only=knee'], '--only=knee: the stages of a study need each other; leave it out'),
        (['--jobs=0'], '--jobs=0 must be at least 1'),
        (['--config.rollout.top_k=5'], 'rollout.top_k=5'),
    ],
)
def test_a_command_line_that_cannot_run_is_refused(tmp_path, monkeypatch, capsys, words, sentence):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch, *words) == 2
    assert sentence in capsys.readouterr().err
    assert not study.workdir.exists()


@pytest.mark.slow
def test_another_plan_in_the_same_directory_is_refused(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path)
    assert study.run(monkeypatch) == 0
    study.write(lags=(0, 4, 16))
    before = study.page()
    assert study.run(monkeypatch) == 2
    assert 'was begun with plan.lock_step.lags=[0, 4, 8], and now it is [0, 4, 16]' in capsys.readouterr().err
    assert study.page() == before


def test_a_directory_of_something_else_is_refused(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path)
    study.workdir.mkdir()
    (study.workdir / 'notes.txt').write_text('')
    assert study.run(monkeypatch) == 2
    assert 'holds notes.txt and no study.json, so it is no study' in capsys.readouterr().err


def test_quick_of_a_plain_sweep_is_refused(tmp_path, monkeypatch, capsys):
    study = ToyStudy(tmp_path)
    study.file.write_text(study.file.read_text().replace('get_study', 'get_sweep'))
    assert study.run(monkeypatch, '--quick') == 2
    assert '--quick is for a study' in capsys.readouterr().err
