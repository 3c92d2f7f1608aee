"""Memory that XLA frees is given to it again. Each program is a process of its own: the setting is for a whole one."""

import json
import pathlib
import platform
import subprocess
import sys

import pytest

from areal_jax.native import compiled_library as library
from tests.native import needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='blocks are kept beside glibc'),
]

START = """
import gc, json, resource, sys, time
import jax, jax.numpy as jnp, numpy as np
from areal_jax.app.process.setup import return_freed_memory
from areal_jax.native import compiled_library as blocks
from areal_jax.native import arrays
return_freed_memory()
keeps = sys.argv[1] == 'keep'
assert not keeps or blocks.keep_blocks()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def square(x):  # a temporary of 64 MB
    return jnp.tanh(x[:, None] * jnp.arange(64.0)) @ jnp.ones((64, 8))
"""
REPEAT = """
x = jnp.arange(1 << 18, dtype=jnp.float32)
program = jax.jit(square)
def call():
    time.sleep(0.05)  # the call before lets go of its memory, a moment after its result is there
    return np.asarray(program(x)[-1]).tolist()
values = [call() for _ in range(3)]  # the first one compiles in between
began = faults()
values += [call() for _ in range(12)]
print(json.dumps([values, faults() - began, blocks.count_blocks()]))
"""
BOUND = """
counts = []
def note():
    counts.append(blocks.count_blocks())
def make(size):
    return jax.block_until_ready(jnp.ones(size << 18))  # MiB
held = [make(40), make(30)]; note()
del held; note()  # 70 MiB kept
small = make(30); note()
other = make(64); note()  # fits no kept block, and with one of them it would be more than 5/4 of what was in use
blocks.free_kept_blocks(); note()
del small, other; note()
other = make(20); note()  # less than a quarter above the 94 MiB
more = make(5); note()
print(json.dumps(counts))
"""
AWAITED = r"""
#include "blocks.h"

#include <cstdio>
#include <thread>

// How often, of five times, a block that is freed 2 ms after it is asked for is given.
int main() {
  constexpr size_t kBytes = areal_jax::kAwaitedBytes;
  int given = 0;
  for (int turn = 0; turn < 5; ++turn) {
    areal_jax::Blocks blocks;
    char memory;  // its address is all that is read
    blocks.NoteFresh(&memory, kBytes);
    std::atomic<bool> asked{false};
    std::thread other([&] {
      while (!asked) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      blocks.Keep(&memory, kBytes);
    });
    asked = true;
    given += blocks.Take(1, kBytes) == &memory;
    other.join();
  }
  std::printf("%d", given);
}
"""
NUMPY = """
first = arrays.empty_aligned((1 << 20,))
address = first.ctypes.data
first[:] = 3
on_device = jax.device_put(first[: 1 << 19])
del first
other = arrays.empty_aligned((1 << 20,))
assert other.ctypes.data != address  # the array on the device lies in it
assert on_device.unsafe_buffer_pointer() == address
del on_device
gc.collect()  # jax lets go of arrays of the host a moment later
print(json.dumps(arrays.empty_aligned((1 << 20,)).ctypes.data == address))
"""


def run(program, mode='keep'):
    done = subprocess.run(
        [sys.executable, '-c', START + program, mode], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_program_that_runs_again_asks_the_system_for_hardly_any_pages():
    plain, plain_faults, _ = run(REPEAT, 'plain')
    kept, kept_faults, (_, _, given_again) = run(REPEAT)
    assert kept == plain
    assert plain_faults > 12 * (64 << 20) / 4096  # the temporary, in every call
    # on a loaded machine a call may still begin before that: then there is one more block from that call on
    assert kept_faults < plain_faults / 3
    assert given_again >= 9


def test_a_program_waits_a_moment_for_the_memory_of_the_one_before(tmp_path):
    """XLA says that results are ready before it frees what the program needed beside them."""
    source, program = tmp_path / 'awaited.cc', tmp_path / 'awaited'
    source.write_text(AWAITED)
    headers = pathlib.Path(library.__file__).parent
    compiler = [library.find_compiler(), '-std=c++17', '-pthread', f'-I{headers}']
    subprocess.run([*compiler, str(source), '-o', str(program)], check=True)
    given = int(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)
    assert given >= 1  # on a busy machine the other thread may come too late


def test_at_most_a_quarter_more_is_held_than_was_in_use_at_once():
    most, freed, again, grown, cleared, free, above, bound = run(BOUND)
    mib = lambda counts: [round(part / (1 << 20)) for part in counts[:2]]  # kept, in use
    assert mib(most) == [0, 70]
    assert mib(freed) == [70, 0]
    assert mib(again) == [40, 30]
    assert mib(grown) == [0, 94]
    assert mib(cleared) == [0, 94]
    assert mib(free) == [94, 0]
    assert mib(above) == [94, 20]  # of 117 that may be
    assert mib(bound) == [64, 25]  # the smallest block that is enough went


def test_an_array_of_the_host_gives_its_memory_back_when_nothing_refers_to_it():
    assert run(NUMPY)
