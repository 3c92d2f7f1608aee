"""The pool of window layers under random schedules of all sizes, on the host alone: a backend that computes nothing.

The recorder of test_random_schedules.py knows what every part of every block holds, and requires it of each dispatch.
"""

import collections
import zlib

import numpy as np
import pytest

from areal_jax.rollout.backend import DecodeOutput, PrefillBucket, SamplingSupport
from areal_jax.rollout.window_blocks import WindowPool, WindowSizes, size_windows
from tests.rollout.decode.test_random_schedules import CONTEXT, STEPS, Recorder, Schedule, assert_delivered


class HostBackend:
    """rollout.backend.DecodeBackend whose tokens are hashes of the request and the position."""

    devices, state_bytes, records_context, largest_piece, slots = ('host',), 0, False, 16, 4
    sampling = SamplingSupport(vocab_size=300, cuts=True, adjusts=False, stop_tokens=4, biased_tokens=0)

    def __init__(self, block_tokens, cache_blocks, windows, states=None):
        self.context_tokens, self.block_tokens, self.cache_blocks = CONTEXT, block_tokens, cache_blocks
        self.windows, self.states = windows, states

    def prepare(self, weights):
        return weights

    def initial_state(self):
        return 0

    def prefill_bucket(self, spans):
        tokens = sum(stop - start for start, stop in spans)
        return PrefillBucket(-(-tokens // 8) * 8, 0) if tokens <= self.largest_piece else None

    def batch_bucket(self, rows):
        return self.slots

    def prefill(self, weights, state, pieces):
        return state

    def copy(self, state, copies, parts=(), states=()):
        return state

    def generate(self, weights, state, rows, steps):
        tokens, valid = np.zeros((steps, len(rows)), np.int32), np.zeros((steps, len(rows)), bool)
        for index, row in enumerate(rows):
            for step in range(min(steps, row.limit - row.position - 1)):
                name = row.request.draw, row.request.sample, row.position + step
                tokens[step, index] = zlib.crc32(repr(name).encode()) % 300
                valid[step, index] = True
                if tokens[step, index] in row.request.sampling.stop_tokens:
                    break
        logprobs = np.full(tokens.shape, -1, np.float32)
        return state, DecodeOutput(tokens, logprobs, valid, {'sampling_logprobs': logprobs})


class HostRecorder(Recorder):
    def _write_nan(self, state, blocks, offsets, parts, states):
        return state


def run(seed, actions=50, states=None):
    """A schedule with a window, blocks, a cache and a pool of a random size, this not smaller than it may be.

    `states` are sizes: then there are recurrent layers too.
    """
    rng = np.random.default_rng(seed)
    block, window = (int(rng.choice(sizes)) for sizes in ([1, 2, 3, 4], [1, 2, 5, 6, 9]))
    cache = int(rng.choice([56, 64, 96, 150])) // block
    sizes = {'slots': 4, 'cache_blocks': 10**6, 'block_tokens': block, 'steps': STEPS, 'piece_tokens': 16}
    kept = 2 * (-(-window // block) + 1)  # the part of the pool that no sequence needs
    parts = min(cache, size_windows(window, **sizes).blocks - int(rng.choice([0, kept, kept])))
    recorder = HostRecorder(HostBackend(block, cache, WindowSizes(window, parts), states))
    policy = ('recompute', 'keep')[seed % 2]
    schedule = Schedule(seed, block_tokens=block, cache_tokens=cache, kv_policy=policy, recorder=recorder)
    assert_delivered(schedule.run(actions))
    return schedule.occurred


def test_every_dispatch_finds_what_it_sees_in_the_layers_with_a_window():
    occurred = collections.Counter()
    for seed in range(15):
        occurred += run(seed)
    wanted = ('prefix hit', 'preempted answer goes on', 'block copied', 'resumed engine', 'swap', 'part is gone')
    assert {*wanted, 'kept sequence gone on with', 'keys of earlier weights read', 'resumed answer'} <= set(occurred)


@pytest.mark.parametrize('early', [4, 8])
def test_a_part_that_is_given_away_some_tokens_too_early_shows(monkeypatch, early):
    hold = WindowPool.hold

    def too_early(self, need, blocks, start, stop):
        hold(self, need, blocks, start, stop)
        hold(self, need, blocks, min(start + early, stop), stop)

    monkeypatch.setattr(WindowPool, 'hold', too_early)
    with pytest.raises((AssertionError, IndexError)):
        run(0)


@pytest.mark.slow
def test_many_schedules():
    for seed in range(100, 400):
        run(seed)
