"""Whole runs whose devices move between generation and training: real engines and learner on eight virtual devices."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest

from areal_jax.app.run.replay import replay
from areal_jax.app.workdir.records import read_workdir
from areal_jax.report.rules.log_rules import Limits, find_violation
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.names import COMPILATIONS
from tests.app.small import SmallRun, equal, small_config, start_killed_and_resumed

PLAN = {2: ('fsdp=4', 4), 3: ('fsdp=2', 6), 4: ('data=1', 7), 5: ('fsdp=4', 1)}
BEGIN = {
    'cluster__learner': 'fsdp=2', 'cluster__engines': '6 x tensor=1', 'learner__rows_per_microbatch': 4,
    'virtual__train_token_s': 1e-4, 'rollout__max_running_groups': 0, 'rollout__slots': 1, 'staleness__eta': 8.0,
    'run__steps': 6,
}  # fmt: skip


@pytest.fixture
def moving(tmp_path):
    """Fields of a run with four moves."""
    file = tmp_path / 'plan.jsonl'
    lines = [
        json.dumps({'update': update, 'learner': learner, 'engines': f'{engines} x tensor=1'})
        for update, (learner, engines) in PLAN.items()
    ]
    file.write_text('\n'.join(lines))
    return BEGIN | {'cluster__reallocate': f'plan({file})'}


def moves_of(run):
    return [event for event in run.events if event['kind'] == 'reallocate']


def assert_exact(run, fields):
    """Every rule of a log holds, the token ledger balances, and what was generated is in answers or under way."""
    assert find_violation(run.events, Limits.of(small_config(**fields).to_dict())) is None
    assert run.session.context.unsaved is None
    assert not any(event.get('discarded') for event in run.events if event['kind'] == 'decode')
    trained = [draw for event in run.events if event['kind'] == 'consume' for draw in event['draws']]
    assert len(trained) == len(set(trained))


@pytest.mark.slow  # tests/control/test_reallocation.py kills and resumes moves with toys at every change
def test_a_killed_run_goes_through_the_same_moves(tmp_path, moving):
    """Four moves; killed after the second one, resumed from the checkpoint before it."""
    fields = moving | {'checkpoint__every': 1}
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    resumed = start_killed_and_resumed(tmp_path / 'killed', 3, **fields).train()
    for run in (whole, resumed):
        moves = moves_of(run)
        assert [move['update'] for move in moves] == [*PLAN]
        assert sum(move['moved'] for move in moves) > 4
        assert_exact(run, fields)
    assert equal(whole.final, resumed.final)
    first, second = (read_metrics(tmp_path / name / 'metrics.jsonl') for name in ('whole', 'killed'))
    assert [without_compilations(row) for row in first] == [without_compilations(row) for row in second]


def without_compilations(row):
    """The second attempt of a process finds what the first has compiled."""
    return {name: value for name, value in row.items() if name != COMPILATIONS}


def test_four_moves_change_no_token_and_no_weight_beyond_rounding(tmp_path, moving):
    """With eta=0 a batch is a function of the weights alone, wherever it is generated and trained."""
    moved = SmallRun(tmp_path / 'moved', **moving | {'staleness__eta': 0.0}).train()
    stayed = SmallRun(tmp_path / 'stayed', **BEGIN | {'staleness__eta': 0.0}).train()
    assert len(moves_of(moved)) == len(PLAN)
    for ours, theirs in zip(moved.batches, stayed.batches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.draw == other.draw
            for mine, its in zip(one.trajectories, other.trajectories, strict=True):
                assert mine.tokens.tolist() == its.tokens.tolist()
    # rounding of one update on another mesh is below 1e-6 (tests/learning/test_moving_learner.py); it adds up
    atol = 1e-6 * len(moved.batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), moved.final, stayed.final)


@pytest.mark.parametrize('step', ['prepare', 'stop_engine', 'move_learner', 'build_engine', 'start_engine'])
@pytest.mark.slow
def test_a_move_that_fails_at_any_step_is_made_again(tmp_path, moving, step):
    fields = moving | {'checkpoint__every': 1, 'run__steps': 4}
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    killed = SmallRun(tmp_path / 'killed', **fields)
    moves = killed.session.program.parts.generation.rollout.moves.site
    act, calls = getattr(moves, step), itertools.count(1)

    def fail(*args):
        if next(calls) == (2 if step == 'prepare' else 1):
            raise OSError('a device is gone')
        return act(*args)

    setattr(moves, step, fail)
    with pytest.raises(OSError, match='a device is gone'):
        killed.train()
    resumed = SmallRun(tmp_path / 'killed', resume=True, **fields).train()
    assert equal(whole.final, resumed.final)
    assert_exact(resumed, fields)


@pytest.mark.slow
def test_a_run_of_the_real_clock_with_moves_is_replayed(tmp_path, moving):
    fields = moving | {'run__clock': 'real', 'checkpoint__every': 2}
    run = SmallRun(tmp_path / 'run', **fields).train()
    assert [move['update'] for move in moves_of(run)] == [*PLAN]
    assert_exact(run, fields)
    outcome = replay(read_workdir(tmp_path / 'run'), tmp_path / 'out', {}, print)
    assert outcome['finished'] is True
    assert outcome['weights_sha256'] == run.report['weights_sha256']
