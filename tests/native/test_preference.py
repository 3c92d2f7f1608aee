"""Kernels that give way to an update: the same bits, on threads that no other work waits for."""

import contextlib
import os
import pathlib
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.expert_products import mix_native
from areal_jax.models.quantized import NativeColumns
from areal_jax.native.compiled_library import preferred
from tests.native import needs_kernels
from tests.native.test_kernels import multiply, normal
from tests.rollout.decode.examples import Decoding, backend, request

pytestmark = needs_kernels


def idle_threads():
    """CPU time in ticks of each thread of this process that runs when nothing else does, once all of them wait.

    On a busy machine one gets to the end of its work only after the result is there.
    """
    tasks = [int(path.name) for path in pathlib.Path('/proc/self/task').iterdir()]
    idle = [task for task in tasks if os.sched_getscheduler(task) == os.SCHED_IDLE]
    until = time.monotonic() + 60
    while True:
        texts = {task: pathlib.Path(f'/proc/self/task/{task}/stat').read_text() for task in idle}
        read = {task: text.rpartition(')')[2].split() for task, text in texts.items()}
        if all(fields[0] == 'S' for fields in read.values()):
            return {task: sum(map(int, fields[11:13])) for task, fields in read.items()}
        assert time.monotonic() < until, 'threads of low priority do not end'
        time.sleep(0.01)


def decode():
    run = Decoding(backend())
    run.start({'a': request(0), 'b': request(1, prompt=range(1, 12)), 'c': request(2, new=3)})
    run.finish()
    return [(run.tokens(name), run.logprobs(name)) for name in 'abc']


def test_decoding_that_gives_way_has_the_same_bits():
    before = decode()
    with preferred():
        beside = decode()
    assert beside == before


def multiply_much():
    """About 50 ms of one processor: idle time is counted in ticks of 10 ms."""
    w, x = NativeColumns().stored_table(normal(1, 4096, 1024)), normal(2, 1024, 64)
    for _ in range(8):
        multiply(x, w)[0].block_until_ready()


@pytest.mark.skipif(sys.platform != 'linux', reason='policies of threads are those of Linux')
def test_kernels_run_on_idle_threads_while_an_update_is_preferred_and_only_then():
    multiply_much()
    with preferred(), preferred():
        multiply_much()
    held = idle_threads()
    assert held
    multiply_much()
    assert idle_threads() == held  # preferred by nobody any more
    with contextlib.suppress(ValueError), preferred():
        multiply_much()
        raise ValueError('of an update')
    grown = idle_threads()
    assert sum(grown.values()) > sum(held.values())
    multiply_much()
    assert idle_threads() == grown


@pytest.mark.skipif(sys.platform != 'linux', reason='policies of threads are those of Linux')
def test_the_experts_of_an_update_are_not_behind_it():
    with preferred():
        multiply_much()
        held = idle_threads()
        x, experts = normal(3, 2048, 64), jnp.zeros((2048, 1), jnp.int32)
        for _ in range(8):
            mix_native(
                x, experts, jnp.ones((2048, 1)), normal(4, 1, 64, 512), normal(5, 1, 64, 512), normal(6, 1, 512, 64)
            )
        assert idle_threads() == held


def test_calls_at_the_same_time_have_memory_of_their_own():
    w, inputs = NativeColumns().stored_table(normal(1, 512, 1024)), [normal(i, 1024, 45) for i in range(4)]
    expected = [np.asarray(multiply(x, w)[0]) for x in inputs]
    wrong = []

    def repeat(x, whole):
        wrong.extend(1 for _ in range(100) if not np.array_equal(multiply(x, w)[0], whole))

    threads = [threading.Thread(target=repeat, args=work) for work in zip(inputs, expected, strict=True)]
    with preferred():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
