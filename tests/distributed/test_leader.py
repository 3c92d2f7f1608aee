"""Process 0 sends commands to a follower over a socket, in one process: order, errors, deadlines, writing beside."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from areal_jax.distributed import remote_learner as following
from areal_jax.distributed.peers import CommandError, Peers, make_pair
from areal_jax.distributed.remote_learner import CommandLeader, follow


class _Recorder:
    """A learner that notes what it is told."""

    def __init__(self):
        self.calls: list = []

    def update(self, groups, version):
        self.calls.append(('update', groups, version))
        if version < 0:
            raise ValueError(f'version={version}')
        return {'loss/value': 1.0}

    def publish(self, version):
        self.calls.append(('publish', version))
        return version


def _pair(leader_learner, follower_learner, deadline_s=5.0):
    ours, theirs = make_pair()
    lost: list[str] = []
    # a daemon, so that a failing test does not keep the process
    thread = threading.Thread(
        target=follow, args=(follower_learner, theirs), kwargs={'on_lost': lost.append}, daemon=True
    )
    thread.start()
    peers = Peers([('follower 1', ours)], deadline_s=deadline_s, on_lost=lost.append)
    return CommandLeader(leader_learner, peers), lost, thread


def test_followers_do_what_is_said_in_that_order():
    one, other = _Recorder(), _Recorder()
    leader, lost, thread = _pair(one, other)
    assert leader.update(['group'], 3) == {'loss/value': 1.0}
    assert leader.publish(4) == 4
    leader.close()
    thread.join(5)
    assert not thread.is_alive()
    assert one.calls == other.calls == [('update', ['group'], 3), ('publish', 4)]
    assert lost == []


def test_an_error_of_all_is_that_of_process_0_and_the_next_command_works():
    leader, lost, thread = _pair(_Recorder(), _Recorder())
    with pytest.raises(ValueError, match='version=-1'):
        leader.update([], -1)
    assert leader.publish(1) == 1
    leader.close()
    thread.join(5)
    assert lost == []


class _Saver(_Recorder):
    def save(self):
        return {'w': np.ones(3)}


def test_followers_write_while_commands_go_on(tmp_path, monkeypatch):
    go_on, written = threading.Event(), []

    def write(directory, leaves):
        assert go_on.wait(5)
        written.append((directory, leaves))
        return {'w': []}

    monkeypatch.setattr(following, 'write_shards', write)
    leader, lost, thread = _pair(_Saver(), _Saver())
    leader.save()
    (follower,) = leader.followers
    follower.write(str(tmp_path))
    leader.update([], 1)
    assert not written  # it was still at it
    go_on.set()
    assert follower.written() == {'w': []}
    assert [(directory, list(leaves)) for directory, leaves in written] == [(tmp_path, ['w'])]
    follower.write(str(tmp_path))  # a copy is written once
    assert follower.written().startswith('IndexError')
    leader.close()
    thread.join(5)
    assert lost == []


def test_a_follower_that_does_not_write_is_reported_within_the_deadline(tmp_path, monkeypatch):
    answers = iter([1.5, 0])
    write = lambda directory, _: time.sleep(next(answers)) or {directory.name: []}
    monkeypatch.setattr(following, 'write_shards', write)
    leader, lost, _ = _pair(_Saver(), _Saver(), deadline_s=0.6)
    (follower,) = leader.followers
    leader.save()
    follower.write(str(tmp_path / 'one'))
    assert follower.written() == 'no word of its shards for distributed.command_deadline_s=0.6'
    leader.save()
    follower.write(str(tmp_path / 'other'))
    time.sleep(1.5)
    assert follower.written() == {'other': []}  # not the late answer
    assert lost == []
    leader.close()


def test_an_error_of_a_follower_alone_names_it():
    class Failing(_Recorder):
        def publish(self, version):
            raise OSError('no space left')

    leader, _, _ = _pair(_Recorder(), Failing())
    with pytest.raises(CommandError, match=r"follower 1 failed at the command 'publish' .* OSError: no space left"):
        leader.publish(1)
    leader.close()


def test_a_follower_that_does_not_answer_is_reported_within_the_deadline():
    class Slow(_Recorder):
        def publish(self, version):
            time.sleep(2)

    began = time.monotonic()
    leader, lost, _ = _pair(_Recorder(), Slow(), deadline_s=0.2)
    with pytest.raises(CommandError, match=r'follower 1 gave no answer for 0.2 s'):
        leader.publish(1)
    assert time.monotonic() - began < 1.5
    assert [reason for reason in lost if 'follower 1 gave no answer for 0.2 s' in reason]
    leader.close()
