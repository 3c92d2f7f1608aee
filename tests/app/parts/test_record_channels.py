"""Whole runs through shared memory and sockets, which generate and train what a run inside the process does."""

import pathlib
import tempfile

import pytest

from areal_jax.app.parts.channels import ChannelParts
from areal_jax.app.parts.record_channels import build_shm, stream_key
from areal_jax.config import TrackedConfig
from areal_jax.distributed.handshake import load_key
from areal_jax.publication.carriers.shm_segment import DIRECTORY
from tests.app.small import SmallRun, equal, small_config


def left_behind():
    return {*DIRECTORY.glob('areal_jax-*'), *pathlib.Path(tempfile.gettempdir()).glob('areal_jax-weights-*')}


@pytest.mark.slow
@pytest.mark.parametrize('channel', ['shm', 'stream'])
def test_a_run_over_a_carrier_of_records_equals_one_without(tmp_path, channel):
    before = left_behind()
    run = SmallRun(tmp_path / channel, publication__channel=channel).train()
    usual = SmallRun(tmp_path / 'usual').train()
    assert equal(run.final, usual.final)
    assert left_behind() <= before


def test_the_segment_of_a_run_is_watched_as_long_as_it_is_there(tmp_path, monkeypatch):
    watched = []
    monkeypatch.setattr('areal_jax.app.parts.record_channels.remove_with_owner', watched.append)
    config = TrackedConfig(small_config(publication__channel='shm'))
    channel = build_shm(ChannelParts(config, tmp_path, model=None, allocation=None))
    try:
        (path,) = watched
        assert path.exists()
    finally:
        channel.close()
    assert not path.exists()


def test_the_key_of_weights_is_not_that_of_roles(tmp_path):
    key = load_key(tmp_path / 'registry' / 'key')
    assert stream_key(tmp_path) == stream_key(tmp_path) != key
