"""A run whose checkpoints leave the machine: what the mirror holds, and a resume from it alone."""

import errno
import json
import pathlib
import shutil
import threading

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from areal_jax.app.library import build_run
from areal_jax.app.model.model import EarlierRun
from areal_jax.app.workdir.mirrored_run import RunMirror, locate_run
from areal_jax.checkpoint.mirror import Mirror, MirrorError
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from tests.app.small import SmallRun, call_after, equal, small_config, train_until_killed

STORE = MemoryFileSystem()
ADDRESS = 'memory://bucket/run'
FIELDS = {'run__mirror': ADDRESS, 'checkpoint__every': 1, 'run__steps': 4}


@pytest.fixture(autouse=True)
def empty_store():
    STORE.store.clear()
    locate_run.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def kill_when_mirrored(workdir, step, **fields):
    """A run that is killed after update `step`, when the mirror has the checkpoint of the update before it."""
    killed = SmallRun(workdir, **FIELDS, **fields)
    call_after(killed.session, step, lambda: await_copy(f'step_{step - 1:08d}'))
    train_until_killed(killed, step)


def await_copy(name):
    for _ in range(400):
        if name in Mirror(ADDRESS).steps():
            return
        threading.Event().wait(0.05)
    raise AssertionError(f'no copy {name}')


def test_a_resume_from_the_mirror_alone_equals_one_on_the_machine(tmp_path, capsys):
    """From the same checkpoint; the records are those of later times, as after a kill."""
    kill_when_mirrored(tmp_path / 'killed', 3)
    newest = Mirror(ADDRESS).steps()[-1]
    local = shutil.copytree(tmp_path / 'killed', tmp_path / 'local')
    for _, path in CheckpointStore(local / 'checkpoints').saves():
        if path.name > newest:
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / 'killed')
    fetched = SmallRun(tmp_path / 'killed', resume=True, **FIELDS).train()
    assert f'fetched {newest} from {ADDRESS}' in capsys.readouterr().out
    STORE.store.clear()
    resumed = SmallRun(local, resume=True, **FIELDS).train()
    assert fetched.version_at_start == resumed.version_at_start == int(newest.split('_')[1])
    assert equal(fetched.final, resumed.final)
    for name in ('events.jsonl', 'metrics.jsonl', 'rollouts/000001.jsonl'):
        assert (fetched.workdir / name).read_bytes() == (resumed.workdir / name).read_bytes()


def test_a_finished_run_leaves_checkpoints_as_on_the_machine_its_report_and_its_export(tmp_path):
    run = SmallRun(tmp_path, **FIELDS, run__export=True, model__family='llama').train()
    here = [path.name for _, path in CheckpointStore(tmp_path / 'checkpoints').saves()]
    mirror = Mirror(ADDRESS)
    assert mirror.steps() == here == ['step_00000003', 'step_00000004']
    report = json.loads(STORE.cat_file('/bucket/run/finished/report.json'))
    assert report['weights_sha256'] == run.report['weights_sha256']
    weights = STORE.cat_file('/bucket/run/export/model.safetensors')
    assert weights == (tmp_path / 'export' / 'model.safetensors').read_bytes()
    assert not any('registry' in path or '.lock' in path for path in STORE.find('/bucket/run'))


def test_a_finished_run_resumes_from_the_mirror_with_its_report(tmp_path):
    first = SmallRun(tmp_path / 'a', **FIELDS).train()
    again = SmallRun(tmp_path / 'b', resume=True, **FIELDS).train()
    assert again.report == json.loads((tmp_path / 'a' / 'report.json').read_text())
    longer = SmallRun(tmp_path / 'c', resume=True, **FIELDS | {'run__steps': 5}).train()
    assert longer.version_at_start == 4
    assert equal(longer.weights[4], first.final)


def test_a_damaged_copy_is_named_and_the_one_before_is_used(tmp_path, capsys):
    SmallRun(tmp_path / 'a', **FIELDS).train()
    STORE.pipe_file('/bucket/run/step_00000004/metrics.jsonl', b'cut')
    resumed = SmallRun(tmp_path / 'b', resume=True, **FIELDS)
    assert resumed.version_at_start == 3
    assert 'step_00000004: metrics.jsonl is not the committed file; the copy before it' in capsys.readouterr().err
    resumed.train()
    assert Mirror(ADDRESS).fetch('step_00000004', tmp_path / 'again').step == 4


@pytest.mark.parametrize(
    'error',
    [
        OSError(errno.ENOSPC, 'No space left on device'),
        PermissionError('Access Denied'),
        ConnectionResetError('the connection was cut'),
    ],
)
def test_a_run_continues_when_uploads_fail_and_the_next_checkpoint_tries_again(tmp_path, capsys, monkeypatch, error):
    failing, whole = threading.Event(), MemoryFileSystem.open
    failing.set()

    def open_or_fail(self, path, mode='rb', **settings):
        if mode == 'wb' and failing.is_set() and 'events' in path:
            raise error
        return whole(self, path, mode, **settings)

    monkeypatch.setattr(MemoryFileSystem, 'open', open_or_fail)
    run = SmallRun(tmp_path, **FIELDS)
    call_after(run.session, 3, lambda: (threading.Event().wait(1.0), failing.clear()))
    report = run.train().report
    assert report['steps'] == 4
    assert Mirror(ADDRESS).steps()[-1] == 'step_00000004'
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: run.mirror')]
    assert 1 <= len(warnings) <= 2
    reason = f'{type(error).__name__}: {error}'
    assert warnings[0].endswith(f'lacks step_00000001 ({ADDRESS}: {reason}); the run goes on, and the next checkpoint '
                                'tries again')  # fmt: skip


def test_a_finished_run_without_its_copies_says_so_after_the_report(tmp_path, monkeypatch):
    def refuse(self, path, mode='rb', **settings):
        raise PermissionError('Access Denied')

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, 'open', refuse)
        with pytest.raises(UserError, match=r'^the run has finished .* run\.mirror lacks step_00000004: memory://'):
            SmallRun(tmp_path, **FIELDS).train()
    assert (tmp_path / 'report.json').exists()
    SmallRun(tmp_path, resume=True, **FIELDS).train()
    assert Mirror(ADDRESS).steps() == ['step_00000004']
    assert Mirror(ADDRESS).read_record('finished').step == 4


def test_a_mirror_belongs_to_one_run(tmp_path):
    SmallRun(tmp_path / 'a', **FIELDS).train()
    with pytest.raises(ConfigError, match=r"run\.mirror='memory://bucket/run' holds a run already \(step_00000004\)"):
        SmallRun(tmp_path / 'b', **FIELDS)
    other = {**FIELDS, 'run__mirror': 'memory://other', 'run__steps': 1}
    SmallRun(tmp_path / 'c', **other).train()
    with pytest.raises(ConfigError, match='which is newer than every checkpoint of'):
        SmallRun(tmp_path / 'c', resume=True, **{**other, 'run__mirror': ADDRESS})


def test_a_mirror_that_cannot_be_read_is_no_start_at_update_0(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError('Access Denied')

    monkeypatch.setattr(MemoryFileSystem, 'glob', refuse)
    with pytest.raises(MirrorError, match=r'^memory://bucket/run: PermissionError: Access Denied$'):
        SmallRun(tmp_path / 'a', resume=True, **FIELDS)
    assert [path.name for path in (tmp_path / 'a').iterdir()] == ['.lock']


def test_a_model_is_read_from_the_mirror_of_a_run(tmp_path, cache):
    SmallRun(tmp_path / 'a', **FIELDS).train()
    run = EarlierRun(ADDRESS)
    assert (run.step, run.config.model.d_model) == (4, 32)
    assert EarlierRun(f'{ADDRESS}/step_00000003').step == 3
    second = {'run__steps': 1, 'model__source': 'run', 'model__path': ADDRESS}
    begun = SmallRun(tmp_path / 'b', **second)
    here = SmallRun(tmp_path / 'c', **{**second, 'model__path': str(tmp_path / 'a')})
    assert equal(begun.weights[0], here.weights[0])
    for started in (begun, here):
        started.session.close()


def test_a_directory_is_a_mirror_too(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mirror = pathlib.Path('mirror') / 'run'
    SmallRun(pathlib.Path('a'), **{**FIELDS, 'run__mirror': str(mirror)}).train()
    assert EarlierRun(str(mirror)).step == 4
    assert EarlierRun(str(mirror / 'step_00000003')).workdir == mirror / 'step_00000003'  # a workdir by itself
    resumed = SmallRun(tmp_path / 'b', resume=True, **{**FIELDS, 'run__mirror': str(mirror), 'run__steps': 5})
    assert resumed.version_at_start == 4
    resumed.session.close()


def save(store, step):
    """Saves a step of one number; returns its directory."""
    store.save(step, {'params': {'a': np.full(1, step)}}, {})
    return store.path(step)


@pytest.fixture
def hold(monkeypatch):
    """Holds every upload until it is set; `hold.begun` tells that one waits."""
    may_end, whole = threading.Event(), MemoryFileSystem.open
    may_end.begun = threading.Event()

    def open_late(self, path, mode='rb', **settings):
        if mode == 'wb':
            may_end.begun.set()
            may_end.wait(20)
        return whole(self, path, mode, **settings)

    monkeypatch.setattr(MemoryFileSystem, 'open', open_late)
    yield may_end
    may_end.set()


def test_checkpoints_of_a_slow_mirror_are_skipped_and_those_in_use_stay(tmp_path, hold):
    """Five checkpoints while the first is copied: then the fifth is copied, none between."""
    mirror = RunMirror(ADDRESS, tmp_path, keep=5)
    store = CheckpointStore(tmp_path / 'checkpoints', 1, mirror.in_use)
    mirror.start(None)
    for step in range(1, 6):
        mirror.put(save(store, step))
        assert hold.begun.wait(20)
    assert [step for step, _ in store.saves()] == [1, 4, 5]  # the fourth waited when the fifth was saved
    hold.set()
    assert mirror.finish(20) == ''
    assert Mirror(ADDRESS).steps() == ['step_00000001', 'step_00000005']
    save(store, 6)
    assert [step for step, _ in store.saves()] == [6]


def test_the_end_waits_no_longer_than_its_deadline_and_what_it_abandons_is_not_committed(tmp_path, hold):
    mirror = RunMirror(ADDRESS, tmp_path, keep=1)
    mirror.start(save(CheckpointStore(tmp_path / 'checkpoints'), 1))
    assert mirror.finish(0.1) == f'{ADDRESS}: the copy has not ended after run.mirror_wait_s=0.1'
    threading.Timer(0.2, hold.set).start()
    mirror.close()
    assert Mirror(ADDRESS).steps() == []


@pytest.mark.parametrize(
    ('address', 'sentence'),
    [
        ('az://bucket/run', r"run\.mirror='az://bucket/run' is a URL"),
        (
            'gs://bucket/run',
            r"run\.mirror='gs://bucket/run' needs the package gcsfs, which is not installed: .*pip inst",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_the_run(tmp_path, monkeypatch, address, sentence):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None if name == 'gcsfs' else name)
    with pytest.raises(ConfigError, match=sentence):
        build_run(small_config(run__mirror=address), tmp_path / 'a')
    assert not (tmp_path / 'a').exists()
