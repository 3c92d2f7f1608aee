"""Channels: a version is let go when nobody needs it; whole runs through shared memory and sockets."""

from __future__ import annotations

import pathlib
import tempfile

import jax
import numpy as np
import pytest

from areal_jax.app.model.model import describe_model
from areal_jax.app.parts.channels import ChannelParts, build_carried, build_device, stream_key
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import TrackedConfig
from areal_jax.distributed.handshake import load_key
from areal_jax.publication.carriers.shm_segment import DIRECTORY
from areal_jax.publication.versions import PublicationError
from tests.app.small import SmallRun, equal, small_config

WEIGHTS = {'norm': np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ('fields', 'is_kept'),
    [
        ({}, False),
        ({'evaluation__every': 2}, True),  # engines pin a version for it
        ({'staleness__schedule': 'fixed(1)'}, True),  # a later batch asks for it
        (  # engines join
            {'cluster__reallocate': 'auto', 'cluster__engines': '3 x tensor=1', 'cluster__learner': 'fsdp=4'},
            True,
        ),
    ],
)
def test_the_newest_version_is_kept_where_engines_may_ask_for_it_again(tmp_path, fields, is_kept):
    config = TrackedConfig(small_config(**fields))
    channel = build_device(ChannelParts(config, tmp_path, describe_model(config), build_allocation(config)))
    published = channel.transfer(1, jax.device_put(WEIGHTS))
    channel.release(1)
    if is_kept:
        assert channel.receive(published)['norm'].tolist() == [1.0, 1.0, 1.0]
    else:
        with pytest.raises(PublicationError, match=r'holds \[\]'):
            channel.receive(published)


def test_the_first_version_is_let_go_when_the_engines_are_built(tmp_path):
    run = SmallRun(tmp_path)
    generation = run.session.program.parts.generation
    with pytest.raises(PublicationError, match=r'holds \[\]'):
        generation.channel.receive(generation.newest)


# Whole runs through shared memory and sockets, which generate and train what a run inside the process does.


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
    monkeypatch.setattr('areal_jax.app.parts.channels.remove_with_owner', watched.append)
    config = TrackedConfig(small_config(publication__channel='shm'))
    channel = build_carried(ChannelParts(config, tmp_path, model=None, allocation=None))
    try:
        (path,) = watched
        assert path.exists()
    finally:
        channel.close()
    assert not path.exists()


def test_the_key_of_weights_is_not_that_of_roles(tmp_path):
    key = load_key(tmp_path / 'registry' / 'key')
    assert stream_key(tmp_path) == stream_key(tmp_path) != key
