"""The processes of a study with real weights: a program of arms, and the scores of a run."""

import json

import pytest

from areal_jax.app.model.model import EarlierRun
from areal_jax.studies.score_runs import score_runs
from areal_jax.studies.stages import CONTROLS, LIST, SCORE, Factors, read_records
from areal_jax.studies.train_program import train
from tests.studies.toy_study import read_study

STEPS = 3


def write(job):
    job.workdir.mkdir(parents=True)
    job.write_list()
    return job.workdir / LIST


def overrides(plan):
    small = {'run.steps': STEPS, 'model.n_layers': 1}
    part = {**plan.lock_step.common, **small}
    return {
        'lock_step': {**part, **plan.lock_step.methods['decoupled'], 'staleness.schedule': 'fixed(1)'},
        'natural': {**plan.natural.common, **small, 'staleness.eta': 1.0},
    }


@pytest.mark.slow
def test_a_program_leaves_what_a_study_reads_and_begins_anew(tmp_path):
    plan, maker = read_study(workdir=tmp_path)
    built = {}
    for name, rate in (('still', 0.0), ('moves', 1e-2), ('again', 1e-2)):
        factors = Factors(CONTROLS, 'decoupled', 0, lag=1, variant=name)
        built[factors] = {**overrides(plan)['lock_step'], 'optimizer.learning_rate': rate}
    stage = maker.build(CONTROLS, built)
    [program] = stage.programs
    half = tmp_path / CONTROLS / program.arms[0].name
    half.mkdir(parents=True)
    (half / 'metrics.jsonl').write_text('{"step": 1}\n')  # of a process that was killed
    assert not program.read_state().is_finished
    assert train(write(program)) == 0
    assert program.read_state().is_finished
    still, moves, again = read_records(stage.arms)
    assert still.weights == still.initial_weights == moves.initial_weights
    assert moves.weights == again.weights != still.weights
    assert moves.score == again.score
    assert (still.oldest, len(still.curve)) == (1, STEPS)


@pytest.mark.slow
def test_the_score_of_a_run_is_that_of_its_newest_checkpoint(tmp_path):
    plan, maker = read_study(workdir=tmp_path)
    factors = Factors(CONTROLS, 'decoupled', 0, eta=1.0)
    stage = maker.build(CONTROLS, {factors: overrides(plan)['natural']})
    from areal_jax.app.library import build_run

    [arm] = stage.runs
    build_run(arm.config, arm.workdir, resume=False).train()
    [unscored] = read_records(stage.arms)
    assert not unscored.state.is_finished
    assert unscored.state.reason == 'its final weights have no score'
    scoring = maker.scoring(stage)
    assert score_runs(write(scoring)) == 0
    assert EarlierRun(str(arm.workdir)).step == STEPS
    [scored] = read_records(stage.arms)
    assert scored.score == json.loads((arm.workdir / SCORE).read_text())['score']
    assert scored.tokens_per_second > 0
    assert scored.drift is None or scored.drift >= 0
