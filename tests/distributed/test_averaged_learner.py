"""A learner whose blocks are replaced by their means: which, when, and what a resumed one sends again."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from areal_jax.distributed.averaged_learner import Average, AveragedLearner, AverageError, Averages, ClientSettings
from areal_jax.sharding.rules import make_mesh
from tests.learning.block_examples import (
    DECODER,
    FIRST_GROUPS,
    PARAMS,
    assert_bit_equal,
    leaves_of,
    make_block_learner,
    make_blocks,
    weights_of,
)
from tests.learning.examples import learner_settings, make_optimizer

_STEPS = 12  # of the run


class OtherClient:
    """An exchange with a client that has changed every weight by 2: half of it is in the mean, 1 more than without."""

    def __init__(self):
        self.sent: queue.Queue[int] = queue.Queue()  # turns: they are sent by a thread

    def exchange(self, turn, block):
        self.sent.put(turn)
        return Average((0, 1), {path: leaf + np.float32(1) for path, leaf in block.items()}, waited_s=0.5)


def make_client(averages, *, overlap, steps=_STEPS, **blocks):
    return AveragedLearner(
        DECODER, PARAMS, make_mesh(),
        blocks=make_blocks(**blocks), optimizer=make_optimizer('adamw', clip_norm=1.0), learning_rate=0.05,
        settings=learner_settings(row_tokens=40, row_loss_tokens=24),
        averages=averages, client=ClientSettings(overlap, steps),
    )  # fmt: skip


def test_one_client_that_waits_is_the_learner_of_blocks_bit_for_bit(tmp_path):
    alone, client = make_block_learner(), make_client(Averages(tmp_path, 0, 1, run='', deadline_s=60.0), overlap=False)
    for version in range(4):
        alone.update(FIRST_GROUPS, version)
        metrics = client.update(FIRST_GROUPS, version)
        assert (metrics['average/block'], metrics['average/clients']) == (version % 3, 1)
        assert_bit_equal(leaves_of(alone.publish(version + 1)), leaves_of(client.publish(version + 1)))


def test_without_overlap_the_trained_block_is_replaced_at_the_end_of_its_turn():
    alone, client = make_block_learner(), make_client(OtherClient(), overlap=False)
    alone.update(FIRST_GROUPS, 0)
    client.update(FIRST_GROUPS, 0)
    mine, averaged = weights_of(alone), weights_of(client)
    for path in mine:
        np.testing.assert_array_equal(averaged[path], mine[path] + (path in client.paths[0]), err_msg=path)


def test_with_overlap_a_block_is_replaced_one_turn_later():
    """Turns of two updates: versions 0 and 1 train block 0, versions 2 and 3 block 1."""
    other = OtherClient()
    alone = make_block_learner(block_updates=2)
    client = make_client(other, overlap=True, block_updates=2)
    states = {}
    for version in range(2):  # turn 0: nothing was sent before
        alone.update(FIRST_GROUPS, version)
        metrics = client.update(FIRST_GROUPS, version)
        assert 'average/block' not in metrics
    assert_bit_equal(weights_of(alone), weights_of(client))  # block 0 is on its way
    for version in (2, 3):
        alone.update(FIRST_GROUPS, version)
        states[version] = client.update(FIRST_GROUPS, version), weights_of(client)
    # in the middle of turn 1 nothing changes; at its end the mean of block 0, which was sent after turn 0, is there
    assert 'average/block' not in states[2][0]
    metrics, averaged = states[3]
    assert (metrics['average/block'], metrics['average/clients'], metrics['average/seconds']) == (0, 2, 0.5)
    mine = weights_of(alone)
    assert_bit_equal({p: averaged[p] for p in client.paths[0]}, {p: mine[p] + 1 for p in client.paths[0]})
    assert_bit_equal({p: averaged[p] for p in client.paths[1]}, {p: mine[p] for p in client.paths[1]})
    assert [other.sent.get(timeout=60) for _ in range(2)] == [0, 1]


def test_a_version_publishes_the_trained_block_and_the_averaged_one():
    client = make_client(OtherClient(), overlap=True)
    client.update(FIRST_GROUPS, 0)
    before = leaves_by_identity(client.publish(1))
    client.update(FIRST_GROUPS, 1)
    after = leaves_by_identity(client.publish(2))
    assert {p for p in after if after[p] is not before[p]} == client.paths[0] | client.paths[1]


def leaves_by_identity(tree, prefix=''):
    found = {}
    for name, value in tree.items():
        found |= leaves_by_identity(value, f'{prefix}{name}/') if isinstance(value, dict) else {prefix + name: value}
    return found


def test_after_the_last_update_nothing_is_left_to_be_averaged():
    client = make_client(OtherClient(), overlap=True, steps=2)
    client.update(FIRST_GROUPS, 0)
    before = client.read_block(1)
    metrics = client.update(FIRST_GROUPS, 1)
    assert metrics['average/block'] == 1  # the last mean of the two of this update
    assert not all(np.array_equal(before[path], leaf) for path, leaf in client.read_block(1).items())


@pytest.mark.parametrize('overlap', [True, False])
@pytest.mark.parametrize('stop', [4, 5])
def test_a_resumed_client_makes_the_updates_of_the_uninterrupted_one(overlap, stop):
    blocks = {'block_updates': 2, 'blocks': 3}
    whole = make_client(OtherClient(), overlap=overlap, **blocks)
    for version in range(8):
        if version == stop:
            saved = whole.save()
        whole.update(FIRST_GROUPS, version)
    other = OtherClient()
    resumed = make_client(other, overlap=overlap, **blocks)
    resumed.restore(saved)
    for version in range(stop, 8):
        resumed.update(FIRST_GROUPS, version)
    assert_bit_equal(weights_of(whole), weights_of(resumed))
    # version 4 is in turn 2: what was on its way is sent again
    assert other.sent.get(timeout=60) == (1 if overlap else 2)


def test_an_error_of_the_exchange_ends_the_update():
    class Broken:
        def exchange(self, turn, block):
            raise AverageError('the directory is gone')

    client = make_client(Broken(), overlap=True)
    client.update(FIRST_GROUPS, 0)
    with pytest.raises(AverageError, match='the directory is gone'):
        client.update(FIRST_GROUPS, 1)
