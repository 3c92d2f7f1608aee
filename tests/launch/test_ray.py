"""launch.ray without Ray: bundles and commands, what an actor does with its role, and what becomes of lost groups."""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from areal_jax.errors import UserError
from areal_jax.installation import describe_install
from launch.accelerators import Slice
from launch.ray import main as command
from launch.ray.actor import RoleActor, State
from launch.ray.plan import Group, Process
from launch.ray.reservation import Reservation, await_let_go
from launch.ray.supervision import LostGroupError, supervise
from tests.launch.golden_files import require_golden
from tests.launch.test_local import ROOT, is_alive, wait_until

COMMON = [
    *('launch.ray', '--config=configs/tiny_cpu.py', '--python=python3', '--workdir=/shared/runs/a'),
    *('--config.rollout.server=own', '--config.publication.channel=files', '--config.learner.rows_per_microbatch=16'),
]
PLANS = {
    'tpu': [
        *('--accelerator=v4', '--topology=2x2x2', '--engine_topology=2x2x1'),
        *('--config.cluster.learner=hosts=2 x fsdp=8', '--config.cluster.engines=2 x tensor=4'),
    ],
    'gpu': [
        *('--accelerator=gpu', '--cpus=8', '--environment=NCCL_DEBUG=WARN'),
        *('--config.cluster.learner=hosts=2 x fsdp=16', '--config.cluster.engines=1 x tensor=2'),
    ],
    'cpu': [
        *('--accelerator=cpu', '--config.cluster.learner=hosts=2 x fsdp=4', '--config.cluster.engines=2 x tensor=1'),
        *('--config.checkpoint.every=2', '--config.run.export_every=4'),
    ],
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize('name', PLANS)
def test_the_plan_is_the_golden_one(name, capsys):
    assert command.main([*COMMON, *PLANS[name], '--dry_run']) == 0
    require_golden(f'ray_{name}.txt', capsys.readouterr().out, ROOT)


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (
            ['--topology=4x4x4'],
            "cluster.learner='hosts=2 x fsdp=8' asks for 2 x 4 devices, and a slice of v4 4x4x4 has 16 x 4: make",
        ),
        (['--engine_topology=2x2x2'], "cluster.engines='2 x tensor=4' asks for 1 x 4 devices, and a slice of v4 2x2x2"),
        (['--environment=A'], "--environment='A' has no NAME=VALUE"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_sentence(flags, said):
    names = {flag.split('=')[0] for flag in flags}
    given = [flag for flag in PLANS['tpu'] if flag.split('=')[0] not in names]
    with pytest.raises(UserError, match=re.escape(said)):
        command.main([*COMMON, *given, *flags, '--dry_run'])


@pytest.mark.parametrize(
    ('flag', 'said'),
    [
        ('--cpus=nan', '--cpus=nan is no number of cores'),
        ('--cpus=inf', '--cpus=inf is no number of cores'),
        ('--controller_cpus=nan', '--controller_cpus=nan is no number of cores'),
        ('--wait_s=nan', '--wait_s=nan is no number of seconds'),
        ('--grace_s=nan', '--grace_s=nan is no number of seconds'),
    ],
)
def test_what_is_no_number_is_refused(flag, said):
    with pytest.raises(UserError, match=re.escape(said)):
        command.main([*COMMON, *PLANS['cpu'], flag, '--dry_run'])


def test_roles_may_be_waited_for_without_an_end():
    assert command.main([*COMMON, *PLANS['cpu'], '--wait_s=inf', '--grace_s=inf', '--dry_run']) == 0


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'ray' else find(name))
    flags = [word for word in COMMON if 'workdir' not in word]
    with pytest.raises(UserError, match=re.escape(describe_install('ray'))):
        command.main([*flags, f'--workdir={tmp_path}/run', *PLANS['cpu']])


def test_the_package_does_not_stand_in_for_ray():
    """Neither here nor in a worker, which has the folder of the started file on its path."""
    folder = ROOT / 'launch' / 'ray'
    program = (
        f'import sys; sys.path.insert(0, {str(folder)!r}); import importlib.util as u\n'
        'import launch.ray.main\n'
        'spec = u.find_spec("ray"); print(spec.origin if spec else None)'
    )
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout.replace(sys.prefix, '')


class OneRole:
    """An actor with a stand-in for its role, in this process."""

    def __init__(self, tmp_path, name='engine'):
        self.workdir, self.name = tmp_path, name
        words = [sys.executable, '-m', 'tests.launch.stand_in_peer', f'--workdir={tmp_path}', f'--role={name}']
        words += ['--index=0', '--count=1']
        self.actor = RoleActor(f'{name}-0', words, {}, str(ROOT), str(tmp_path / 'logs'), host='127.0.0.1', restarts=1)

    def pids(self):
        path = self.workdir / 'events'
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[3]) for line in lines if line.startswith(f'{self.name} 0 start')]

    def await_start(self, count):
        wait_until(lambda: self.actor.look() and len(self.pids()) == count, f'start {count}')
        return self.pids()[-1]


def test_an_actor_starts_its_role_again_within_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr('launch.ray.actor.PAUSE_S', 0.0)
    role = OneRole(tmp_path)
    for starts in (1, 2):
        os.kill(role.await_start(starts), signal.SIGKILL)
    wait_until(lambda: role.actor.look().code is not None, 'the end')
    state = role.actor.look()
    assert (state.starts, state.code) == (2, 75)
    assert sorted(path.name for path in (tmp_path / 'logs').iterdir()) == ['engine-0.0.log', 'engine-0.1.log']


def test_a_role_with_an_error_of_the_configuration_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr('launch.ray.actor.PAUSE_S', 0.0)
    monkeypatch.setenv('STAND_IN_FAILS', 'engine-0')
    role = OneRole(tmp_path)
    wait_until(lambda: role.actor.look().code is not None, 'the end')
    state = role.actor.look()
    assert (state.starts, state.code, state.tail) == (1, 2, 'error: port 1 is in use: use another')


@pytest.mark.parametrize(('name', 'code'), [('engine', 0), ('learner', 75)])
def test_a_role_that_is_told_to_stop_ends_by_itself_and_stays_away(name, code, tmp_path, monkeypatch):
    monkeypatch.setattr('launch.ray.actor.PAUSE_S', 0.0)
    role = OneRole(tmp_path, name)
    role.await_start(1)
    role.actor.stop()
    wait_until(lambda: role.actor.look().code is not None, 'the end')
    state = role.actor.look()
    assert (state.starts, state.code) == (1, code)


def test_a_role_ends_with_its_actor(tmp_path):
    program = (
        'import sys, time\nfrom launch.ray.actor import RoleActor\n'
        f'RoleActor("engine-0", [sys.executable, "-m", "tests.launch.stand_in_peer", "--workdir={tmp_path}", '
        f'"--role=engine", "--index=0"], {{}}, {str(ROOT)!r}, {str(tmp_path)!r}, host="h", restarts=0)\ntime.sleep(100)'
    )
    actor = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT)
    wait_until(lambda: (tmp_path / 'events').exists(), 'the role')
    pid = int((tmp_path / 'events').read_text().split()[3])
    actor.kill()
    actor.wait()
    wait_until(lambda: not is_alive(pid), 'the end of the role')


class Stage:
    """Groups on a cluster that a test moves: what each look at a group finds, one after the other."""

    def __init__(self, ends=None, **looks):
        self.looks, self.placed, self.calls, self.count = looks, [], [], 0
        self.ends = ends or {}  # looks at a group that was told to stop

    def note_look(self):
        self.count += 1
        assert self.count < 500, 'the run does not end'

    def place(self, group):
        self.placed.append(group.name)
        return StagedGroup(self, group.name)

    def run(self, restarts=1, wait_s=100.0, grace_s=2.0):
        groups = [Group(name, {'CPU': 1}, [Process(f'{name}-0', [])], {}) for name in self.looks]
        shortage = lambda group: f'{group.name} has no room'
        return supervise(groups, self.place, shortage, restarts=restarts, wait_s=wait_s, grace_s=grace_s)


class StagedGroup:
    def __init__(self, stage, name):
        self.stage, self.name = stage, name

    def is_reserved(self):
        self.stage.note_look()
        return self.stage.looks[self.name][0] != 'unreserved'

    def is_placed(self):
        return self.stage.looks[self.name][0] not in ('waiting', 'unreserved')

    def look(self):
        looks = self.stage.looks[self.name]
        found = looks.pop(0) if len(looks) > 1 else looks[0]
        self.stage.note_look()
        if found == 'lost':
            raise LostGroupError('the node is gone')
        return [State(1, None if found == 'runs' else found, 'last words')]

    def stop(self):
        self.stage.calls.append(f'stop {self.name}')
        self.stage.looks[self.name] = self.stage.ends.get(self.name, [75 if self.name == 'controller' else 0])

    def remove(self):
        self.stage.calls.append(f'remove {self.name}')


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr('launch.ray.supervision.LOOK_S', 0.01)
    monkeypatch.setattr('launch.ray.supervision.RESERVE_S', 0.01)


def test_the_run_ends_with_its_controller():
    stage = Stage(controller=['runs', 'runs', 0], learner=['runs', 0], **{'engine-0': ['runs']})
    assert stage.run() == 0
    assert stage.calls == ['stop engine-0', 'remove controller', 'remove learner', 'remove engine-0']


def test_a_lost_group_is_placed_again_and_the_others_stay():
    stage = Stage(controller=['runs'] * 6 + [0], learner=['runs', 'lost', 'runs'], **{'engine-0': ['lost', 'runs']})
    assert stage.run() == 0
    assert stage.placed == ['controller', 'learner', 'engine-0', 'engine-0', 'learner']


def test_a_learner_that_is_lost_too_often_ends_the_run_and_it_can_go_on():
    stage = Stage(controller=['runs'], learner=['lost', 'lost', 'runs'])
    assert stage.run(restarts=1) == 75
    assert 'stop controller' in stage.calls


def test_an_engine_that_is_lost_for_good_does_not_end_the_run():
    stage = Stage(controller=['runs'] * 5 + [0], learner=['runs'], **{'engine-0': ['lost'] * 3})
    assert stage.run(restarts=0) == 0


def test_an_engine_that_finds_no_room_again_is_not_waited_for_at_the_end():
    stage = Stage(controller=['runs'] * 5 + [0], learner=['runs'], **{'engine-0': ['lost', 'waiting']})
    began_s = time.monotonic()
    assert stage.run(grace_s=60.0) == 0
    assert time.monotonic() - began_s < 30.0  # of 60 s that roles have to save their state
    assert 'stop engine-0' not in stage.calls


def test_an_error_of_the_configuration_ends_the_run():
    stage = Stage(controller=['runs'], learner=['runs'], **{'engine-0': ['runs', 2]})
    assert stage.run() == 2


def test_too_few_nodes_end_the_start_with_one_sentence():
    stage = Stage(controller=['runs'], learner=['waiting'])
    with pytest.raises(UserError, match='learner has no room'):
        stage.run(wait_s=0.05)
    assert stage.calls == ['remove controller', 'remove learner']


@contextlib.contextmanager
def told_to_stop(after_s=0.1):
    """SIGTERM to this process."""
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_signal_has_all_roles_save():
    stage = Stage(controller=['runs'], learner=['runs'])
    with told_to_stop():
        assert stage.run() == 75
    assert stage.calls[:2] == ['stop controller', 'stop learner']


@pytest.mark.parametrize(('end', 'code'), [('runs', 75), (0, 0), (3, 3)])
def test_a_run_whose_controller_does_not_end_in_time_has_not_finished(end, code):
    stage = Stage(controller=['runs'], learner=['runs'], ends={'controller': [end]})
    with told_to_stop():
        assert stage.run(grace_s=0.1) == code


def test_a_group_that_is_lost_while_roles_save_is_not_placed_again():
    stage = Stage(controller=['runs'], learner=['runs'], ends={'learner': ['lost']})
    with told_to_stop():
        assert stage.run() == 75
    assert stage.placed == ['controller', 'learner']


def test_a_place_that_is_not_found_ends_the_start_and_what_comes_after_it_is_not_asked_for():
    stage = Stage(learner=['unreserved'], **{'engine-0': ['runs']}, controller=['runs'])
    with pytest.raises(UserError, match='learner has no room'):
        stage.run(wait_s=0.1)
    assert stage.placed == ['learner']
    assert stage.calls == ['remove learner']


def test_a_signal_is_heeded_while_a_place_is_looked_for():
    stage = Stage(learner=['unreserved'], controller=['runs'])
    with told_to_stop():
        assert stage.run() == 75
    assert stage.calls == ['remove learner']


def test_a_learner_that_finds_no_room_again_ends_the_run_with_one_sentence(capsys):
    stage = Stage(controller=['runs'], learner=['lost', 'unreserved'])
    assert stage.run(wait_s=0.05) == 75
    assert capsys.readouterr().out.count('learner has no room') == 1


def test_an_engine_that_finds_no_room_again_is_tried_for_as_long_as_the_run_goes_on():
    stage = Stage(controller=['runs'] * 30 + [0], learner=['runs'], **{'engine-0': ['lost', 'unreserved']})
    assert stage.run(wait_s=0.05) == 0
    assert stage.placed == ['controller', 'learner', 'engine-0', 'engine-0']


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class GetTimeoutError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


DEAD_AT_START = """The actor died because of an error raised in its creation task, \x1b[36mray::A()\x1b[39m (pid=7)
  File "/shared/launch/ray/actor.py", line 53, in __init__
    os.chdir(cwd)
    ^^^^^^^^^^^^^
FileNotFoundError: [Errno 2] No such file or directory: '/home/me'"""
DEAD_NODE = """The actor died unexpectedly before finishing this task.
\tclass_name: RoleActor
\tip: 10.0.0.7
The actor is dead because its node has died. Node Id: 12
The actor never ran - it was cancelled before it started running."""
FAILED = """\x1b[36mray::RoleActor.look()\x1b[39m (pid=7, ip=10.0.0.7)
  File "/shared/launch/ray/actor.py", line 88, in _start
    self._logs.mkdir(parents=True, exist_ok=True)
OSError: [Errno 116] Stale file handle: '/shared/runs/a/ray'"""


class FakeRay:
    """Of Ray what placement.py and main.py use; references are functions that return the value."""

    def __init__(self):
        self.nodes, self.calls = [{'Alive': True}], []
        self.answers = {}  # of `look` by the name of a role: what it returns, or raises
        self.frees_slices, self.are_slices_free = threading.Event(), True

    def modules(self):
        exceptions = [RayError, RayTaskError, RayActorError, ActorUnavailableError, GetTimeoutError, OutOfMemoryError]
        members = {
            'ray': {
                **dict.fromkeys(('init', 'shutdown', 'kill'), lambda *_, **__: None),
                'get': lambda asked, timeout=None: [ask() for ask in asked] if isinstance(asked, list) else asked(),
                'wait': lambda asked, timeout: (asked, []),
                'remote': lambda cls: self,
                'nodes': lambda: self.nodes,
                'cluster_resources': lambda: {'TPU': 8.0},
            },
            'ray.exceptions': {cls.__name__: cls for cls in exceptions},
            'ray.util': {'placement_group': lambda *_, **__: self.reserve('bundles'), 'remove_placement_group': id},
            'ray.util.tpu': {'slice_placement_group': lambda **asked: self.reserve_slice(asked['topology'])},
            'ray.util.placement_group': {'PlacementGroup': object},
            'ray.util.scheduling_strategies': {'PlacementGroupSchedulingStrategy': lambda *_, **__: None},
        }
        modules = {name: types.ModuleType(name) for name in members}
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(module).update(members[name])
        modules['ray'].exceptions, modules['ray'].util = modules['ray.exceptions'], modules['ray.util']
        modules['ray.util'].tpu = modules['ray.util.tpu']
        return modules

    def reserve(self, what):
        self.calls.append(f'reserve {what}')
        return types.SimpleNamespace(ready=lambda: lambda: None)

    def reserve_slice(self, topology):
        if not self.are_slices_free:
            self.calls.append(f'look for {topology}')
            assert self.frees_slices.wait(100.0), 'somebody waits for a slice'
        remove = lambda: self.calls.append(f'remove {topology}')
        return types.SimpleNamespace(placement_group=self.reserve(topology), shutdown=remove)

    def options(self, **_):
        return types.SimpleNamespace(remote=self.start)

    def start(self, name, *_, **__):
        method = lambda call: types.SimpleNamespace(remote=lambda: call)
        stop = types.SimpleNamespace(remote=lambda: self.answers.update({name: [75]}))
        return types.SimpleNamespace(look=method(lambda: self.look(name)), stop=stop, kill=method(lambda: None))

    def look(self, name):
        answers = self.answers.get(name, [None])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return State(1, answer)


@pytest.fixture
def fake_ray(monkeypatch):
    fake = FakeRay()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, 'launch.ray.placement', raising=False)
    monkeypatch.setattr('launch.ray.reservation.PAUSE_S', 0.01)
    yield fake
    fake.frees_slices.set()
    await_let_go(5.0)
    sys.modules.pop('launch.ray.placement', None)


def place(group):
    placement = importlib.import_module('launch.ray.placement')
    return placement.PlacedGroup(group, logs='/shared/runs/a/ray', host='', restarts=1)


def group_of(name, topology=None):
    found = Slice('v4', topology, 1, 4) if topology else None
    return Group(name, {'CPU': 1.0}, [Process(f'{name}-0', [])], {}, found)


def placed_engine(answers, fake):
    fake.answers['engine-0'] = answers
    placed = place(group_of('engine'))
    wait_until(placed.is_placed, 'the bundles')
    return placed


def test_a_group_does_not_wait_for_its_slice(fake_ray):
    fake_ray.are_slices_free = False
    placed = place(group_of('learner', '2x2x2'))
    assert (placed.is_reserved(), placed.is_placed()) == (False, False)
    fake_ray.frees_slices.set()
    wait_until(placed.is_placed, 'the slice')
    assert [state.code for state in placed.look()] == [None]
    placed.remove()
    assert fake_ray.calls == ['look for 2x2x2', 'reserve 2x2x2', 'remove 2x2x2']


def test_a_slice_that_comes_after_its_group_was_removed_is_given_back(fake_ray):
    fake_ray.are_slices_free = False
    placed = place(group_of('learner', '2x2x2'))
    began_s = time.monotonic()
    placed.remove()
    assert time.monotonic() - began_s < 30.0  # of 100 s that an attempt takes
    fake_ray.frees_slices.set()
    wait_until(lambda: 'remove 2x2x2' in fake_ray.calls, 'the end of the reservation')


@pytest.mark.parametrize('error', [TimeoutError, RuntimeError, RayError])
def test_a_slice_is_looked_for_again_where_there_is_no_room(error, fake_ray, monkeypatch):
    attempts = [error('no head'), error('no head'), types.SimpleNamespace(placement_group=fake_ray.reserve('4'))]

    def attempt(**_):
        if isinstance(attempts[0], Exception):
            raise attempts.pop(0)
        return attempts[0]

    monkeypatch.setattr(sys.modules['ray.util.tpu'], 'slice_placement_group', attempt)
    attempts[-1].shutdown = lambda: None
    wait_until(place(group_of('learner', '2x2x2')).is_placed, 'the third attempt')


def test_an_error_of_a_reservation_is_not_kept_on_its_thread(fake_ray, monkeypatch):
    def refuse(**_):
        raise ValueError('Invalid accelerator topology')

    monkeypatch.setattr(sys.modules['ray.util.tpu'], 'slice_placement_group', refuse)
    placed = place(group_of('learner', '2x2x2'))
    with pytest.raises(ValueError, match='Invalid accelerator topology'):
        wait_until(placed.is_reserved, 'the error')


def test_the_others_are_watched_and_signals_heeded_while_a_lost_engine_looks_for_a_slice(fake_ray):
    fake_ray.answers |= {'engine-0': [None, RayActorError(DEAD_NODE)], 'controller-0': [None] * 5 + [0]}
    assert supervise_slices(fake_ray) == 0
    assert fake_ray.calls.count('look for 2x2x1') == 1


def test_a_signal_is_heeded_while_a_lost_engine_looks_for_a_slice(fake_ray):
    fake_ray.answers['engine-0'] = [None, RayActorError(DEAD_NODE)]
    with told_to_stop(0.3):
        assert supervise_slices(fake_ray) == 75
    assert fake_ray.calls.count('look for 2x2x1') == 1
    fake_ray.frees_slices.set()
    wait_until(lambda: fake_ray.calls.count('remove 2x2x1') == 2, 'both slices of the engine to be given back')


def supervise_slices(fake):
    """A run whose engine finds its slice, and after it is lost no other."""

    def place_and_take(group):
        placed = place(group)
        if group.name == 'engine' and fake.are_slices_free:
            wait_until(placed.is_reserved, 'the slice')
            fake.are_slices_free = False
        return placed

    began_s = time.monotonic()
    groups = [group_of('learner', '2x2x4'), group_of('engine', '2x2x1'), group_of('controller')]
    shortage = lambda group: f'{group.name} has no room'
    code = supervise(groups, place_and_take, shortage, restarts=9, wait_s=0.1, grace_s=2.0)
    assert time.monotonic() - began_s < 30.0  # of 100 s that an attempt takes
    return code


def test_a_look_that_fails_inside_an_actor_is_one_that_failed_this_time(fake_ray):
    placed = placed_engine([RayTaskError(FAILED), ActorUnavailableError('later'), None], fake_ray)
    assert [len(placed.look()) for _ in range(3)] == [0, 0, 1]


def test_a_group_whose_looks_fail_for_long_is_lost(fake_ray, monkeypatch):
    placed = placed_engine([RayTaskError(FAILED)], fake_ray)
    assert placed.look() == []
    monkeypatch.setattr('launch.ray.placement.PATIENCE_S', -1.0)
    with pytest.raises(LostGroupError, match=r'^no answer for -1 s: OSError: \[Errno 116\] Stale file handle'):
        placed.look()


@pytest.mark.parametrize(
    ('error', 'said'),
    [
        (
            RayActorError(DEAD_AT_START),
            "an actor died: FileNotFoundError: [Errno 2] No such file or directory: '/home/me'",
        ),
        (RayActorError(DEAD_NODE), 'an actor died: The actor is dead because its node has died. Node Id: 12'),
        (OutOfMemoryError('The node runs low on memory.\nIts id: 12'), 'an actor died: The node runs low on memory.'),
        (RayActorError(''), 'an actor died: RayActorError'),
    ],
)
def test_a_lost_group_says_why(error, said, fake_ray):
    placed = placed_engine([error], fake_ray)
    with pytest.raises(LostGroupError) as raised:
        placed.look()
    assert str(raised.value) == said


def test_a_role_whose_log_is_away_at_its_end_keeps_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv('STAND_IN_FAILS', 'engine-0')
    role = OneRole(tmp_path)
    wait_until(lambda: role.actor._program.poll() is not None, 'the end of the process')
    (tmp_path / 'logs').rename(tmp_path / 'away')
    state = role.actor.look()
    assert state.code == 2
    assert state.tail == f'{tmp_path}/logs/engine-0.0.log cannot be read: No such file or directory'


def test_ray_is_left_when_no_attempt_to_reserve_is_under_way(fake_ray, tmp_path, monkeypatch):
    events = []

    def attempt():
        time.sleep(0.2)
        events.append('attempted')

    def end(*_, **__):
        reservation = Reservation(attempt, lambda _: None)
        time.sleep(0.05)
        reservation.let_go()
        return 0

    monkeypatch.setattr(sys.modules['ray'], 'shutdown', lambda: events.append('left'))
    assert start_on([True], fake_ray, tmp_path, monkeypatch, run=end) == 0
    assert events == ['attempted', 'left']


def start_on(nodes, fake, tmp_path, monkeypatch, *flags, run=lambda *_, **__: 0):
    fake.nodes = [{'Alive': alive} for alive in nodes]
    monkeypatch.setattr(command, 'supervise', run)
    monkeypatch.setattr('launch.cluster_run.PER_NODE', ())
    words = [word for word in COMMON if 'workdir' not in word]
    return command.main([*words, f'--workdir={tmp_path}/run', *PLANS['cpu'], *flags])


def test_one_address_for_roles_of_several_nodes_is_refused(fake_ray, tmp_path, monkeypatch):
    said = '--host=10.0.0.1 would be the address of the roles of all 2 nodes: leave it out'
    with pytest.raises(UserError, match=re.escape(said)):
        start_on([True, True, False], fake_ray, tmp_path, monkeypatch, '--host=10.0.0.1')


@pytest.mark.parametrize(
    ('nodes', 'flags'),
    [([True, False], ['--host=10.0.0.1']), ([True, True], ['--host=127.0.0.1', '--local_nodes']), ([True, True], [])],
)
def test_one_address_is_taken_where_it_can_be_that_of_all(nodes, flags, fake_ray, tmp_path, monkeypatch):
    assert start_on(nodes, fake_ray, tmp_path, monkeypatch, *flags) == 0


def test_the_interpreter_of_the_roles_needs_jax_for_the_gpus_of_the_cluster(fake_ray, tmp_path, monkeypatch):
    """The interpreter of the tests has none."""
    python = f'--python={sys.executable}'
    assert start_on([True], fake_ray, tmp_path, monkeypatch, python) == 0
    with pytest.raises(UserError, match=re.escape(f'{python} has no jax for GPUs')):
        start_on([True], fake_ray, tmp_path, monkeypatch, python, *PLANS['gpu'])
