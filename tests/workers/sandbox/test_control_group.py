"""Control groups of answers: where they are made, what they bound and count, and that none stays."""

from __future__ import annotations

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.workers.sandbox import control_group
from areal_jax.workers.sandbox.control_group import find_files, make_group, read_used
from areal_jax.workers.worker_process import worker_environment

BOUND, TOUCHED = 48 * 2**20, 20 * 2**20


@pytest.fixture
def group():
    group = make_group()
    if group is None:
        pytest.skip('no control group can be made here')
    yield group
    group.close()


def find(tmp_path, mounts, own):
    for name, text in (('mountinfo', mounts), ('cgroup', own)):
        (tmp_path / name).write_text(text)
    return list(find_files(str(tmp_path / 'mountinfo'), str(tmp_path / 'cgroup')))


def make_tree(root, folder, controllers):
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / 'cgroup.subtree_control').write_text(f'{controllers}\n')


def test_version_2_is_used_where_a_group_above_governs_memory(tmp_path):
    """Its own group has processes, and so no groups with a bound below it."""
    tree = tmp_path / 'tree'
    make_tree(tree, 'user/app/run', '')
    make_tree(tree, 'user/app', 'cpu memory pids')
    make_tree(tree, 'user', 'memory')
    make_tree(tree, '', 'cpuset cpu memory pids')
    mounts = f'25 1 0:22 / {tree} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n20 1 0:5 / /proc rw - proc proc rw\n'
    first, second = find(tmp_path, mounts, '0::/user/app/run\n')
    assert set(first.folders.values()) == {str(tree / 'user' / 'app')}
    assert set(second.folders.values()) == {str(tree)}
    assert (first.memory[0], first.cpu, first.title) == ('memory.max', 'cpu.stat', 'cgroup v2')
    inside = mounts.replace('0:22 /', '0:22 /user/app')  # a container sees its part of the tree
    (found,) = find(tmp_path, inside.replace(str(tree), str(tree / 'user' / 'app')), '0::/user/app/run\n')
    assert set(found.folders.values()) == {str(tree / 'user' / 'app')}
    assert find(tmp_path, mounts, '0::/../elsewhere\n') == []


def test_version_1_needs_memory_and_the_count_of_cpu(tmp_path):
    mounts = ''.join(
        f'3{i} 1 0:{i} / /cg/{name} rw - cgroup cgroup rw,{name}\n'
        for i, name in enumerate(['memory', 'cpu,cpuacct', 'pids'])
    )
    own = '5:memory:/a/b\n4:cpu,cpuacct:/\n3:pids:/\n1:name=systemd:/\n0::/\n'
    (found,) = find(tmp_path, mounts, own)
    assert dict(found.folders) == {'memory': '/cg/memory/a/b', 'cpuacct': '/cg/cpu,cpuacct', 'pids': '/cg/pids'}
    assert found.title == 'cgroup v1'
    assert [len(find(tmp_path, mounts, own.replace(name, 'x'))) for name in ('memory', 'cpuacct', 'pids')] == [0, 0, 1]


@pytest.mark.parametrize(('mounts', 'own'), [('', ''), ('', '0::/\n'), ('30 1 0:1 / /cg rw - cgroup2 x rw\n', '')])
def test_a_machine_without_groups_has_none(tmp_path, mounts, own):
    assert find(tmp_path, mounts, own) == []
    assert list(find_files(str(tmp_path / 'none'), str(tmp_path / 'none'))) == []


def test_seconds_of_both_versions_are_read(tmp_path):
    (tmp_path / 'first').write_text('1500000000\n')
    (tmp_path / 'second').write_text('usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n')
    (tmp_path / 'kills').write_text('low 0\noom 5\noom_kill 3\noom_group_kill 0\n')
    for name in ('first', 'second'):
        assert read_used(str(tmp_path / name), str(tmp_path / 'kills')) == (1.5, 3)


def in_group(group, action):
    """In a fork that has entered; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            group.enter()
            action()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def fork_each(count, action):
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            action()
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def test_its_processes_have_no_more_memory_together_than_its_bound(group):
    """Each of them has less; what the kernel says of the most that there was at once is version 1's."""
    group.bound(BOUND, 16)
    ready = os.pipe()

    def fill():
        memory = b'x' * TOUCHED
        os.write(ready[1], b'x')
        signal.alarm(20)
        signal.pause()
        os._exit(len(memory))

    before = group.read_used().kills
    pid = os.fork()
    if pid == 0:
        group.enter()
        fork_each(4, fill)
        os._exit(0)
    end_s = time.monotonic() + 20
    while group.read_used().kills == before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert group.read_used().kills > before

    memory = group.folders['memory']
    for name in ('memory.max_usage_in_bytes', 'memory.peak'):
        if (file := pathlib.Path(memory, name)).exists():
            assert TOUCHED < int(file.read_text()) <= 1.2 * BOUND
    group.close()  # ends them
    assert os.waitpid(pid, 0)[1] != 0


def test_it_counts_the_cpu_of_all_that_were_ever_in_it(group):
    """Also of those for whom nobody waits."""

    def act(seconds):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(4):
            if os.fork() == 0:
                while time.process_time() < seconds:
                    pass
                os._exit(0)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                return

    in_group(group, lambda: act(0.0))
    forks_s = group.read_used().cpu_s  # of this process, which may be large
    in_group(group, lambda: act(0.2))
    assert 0.8 * 0.9 <= group.read_used().cpu_s - forks_s <= 0.8 * 1.1 + 0.1 + 2 * forks_s


def test_it_bounds_the_number_of_processes(group):
    if 'pids' not in group.folders:
        pytest.skip('the number of processes is not governed here')
    group.bound(2**31, 4)  # forks of this process, which may be large, are no matter of memory

    def act():
        made = 0
        try:
            for _ in range(8):
                if os.fork() == 0:
                    signal.pause()
                made += 1
        except BlockingIOError:
            pass
        os._exit(made)

    status = in_group(group, act)
    assert os.waitstatus_to_exitcode(status) == 3
    group.close()


OWNER = """
import os, signal, sys
from areal_jax.workers.sandbox.control_group import make_group
group = make_group()
left = os.fork()
if left == 0:
    group.enter()
    os.closerange(3, 100)  # as confined children do: the lock is the owner's
    print(*group.folders.values(), flush=True)
    signal.pause()
signal.pause()
"""


def test_a_group_whose_owner_was_killed_is_removed_by_the_next_and_one_that_lives_is_not(group, monkeypatch):
    owners = [
        subprocess.Popen([sys.executable, '-c', OWNER], env=worker_environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (owner.stdout.readline().split() for owner in owners)
    owners[0].kill()
    owners[0].wait()
    assert all(map(os.path.isdir, killed + living))
    make_group().close()
    assert all(map(os.path.isdir, killed))  # it may be one that is about to be locked
    monkeypatch.setattr(control_group, 'GRACE_S', 0.0)
    make_group().close()
    assert not any(map(os.path.isdir, killed))
    assert all(map(os.path.isdir, living))
    owners[1].kill()
    owners[1].wait()
    make_group().close()
    assert not any(map(os.path.isdir, living))
    assert all(map(os.path.isdir, group.folders.values()))


def test_what_cannot_be_made_leaves_nothing(group, monkeypatch):
    """The lock is refused in the middle."""
    above = [pathlib.Path(folder).parent for folder in group.folders.values()]
    before = [set(os.listdir(folder)) for folder in above]

    def refuse(descriptor, flags):
        raise OSError('no lock')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    assert make_group() is None
    assert [set(os.listdir(folder)) - names for folder, names in zip(above, before, strict=True)] == [set()] * len(
        above
    )
