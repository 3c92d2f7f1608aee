"""areal_jax.train, evaluate and export: the weights of main_train, again and again, and a process that is as before."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest

import areal_jax
from areal_jax.app import library
from areal_jax.app.process.ending import CallerInterrupts
from areal_jax.app.run import own_site
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.files import DirectoryLock
from areal_jax.learning.learner import SpmdLearner
from areal_jax.tasks.scoring.verifier import InlineVerifier
from tests.app.process.test_ending import interruptible, press_ctrl_c
from tests.app.run.test_supervised import sft_config
from tests.app.small import small_config

ROOT = pathlib.Path(__file__).parents[2]
CONFIG_FILE = 'from tests.app.small import small_config\n\n\ndef get_config():\n    return small_config(run__steps=3)\n'
WORKERS = {'task__verifier': 'process', 'task__verifier_workers': 1}


__all__ = ['interruptible']  # a fixture


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    """Of a run that everything else is compared with."""
    return areal_jax.train(small_config(run__steps=3), tmp_path_factory.mktemp('reference'))


def interrupt_at(monkeypatch, owner, name, call=1, times=1):
    """Presses Ctrl-C in the n-th call of a function of the run, which goes on when it was heard."""
    original, calls, noted = getattr(owner, name), itertools.count(1), []

    def interrupting(*args, **kwargs):
        if next(calls) == call:
            for number in range(1, times + 1):
                press_ctrl_c()
                while len(noted) < number:
                    time.sleep(0.01)
        return original(*args, **kwargs)

    note = CallerInterrupts.note
    monkeypatch.setattr(CallerInterrupts, 'note', lambda self: (note(self), noted.append(True)))
    monkeypatch.setattr(owner, name, interrupting)


def held():
    return (
        {thread for thread in threading.enumerate() if thread.is_alive()},
        {child.pid for child in psutil.Process().children(recursive=True)},
    )


# The same run.


def test_the_weights_are_those_of_main_train(report, tmp_path):
    (tmp_path / 'config_file.py').write_text(CONFIG_FILE)
    command = ['-m', 'areal_jax.main_train', f'--config={tmp_path}/config_file.py', f'--workdir={tmp_path}/run']
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, timeout=300)
    of_command = json.loads((tmp_path / 'run' / 'report.json').read_text())
    assert report['weights_sha256'] == of_command['weights_sha256']
    assert report.keys() == of_command.keys()


def test_a_config_file_gives_the_same_run_and_its_name(report, tmp_path):
    (tmp_path / 'config_file.py').write_text(CONFIG_FILE)
    again = areal_jax.train(f'{tmp_path}/config_file.py', str(tmp_path / 'run'))
    assert again['weights_sha256'] == report['weights_sha256']
    assert again['config'] == f'{tmp_path}/config_file.py'


@pytest.mark.slow
def test_other_runs_between_two_equal_ones_change_nothing(report, tmp_path, monkeypatch):
    areal_jax.train(sft_config(), tmp_path / 'sft')
    wider = {'model__d_model': 64, 'model__n_layers': 1, 'rollout__slots': 4}
    areal_jax.train(small_config(run__steps=2, **wider), tmp_path / 'wider')
    with monkeypatch.context() as patch:
        patch.setattr(SpmdLearner, 'update', fail)
        with pytest.raises(RuntimeError, match='injected'):
            areal_jax.train(small_config(run__steps=2), tmp_path / 'failed')
    assert areal_jax.train(small_config(run__steps=3), tmp_path / 'again')['weights_sha256'] == report['weights_sha256']


def fail(*args, **kwargs):
    raise RuntimeError('injected into the learner')


def test_a_failed_run_keeps_no_weights_alive(tmp_path, monkeypatch):
    learners = []
    build = own_site.build_learner
    monkeypatch.setattr(
        own_site, 'build_learner', lambda *args, **kwargs: (learners.append(build(*args, **kwargs)), learners[-1])[1]
    )
    monkeypatch.setattr(SpmdLearner, 'update', fail)
    with pytest.raises(RuntimeError, match='injected') as caught:
        areal_jax.train(small_config(run__steps=2), tmp_path)
    [learner] = learners
    learners.clear()
    gc.collect()
    holders = [holder for holder in gc.get_referrers(learner) if not isinstance(holder, types.FrameType)]
    assert caught.value  # is kept, as a notebook does
    assert holders == []


@pytest.mark.parametrize('in_thread', [False, True], ids=['in the loop', 'in a thread of the caller'])
def test_in_a_running_event_loop(report, tmp_path, in_thread):
    async def cell():
        call = functools.partial(areal_jax.train, small_config(run__steps=3), tmp_path)
        return await asyncio.to_thread(call) if in_thread else call()

    assert asyncio.run(cell())['weights_sha256'] == report['weights_sha256']


def test_the_config_of_the_caller_is_not_changed(tmp_path):
    config = small_config(run__steps=1)
    before = copy.deepcopy(config)
    areal_jax.train(config, tmp_path)
    assert (config, config.is_locked) == (before, before.is_locked)


# Interrupts.


@pytest.mark.parametrize('fields', [{}, {'run__clock': 'real', **WORKERS}], ids=['virtual', 'real'])
def test_an_interrupt_finishes_the_update_and_saves(report, tmp_path, monkeypatch, fields):
    config = small_config(run__steps=3, checkpoint__every=0, **fields)
    before = held()
    with monkeypatch.context() as patch:
        interrupt_at(patch, SpmdLearner, 'update')
        with pytest.raises(KeyboardInterrupt, match='resume=True goes on'):
            areal_jax.train(config, tmp_path)
    assert held() == before
    DirectoryLock(tmp_path).release()
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['step_00000001']
    resumed = areal_jax.train(config, tmp_path, resume=True)
    assert resumed['steps'] == 3
    assert held() == before


def test_a_second_interrupt_stops_without_saving(tmp_path, monkeypatch, capsys):
    config = small_config(run__steps=3, checkpoint__every=1)
    before = held()
    with monkeypatch.context() as patch:
        interrupt_at(patch, SpmdLearner, 'update', call=2, times=2)
        with pytest.raises(KeyboardInterrupt):
            areal_jax.train(config, tmp_path)
    assert held() == before
    assert 'stopping without saving' in capsys.readouterr().out
    assert areal_jax.train(config, tmp_path, resume=True)['steps'] == 3


@pytest.mark.parametrize('name', ['build_learner', 'build_task', 'build_engines'])
def test_an_interrupt_of_the_start_ends_it(report, tmp_path, monkeypatch, name):
    config = small_config(run__steps=3, **WORKERS)
    before = held()
    module = {'build_learner': 'own_site', 'build_task': 'loop', 'build_engines': 'own_site'}[name]
    owner = sys.modules[f'areal_jax.app.run.{module}']
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            areal_jax.train(config, tmp_path)
    assert held() == before
    assert not (tmp_path / 'metrics.jsonl').exists() or not (tmp_path / 'metrics.jsonl').read_text()
    assert areal_jax.train(config, tmp_path)['steps'] == 3


def test_an_interrupt_of_supervised_training(tmp_path, monkeypatch):
    whole = areal_jax.train(sft_config(run__steps=4), tmp_path / 'whole')
    with monkeypatch.context() as patch:
        interrupt_at(patch, SpmdLearner, 'update', call=2)
        with pytest.raises(KeyboardInterrupt):
            areal_jax.train(sft_config(run__steps=4), tmp_path / 'run')
    resumed = areal_jax.train(sft_config(run__steps=4), tmp_path / 'run', resume=True)
    assert resumed['weights_sha256'] == whole['weights_sha256']


# The process afterwards.

PROCESS = """
import atexit, json, logging, os, random, resource, signal, sys, threading, warnings, weakref
import absl.flags, absl.logging, flax.nnx, jax, jax.monitoring, matplotlib.figure, matplotlib.backends.backend_agg
import ml_collections.config_flags, numpy, optax, orbax.checkpoint, psutil, safetensors, tensorboardX, tensorstore
import bokeh.plotting, scipy.special
jax.devices()
weakref.finalize(jax, print).detach()  # the first one registers an exit handler of weakref; jax makes some
import areal_jax
from areal_jax.app.process import setup
from areal_jax.native import compiled_library as blocks
from tests.app.small import small_config

def allocator(*_):
    raise AssertionError('malloc was set')

def collector():
    raise AssertionError('the garbage collector was set')

setup.return_freed_memory = allocator
setup.space_full_collections = collector
blocks.keep_blocks = allocator

def subreaper():
    import ctypes
    flag = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0)
    return flag.value

def read_link(number):  # fonts that matplotlib has drawn with stay open
    return os.readlink(f'/proc/self/fd/{number}') if os.path.exists(f'/proc/self/fd/{number}') else '.ttf'

def handlers(log):  # libraries give their loggers a NullHandler when they are imported
    return [repr(handler) for handler in log.handlers if not isinstance(handler, logging.NullHandler)]

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        'signals': {str(n): repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        'jax': {name: repr(value) for name, value in jax.config.values.items()},
        'environment': dict(os.environ),
        'threads': sorted(thread.name for thread in threading.enumerate()),
        'children': [child.pid for child in psutil.Process().children(recursive=True)],
        'files': sorted(name for name in map(read_link, os.listdir('/proc/self/fd')) if not name.endswith('.ttf')),
        'logging': {log.name: [log.level, log.propagate, log.disabled, handlers(log)]
                    for log in loggers if handlers(log) or log.level},
        'absl': [absl.logging.get_verbosity(), sorted(absl.flags.FLAGS)],
        'hooks': [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        'warnings': list(map(repr, warnings.filters)),
        'exit handlers': atexit._ncallbacks(),
        'random': [hash(random.getstate()), repr(numpy.random.get_state())],
        'matplotlib': repr(dict(matplotlib.rcParams)),
        'path': [sys.path, os.getcwd(), os.umask(0o22)],
        'limits': [resource.getrlimit(n) for n in (resource.RLIMIT_CORE, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)],
        'subreaper': subreaper(),
        'modules': 'config_file' in sys.modules,
    }

import pathlib, tempfile
directory = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1]))
cache = os.environ['JAX_COMPILATION_CACHE_DIR'] + '/library'  # kept between two runs of the tests
fields = dict(run__steps=2, run__compilation_cache=cache, evaluation__problems=2,
              task__verifier='process', task__verifier_workers=1,
              telemetry__plots=True, telemetry__tensorboard=True, telemetry__progress=True)
before = state()
print(json.dumps(before), file=sys.stderr)
for clock in ('virtual', 'real'):
    areal_jax.train(small_config(run__clock=clock, **fields), directory / clock)
    print(json.dumps(state()), file=sys.stderr)
try:
    areal_jax.train(small_config(model__source='hf', model__path='nowhere'), directory / 'failing')
except Exception:
    print(json.dumps(state()), file=sys.stderr)
"""


def test_the_process_is_as_before(tmp_path):
    done = subprocess.run(
        [sys.executable, '-c', PROCESS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    states = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{')]
    assert len(states) == 4
    for after in states[1:]:
        for name, value in states[0].items():
            assert after[name] == value, name


def test_importing_areal_jax_imports_nothing_slow():
    program = 'import sys, areal_jax; dir(areal_jax); print({"jax", "numpy", "absl", "asyncio"} & set(sys.modules))'
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'set()'


def test_the_functions_are_there():
    assert {'train', 'evaluate', 'export'} <= set(dir(areal_jax))
    assert areal_jax.train is library.train
    with pytest.raises(AttributeError, match='no attribute'):
        _ = areal_jax.sweep


# What is refused.


@pytest.mark.parametrize(
    ('config', 'error', 'message'),
    [
        ({'run': {}}, ConfigError, 'config is a dict: give an ml_collections ConfigDict'),
        ('configs/nothing.py', UserError, "there is no file 'configs/nothing.py'"),
        (
            small_config(cluster__learner='hosts=2 x data=2', learner__rows_per_microbatch=2),
            ConfigError,
            r"'hosts=2 x data=2' has 2 processes.* in each process",
        ),
        (small_config(rollout__slots=0), ConfigError, r'rollout\.slots'),
    ],
)
def test_what_cannot_run_is_one_sentence(tmp_path, config, error, message):
    with pytest.raises(error, match=message):
        areal_jax.train(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='is a file'):
        areal_jax.train(small_config(), tmp_path / 'file')


def test_a_second_run_at_the_same_time_is_refused(tmp_path, monkeypatch):
    errors = []

    def call(*_):
        try:
            areal_jax.train(small_config(), tmp_path / 'second')
        except UserError as error:
            errors.append(str(error))
        raise RuntimeError('enough')

    monkeypatch.setattr(own_site, 'build_model', call)
    with pytest.raises(RuntimeError, match='enough'):
        areal_jax.train(small_config(), tmp_path / 'first')
    assert 'another run of this process has not ended' in errors[0]


# Evaluation and export: what is passed on.


def test_evaluate_passes_its_arguments_on(tmp_path, monkeypatch):
    calls = []

    def evaluate_model(config, workdir, *, model, resume, source, interrupts):
        calls.append((config.run.steps, workdir, model, resume, source, interrupts.ends_process))
        with interrupts.deferred(print, 'stopping'):
            return {'accuracy': 0.5}

    monkeypatch.setitem(
        sys.modules, 'areal_jax.app.evaluate.evaluate', types.SimpleNamespace(evaluate_model=evaluate_model)
    )
    config = small_config(run__steps=7)
    assert areal_jax.evaluate(config, str(tmp_path), model=pathlib.Path('runs/a'), resume=True) == {'accuracy': 0.5}
    assert calls == [(7, tmp_path, 'runs/a', True, '', False)]


def test_export_passes_its_arguments_on(monkeypatch):
    export_run = lambda workdir, out, *, step, dtype: (workdir, out, step, dtype)
    monkeypatch.setitem(sys.modules, 'areal_jax.app.export.run_export', types.SimpleNamespace(export_run=export_run))
    found = areal_jax.export('runs/a', 'out', step=3, dtype='bfloat16')
    assert found == (pathlib.Path('runs/a'), pathlib.Path('out'), 3, 'bfloat16')


def test_evaluate_and_export_what_was_trained(tmp_path, monkeypatch):
    """The evaluation has the numbers of the run after its last update, also one that was interrupted and resumed."""
    config = small_config(run__steps=2, evaluation__problems=4, evaluation__samples=2)
    report = areal_jax.train(config, tmp_path / 'run')
    before = held()
    with monkeypatch.context() as patch:
        interrupt_at(patch, InlineVerifier, 'verify', call=2)
        with pytest.raises(KeyboardInterrupt):
            areal_jax.evaluate(config, tmp_path / 'evaluation', model=tmp_path / 'run')
    assert held() == before
    results = areal_jax.evaluate(config, tmp_path / 'evaluation', model=tmp_path / 'run', resume=True)
    assert results['model']['weights_sha256'] == report['weights_sha256']
    for name, accuracy in (('greedy', 'greedy'), ('avg@2', 'sampled')):
        assert results['metrics'][name]['mean'] == report['accuracy'][accuracy]['after']['mean']
    path = areal_jax.export(tmp_path / 'run', tmp_path / 'export', step=2, dtype='bfloat16')
    assert 'model.safetensors' in os.listdir(path)
