"""What a process sets at its start, the packages that a config needs, and the key of servers."""

from __future__ import annotations

import gc
import importlib.util
import pathlib
import platform
import stat
import subprocess
import sys
import threading

import pytest

from areal_jax.app.process.setup import (
    API_KEY,
    EXTRAS,
    FullCollections,
    find_key,
    require_extras,
    require_key,
    require_serving,
)
from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.distributed.handshake import KeyFileError, key_path, load_key
from areal_jax.errors import UserError
from areal_jax.rollout.http.server.thread import bind


@pytest.fixture
def collector():
    """Python's collector, and at the end its settings again; no collection comes of itself."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.disable()
    gc.set_threshold(700, 10, 10)
    yield gc
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.enable()


class Clock:
    """Each collection takes `lasting_s`, as it is asked for the time at the start and at the end of one."""

    def __init__(self):
        self.time_s, self.lasting_s = 0.0, 0.0

    def __call__(self):
        self.time_s += self.lasting_s
        return self.time_s


def test_a_full_collection_is_put_off_for_a_hundred_times_its_duration(collector):
    clock = Clock()
    collector.callbacks.append(FullCollections(clock).note)
    clock.time_s, clock.lasting_s = 50.0, 2.0
    collector.collect()  # from 52 to 54 s
    assert collector.get_threshold()[:2] == (700, 10)
    assert collector.get_threshold()[2] > 10**9
    clock.lasting_s = 0.0
    for time_s, due in ((253.0, False), (254.0, True)):
        clock.time_s = time_s
        collector.collect(1)
        assert (collector.get_threshold() == (700, 10, 10)) is due


def test_collections_of_new_objects_put_nothing_off(collector):
    clock = Clock()
    clock.lasting_s = 2.0
    collector.callbacks.append(FullCollections(clock).note)
    collector.collect(0)
    collector.collect(1)
    assert collector.get_threshold() == (700, 10, 10)


# Open requests come and go, as many as there are: Python alone searches all of them again and again.
TURNOVER = """
import collections, gc, sys, weakref
from areal_jax.app.process.setup import space_full_collections
if sys.argv[1] == 'spaced':
    space_full_collections()
full = 0
def count(phase, info):
    global full
    full += phase == 'stop' and info['generation'] == 2
gc.callbacks.append(count)
class Open: ...
circle = Open()
circle.itself, found = circle, weakref.ref(circle)
del circle
turned_over = 0
requests = collections.deque(([], [], []) for _ in range(100_000))
while full < 2 or found() is not None or turned_over < 6:
    for _ in range(100):  # 1,000 at once: Python counts objects made less objects freed
        for _ in range(1000):
            requests.popleft()
        requests.extend(([], [], []) for _ in range(1000))
    turned_over += 1
print(full / turned_over)
"""


def full_collections(setting):
    """In the time in which all objects are replaced once."""
    done = subprocess.run(
        [sys.executable, '-c', TURNOVER, setting], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


def test_python_searches_all_objects_rarely_and_finds_circles_all_the_same():
    assert full_collections('spaced') < 0.3 * full_collections('as it is')


# 100 blocks of 4 MB, freed in an order that leaves a heap full of holes: the last one keeps it from shrinking
PROGRAM = """
import psutil, numpy as np
from areal_jax.app.process.setup import return_freed_memory
{call}
np.ones(3_000_000).sum()  # freeing 24 MB makes glibc raise its threshold for mapped blocks to that
blocks = [np.ones(500_000) for _ in range(100)]
keep = blocks[-1]
del blocks
print(psutil.Process().memory_info().rss >> 20)
"""


def resident_mb(call):
    done = subprocess.run([sys.executable, '-c', PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='mallopt is of glibc')
def test_freed_blocks_go_back_to_the_system():
    assert resident_mb('pass') > 350  # 0.4 GB of holes
    assert resident_mb('assert return_freed_memory()') < 200


# The key of servers: the user's, or that of a run, which its processes share and nobody else reads.


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)


def test_the_key_of_the_user_wins_over_that_of_a_run(tmp_path, monkeypatch):
    assert find_key() == ''
    own = find_key(tmp_path)
    monkeypatch.setenv(API_KEY, 'mine')
    assert (find_key(), find_key(tmp_path)) == ('mine', 'mine')
    monkeypatch.setenv(API_KEY, '')
    assert find_key(tmp_path) == own


def test_all_processes_of_a_run_that_start_at_the_same_time_have_one_key_that_nobody_else_reads(tmp_path):
    keys, start = [], threading.Barrier(8)

    def find():
        start.wait(5)
        keys.append(find_key(tmp_path))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    file = tmp_path / 'registry' / 'api_key'
    assert (len(keys), len(set(keys)), len(keys[0])) == (8, 1, 64)
    assert (file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)) == (keys[0], 0o600)
    assert find_key(tmp_path / 'other') != keys[0] != load_key(key_path(tmp_path)).hex()


def test_a_key_that_others_could_read_is_refused(tmp_path):
    find_key(tmp_path)
    (tmp_path / 'registry' / 'api_key').chmod(0o644)
    with pytest.raises(KeyFileError, match='api_key has mode 644, so that others may know the key'):
        find_key(tmp_path)


@pytest.mark.parametrize('host', ['127.0.0.1', '127.8.9.1', 'localhost'])
def test_a_server_of_this_machine_alone_needs_no_key(host):
    with bind(host, 0) as listener:
        require_key(listener, '', is_insecure=False)


def test_a_server_that_other_machines_reach_needs_a_key_unless_that_is_meant():
    with bind('0.0.0.0', 0) as listener:
        require_key(listener, 'secret', is_insecure=False)
        require_key(listener, '', is_insecure=True)
        with pytest.raises(
            UserError, match=r'^--host=0\.0\.0\.0 lets other machines .*: set AREAL_JAX_API_KEY, or add --i'
        ):
            require_key(listener, '', is_insecure=False)


# A package that a config needs and that is missing is named before anything is built.


NEEDED = {
    'tensorboardX': ({}, r"telemetry\.tensorboard=True .*\[tensorboard\]', or --config\.telemetry\.tensorboard=False"),
    'matplotlib': ({}, r"telemetry\.plots=True .*\[plots\]', or --config\.telemetry\.plots=False"),
    'reasoning_gym': ({'task.name': 'reasoning_gym'}, r"task\.name='reasoning_gym' .*\[tasks\]'$"),
    'math_verify': (
        {'task.name': 'jsonl', 'task.path': 'x', 'task.answer': 'math'}, r"task\.answer='math' .*\[tasks\]'$"
    ),
    'gguf': ({'model.source': 'gguf'}, r"model\.source='gguf' .*\[gguf\]'$"),
    'aiohttp': (
        {'rollout.server': 'own'}, r"rollout\.server='own' .*\[serve\]', or --config\.rollout\.server='in_process'"
    ),
    'pydantic': ({'rollout.workflow': 'program'}, r"rollout\.workflow='program' .*\[serve\]'$"),
    'wandb': ({'telemetry.tracker': 'wandb'}, r"telemetry\.tracker='wandb' .*\[wandb\]', or .*tracker=none"),
    'mlflow': ({'telemetry.tracker': 'mlflow'}, r"telemetry\.tracker='mlflow' .*\[mlflow\]'"),
    'mcp': ({'agent.mcp_servers': ('server',)}, r"agent\.mcp_servers=\('server',\) .*\[agents\]'$"),
    'trackio': ({'telemetry.tracker': 'trackio'}, r"telemetry\.tracker='trackio' .*\[trackio\]'"),
}  # fmt: skip


@pytest.mark.parametrize('missing', NEEDED)
def test_a_missing_package_is_named_with_the_command(monkeypatch, missing):
    fields, message = NEEDED[missing]
    config = default_config()
    require_extras(config)
    config.update_from_flattened_dict(fields)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == missing else find(name))
    with pytest.raises(ConfigError, match=rf'{message}'):
        require_extras(config)


def test_a_server_needs_the_package_of_its_notation(monkeypatch):
    config, find = default_config(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'renderers' else find(name))
    require_serving(config)
    config.server.notation = 'qwen3'
    with pytest.raises(ConfigError, match=r"server\.notation='qwen3' needs the package renderers, .*\[agents\]'$"):
        require_serving(config)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r"a server needs the package aiohttp, .*\[serve\]'$"):
        require_serving(config)


def test_a_bare_installation_runs_what_needs_no_extra(monkeypatch):
    config = default_config()
    config.update_from_flattened_dict({'telemetry.tensorboard': False, 'telemetry.plots': False})
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    require_extras(config)


def test_every_extra_that_is_named_can_be_installed():
    setup = pathlib.Path('setup.py').read_text()
    for package, extra in EXTRAS.items():
        assert f"'{extra}': " in setup, package
