"""Exports beside training: of every version that is due, of the newest checkpoint of it, and no more."""

import json
import os
import shutil
import signal
import threading
import time

import pytest

from areal_jax.app.export import run_export
from areal_jax.app.export.run_export import EXPORTS, Exporter, serve_exports
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.roles.roles import RoleProcess, keep_name
from areal_jax.errors import UserError
from areal_jax.formats.hf_directory import load_hf
from tests.app.small import SmallRun, equal, small_config, to_host

STEPS = 8
FIELDS = {'run__steps': STEPS, 'checkpoint__every': 2, 'checkpoint__keep': 9}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('finished'), **FIELDS).train()


@pytest.fixture
def run(finished, tmp_path):
    """A copy of its workdir, with times."""
    shutil.copytree(finished.workdir, tmp_path / 'run')
    return tmp_path / 'run'


def exported(workdir):
    return {path.name for path in (workdir / EXPORTS).glob('*')}


def make_exporter(workdir, every=2, steps=STEPS):
    return Exporter(workdir, every, steps, 'float32')


def export_all(exporter):
    for path in exporter.find_due():
        exporter.export(path)


def test_the_exports_are_the_weights_of_their_versions(finished, run):
    exporter = make_exporter(run)
    export_all(exporter)
    assert exported(run) == {'2', '4', '6'}  # the controller exports the last one
    for name in exported(run):
        assert equal(to_host(load_hf(run / EXPORTS / name)[1]), finished.weights[int(name)])
        assert json.loads((run / EXPORTS / name / 'areal_jax.json').read_text())['step'] == int(name)
    assert exporter.find_due() == []
    assert make_exporter(run).find_due() == []  # after a restart


def test_only_multiples_are_due(run):
    assert [path.name for path in make_exporter(run, every=4).find_due()] == ['step_00000004']


def test_a_version_that_is_saved_again_is_exported_again(run):
    exporter = make_exporter(run)
    export_all(exporter)
    again = run / 'checkpoints' / 'step_00000004_1'
    shutil.copytree(run / 'checkpoints' / 'step_00000006', again)
    later = time.time() + 10
    os.utime(again, (later, later))
    assert exporter.find_due() == [again]


def test_a_checkpoint_that_is_gone_is_named(run, capsys):
    exporter = make_exporter(run)
    due = exporter.find_due()
    shutil.rmtree(due[0])
    for path in due:
        exporter.export(path)
    assert exported(run) == {'4', '6'}
    said = capsys.readouterr().out
    assert 'warning: version 2 is not exported: ' in said
    assert 'raise checkpoint.keep' in said


def test_an_export_that_fails_is_said_once_and_the_others_go_on(run, capsys, monkeypatch):
    def fail(path, out, dtype):
        if path.name == 'step_00000002':
            raise UserError('the disk is full')
        return export(path, out, dtype)

    export = run_export.export_checkpoint
    monkeypatch.setattr(run_export, 'export_checkpoint', fail)
    exporter = make_exporter(run)
    export_all(exporter)
    export_all(exporter)
    assert exported(run) == {'4', '6'}
    assert capsys.readouterr().out.count('warning: version 2 is not exported: the disk is full\n') == 1


@pytest.mark.parametrize(('steps', 'holds'), [(STEPS, True), (STEPS + 2, False)])
def test_a_run_has_finished_with_the_report_of_its_last_update(run, steps, holds):
    assert make_exporter(run, steps=steps).has_finished() is holds


class Serving:
    """serve_exports of a run that is not over, on a thread, with a controller that lives."""

    def __init__(self, workdir, **fields):
        chosen = FIELDS | {'run__export_every': 2, 'cluster__learner': 'hosts=1 x data=1', **fields}
        self.config, self.workdir = small_config(**chosen), workdir
        self.interrupts = Interrupts()
        self._error = None

    def __enter__(self):
        self._controller = keep_name(RoleProcess('controller', 0, self.workdir), self.config).__enter__()
        self.interrupts.__enter__()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def _serve(self):
        process = RoleProcess('exporter', 0, self.workdir)
        self.has_finished = serve_exports(self.config, process, self.interrupts)

    def __exit__(self, *error):
        self.interrupts.__exit__(*error)
        self._controller.__exit__(None, None, None)

    def end(self):
        self._thread.join(30)
        return not self._thread.is_alive()


def wait_until(holds):
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_it_ends_with_the_run_and_a_signal_before(run, tmp_path):
    with Serving(run) as serving:
        assert serving.end()
    assert serving.has_finished
    assert exported(run) == {'2', '4', '6'}
    (run / 'report.json').unlink()
    late = run / 'checkpoints' / 'step_00000006'
    late.rename(tmp_path / 'late')
    shutil.rmtree(run / EXPORTS)
    with Serving(run) as serving:
        wait_until(lambda: exported(run) == {'2', '4'})
        (tmp_path / 'late').rename(late)
        wait_until(lambda: '6' in exported(run))
        os.kill(os.getpid(), signal.SIGTERM)
        assert serving.end()
    assert not serving.has_finished


def test_another_config_is_refused(run):
    config = small_config(**FIELDS, run__export_every=2)
    said = r'run\.export_every=2 and .* has 0'
    with (
        keep_name(RoleProcess('controller', 0, run), small_config(**FIELDS)),
        Interrupts() as interrupts,
        pytest.raises(UserError, match=said),
    ):
        serve_exports(config, RoleProcess('exporter', 0, run), interrupts)
