import gc
import platform
import subprocess
import sys

import pytest

from areal_jax.app.process.setup import FullCollections


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
requests = collections.deque(([], [], []) for _ in range(300_000))
while full < 2 or found() is not None or turned_over < 6:
    for _ in range(300):  # 1,000 at once: Python counts objects made less objects freed
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


# 400 blocks of 4 MB, freed in an order that leaves a heap full of holes: the last one keeps it from shrinking
PROGRAM = """
import psutil, numpy as np
from areal_jax.app.process.setup import return_freed_memory
{call}
np.ones(3_000_000).sum()  # freeing 24 MB makes glibc raise its threshold for mapped blocks to that
blocks = [np.ones(500_000) for _ in range(400)]
keep = blocks[-1]
del blocks
print(psutil.Process().memory_info().rss >> 20)
"""


def resident_mb(call):
    done = subprocess.run([sys.executable, '-c', PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='mallopt is of glibc')
def test_freed_blocks_go_back_to_the_system():
    assert resident_mb('pass') > 1000  # 1.6 GB of holes
    assert resident_mb('assert return_freed_memory()') < 300
