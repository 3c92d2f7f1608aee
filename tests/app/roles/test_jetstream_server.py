"""The interpreter of servers behind JetStream: this one, the one that is named, the one of a clone, or a sentence."""

import importlib.util
import os
import sys

import pytest

from areal_jax.app.roles.own_server import JETSTREAM, describe_jetstream, enter_jetstream, find_jetstream
from areal_jax.app.roles.server_front import HTTP, find_front
from areal_jax.config.kinds import JETSTREAM_CLIENT
from areal_jax.errors import UserError
from areal_jax.workers import descendants


@pytest.fixture
def missing(monkeypatch):
    """No JetStream in this interpreter, which is no clone of any environment."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'jetstream' else find_spec(name))
    monkeypatch.delenv(JETSTREAM.variable, raising=False)


@pytest.fixture
def started(monkeypatch):
    found = []
    monkeypatch.setattr(os, 'execv', lambda python, words: found.append((python, words)))
    return found


def test_the_interpreter_that_is_named_goes_on_with_the_same_command(missing, started, monkeypatch, tmp_path):
    python = tmp_path / 'python'
    python.touch()
    monkeypatch.setenv(JETSTREAM.variable, str(python))
    monkeypatch.setattr(sys, 'orig_argv', ['python3', '-m', 'areal_jax.main_serve', '--port=0'])
    enter_jetstream()
    assert started == [(str(python), [str(python), '-m', 'areal_jax.main_serve', '--port=0'])]


def test_a_clone_has_one_of_its_own(missing, monkeypatch, tmp_path):
    monkeypatch.setattr(descendants, 'find_clone', lambda: tmp_path)
    with pytest.raises(UserError, match=r'jetstream/bin/python is none: make one with `bash launch/jetstream_environ'):
        find_jetstream()
    made = tmp_path / '.venv-jetstream/bin/python'
    made.parent.mkdir(parents=True)
    made.touch()
    assert find_jetstream() == str(made)


def test_an_installation_has_none(missing, monkeypatch):
    monkeypatch.setattr(descendants, 'find_clone', lambda: None)
    message = r"^rollout.server='jetstream' needs an interpreter that has JetStream: install JetStream into"
    with pytest.raises(UserError, match=message):
        find_jetstream()


def test_an_interpreter_without_jetstream_is_not_started_again_and_again(missing, started, monkeypatch):
    """Named as its own successor it would go round for ever."""
    monkeypatch.setenv(JETSTREAM.variable, sys.executable)
    with pytest.raises(UserError, match=r'has JetStream, and .* is none: '):
        enter_jetstream()
    assert started == []


def test_where_jetstream_is_nothing_is_started(started, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: object())
    enter_jetstream()
    assert started == []
    assert find_jetstream() == sys.executable


@pytest.mark.parametrize('server', ['in_process', 'own', 'vllm', 'external'])
def test_all_other_kinds_are_served_over_http(server):
    assert find_front(server) is HTTP


def test_a_kind_may_bring_a_front_of_its_own():
    front = find_front('jetstream')
    assert front == describe_jetstream()
    assert front.client is JETSTREAM_CLIENT
    assert front.survives
