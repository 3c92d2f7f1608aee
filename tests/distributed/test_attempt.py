"""How learner processes find each other: exactly those that are alive are invited, or one sentence says who is not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading

import pytest

from areal_jax.distributed import handshake as attempts
from areal_jax.distributed.handshake import FILE, join_attempt, lead_attempt, learner_name, read_attempt
from areal_jax.errors import LostPeerError, UserError
from areal_jax.registry import Entry, Heartbeat, Registration

HOST = '127.0.0.1'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr('areal_jax.registry.PERIOD_S', 0.02)
    monkeypatch.setattr('areal_jax.registry.LOOK_S', 0.01)
    monkeypatch.setattr(attempts, 'LOOK_S', 0.01)


def alive(workdir, index):
    return Heartbeat(workdir, Entry(learner_name(index), 0, '', role='learner', index=index), lambda error: None)


def test_all_processes_come_to_one_attempt_and_the_next_one_has_another_port(tmp_path):
    for number in (1, 2):
        with contextlib.ExitStack() as living, concurrent.futures.ThreadPoolExecutor(3) as threads:
            beats = [living.enter_context(alive(tmp_path, index)) for index in range(3)]
            joining = [threads.submit(join_attempt, tmp_path, beats[index].entry, index, 10.0) for index in (1, 2)]
            led = lead_attempt(tmp_path, beats[0].entry, 3, HOST, 10.0)
            assert [one.result() for one in joining] == [led, led]
            assert led.number == number
            assert led.members == tuple(beat.entry.holder for beat in beats)
            assert led.coordinator.startswith(f'{HOST}:')
    record = json.loads((tmp_path / 'registry' / FILE).read_text())
    assert (record['attempt'], record['count']) == (2, 3)


def test_a_process_of_an_earlier_attempt_is_not_invited_and_its_invitation_is_not_taken(tmp_path, monkeypatch):
    dead = Registration(tmp_path, Entry(learner_name(1), 0, '', role='learner', index=1))
    with alive(tmp_path, 0) as leader:
        record = {'attempt': 4, 'coordinator': 'x:1', 'count': 2, 'members': ['1-00000000', dead.entry.holder]}
        (tmp_path / 'registry' / FILE).write_text(json.dumps(record))
        with pytest.raises(
            LostPeerError, match=r'^waited 0 s for the learner processes of attempt 5 in .*, and learner-1 has not come'
        ):
            lead_attempt(tmp_path, leader.entry, 2, HOST, 0.2)
        said = []
        monkeypatch.setattr(attempts, 'REPORT_S', 0.1)
        with alive(tmp_path, 1) as again, pytest.raises(LostPeerError) as waited:
            join_attempt(tmp_path, again.entry, 1, 0.3, say=said.append)
        assert str(waited.value).startswith(
            'waited 0 s for learner 0 of attempt 5, which is alive and waits for others: start all learner processes'
        )
        assert said[0] == 'waiting for learner 0 of attempt 5, which is alive and waits for others, 0 s'


def test_a_record_that_is_not_whole_is_read_again(tmp_path):
    with alive(tmp_path, 0) as leader, alive(tmp_path, 1) as other:
        path = tmp_path / 'registry' / FILE
        path.write_text('{"attempt": 1, "coordin')
        assert read_attempt(tmp_path) is None
        timer = threading.Timer(0.1, lead_attempt, [tmp_path, leader.entry, 2, HOST, 10.0])
        timer.start()
        assert join_attempt(tmp_path, other.entry, 1, 10.0).number == 1
        timer.join()


def test_a_single_process_waits_for_nobody(tmp_path):
    with alive(tmp_path, 0) as leader:
        assert lead_attempt(tmp_path, leader.entry, 1, HOST, 1.0).members == (leader.entry.holder,)


def test_a_host_of_no_interface_is_named(tmp_path):
    with (
        alive(tmp_path, 0) as leader,
        pytest.raises(UserError, match=r'--host=192\.0\.2\.1 is no address'),
    ):
        lead_attempt(tmp_path, leader.entry, 1, '192.0.2.1', 1.0)


def test_an_address_of_version_6_is_written_as_jax_reads_it(tmp_path):
    with alive(tmp_path, 0) as leader:
        assert lead_attempt(tmp_path, leader.entry, 1, '::1', 1.0).coordinator.startswith('[::1]:')
