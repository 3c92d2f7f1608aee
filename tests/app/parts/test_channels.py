"""The channel inside a process: a version that all engines have is let go, unless one of them may ask for it again."""

import jax
import numpy as np
import pytest

from areal_jax.app.model.model import describe_model
from areal_jax.app.parts.channels import ChannelParts, build_device
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import TrackedConfig
from areal_jax.publication.versions import PublicationError
from tests.app.small import SmallRun, small_config

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
