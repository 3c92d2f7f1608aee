"""The registry: who holds a name, whatever the order of the accesses to the directory."""

from __future__ import annotations

import dataclasses
import json
import os
import random

import pytest

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.registry import REGISTRY, Entry, FencedError, Registration, list_orders, read_entries

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
