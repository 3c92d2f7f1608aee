"""Runs with a real engine and learner: every token has one fate, also after a kill, and the ratio can be split."""

from __future__ import annotations

import json

import pytest

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.token_ledger import IN_BATCH, LedgerError
from tests.app.small import SmallRun, equal, start_killed_and_resumed

MASK = {'staleness__max_token_age': 0, 'staleness__over_age': 'mask'}


def rows(run):
    return read_metrics(run.workdir / 'metrics.jsonl')


def balance(row):
    """(generated, the sum of all fates)."""
    fates = {
        name: value for name, value in row.items() if name.startswith(names.LEDGER) and not name.endswith('_by_age')
    }
    generated = fates.pop(names.LEDGER_GENERATED)
    return generated, sum(fates.values())


def count_fates(run, oldest=None):
    """Over all batches, token by token."""
    found = dict.fromkeys(IN_BATCH, 0)
    for version, groups in enumerate(run.batches):
        for group in groups:
            for trajectory in group.trajectories:
                for born in trajectory.policy_versions.tolist():
                    if born >= 0:
                        is_old = oldest is not None and version - born > oldest
                        found['filtered' if group.has_equal_rewards() else 'masked' if is_old else 'trained'] += 1
    return found


@pytest.fixture(scope='module')
def masked(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('masked'), run__steps=4, checkpoint__every=2, **MASK).train()


def test_every_row_and_the_end_close(masked):
    for row in rows(masked):
        generated, fates = balance(row)
        assert generated == fates
        assert row['ledger/unfinished'] >= 0
    last, expected = rows(masked)[-1], count_fates(masked, oldest=0)
    assert {fate: last[f'ledger/{fate}'] for fate in IN_BATCH} == expected
    assert expected['masked'] > 0
    fates = masked.report['token_fates']
    assert fates['fault'] == ''
    assert fates['generated'] == sum(fates['fates'].values()) == last['ledger/generated']
    assert fates['fates']['unfinished'] == last['ledger/unfinished'] == 0
    assert sum(map(sum, fates['by_version'].values())) == sum(map(sum, fates['by_age'].values())) == fates['generated']
    answers = [e['tokens'] for e in masked.events if e['kind'] == 'finish']
    assert fates['generated'] == sum(answers)  # nothing was generated twice


def test_a_killed_run_closes_after_its_resume(masked, tmp_path):
    resumed = start_killed_and_resumed(tmp_path, 3, run__steps=4, checkpoint__every=2, **MASK).train()
    assert resumed.report['token_fates']['fault'] == ''
    assert [balance(row) for row in rows(resumed)] == [(n, n) for n, _ in map(balance, rows(resumed))]
    assert equal(resumed.final, masked.final)
    ours, theirs = resumed.report['token_fates'], masked.report['token_fates']
    assert ours['fates'] == theirs['fates']
    steps = names.STEP_AGE_MEAN
    assert [row.get(steps) for row in rows(resumed)] == [row.get(steps) for row in rows(masked)]


def test_a_ledger_that_does_not_close_ends_the_run_after_its_report(tmp_path):
    run = SmallRun(tmp_path, run__steps=1)
    ledger = run.session.program.parts.observer.ledger
    ledger.apply({'kind': 'decode', 'version': 0, 'tokens': 1})  # that no engine generated
    with pytest.raises(LedgerError, match=r'\{0: 1} tokens by version have no fate, and the loop holds \{}'):
        run.train()
    assert json.loads((tmp_path / 'report.json').read_text())['finished']


def test_a_run_says_the_ratio_by_cause(tmp_path):
    fields = {'run__steps': 3, 'learner__n_minibatches': 2}
    plain = SmallRun(tmp_path / 'plain', **fields).train()
    split = SmallRun(tmp_path / 'split', diagnostics__ratio_sample=1.0, **fields).train()
    assert equal(plain.final, split.final)
    assert plain.report['ratio_split'] is None
    found = split.report['ratio_split']
    trained = sum(row['update/trained_tokens'] for row in rows(split))
    assert found['tokens'] + found['left_ring_tokens'] == trained
    assert found['left_ring_tokens'] == 0
    assert found['identity_error'] < 1e-6
    assert found['parts']['mismatch']['rms'] < 1e-4 < found['parts']['drift']['rms']
    assert split.report['compilations'] == 0
    ours = [{name: value for name, value in row.items() if not name.startswith('ratio/')} for row in rows(split)]
    assert ours == rows(plain)
    assert any(warning.startswith('Ages count publications') for warning in split.report['warnings'])
    assert split.report['ratios_by_age'][0]['age'] == '0'
