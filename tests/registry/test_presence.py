"""Who is alive, and waits that name whom they wait for."""

from __future__ import annotations

import os
import threading

import pytest

from areal_jax import registry
from areal_jax.errors import LostPeerError
from areal_jax.registry import PATIENCE_S, Entry, FencedError, Heartbeat, Presence, Registration, await_living


def register(workdir, name):
    return Registration(workdir, Entry(name, 0, '', 'host:1'))


def test_a_process_lives_while_its_heartbeat_changes(tmp_path):
    now = [0.0]
    registered = register(tmp_path, 'learner-0')
    reader = Presence(tmp_path, now=lambda: now[0])
    assert reader.look() == {}  # it may be the rest of a dead one
    os.utime(registered.path, ns=(7, 7))
    now[0] = 1.0
    assert list(reader.look()) == ['learner-0']
    now[0] = 1.0 + PATIENCE_S
    assert list(reader.look()) == ['learner-0']
    now[0] += 0.1
    assert reader.look() == {}
    os.utime(registered.path, ns=(5, 5))  # any change, whatever the clock of that host says
    assert list(reader.look()) == ['learner-0']
    again = register(tmp_path, 'learner-0')
    assert reader.look() == {}  # another process
    os.utime(again.path, ns=(9, 9))
    assert reader.look()['learner-0'].order == again.entry.order
    again.close()
    assert reader.look() == {}


def test_a_wait_says_for_whom_and_ends_with_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, 'REPORT_S', 0.05)
    monkeypatch.setattr(registry, 'LOOK_S', 0.02)
    said = []
    with pytest.raises(
        LostPeerError, match=r'^waited 0 s for learners of attempt 2 in .*, and learner-0, learner-1 has not come: star'
    ):
        await_living(
            tmp_path, ['learner-0', 'learner-1'], 0.2, what='learners of attempt 2', fix='start them', say=said.append
        )
    assert said[0] == 'waiting for learners of attempt 2 (learner-0, learner-1), 0 s'


def test_those_who_come_are_found_and_the_heart_beats_on_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr('areal_jax.registry.PERIOD_S', 0.02)
    told = threading.Event()
    with Heartbeat(tmp_path, Entry('learner-0', 0, '', 'host:1'), lambda error: told.set()) as beating:
        found = await_living(tmp_path, ['learner-0'], 10.0, what='learners', fix='')
        assert found['learner-0'].order == beating.entry.order
        beating.update(address='host:2')
        register(tmp_path, 'learner-0')
        assert told.wait(10.0)
    with pytest.raises(FencedError):
        beating.registration.beat()
