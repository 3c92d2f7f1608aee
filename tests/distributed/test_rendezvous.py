"""The processes of a run wait for each other before the first collective, and see one workdir and no other cluster."""

from __future__ import annotations

import atexit
import pathlib

import jax
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.distributed import rendezvous
from areal_jax.distributed.peers import CommandError


class _Store(dict):
    """What processes have told each other; a process that is silent stays so."""

    def key_value_set(self, key, value, allow_overwrite=False):
        self[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self:
            raise jax.errors.JaxRuntimeError(f'DEADLINE_EXCEEDED after {timeout_ms}')
        return self[key]


@pytest.fixture
def store(monkeypatch):
    told = _Store()
    monkeypatch.setattr(rendezvous, 'coordination', lambda: told)
    return told


def test_a_process_without_a_number_is_told():
    with pytest.raises(ConfigError, match=r"coordinator='here:1' needs --process_id, from 0 to 2, a different one"):
        rendezvous.join('here:1', 3, None, 5)


@pytest.mark.parametrize(
    ('last', 'message'),
    [
        ({'areal_jax/process/2': 'built'}, None),
        ({'areal_jax/process/2': 'ended'}, 'process 2 ended before the run began'),
        ({}, r'process 2 did not build .* within distributed\.command_deadline_s=5: .*; raise the deadline'),
    ],
    ids=['all there', 'one ended', 'one silent'],
)
def test_processes_wait_for_each_other_before_the_first_collective(monkeypatch, store, last, message):
    store.update({'areal_jax/process/1': 'built'} | last)
    monkeypatch.setattr(jax, 'process_count', lambda: 3)
    if message:
        with pytest.raises(CommandError, match=message):
            rendezvous.meet(5)
    else:
        rendezvous.meet(5)
    assert store['areal_jax/process/0'] == 'built'


def test_a_run_that_has_met_says_no_more_that_it_ended(monkeypatch, store):
    unregistered = []
    monkeypatch.setattr(atexit, 'unregister', unregistered.append)
    rendezvous.meet(5)
    (say,) = unregistered  # what would have told the others at the end of the process
    say('ended')
    assert store['areal_jax/process/0'] == 'ended'


def test_a_follower_sees_the_witness_while_it_is_there(tmp_path, store):
    store['areal_jax/process/0'] = 'built'
    with rendezvous.witness(tmp_path):
        rendezvous.require_shared_workdir(5)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=f'process 0 does not see .* --workdir={tmp_path}: .* all processes share'):
        rendezvous.require_shared_workdir(5)


def test_a_follower_is_told_that_process_0_ended_before_it_looks_for_the_witness(store):
    store['areal_jax/process/0'] = 'ended'
    with pytest.raises(CommandError, match='process 0 ended before the run began'):
        rendezvous.require_shared_workdir(5)


def test_a_relative_workdir_is_named_by_its_whole_path(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with rendezvous.witness(pathlib.Path('.')):
        assert pathlib.Path(store['areal_jax/witness']).parent == tmp_path


@pytest.mark.parametrize(('coordinator', 'host'), [('node7:1234', 'node7'), ('10.0.0.1:80', '10.0.0.1')])
def test_the_host_of_process_0_is_that_of_the_coordinator(coordinator, host):
    assert rendezvous.host_of(coordinator) == host


@pytest.mark.parametrize(('coordinator', 'method'), [('n1:6000', 'deactivate'), ('', None)])
def test_jax_detects_a_cluster_only_where_nothing_was_said(coordinator, method, monkeypatch):
    """jax's detection of SLURM also leaves a process one GPU only."""
    given = {}
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **arguments: given.update(arguments))
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(rendezvous.atexit, 'register', lambda *arguments: None)
    rendezvous.join(coordinator, 2, 1 if coordinator else None, 5.0)
    assert given['cluster_detection_method'] == method
