"""The mean of a block over clients, through a directory: who is in it, and that all read the same one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from areal_jax.distributed.averaged_learner import AverageError, Averages, mean_blocks
from areal_jax.distributed.messages import encode


def make_block(value, shape=(2,)):
    return {'layers/0/up': np.full(shape, value, np.float32)}


def exchange_all(directory, values, turn=0, clients=None, **settings):
    """Each client on a thread of its own, as clients in processes are; returns the means by client."""
    means = {}

    def run(client, value):
        averages = Averages(directory, client, clients or len(values), **{'run': 'a', 'deadline_s': 60.0} | settings)
        means[client] = averages.exchange(turn, make_block(value))

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in values.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return means


def value_of(average):
    return average.values['layers/0/up'].tolist()


def test_all_clients_get_the_mean(tmp_path):
    # equal weights 1 before the turn, changes 1, 3 and 8: 1 + (1 + 3 + 8) / 3 = 5
    means = exchange_all(tmp_path / 'means', {0: 2.0, 1: 4.0, 2: 9.0})
    assert [value_of(means[client]) for client in range(3)] == [[5.0, 5.0]] * 3
    assert means[0].clients == (0, 1, 2)
    assert not list(tmp_path.glob('means/turn_*/client_*'))  # only the mean stays


def test_the_mean_of_one_client_is_its_block_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    block = {'a': rng.normal(size=100).astype(np.float32), 'b': np.float32([1e-45, -0.0, 3e38])}
    mean = Averages(tmp_path, 0, 1, run='a', deadline_s=60.0).exchange(0, block).values
    assert {path: leaf.tobytes() for path, leaf in mean.items()} == {p: leaf.tobytes() for p, leaf in block.items()}


def test_the_mean_does_not_depend_on_who_comes_first():
    values = [np.float32(v) for v in (1e8, 1.0, -1e8, 1.0)]
    blocks = [make_block(value) for value in values]
    assert mean_blocks(blocks, None)['layers/0/up'].tolist() == [0.5, 0.5]  # float32 sums give 0.25, 0.5 or 0


def send_first(directory, client, value, turn=0, shape=(2,), **settings):
    """A client that has sent its block and waits for the mean; returns a function that gives the mean."""
    means = []
    averages = Averages(directory, client, **{'clients': 2, 'run': 'a', 'deadline_s': 1e5} | settings)
    thread = threading.Thread(
        target=lambda: means.append(averages.exchange(turn, make_block(value, shape))), daemon=True
    )
    thread.start()
    while not (directory / f'turn_{turn:06d}' / f'client_{client}').exists():
        time.sleep(0.001)

    def finish():
        thread.join(60)
        return means[0]

    return finish


def test_a_client_that_died_is_left_out_after_the_deadline(tmp_path, capsys):
    finish = send_first(tmp_path, 0, 2.0, clients=3)
    own = Averages(tmp_path, 1, 3, run='a', deadline_s=0.0).exchange(0, make_block(4.0))
    assert value_of(own) == value_of(finish()) == [3.0, 3.0]
    told = (
        'warning: clients 2 sent no block of turn 0 within distributed.average_deadline_s=0: the mean is over clients '
    )
    assert told + '0, 1\n' in capsys.readouterr().err
    # no client waits for it at the next turn: with this deadline the test would not end
    means = exchange_all(tmp_path, {0: 5.0, 1: 7.0}, turn=1, clients=3, deadline_s=1e5)
    assert value_of(means[0]) == [6.0, 6.0]


def test_another_client_makes_the_mean_where_the_one_whose_turn_it_is_has_died(tmp_path):
    home = tmp_path / 'turn_000000'
    home.mkdir()
    (home / 'client_0').write_bytes(encode({'run': 'a', 'values': make_block(2.0)}))  # it sent its block, no more
    own = Averages(tmp_path, 1, 2, run='a', deadline_s=20.0, patience_s=0.1).exchange(0, make_block(4.0))
    assert (value_of(own), own.clients) == ([3.0, 3.0], (0, 1))
    assert 0.1 <= own.waited_s < 10


def test_large_leaves_are_added_up_in_parts_bit_for_bit():
    rng = np.random.default_rng(0)
    blocks = [{'a': rng.normal(size=(3, 70_001)).astype(np.float32)} for _ in range(3)]
    whole = sum(block['a'].astype(np.float64) for block in blocks) / 3
    np.testing.assert_array_equal(mean_blocks(blocks, None)['a'], whole.astype(np.float32))


def test_a_late_client_goes_on_with_the_mean_of_the_others_and_takes_part_again(tmp_path, capsys):
    exchange_all(tmp_path, {0: 2.0}, clients=2, deadline_s=0.0)
    late = exchange_all(tmp_path, {1: 100.0}, clients=2)[1]
    assert (late.clients, value_of(late)) == ((0,), [2.0, 2.0])
    told = 'client 1 came after the deadline of turn 0: it goes on with the mean of clients 0\n'
    assert told in capsys.readouterr().err
    # at the next turn it is there before client 0, which finds it
    finish = send_first(tmp_path, 1, 4.0, turn=1)
    assert value_of(exchange_all(tmp_path, {0: 2.0}, turn=1, clients=2)[0]) == [3.0, 3.0]
    assert value_of(finish()) == [3.0, 3.0]


def test_a_resumed_client_gets_the_mean_that_it_had(tmp_path):
    first = exchange_all(tmp_path, {0: 2.0, 1: 4.0})
    again = exchange_all(tmp_path, {1: 55.0}, clients=2)[1]
    assert value_of(again) == value_of(first[1])
    assert again.clients == (0, 1)


def test_a_mean_that_is_not_kept_any_more_is_an_error(tmp_path):
    for turn in range(4):
        exchange_all(tmp_path, {0: 2.0}, turn=turn, kept_turns=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['turn_000002', 'turn_000003']
    with pytest.raises(AverageError, match=r'has the mean of turn 2 and none of turn 1.*raise distributed\.kept_turns'):
        Averages(tmp_path, 0, 1, run='a', deadline_s=60.0).exchange(1, make_block(1.0))


def test_the_means_of_an_earlier_run_are_refused(tmp_path):
    exchange_all(tmp_path, {0: 2.0}, clients=2, deadline_s=0.0)
    Averages(tmp_path, 1, 2, run='a', deadline_s=60.0).require_new()  # it comes late, and was in no mean
    Averages(tmp_path / 'absent', 0, 2, run='a', deadline_s=60.0).require_new()
    with pytest.raises(AverageError, match=r'has means of an earlier run, with client 0 in them: give every run a dir'):
        Averages(tmp_path, 0, 2, run='a', deadline_s=60.0).require_new()


def test_blocks_of_other_leaves_are_refused(tmp_path):
    with pytest.raises(AverageError, match=r'sent blocks of other leaves to .*a distributed\.average_directory of its'):
        mean_blocks([make_block(1.0), make_block(1.0, shape=(3,))], tmp_path)


def test_a_damaged_block_is_named(tmp_path):
    (tmp_path / 'turn_000000').mkdir()
    (tmp_path / 'turn_000000' / 'client_0').write_bytes(b'none')
    with pytest.raises(AverageError, match=r'turn_000000/client_0 holds no block'):
        Averages(tmp_path, 1, 2, run='a', deadline_s=60.0, patience_s=0.1).exchange(0, make_block(1.0))


def test_every_byte_over_the_link_is_counted(tmp_path):
    """A client sends its block and fetches the mean; who makes the mean fetches the blocks of the others as well."""
    (tmp_path / 'turn_000000').mkdir()
    block = make_block(1.0, (1000,))
    (tmp_path / 'turn_000000' / 'client_0').write_bytes(encode({'run': 'a', 'values': block}))
    first, second = [], []
    Averages(tmp_path, 1, 2, run='a', deadline_s=60.0, patience_s=0.1, pace=second.append).exchange(0, block)
    Averages(tmp_path, 0, 2, run='a', deadline_s=60.0, pace=first.append).exchange(0, block)  # the mean is there
    assert [[round(nbytes / 4000) for nbytes in sent] for sent in (first, second)] == [[1], [1, 1, 1]]


def test_clients_of_different_runs_are_refused(tmp_path):
    client = Averages(tmp_path, 1, 2, run='b', deadline_s=60.0, patience_s=0.1)
    (tmp_path / 'turn_000000').mkdir()
    (tmp_path / 'turn_000000' / 'client_0').write_bytes(encode({'run': 'a', 'values': make_block(2.0)}))
    with pytest.raises(AverageError, match=r'client 0 in .* is of another run than client 1: start all clients with'):
        client.exchange(0, make_block(4.0))
    Averages(tmp_path, 0, 1, run='a', deadline_s=60.0).exchange(1, make_block(2.0))
    with pytest.raises(AverageError, match=r'the mean of turn 1 in .* is of another run than client 1'):
        client.exchange(1, make_block(4.0))
