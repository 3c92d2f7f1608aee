"""launch.ray without Ray: bundles and commands, what an actor does with its role, and what becomes of lost groups."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.errors import UserError
from launch.ray import main as command
from launch.ray.actor import RoleActor, State
from launch.ray.plan import Group, Process
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
        (['--accelerator=v9'], "--accelerator='v9' is not known: use v4, v5p, v5e, v6e, v7x, gpu or cpu"),
        (
            ['--topology=2x2x3'],
            "the topology '2x2x3' is none of v4; those that are known are 2x2x1, 2x2x2, 2x2x4, 2x4x4",
        ),
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


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'ray' else find(name))
    flags = [word for word in COMMON if 'workdir' not in word]
    with pytest.raises(UserError, match=re.escape("pip install 'areal_jax[ray]'")):
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
    monkeypatch.setattr('launch.ray.actor._PAUSE_S', 0.0)
    role = OneRole(tmp_path)
    for starts in (1, 2):
        os.kill(role.await_start(starts), signal.SIGKILL)
    wait_until(lambda: role.actor.look().code is not None, 'the end')
    state = role.actor.look()
    assert (state.starts, state.code) == (2, 75)
    assert sorted(path.name for path in (tmp_path / 'logs').iterdir()) == ['engine-0.0.log', 'engine-0.1.log']


def test_a_role_with_an_error_of_the_configuration_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr('launch.ray.actor._PAUSE_S', 0.0)
    monkeypatch.setenv('STAND_IN_FAILS', 'engine-0')
    role = OneRole(tmp_path)
    wait_until(lambda: role.actor.look().code is not None, 'the end')
    state = role.actor.look()
    assert (state.starts, state.code, state.tail) == (1, 2, 'error: port 1 is in use: use another')


@pytest.mark.parametrize(('name', 'code'), [('engine', 0), ('learner', 75)])
def test_a_role_that_is_told_to_stop_ends_by_itself_and_stays_away(name, code, tmp_path, monkeypatch):
    monkeypatch.setattr('launch.ray.actor._PAUSE_S', 0.0)
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

    def __init__(self, **looks):
        self.looks, self.placed, self.calls, self.count = looks, [], [], 0

    def place(self, group):
        self.placed.append(group.name)
        return StagedGroup(self, group.name)

    def run(self, restarts=1, wait_s=100.0):
        groups = [Group(name, {'CPU': 1}, [Process(f'{name}-0', [])], {}) for name in self.looks]
        return supervise(
            groups, self.place, lambda group: f'{group.name} has no room', restarts=restarts, wait_s=wait_s, grace_s=2.0
        )


class StagedGroup:
    def __init__(self, stage, name):
        self.stage, self.name = stage, name

    def is_placed(self):
        looks = self.stage.looks[self.name]
        return not (looks and looks[0] == 'waiting')

    def look(self):
        looks = self.stage.looks[self.name]
        found = looks.pop(0) if len(looks) > 1 else looks[0]
        self.stage.count += 1
        assert self.stage.count < 500, 'the run does not end'
        if found == 'lost':
            raise LostGroupError('the node is gone')
        return [State(1, None if found == 'runs' else found, 'last words')]

    def stop(self):
        self.stage.calls.append(f'stop {self.name}')
        self.stage.looks[self.name] = [75 if self.name == 'controller' else 0]

    def remove(self):
        self.stage.calls.append(f'remove {self.name}')


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr('launch.ray.supervision._LOOK_S', 0.01)


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
    assert stage.run() == 0
    assert time.monotonic() - began_s < 1.0  # of 2 s that roles have to save their state
    assert 'stop engine-0' not in stage.calls


def test_an_error_of_the_configuration_ends_the_run():
    stage = Stage(controller=['runs'], learner=['runs'], **{'engine-0': ['runs', 2]})
    assert stage.run() == 2


def test_too_few_nodes_end_the_start_with_one_sentence():
    stage = Stage(controller=['runs'], learner=['waiting'])
    with pytest.raises(UserError, match='learner has no room'):
        stage.run(wait_s=0.05)
    assert stage.calls == ['remove controller', 'remove learner']


def test_a_signal_has_all_roles_save(monkeypatch):
    stage = Stage(controller=['runs'], learner=['runs'])
    timer = signal.setitimer(signal.ITIMER_REAL, 0.1)
    monkeypatch.setattr(signal, 'SIGALRM', signal.SIGALRM)
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        assert stage.run() == 75
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert stage.calls[:2] == ['stop controller', 'stop learner']
    assert timer == (0.0, 0.0)
