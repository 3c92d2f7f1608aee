"""The registry: who holds a name, whatever the order of the accesses; who is alive, and waits that name for whom."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import random
import threading

import pytest

from areal_jax import files, registry
from areal_jax.errors import LostPeerError, UserError
from areal_jax.registry import (
    PATIENCE_S,
    REGISTRY,
    Entry,
    FencedError,
    Heartbeat,
    Presence,
    Registration,
    await_living,
    list_orders,
    read_entries,
    require_usable,
)

ENTRY = Entry('engine-3', 0, '', 'http://host:1', 'own', 'engine', 3)


def test_an_entry_is_read_as_it_was_written_and_beats_and_leaves(tmp_path):
    assert read_entries(tmp_path) == []
    holder = Registration(tmp_path, dataclasses.replace(ENTRY, details={'devices': 4}))
    (read,) = read_entries(tmp_path)
    assert dataclasses.replace(read, heartbeat=None) == holder.entry
    assert (read.incarnation, read.process, read.details) == (1, os.getpid(), {'devices': 4})
    os.utime(holder.path, ns=(5, 5))
    holder.beat()
    assert read_entries(tmp_path)[0].heartbeat not in (5, None)
    holder.close()
    assert read_entries(tmp_path)[0].is_leaving


def test_pipes_and_devices_in_the_place_of_entries_are_passed_over(tmp_path, at_once):
    holder = Registration(tmp_path, ENTRY)
    os.mkfifo(tmp_path / REGISTRY / 'engine-4.000001.00000000.json')
    (tmp_path / REGISTRY / 'engine-5.000001.00000000.json').symlink_to('/dev/zero')
    large = tmp_path / REGISTRY / 'engine-6.000001.00000000.json'
    large.write_text(json.dumps(json.loads(holder.path.read_text()) | {'name': 'engine-6', 'code': 'x' * 2**20}))
    assert [entry.name for entry in read_entries(tmp_path)] == ['engine-3']


@pytest.mark.parametrize('changed', [{'name': 'engine-4'}, {'incarnation': 2}, {'token': '00000000'}])
def test_an_entry_that_says_another_name_than_its_file_is_not_believed(tmp_path, changed):
    holder = Registration(tmp_path, ENTRY)
    holder.path.write_text(json.dumps(json.loads(holder.path.read_text()) | changed))
    assert read_entries(tmp_path) == []


def test_a_process_started_again_takes_its_name_and_the_one_before_learns_it(tmp_path):
    first = Registration(tmp_path, ENTRY)
    second = Registration(tmp_path, ENTRY)
    assert second.entry.order > first.entry.order
    assert [entry.order for entry in read_entries(tmp_path)] == [second.entry.order]
    with pytest.raises(FencedError, match=rf'^engine-3 of .* was taken over by process {os.getpid()} on .*: this proc'):
        first.beat()
    first.close()  # says nothing any more
    second.beat()
    assert [(entry.order, entry.is_leaving) for entry in read_entries(tmp_path)] == [(second.entry.order, False)]


def test_an_entry_that_was_removed_is_written_again(tmp_path):
    holder = Registration(tmp_path, ENTRY)
    holder.path.unlink()
    holder.path.parent.rmdir()
    holder.beat()
    assert read_entries(tmp_path)[0].order == holder.entry.order


def test_unknown_fields_are_ignored_and_what_is_not_whole_is_read_again(tmp_path, monkeypatch):
    holder = Registration(tmp_path, ENTRY)
    whole = json.dumps(json.loads(holder.path.read_text()) | {'colour': 'blue'})
    holder.path.write_text(whole)
    assert read_entries(tmp_path)[0].name == 'engine-3'
    holder.path.write_text(whole[: len(whole) // 2])
    assert read_entries(tmp_path) == []
    looks = []

    def list_and_complete(directory):
        looks.append(1)
        if len(looks) == 2:
            holder.path.write_text(whole)
        return list_orders(directory)

    monkeypatch.setattr('areal_jax.registry.list_orders', list_and_complete)
    assert read_entries(tmp_path)[0].name == 'engine-3'


@pytest.mark.parametrize('name', ['a/b', '', '../x', '.hidden', 'a b'])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match='is no name in a registry'):
        Registration(tmp_path, dataclasses.replace(ENTRY, name=name))


class Model:
    """Processes that start, beat, are killed and leave in any order, and a reader that admits whom it sees."""

    def __init__(self, workdir, seed):
        self.workdir, self.chosen = workdir, random.Random(seed)
        self.starting = []  # (registration, its further steps)
        self.holders = []  # those that have started and were not told to end
        self.told = []  # orders of those that were
        self.admitted = None  # order of whom the reader has admitted last
        self.seen = []

    def act(self):
        getattr(self, self.chosen.choice(['start', 'step', 'step', 'beat', 'beat', 'die', 'leave', 'read', 'read']))()

    def start(self):
        registration = Registration.__new__(Registration)
        self.starting.append((registration, registration.steps(self.workdir, ENTRY)))

    def step(self):
        if not self.starting:
            return
        registration, steps = one = self.chosen.choice(self.starting)
        try:
            next(steps)
        except StopIteration:
            self.starting.remove(one)
            self.holders.append(registration)
        except FencedError:
            self.starting.remove(one)
            self.told.append(registration.entry.order)

    def beat(self):
        if not self.holders:
            return
        holder = self.chosen.choice(self.holders)
        try:
            holder.beat()
        except FencedError:
            self.holders.remove(holder)
            self.told.append(holder.entry.order)

    def die(self):
        if self.holders and self.chosen.random() < 0.5:
            self.holders.remove(self.chosen.choice(self.holders))
        elif self.starting:
            self.starting.remove(self.chosen.choice(self.starting))

    def leave(self):
        if self.holders:
            self.holders.pop(self.chosen.randrange(len(self.holders))).close()

    def read(self):
        entries = read_entries(self.workdir)
        assert len(entries) <= 1  # one name
        for entry in entries:
            assert self.admitted is None or entry.order >= self.admitted, 'an earlier holder came back'
            assert entry.order not in self.told, 'a process that was told to end is admitted'
            self.admitted = entry.order
            self.seen.append(entry.order)

    def settle(self):
        """All that have begun to start do so; then each living one beats."""
        while self.starting:
            self.step()
        for holder in list(self.holders):
            try:
                holder.beat()
            except FencedError:
                self.holders.remove(holder)
        self.read()


@pytest.mark.parametrize('part', range(4))
def test_no_reader_ever_sees_two_holders_of_one_name(tmp_path, monkeypatch, part):
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)
    changes = fenced = alone = 0
    for seed in range(250 * part, 250 * (part + 1)):
        workdir = tmp_path / str(seed)
        (workdir / REGISTRY).mkdir(parents=True)
        model = Model(workdir, seed)
        for _ in range(25):
            model.act()
        model.settle()
        changes += len(set(model.seen))
        fenced += len(model.told)
        living = [holder.entry.order for holder in model.holders]
        assert len(living) <= 1, 'two processes believe that they hold the name'
        if living:
            alone += 1
            assert living == [model.admitted]
    assert min(changes, fenced, alone) > 30  # the interleavings do something
    assert files.LOCK not in os.listdir(workdir / REGISTRY)


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


def test_an_ordinary_directory_passes_and_nothing_is_left_in_it(tmp_path):
    require_usable(tmp_path)
    assert list((tmp_path / 'registry').iterdir()) == []


def _raise(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def _listing_of_before(path):
    return []


@pytest.mark.parametrize(
    ('owner', 'name', 'broken', 'sentence'),
    [
        (pathlib.Path, 'rename', _raise(errno.ENOSYS), 'renaming a file over another does not work there (Function'),
        (os, 'listdir', _listing_of_before, 'listing what was renamed does not give what was put there'),
        (os, 'utime', _raise(errno.EPERM), 'setting the time of a file does not work there'),
        (fcntl, 'flock', _raise(errno.ENOLCK), 'locking a file does not work there (No locks available)'),
        (fcntl, 'flock', lambda file, how: None, 'gives one lock to two holders'),
        (os, 'utime', lambda path, ns: None, 'reading the time of a file does not give what was put there'),
    ],
)
def test_what_does_not_work_is_named(tmp_path, monkeypatch, owner, name, broken, sentence):
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        with pytest.raises(UserError) as refused:
            require_usable(tmp_path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / 'registry'))
    assert str(refused.value).endswith('NFS or Lustre for instance')
    assert list((tmp_path / 'registry').iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / 'registry').touch()
    with pytest.raises(UserError, match='making it does not work there'):
        require_usable(tmp_path)
