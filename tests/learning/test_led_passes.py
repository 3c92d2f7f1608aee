"""Processes that repeat the passes of process 0 get the rows that they kept when each packed everything, and make the
same update to the last bit. Real processes: tests/distributed/test_two_processes.py."""

from __future__ import annotations

import dataclasses
import queue
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.cluster import AXES
from areal_jax.distributed.messages import decode, encode
from areal_jax.learning.led_passes import (
    LeaderFailedError,
    PassCall,
    PassFollower,
    PassLeader,
    PassRows,
    Told,
)
from areal_jax.learning.packed_rows import RowShape
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import training_rows
from areal_jax.sharding import placement
from areal_jax.sharding.placement import place_rows
from areal_jax.sharding.rules import row_sharding, rows_by_process
from tests.learning import test_critic, test_routes
from tests.learning.examples import learner_settings, random_groups
from tests.learning.test_brakes import brake


class _Lines:
    """Carries what process 0 tells, as bytes, to each of the others."""

    def __init__(self, count):
        self.queues = [queue.Queue() for _ in range(count)]

    def send(self, values):
        for line, value in zip(self.queues, values, strict=True):
            line.put(encode(tuple(value)))

    def receive(self, index):
        return lambda: Told(*decode(self.queues[index].get(timeout=60)))


def _batch(seed):
    """A random batch with routes, as [M, 8, ...] rows, in the form of a pass."""
    rng = np.random.default_rng(seed)
    groups = test_routes.give_routes(random_groups(seed, int(rng.integers(2, 9))), test_routes.draw_routes)
    advantages = [rng.normal(size=len(group.trajectories)).astype(np.float32) for group in groups]
    (batch,), _ = pack(
        groups, advantages, mode='ordinary', fill='first_fit', row_tokens=32, row_loss_tokens=24,
        rows_per_microbatch=8, n_minibatches=1, inputs=(test_routes.ROUTES,),
    )  # fmt: skip
    rows, denominator = training_rows(batch, learner_settings().objective)
    assert ROUTED_EXPERTS.name in rows
    return rows, PassCall('step', denominator=denominator, version=int(rng.integers(9)), factor=0.1)


def _deal(rng, processes):
    """Rows of a micro-batch of 8 for each process: every row is of one process or more."""
    dealt = np.array_split(rng.permutation(8), processes)
    return [np.unique([*own, rng.integers(8)]) for own in dealt]


@pytest.mark.parametrize('processes', range(1, 9))
def test_each_process_gets_its_rows_of_every_array_once(processes):
    rng = np.random.default_rng(processes)
    own, lines = _deal(rng, processes), _Lines(processes)
    leader = PassLeader(lines.send, own)
    followers = [PassFollower(lines.receive(index), rows) for index, rows in enumerate(own)]
    (arrays, call), (later, _) = _batch(processes), _batch(processes + 100)
    changed = arrays | {'advantages': arrays['advantages'] + 1}
    shapes = [RowShape(32, 24)] * len(arrays['tokens'])
    with leader.command():
        for given in (arrays, changed, later):
            leader.share(call, PassRows(given, shapes))
    for follower, rows, line in zip(followers, own, lines.queues, strict=True):
        sent = [Told(*decode(body)).new for body in line.queue]
        assert [len(new) for new in sent[1:]] == [1, len(sent[0]), 0]  # zeros have several names, and are sent once
        for given, (found, of) in zip((arrays, changed, later), follower.calls(), strict=True):
            assert found == call
            assert of.shapes == shapes
            assert of.own is rows
            for name, array in given.items():
                assert of.arrays[name].dtype == array.dtype
                np.testing.assert_array_equal(of.arrays[name], array[:, rows], err_msg=name)


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device of some process, for a mesh that is not there."""

    id: int
    process_index: int
    platform: str = 'cpu'
    device_kind: str = 'cpu'
    client: object = None


@pytest.mark.parametrize('processes', [1, 2, 4, 8])
@pytest.mark.parametrize('sizes', [(1, 8, 1, 1, 1), (2, 2, 2, 1, 1), (2, 1, 2, 1, 2), (1, 2, 1, 2, 2)])
@pytest.mark.parametrize('shuffled', [False, True], ids=['in order', 'in the order of links'])
def test_the_rows_of_a_process_are_what_its_devices_hold(monkeypatch, processes, sizes, shuffled):
    numbers = np.random.default_rng(0).permutation(8) if shuffled else np.arange(8)
    grid = np.array([_Device(int(n), int(n) * processes // 8) for n in numbers], object).reshape(sizes)
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    whole = np.random.default_rng(1).normal(size=(3, 16, 24)).astype(np.float32)
    sharding = row_sharding(mesh, leading_axes=1)
    places = sharding.devices_indices_map(whole.shape)
    held = rows_by_process(mesh, 16)
    assert sorted(held) == list(range(processes))
    for process, own in held.items():

        def check(shape, _, cut, process=process):
            assert shape == whole.shape
            for device, index in places.items():
                if device.process_index == process:
                    np.testing.assert_array_equal(cut(index), whole[index])

        monkeypatch.setattr(placement.jax, 'make_array_from_callback', check)
        place_rows(whole[:, own], 1, own, 16, sharding)


_EVERYTHING = {
    'kl_coefficient': 0.1, 'n_minibatches': 2, 'epochs': 2, 'router_aux_loss': 0.1, 'gate': 'second_moment',
    'brake': brake('ess'), 'ratio_sample': 1.0, 'ring_bytes': 10**8,
}  # fmt: skip
_ROUTED = test_routes.make_learner, test_routes.FOREIGN
_CASES = [
    pytest.param(*_ROUTED, _EVERYTHING, id='all kinds of passes'),
    pytest.param(*_ROUTED, {}, id='one pass', marks=pytest.mark.slow),
    pytest.param(*_ROUTED, {'accumulate': 'scan'}, id='scan', marks=pytest.mark.slow),
    pytest.param(
        test_critic.make_learner, test_critic.halves()[1], {'truncated_value': 'last'}, id='critic',
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


def _pair(make_learner, **settings):
    """A learner that leads, and one that follows it."""
    leader, follower, lines = make_learner(**settings), make_learner(**settings), _Lines(1)
    follower.follow(lines.receive(0))
    leader.parts[0].passes.link = PassLeader(lines.send, [follower.parts[0].passes.link.own])
    return leader, follower


def _together(follower, command):
    """Executes a command while the follower repeats its passes; returns its result."""
    thread = threading.Thread(target=follower.repeat_passes)
    thread.start()
    result = command()
    thread.join(60)
    assert not thread.is_alive()
    return result


@pytest.mark.parametrize(('make_learner', 'groups', 'settings'), _CASES)
def test_one_that_repeats_the_passes_makes_the_same_update(make_learner, groups, settings):
    alone = make_learner(**settings)
    leader, follower = _pair(make_learner, **settings)
    for version in (2, 3):
        expected = alone.update(groups, version)
        metrics = _together(follower, lambda version=version: leader.update(groups, version))
        timed = {key for key in metrics if 'seconds' in key or key.endswith('/share')}
        assert {k: v for k, v in metrics.items() if k not in timed} == {
            k: v for k, v in expected.items() if k not in timed
        }
        for each in (alone, leader, follower):
            each.publish(version + 1)
    weights = [jax.device_get((each.state.params, each.state.optimizer)) for each in (alone, leader, follower)]
    jax.tree.map(np.testing.assert_array_equal, *weights[:2])
    jax.tree.map(np.testing.assert_array_equal, *weights[1:])
    answer = groups[0].trajectories[0]
    given = (4, answer.prompt.tokens, answer.answer_tokens)
    np.testing.assert_array_equal(_together(follower, lambda: leader.score(*given)), alone.score(*given))


def test_after_an_update_that_fails_or_has_nothing_to_train_both_are_in_step():
    leader, follower = _pair(test_critic.make_learner)
    groups, failed = random_groups(5, 2), []
    _together(follower, lambda: leader.update([], 1))

    def repeat():
        with pytest.raises(LeaderFailedError):
            follower.repeat_passes()
        failed.append(True)

    told = threading.Thread(target=repeat)
    told.start()
    with pytest.raises(ValueError, match='policy version 2, but the update starts from version 1'):
        leader.update(groups, 1)
    told.join(60)
    assert failed == [True]
    _together(follower, lambda: leader.update(groups, 2))
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(each.state.params) for each in (leader, follower)))
