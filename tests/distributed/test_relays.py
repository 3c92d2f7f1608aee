"""With many processes a large command leaves the controller a few times only and reaches every process, once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from areal_jax.distributed import peers as module
from areal_jax.distributed.handshake import Hello, Listener, connect
from areal_jax.distributed.messages import Command
from areal_jax.distributed.peers import FANOUT, LEAST_BYTES, CommandError, Peers, children_of
from areal_jax.distributed.remote_learner import follow
from tests.distributed.sockets import cut

_KEY = bytes(range(32))
_LARGE = np.arange(LEAST_BYTES, dtype=np.int64)


class _Learner:
    def __init__(self, index):
        self.index, self.seen = index, []

    def update(self, batch, version):
        self.seen.append((len(batch), int(batch[-1]), version))
        return self.index


class _Run:
    """So many processes on threads, and the peers of their controller."""

    def __init__(self, count, *, listens=True):
        self.learners, self.lost, self._listeners, self.sent = [_Learner(i) for i in range(count)], [], [], []
        named = []
        for learner in self.learners:
            listener = Listener('127.0.0.1', 0, _KEY, Hello(f'learner {learner.index}', ''))
            self._listeners.append(listener)
            threading.Thread(target=self._serve, args=(learner, listener if listens else None), daemon=True).start()
            named.append((f'learner {learner.index}', self._connect(listener)))
        self.connections = [connection for _, connection in named]
        self.peers = Peers(named, deadline_s=20, on_lost=self.lost.append)

    def _serve(self, learner, listener):
        met = self._listeners[learner.index].accept(10)
        follow(learner, met.connection, 'controller', reports=True, listener=listener, on_lost=lambda reason: None)

    def _connect(self, listener):
        return connect(listener.address, _KEY, Hello('controller', ''), 10).connection

    def update(self, batch, version):
        return [answer.value for answer in self.peers.call_all(Command('update', (batch, version)))]

    def close(self):
        self.peers.close()
        for listener in self._listeners:
            listener.close()


def test_every_process_is_reached_along_exactly_one_way():
    for count in (1, 4, 5, 6, 20, 64, 85, 512):
        reached = [child for index in range(-1, count) for child in children_of(index, count)]
        assert sorted(reached) == list(range(count))
        assert all(len(children_of(index, count)) <= FANOUT for index in range(-1, count))


@pytest.fixture
def sizes(monkeypatch):
    """The number of processes to which each frame of a controller went."""
    found, send_all = [], module.send_all
    names = {'MainThread'}

    def send(connections, frame, deadline_s):
        if threading.current_thread().name in names:
            found.append(len(connections))
        return send_all(connections, frame, deadline_s)

    monkeypatch.setattr(module, 'send_all', send)
    return found


def test_a_large_command_goes_to_a_few_and_is_passed_on_and_a_small_one_goes_to_all(sizes):
    run = _Run(22)  # three levels: 4, 16, 2
    run.peers.arrange_relays()
    sizes.clear()
    for version, batch in enumerate((_LARGE, np.arange(3), _LARGE + 1)):
        assert run.update(batch, version) == list(range(22))
    assert sizes == [FANOUT, 22, FANOUT]
    for learner in run.learners:
        assert learner.seen == [
            (LEAST_BYTES, LEAST_BYTES - 1, 0), (3, 2, 1), (LEAST_BYTES, LEAST_BYTES, 2)
        ]  # fmt: skip
    run.close()
    assert run.lost == []


@pytest.mark.parametrize(('count', 'listens'), [(FANOUT, True), (6, False)])
def test_few_processes_and_such_that_do_not_listen_get_everything_directly(sizes, count, listens):
    run = _Run(count, listens=listens)
    run.peers.arrange_relays()
    sizes.clear()
    assert run.update(_LARGE, 1) == list(range(count))
    assert sizes == [count]
    run.close()


@pytest.mark.parametrize('index', [1, 9])
def test_a_process_that_dies_is_named_wherever_it_is(index):
    run = _Run(10)
    run.peers.arrange_relays()
    run.update(_LARGE, 0)
    threading.Timer(0.1, cut, [run.connections[index]]).start()
    for learner in run.learners:
        learner.update = lambda *_: time.sleep(0.5)
    with pytest.raises(CommandError, match=f'learner {index} is gone'):
        run.update(_LARGE, 1)
    run.close()
    assert len(run.lost) == 1
