"""A kind of server and a channel that nothing but one file of a user knows, each used by a whole run."""

from __future__ import annotations

import json

from areal_jax.app.workdir.records import OWN_CODE as FILE
from tests.app.parts.test_server_builder import OWN, check_whole, finish, launch
from tests.app.small import SmallRun, equal

CHANNEL = """
import jax
import numpy as np

from areal_jax.config.kinds import ChannelKind
from areal_jax.types import PublishedWeights

class HostChannel:
    '''Versions as numpy arrays.'''
    def __init__(self):
        self.held, self.received = {}, 0

    def transfer(self, version, copy):
        self.held[version] = jax.tree.map(np.array, copy)
        return PublishedWeights(version, f'host {version}', version)

    def receive(self, published, place=None):
        self.received += 1
        return jax.device_put(self.held[published.handle], place)

    def release(self, version, pinned=()):
        self.held = {v: held for v, held in self.held.items() if v >= version or v in pinned}

def build():
    return ChannelKind('host', lambda parts: HostChannel(), reaches_processes=False)
"""
SERVER = """
import pathlib

from areal_jax.config.kinds import OWN, ClientKind, ServerKind
from areal_jax.rollout.http.clients.own import connect

def connect_noted(parts):
    with open(pathlib.Path(__file__).with_name('connected'), 'a') as file:
        print(parts.entry.name, file=file)
    return connect(parts)

def build():
    client = ClientKind('own', connect_noted)
    return ServerKind('noted', (client,), launch=OWN.launch, has_own_engines=True, keeps_kv=True, reads=OWN.reads)
"""


def test_a_run_with_a_channel_of_ones_own_equals_one_without(tmp_path):
    (tmp_path / 'channel.py').write_text(CHANNEL)
    spec = f'{tmp_path}/channel.py:build'
    run = SmallRun(tmp_path / 'own', publication__channel=spec)
    channel = run.session.program.parts.generation.channel
    run.train()
    usual = SmallRun(tmp_path / 'usual').train()
    assert equal(run.final, usual.final)
    assert channel.received >= 5  # the first version and each update
    assert list(channel.held) == [5]
    assert json.loads((tmp_path / 'own' / FILE).read_text())['publication.channel']['function'] == spec


def test_a_run_with_servers_of_a_kind_of_ones_own(tmp_path):
    (tmp_path / 'server.py').write_text(SERVER)
    flags = [f'--config.rollout.server={tmp_path}/server.py:build', '--config.run.steps=3']
    process = launch(tmp_path / 'run', *flags)
    check_whole(*finish(process, tmp_path / 'run'), 3)
    assert set((tmp_path / 'connected').read_text().split()) == {'0'}
    assert '--config.rollout.server=own' in OWN  # the flag given here stands behind it and counts
