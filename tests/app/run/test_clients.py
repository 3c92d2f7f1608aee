"""Runs of several clients that average their blocks, each on a thread of its own under the virtual clock."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from areal_jax.distributed.averaged_learner import AverageError
from tests.app.small import SmallRun, equal, train_until_killed
from tests.learning.block_examples import leaves_of

FIELDS = {
    'run__steps': 6, 'optimizer__blocks': 3, 'learner__filter_equal_rewards': False, 'loss__entropy_coefficient': 0.1,
    'checkpoint__every': 1, 'distributed__clients': 2, 'distributed__average_deadline_s': 300.0,
}  # fmt: skip


def build_clients(directory, resume=False, **fields):
    means = {'distributed__average_directory': str(directory / 'means')}
    return [
        SmallRun(directory / f'client_{client}', resume=resume, **FIELDS | means | fields, distributed__client=client)
        for client in range(2)
    ]


def train_all(runs):
    """Trains runs at the same time; returns what they raised."""
    errors = []

    def train(run):
        try:
            run.train()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert errors == []
    return runs


def rows(run):
    return [json.loads(line) for line in (run.workdir / 'metrics.jsonl').read_text().splitlines()]


def draws(run):
    """The prompts in the order of their draws."""
    found = {group.draw: tuple(group.trajectories[0].prompt.tokens) for batch in run.batches for group in batch}
    return [found[draw] for draw in sorted(found)]


@pytest.fixture(scope='module')
def clients(tmp_path_factory):
    return train_all(build_clients(tmp_path_factory.mktemp('clients')))


def test_clients_train_on_prompts_of_their_own_and_end_with_equal_weights(clients):
    assert equal(clients[0].final, clients[1].final)
    assert not equal(clients[0].weights[2], clients[1].weights[2])  # block 1 is on its way then
    assert draws(clients[0]) != draws(clients[1])
    assert [row.get('average/clients') for row in rows(clients[0])] == [None, 2, 2, 2, 2, 2]
    assert [row.get('average/block') for row in rows(clients[0])] == [None, 0, 1, 2, 0, 2]  # at the end both


def test_a_block_is_one_turn_behind(clients):
    """The version after turn t has the mean of the block of turn t - 1, and the client's own block of turn t."""
    paths = clients[0].session.site.learner.paths
    for version in range(2, 6):
        a, b = (leaves_of(run.weights[version]) for run in clients)
        differing = {path for path in a if not np.array_equal(a[path], b[path])}
        assert differing == paths[(version - 1) % 3]


@pytest.mark.slow
def test_the_result_is_a_function_of_the_seed(clients, tmp_path):
    again = train_all(build_clients(tmp_path))
    for run, other in zip(clients, again, strict=True):
        assert all(equal(run.weights[version], other.weights[version]) for version in run.weights)
        assert run.events == other.events


def test_a_client_that_was_killed_goes_on_where_it_was(clients, tmp_path):
    """Client 1 dies after update 4 and is resumed while client 0 waits: all weights are those without the death."""
    first, second = build_clients(tmp_path)
    other = threading.Thread(target=first.train)
    other.start()
    train_until_killed(second, 4)
    resumed = SmallRun(
        second.workdir, resume=True, **FIELDS, distributed__client=1,
        distributed__average_directory=str(tmp_path / 'means'),
    ).train()  # fmt: skip
    other.join(300)
    assert resumed.version_at_start in (3, 4)
    assert equal(resumed.final, clients[1].final)
    assert equal(first.final, clients[0].final)


def test_a_new_run_does_not_take_the_means_of_an_earlier_one(clients, tmp_path):
    means = str(clients[0].workdir.parent / 'means')
    with pytest.raises(AverageError, match=r'has means of an earlier run, with client 0 in them'):
        SmallRun(tmp_path / 'again', **FIELDS, distributed__average_directory=means)


@pytest.mark.slow
def test_without_overlap_clients_have_equal_weights_after_every_turn(tmp_path):
    runs = train_all(build_clients(tmp_path, distributed__overlap=False, run__steps=4, optimizer__block_updates=2))
    assert [equal(runs[0].weights[version], runs[1].weights[version]) for version in range(5)] == [
        *(True, False, True, False, True)
    ]
