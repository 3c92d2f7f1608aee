"""Whole runs with publication.delta: what is trained and generated is that of the same run with whole versions."""

import shutil

import pytest

from tests.app.small import SmallRun, equal, tokens_of, train_until_killed

pytestmark = pytest.mark.slow  # programs in bfloat16, which no other small run has
FILES = {'publication__channel': 'files', 'publication__dtype': 'bfloat16'}
DELTA = FILES | {'publication__delta': True, 'publication__base_every': 3, 'optimizer__learning_rate': 3e-4}
EVALUATED = {'evaluation__every': 2, 'evaluation__problems': 4, 'evaluation__samples': 1, 'evaluation__slots': 2}


def published(run):
    return [(e['version'], e['record'], e['bytes']) for e in run.events if e['kind'] == 'publish']


@pytest.mark.parametrize('fields', [{}, EVALUATED, {'cluster__engines': '2 x shared'}, {'publication__verify': True}])
def test_a_run_with_deltas_is_the_run_with_whole_versions(tmp_path, fields):
    whole = SmallRun(tmp_path / 'whole', **FILES, optimizer__learning_rate=3e-4, **fields).train()
    delta = SmallRun(tmp_path / 'delta', **DELTA, **fields).train()
    assert tokens_of(delta.batches) == tokens_of(whole.batches)
    assert equal(delta.final, whole.final)
    assert [record for _, record, _ in published(delta)].count('delta') >= 3
    assert delta.report['finished']


def test_a_killed_run_goes_on_with_a_whole_version(tmp_path):
    fields = DELTA | {'checkpoint__every': 2}
    train_until_killed(SmallRun(tmp_path / 'killed', **fields), 3)
    shutil.copytree(tmp_path / 'killed', tmp_path / 'again')
    resumed = SmallRun(tmp_path / 'again', resume=True, **fields)
    assert resumed.version_at_start == 2
    names = sorted(path.name for path in (tmp_path / 'again' / 'publication').glob('v*'))
    assert 'v000002' in names  # whole, in place of what the killed run had written of 2 and later
    assert not {'v000002.delta', 'v000003', 'v000003.delta'} & set(names)
    resumed.train()
    assert resumed.report['finished']
