"""`telemetry.tracker` in a run: every row arrives, the weights are those without it, real libraries keep every step."""

from __future__ import annotations

import importlib.util
import pathlib
import sqlite3
import types

import pytest

from areal_jax.app.parts.tracker_builder import headline
from areal_jax.app.training import build_run
from areal_jax.errors import UserError
from areal_jax.telemetry.trackers import TRACKERS
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, train_until_killed
from tests.telemetry.fake_trackers import install

SCORED = {'evaluation__problems': 2, 'evaluation__samples': 2}


@pytest.mark.parametrize('kind', sorted(TRACKERS))
def test_a_tracked_run_is_told_whole_and_trains_the_same(tmp_path: pathlib.Path, monkeypatch, kind: str):
    store = install(kind, monkeypatch, tmp_path)
    plain = SmallRun(tmp_path / 'plain', **SCORED).train()
    tracked = SmallRun(tmp_path / 'tracked', telemetry__tracker=kind, **SCORED).train()
    assert tracked.report['weights_sha256'] == plain.report['weights_sha256']
    assert store.steps() == [1, 2, 3, 4, 5]
    assert [step for step, row in store.rows if 'evaluation/greedy_accuracy' in row] == [0, 5]
    assert store.summary['summary/steps'] == 5.0
    assert tracked.report['tracker'] == {'calls': 6, 'failed': 0, 'left_out': 0, 'first_error': ''}
    assert plain.report['tracker'] == {}
    assert not (tmp_path / 'plain' / 'tracker.json').exists()


def test_a_killed_run_goes_on_in_its_tracker(tmp_path: pathlib.Path, monkeypatch):
    store = install('trackio', monkeypatch, tmp_path)
    fields = {'telemetry__tracker': 'trackio', 'checkpoint__every': 2}
    train_until_killed(SmallRun(tmp_path / 'run', **fields), 3)
    SmallRun(tmp_path / 'run', resume=True, **fields).train()
    assert store.steps() == [1, 2, 3, 4, 5]
    assert len({begun['name'] for begun in store.begun}) == 1


def test_supervised_training_is_tracked_too(tmp_path: pathlib.Path, monkeypatch):
    store = install('mlflow', monkeypatch, tmp_path)
    build_run(sft_config(telemetry__tracker='mlflow', telemetry__project='mine'), tmp_path / 'run').train()
    assert store.steps('loss/nll') == [1, 2, 3, 4, 5, 6]
    assert store.ended == ['FINISHED']


def test_a_library_that_cannot_be_imported_is_refused_before_anything_is_written(tmp_path: pathlib.Path, monkeypatch):
    install('wandb', monkeypatch, tmp_path)
    monkeypatch.setattr('importlib.import_module', lambda name: (_ for _ in ()).throw(ImportError('broken')))
    with pytest.raises(UserError, match=r"telemetry\.tracker='wandb': the package wandb cannot be imported .*broken"):
        SmallRun(tmp_path / 'run', telemetry__tracker='wandb')
    assert not (tmp_path / 'run').exists()


def test_the_headline_has_the_numbers_that_a_report_has():
    report = {'steps': 3, 'accuracy': {'sampled': {'gain': {'mean': 0.5}}, 'greedy': None}, 'reward': {'last': None}}
    assert headline(report) == {'summary/steps': 3.0, 'summary/accuracy/sampled/gain/mean': 0.5}
    assert headline({'held_out_nll': {'0': 2.0, '6': 1.5}}) == {'summary/held_out_nll/last': 1.5}


def _stored(kind: str, directory: pathlib.Path) -> list[int]:
    """The steps with a reward that the real library holds."""
    if kind == 'wandb':
        from wandb.proto.wandb_internal_pb2 import Record

        from areal_jax.telemetry.trackers import read_records

        files = sorted(directory.glob('run/wandb/offline-run-*/*.wandb'))
        found = [Record.FromString(content) for file in files for content in read_records(file.read_bytes())]
        rows = [record.history for record in found if record.WhichOneof('record_type') == 'history']
        return [row.step.num for row in rows if any('reward/mean' in (i.key, *i.nested_key) for i in row.item)]
    if kind == 'mlflow':
        query = "select step from metrics where key = 'reward/mean' order by step"
        return [step for (step,) in sqlite3.connect(directory / 'mlflow.db').execute(query)]
    (file,) = (directory / 'trackio').glob('*.db')
    rows = sqlite3.connect(file).execute('select step, metrics from metrics order by id').fetchall()
    return [step for step, metrics in rows if b'"reward/mean"' in bytes(metrics)]


@pytest.mark.slow
@pytest.mark.parametrize('kind', sorted(TRACKERS))
def test_the_real_library_keeps_every_step_once(tmp_path: pathlib.Path, monkeypatch, kind: str):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"pip install 'areal_jax[{kind}]'")
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
    monkeypatch.chdir(tmp_path)  # artifacts are stored below the working directory
    monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))
    library = importlib.import_module(kind)
    assert isinstance(library, types.ModuleType)
    fields = {'telemetry__tracker': kind, 'checkpoint__every': 2}
    killed = SmallRun(tmp_path / 'run', **fields)
    train_until_killed(killed, 3)
    SmallRun(tmp_path / 'run', resume=True, **fields).train()
    assert _stored(kind, tmp_path) == [1, 2, 3, 4, 5]
