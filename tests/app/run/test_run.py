"""What a run holds is freed when building fails at any step, when it ends, and when freeing a part fails itself."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import shutil
import threading
import time

import psutil
import pytest
from jax._src import monitoring

from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.library import build_run
from areal_jax.app.run.loop import Loop
from areal_jax.app.run.supervised import SftTraining
from areal_jax.control.event_writer import EventLog
from areal_jax.files import DirectoryLock
from areal_jax.learning.learner import SpmdLearner
from areal_jax.tasks.scoring.verifier import InlineVerifier
from areal_jax.tasks.task import TaskError
from areal_jax.telemetry.devices import ResourceSampler
from areal_jax.telemetry.metrics import MetricsWriter
from tests.app.run.test_supervised import sft_config
from tests.app.small import small_config

# processes, threads and files: a worker of the verifier, the sampler of resources, a line of progress, TensorBoard
RL = {'task__verifier': 'process', 'task__verifier_workers': 1, 'telemetry__progress': True, 'evaluation__problems': 2}
SFT = {'telemetry__progress': True}

# what building calls, in its order; by the module that calls it
RUN, OWN = 'areal_jax.app.run.run', 'areal_jax.app.run.own_site'
LOOP, STORE = 'areal_jax.app.run.loop', 'areal_jax.checkpoint.store.CheckpointStore'
OF_EVERY_RUN = [
    f'{RUN}.prepare_workdir',
    f'{STORE}.remove_unfinished',
    f'{OWN}.use_compilation_cache',
    f'{OWN}.CompilationCounter',
    f'{OWN}.build_model',
    f'{OWN}.note_weights',
    f'{OWN}.build_learner',
    f'{OWN}.lead',
    f'{OWN}.require_finite_weights',
    f'{RUN}.MetricsWriter',
    f'{RUN}.MetricsWriter.truncate',
    'areal_jax.config.TrackedConfig.require_all_read',
    'areal_jax.config.TrackedConfig.idle_fields',
]
OF_SESSION = [
    *(
        f'{LOOP}.{name}'
        for name in (
            *('build_task', 'Scores', 'truncate_events', 'EventLog', 'build_clock', 'build_verifier', 'Supervisor'),
            *(
                'build.build_ring',
                'StepObserver',
                'build.build_sampling',
                'build.build_gate',
                'Controller',
                'Evaluator',
            ),
        )
    ),
    *(f'{OWN}.{name}' for name in ('build_channel', 'build_backends', 'build_engines', 'build_pool')),
    'areal_jax.workers.worker_process.WorkerProcess.wait_until_ready',
]
OF_SFT = [
    'areal_jax.app.run.supervised.build_demonstrations',
    'areal_jax.tasks.demonstrations.Demonstrations.stream',
    'areal_jax.tasks.demonstrations.Demonstrations.held_out_groups',
]
OF_EVERY_RESUME = [
    f'{STORE}.restore_latest',
    'areal_jax.learning.learner.SpmdLearner.restore',
    f'{RUN}.continue_run',
]
OF_SESSION_RESUME = [f'{LOOP}.decode_run_state', 'areal_jax.control.controller.Controller.restore']

# what fails between two of the other steps has nothing more to free
SLOW = {
    f'{STORE}.remove_unfinished', f'{OWN}.note_weights', f'{OWN}.lead', f'{OWN}.require_finite_weights',
    f'{RUN}.MetricsWriter.truncate', 'areal_jax.config.TrackedConfig.require_all_read', f'{LOOP}.Scores',
    f'{LOOP}.truncate_events', f'{LOOP}.StepObserver', f'{LOOP}.build.build_sampling', f'{LOOP}.build.build_gate',
    f'{LOOP}.Controller', f'{OWN}.build_channel',
}  # fmt: skip

KINDS = {'rl': (Loop, small_config, RL), 'sft': (SftTraining, sft_config, SFT)}
FIRST = [*[('rl', step) for step in OF_EVERY_RUN + OF_SESSION], *[('sft', step) for step in OF_EVERY_RUN + OF_SFT]]
RESUMED = [*[('rl', step) for step in OF_EVERY_RESUME + OF_SESSION_RESUME], *[('sft', s) for s in OF_EVERY_RESUME]]


class InjectedError(Exception):
    pass


def open_files():
    descriptors = set()
    for number in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            descriptors.add((int(number), os.readlink(f'/proc/self/fd/{number}')))
    return descriptors


def held():
    """What this process holds now, each with a name; what tests before left to the collector is freed first.

    What outlives a collection is not searched again: that would take longer than most tests here.
    """
    gc.collect()
    gc.freeze()
    before = open_files()
    time.sleep(0.01)  # a thread of a library may read a file just now: not held
    return {
        'files': before & open_files(),
        'processes': {child.pid for child in psutil.Process().children(recursive=True)},
        'threads': set(threading.enumerate()),
        'listeners': len(monitoring.get_event_duration_listeners()),
    }


def inject(monkeypatch, step):
    def fail(*args, **kwargs):
        raise InjectedError(step)

    monkeypatch.setattr(step, fail)


def build(kind, workdir, resume=False, **fields):
    expected, config, own = KINDS[kind]
    run = build_run(config(**own | fields), workdir, resume=resume)
    assert run.context.finished is not None or isinstance(run.program, expected)
    return run


def require_unlocked(workdir):
    DirectoryLock(workdir).release()


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """Whatever a process keeps after its first run (pools of libraries) is there."""
    for kind in KINDS:
        build(kind, tmp_path_factory.mktemp(kind)).close()


@pytest.mark.parametrize(
    ('kind', 'step'),
    [
        # what both kinds do is shown for one of them at every change
        pytest.param(
            kind, step, id=f'{kind} {step.rpartition(".")[2]}',
            marks=[pytest.mark.slow] if step in SLOW or (kind == 'sft' and step in OF_EVERY_RUN) else [],
        )
        for kind, step in FIRST
    ],
)  # fmt: skip
def test_a_build_that_fails_leaves_nothing(built, tmp_path, monkeypatch, kind, step):
    inject(monkeypatch, step)
    before = held()
    with pytest.raises(InjectedError) as caught:  # which keeps the frames, so nothing is freed by their end
        build(kind, tmp_path)
    assert held() == before, caught
    require_unlocked(tmp_path)


@pytest.mark.parametrize('start', [build_run, evaluate_model], ids=['run', 'evaluation'])
def test_an_unknown_task_is_named_before_weights_are_read_or_anything_is_written(tmp_path, start):
    broken = small_config(task__name='sudoku', model__source='gguf', model__path='nowhere.gguf', evaluation__problems=2)
    with pytest.raises(TaskError, match=r"task\.name='sudoku' is not known"):
        start(broken, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.fixture(scope='module')
def trained(built, tmp_path_factory):
    """A workdir of each kind with a checkpoint after update 1."""
    workdirs = {}
    for kind in KINDS:
        workdirs[kind] = tmp_path_factory.mktemp(f'trained_{kind}')
        build(kind, workdirs[kind], run__steps=1).train()
    build('rl', shutil.copytree(workdirs['rl'], tmp_path_factory.mktemp('rl') / 'run'), True, run__steps=2).close()
    return workdirs


@pytest.mark.parametrize(('kind', 'step'), RESUMED, ids=[f'{kind} {s.rpartition(".")[2]}' for kind, s in RESUMED])
def test_a_resume_that_fails_leaves_nothing(trained, tmp_path, monkeypatch, kind, step):
    workdir = pathlib.Path(shutil.copytree(trained[kind], tmp_path / 'run'))
    inject(monkeypatch, step)
    before = held()
    with pytest.raises(InjectedError) as caught:
        build(kind, workdir, resume=True, run__steps=2)
    assert held() == before, caught
    require_unlocked(workdir)


@pytest.mark.parametrize('kind', KINDS)
def test_a_run_that_ends_leaves_nothing(trained, tmp_path, kind):
    before = held()
    run = build(kind, tmp_path, run__steps=1)
    assert held() != before
    assert run.train()['steps'] == 1
    assert held() == before
    require_unlocked(tmp_path)


@pytest.mark.parametrize('kind', KINDS)
def test_a_finished_run_that_is_resumed_leaves_nothing(trained, tmp_path, kind):
    workdir = pathlib.Path(shutil.copytree(trained[kind], tmp_path / 'run'))
    before = held()
    assert build(kind, workdir, resume=True, run__steps=1).train()['steps'] == 1
    assert held() == before
    require_unlocked(workdir)


@pytest.fixture
def freed(monkeypatch):
    """Names of the parts in the order in which they are freed; each raises then."""
    names = []

    def break_end(part, name):
        end = getattr(part, name)

        def broken(self, **settings):
            names.append(part.__name__)
            end(self, **settings)
            raise OSError(f'{part.__name__} failed')

        monkeypatch.setattr(part, name, broken)

    for part in (EventLog, InlineVerifier, SpmdLearner, MetricsWriter):
        break_end(part, 'close')
    break_end(DirectoryLock, 'release')
    break_end(ResourceSampler, 'stop')
    return names


REVERSE = ['MetricsWriter', 'SpmdLearner', 'InlineVerifier', 'EventLog', 'ResourceSampler', 'DirectoryLock']


def test_all_parts_are_freed_in_reverse_order_even_if_each_fails(tmp_path, freed):
    run = build_run(small_config(), tmp_path)
    with pytest.raises(OSError, match='failed'):
        run.close()
    assert freed == REVERSE
    run.close()
    assert freed == REVERSE


@pytest.mark.parametrize('step', [f'{LOOP}.Controller', 'areal_jax.app.run.loop.Loop.warm_up'])
def test_the_first_error_is_the_one_that_is_raised(tmp_path, monkeypatch, freed, step):
    inject(monkeypatch, step)  # while it builds; when it runs
    with pytest.raises(InjectedError):
        build_run(small_config(), tmp_path).train()
    assert freed == REVERSE
