"""A controller without a learner: results are those of learner process 0, failures are told, each process writes its
part. The learners are stubs on threads; tests/distributed/test_two_processes.py has real ones."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from areal_jax.checkpoint.shards import ArrayShape
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.distributed import remote_learner as remote_module
from areal_jax.distributed.handshake import Hello, Listener, connect
from areal_jax.distributed.messages import Command, RemoteError, RemoteUserError, RemoteValueError
from areal_jax.distributed.peers import CommandError, Peers, make_pair
from areal_jax.distributed.remote_learner import CommandLeader, RemoteChannel, RemoteLearner, follow
from areal_jax.errors import LostPeerError, UserError
from areal_jax.learning.led_passes import Told
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.publication.versions import PublicationError
from areal_jax.sharding.host_shards import HostShards
from tests.distributed.sockets import cut
from tests.learning.examples import random_groups

_KEY = bytes(range(32))
_WHOLE = np.arange(8, dtype=np.float32).reshape(4, 2)


class _Learner:
    """Holds two rows of a weight, as one of two processes; fails where it is told to."""

    def __init__(self, index):
        self.index, self.calls, self.errors = index, [], {}

    def __getattr__(self, name):
        if name.startswith('_'):
            raise AttributeError(name)
        results = {
            'lead': None, 'follow': None, 'repeat_passes': None, 'read_tokens': [[]],
            'warm_up': 7, 'price': UpdatePrice('ordinary', 2, False), 'update': {'loss/value': 0.5, 'ages': [1.0, 2]},
            'evaluate': {'nll': 1.5}, 'score': np.float32([1, 2]) + self.index, 'publish': {'w': self.index},
            'restore': None, 'require_finite': None,
        }  # fmt: skip

        def call(*args):
            self.calls.append((name, args))
            if name in self.errors:
                raise self.errors[name]
            return results[name]

        return call

    def save(self):
        part = HostShards((4, 2), np.dtype(np.float32), (((2 * self.index, 0), _WHOLE[2 * self.index :][:2]),))
        return {'params': {'w': part}, 'optimizer': {}}


class _Versions:
    """What a process writes of a version; see publication/export.py."""

    def __init__(self, index):
        self.index, self.error = index, None

    def begin(self, directory, version, copy):
        pathlib.Path(directory).mkdir(exist_ok=True)

    def write(self, directory, version, copy):
        if self.error:
            raise self.error
        (pathlib.Path(directory) / f'{version}-{self.index}').write_text(str(copy))
        return {f'leaf {self.index}': {'shape': [1]}}

    def finish(self, directory, version, copy, manifest):
        return f'digest of {sorted(manifest)}', f'{directory}/v{version}'


@pytest.fixture
def processes():
    """(RemoteLearner, its Peers, the learners, the writers of versions, what was lost)."""
    learners, writers, named, lost = [_Learner(0), _Learner(1)], [_Versions(0), _Versions(1)], [], []
    listeners = [Listener('127.0.0.1', 0, _KEY, Hello(f'learner {index}', '')) for index in range(2)]

    def serve(index):
        met, options = listeners[index].accept(10), {'versions': writers[index], 'reports': index == 0}
        follow(
            learners[index],
            met.connection,
            'controller',
            listener=listeners[index],
            on_lost=lambda reason: None,
            **options,
        )

    for index, listener in enumerate(listeners):
        threading.Thread(target=serve, args=(index,), daemon=True).start()
        connection = connect(listener.address, _KEY, Hello('controller', ''), 10).connection
        named.append((f'learner {index}', connection))
    peers = Peers(named, deadline_s=10, on_lost=lost.append)
    learner = RemoteLearner(peers)
    for each, first in zip(learners, ('lead', 'follow'), strict=True):
        name, (each.rows,) = each.calls.pop(0)
        assert name == first
    yield learner, peers, learners, writers, lost
    peers.close()
    for listener in listeners:
        listener.close()
    assert lost == []


def test_every_process_executes_every_command_the_first_alone_gets_groups_and_answers(processes):
    learner, _, learners, _, _ = processes
    groups = random_groups(3, 2)
    assert learner.warm_up() == 7
    assert learner.update(groups, 4) == {'loss/value': 0.5, 'ages': [1.0, 2]}
    assert learner.evaluate(groups) == {'nll': 1.5}
    np.testing.assert_array_equal(learner.score(3, np.arange(2), np.arange(2)), np.float32([1, 2]))
    assert learner.read_tokens([3]) == [[]]
    learner.require_finite('the weights', 'mend them')
    assert learner.publish(5).version == 5
    names = ['price', 'warm_up', 'update', 'evaluate', 'score', 'read_tokens', 'require_finite', 'publish']
    others = ['price', 'warm_up', *['repeat_passes'] * 3, 'require_finite', 'publish']
    assert [[name for name, _ in each.calls] for each in learners] == [names, others]
    assert learners[1].calls[2:5] == [('repeat_passes', ())] * 3
    (sent, version), expected = learners[0].calls[2][1], groups
    assert version == 4
    for one, other in zip(sent, expected, strict=True):
        for found, wanted in zip(one.trajectories, other.trajectories, strict=True):
            np.testing.assert_array_equal(found.tokens, wanted.tokens)
            np.testing.assert_array_equal(found.behavior_logprobs, wanted.behavior_logprobs)


def test_tokens_of_an_update_are_counted_without_sending_it(processes):
    learner, _, learners, _, _ = processes
    groups = random_groups(3, 2)
    assert learner.update_tokens(groups) == UpdatePrice('ordinary', 2, False).tokens(groups) > 0
    assert [name for name, _ in learners[0].calls] == ['price']


@pytest.mark.parametrize(
    ('error', 'raised', 'message'),
    [
        (UserError('the weights are NaN: lower it'), RemoteUserError, '^the weights are NaN: lower it$'),
        (
            ValueError('of another model'),
            RemoteValueError,
            "learner 0 failed at the command 'update': ValueError: of an",
        ),
        (KeyError('x'), RemoteError, r"learner 0 failed at the command 'update': KeyError: 'x' \(the traceback is in"),
    ],
)
def test_an_error_of_all_is_that_of_the_first_process(processes, error, raised, message):
    learner, _, learners, _, _ = processes
    for each, name in zip(learners, ('update', 'repeat_passes'), strict=True):
        each.errors[name] = error
    with pytest.raises(raised, match=message):
        learner.update([], 1)
    assert learner.warm_up() == 7  # the next command works


def test_an_error_of_one_process_alone_names_it(processes):
    learner, _, learners, _, _ = processes
    learners[1].errors['publish'] = OSError('no memory')
    message = "learner 1 failed at the command 'publish' that learner 0 did: OSError: no memory"
    with pytest.raises(CommandError, match=message) as raised:
        learner.publish(1)
    assert isinstance(raised.value, LostPeerError)  # ends with 75


def test_a_method_that_is_no_command_is_refused(processes):
    _, peers, learners, _, _ = processes
    for answer in peers.call_all(Command('compile')):
        assert answer.failure.is_user_error
        assert "'compile' is no command of a learner" in str(answer.failure)
    assert [name for name, _ in learners[0].calls] == ['price']


def test_a_checkpoint_is_written_by_the_processes_and_read_again(processes, tmp_path):
    learner, _, learners, _, _ = processes
    store = CheckpointStore(tmp_path / 'steps')
    saved = learner.save()
    assert saved == {'params': {'w': ArrayShape((4, 2), 'float32')}, 'optimizer': {}}
    ring = {'3': {'w': np.ones(2, np.float32)}}  # what the controller itself holds
    store.save(5, {**saved, 'ring': ring}, {'version': 5}, learner.followers)
    step, arrays, state = store.restore_latest()
    assert (step, state) == (5, {'version': 5})
    np.testing.assert_array_equal(np.asarray(arrays['params']['w']), _WHOLE)
    np.testing.assert_array_equal(np.asarray(arrays['ring']['3']['w']), ring['3']['w'])
    assert {piece.tree.split('/')[0] for piece in arrays['params']['w'].pieces} == {'writer_0001', 'writer_0002'}
    learner.restore({name: arrays[name] for name in ('params', 'optimizer')})
    for each in learners:
        ((name, (restored,)),) = each.calls[1:]
        assert name == 'restore'
        np.testing.assert_array_equal(restored['params']['w'][slice(1, 3), slice(0, 2)], _WHOLE[1:3])


def test_a_save_without_arrays_of_the_controller_has_no_files_of_it(processes, tmp_path):
    learner, *_ = processes
    store = CheckpointStore(tmp_path / 'steps')
    store.save(1, learner.save(), {}, learner.followers)
    assert sorted(path.name for path in (tmp_path / 'steps/step_00000001/arrays').iterdir()) == [
        'writer_0001',
        'writer_0002',
    ]


def test_a_process_that_cannot_write_its_shards_is_named(processes, tmp_path):
    learner, *_ = processes
    store = CheckpointStore(tmp_path / 'steps')
    saved = learner.save()
    store.save(1, saved, {}, learner.followers)
    with pytest.raises(CheckpointError, match=r'learner 0: IndexError: .*The checkpoint of step 1 is untouched'):
        store.save(2, saved, {}, learner.followers)  # what was saved has been written already
    assert store.latest() == 1


def test_a_process_that_is_lost_while_it_writes_ends_the_run_to_be_started_again(tmp_path):
    ours, theirs = make_pair()
    learner = _Learner(0)
    options = {'reports': True, 'on_lost': lambda reason: None}
    threading.Thread(target=follow, args=(learner, theirs, 'controller'), kwargs=options, daemon=True).start()
    remote = RemoteLearner(Peers([('learner 0', ours)], deadline_s=60, on_lost=lambda reason: None))
    saved = remote.save()
    cut(theirs)
    store = CheckpointStore(tmp_path / 'steps')
    with pytest.raises(CommandError, match='learner 0 is gone'):  # and not CheckpointError, which is for the user
        store.save(1, saved, {}, remote.followers)
    assert store.latest() is None


def test_a_version_is_written_by_all_processes_and_finished_by_the_first(processes, tmp_path):
    learner, peers, _, _, _ = processes
    channel = RemoteChannel(peers, tmp_path / 'versions')
    published = channel.transfer(3, learner.publish(3))
    assert published.manifest_hash == "digest of ['leaf 0', 'leaf 1']"
    assert published.handle == f'{tmp_path}/versions/v3'
    assert {path.name: path.read_text() for path in (tmp_path / 'versions').iterdir()} == {
        '3-0': "{'w': 0}",
        '3-1': "{'w': 1}",
    }
    with pytest.raises(PublicationError, match='a controller without a learner holds none'):
        channel.receive(published)
    with pytest.raises(RemoteError, match='KeyError'):
        channel.transfer(3, learner)  # it was published, and is gone


def test_versions_that_are_not_read_any_more_are_removed(processes, tmp_path):
    _, peers, *_ = processes
    for version in range(5):
        (tmp_path / f'v{version:06d}').mkdir()
        (tmp_path / f'v{version:06d}' / 'manifest.json').write_text('{}')
    RemoteChannel(peers, tmp_path).release(4, pinned=[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ['v000001', 'v000003', 'v000004']


@pytest.mark.parametrize('index', [0, 1])
def test_a_process_that_cannot_write_its_part_is_told(processes, tmp_path, index):
    learner, peers, _, writers, _ = processes
    writers[index].error = PublicationError('writing v000001 failed: no space')
    with pytest.raises(PublicationError, match=r'^writing v000001 failed: no space$'):
        RemoteChannel(peers, tmp_path / 'versions').transfer(1, learner.publish(1))


def test_the_side_of_the_controller_is_free_of_jax():
    names = ('remote_learner', 'peers', 'handshake', 'messages')
    modules = [f'areal_jax.distributed.{name}' for name in names] + ['areal_jax.checkpoint.store']
    program = (
        f'import sys\nfor name in {modules}: __import__(name)\nprint({{"jax", "flax", "orbax"}} & set(sys.modules))'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'set()'


# Process 0 of the learners leads: it executes every command itself, and followers do what it says.


class _Recorder:
    """A learner that notes what it is told."""

    def __init__(self):
        self.calls: list = []

    def lead(self, send):
        self.send = send

    def follow(self, receive):
        self.receive = receive

    def repeat_passes(self):
        self.calls.append(('repeat_passes', self.receive()))

    def update(self, groups, version):
        self.calls.append(('update', groups, version))
        self.send([Told(('step', version), [(8, 4)], {'tokens': 0}, {'0': _WHOLE[:, :1]})])
        if version < 0:
            raise ValueError(f'version={version}')
        return {'loss/value': 1.0}

    def publish(self, version):
        self.calls.append(('publish', version))
        return version


def _pair(leader_learner, follower_learner, deadline_s=5.0, rows_deadline_s=None):
    ours, theirs = make_pair()
    lost: list[str] = []
    # a daemon, so that a failing test does not keep the process
    thread = threading.Thread(
        target=follow,
        args=(follower_learner, theirs),
        kwargs={'on_lost': lost.append, 'deadline_s': rows_deadline_s},
        daemon=True,
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
    assert one.calls == [('update', ['group'], 3), ('publish', 4)]
    (repeated, told), published = other.calls
    assert (repeated, *published) == ('repeat_passes', 'publish', 4)
    assert told[:3] == (('step', 3), [(8, 4)], {'tokens': 0})
    np.testing.assert_array_equal(told.new['0'], _WHOLE[:, :1])
    assert lost == []


def test_an_error_of_all_is_that_of_process_0_and_the_next_command_works():
    leader, lost, thread = _pair(_Recorder(), _Recorder())
    with pytest.raises(ValueError, match='version=-1'):
        leader.update([], -1)
    assert leader.publish(1) == 1
    leader.close()
    thread.join(5)
    assert lost == []


def test_a_follower_without_rows_gives_up_within_the_deadline():
    silent = _Recorder()
    silent.lead = lambda send: setattr(silent, 'send', lambda values: None)
    leader, _, _ = _pair(silent, _Recorder(), rows_deadline_s=0.2)
    with pytest.raises(
        CommandError,
        match=r"follower 1 failed at the command 'update' .* process 0 sent no rows for distributed.*=0\.2$",
    ):
        leader.update([], 1)
    leader.close()


class _Saver(_Recorder):
    def save(self):
        return {'w': np.ones(3)}


def test_followers_write_while_commands_go_on(tmp_path, monkeypatch):
    go_on, written = threading.Event(), []

    def write(directory, leaves):
        assert go_on.wait(5)
        written.append((directory, leaves))
        return {'w': []}

    monkeypatch.setattr(remote_module, 'write_shards', write)
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
    monkeypatch.setattr(remote_module, 'write_shards', write)
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
