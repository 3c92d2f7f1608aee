"""Published weights go from the learner to an engine on the device: the host sees digests, never weights."""

import jax
import numpy as np
import pytest

from areal_jax.publication.files_channel import DeviceChannel
from areal_jax.publication.manifest import device_manifest, host_manifest
from areal_jax.sharding.placement import move_to
from tests.gpu.test_training import groups, make_learner, params  # noqa: F401 fixtures

pytestmark = pytest.mark.gpu


def addresses(tree):
    return {leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def test_a_copy_is_made_on_the_device_and_no_update_touches_it(params, groups, device):  # noqa: F811
    learner = make_learner(params, dtype='bfloat16', publish_dtype='bfloat16')
    learner.warm_up()
    with jax.transfer_guard_device_to_host('disallow'), jax.transfer_guard_host_to_device('disallow'):
        copy = move_to(learner.publish(0), device)
        jax.block_until_ready(copy)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(copy))
    assert not addresses(copy) & addresses(learner.state.params)
    before = jax.device_get(copy)
    learner.update(groups, version=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(copy), before)


def test_engines_on_the_learners_device_share_the_channels_copy(params, device):  # noqa: F811
    learner = make_learner(params, publish_dtype='bfloat16')
    channel = DeviceChannel(device, verify=True)
    copy = learner.publish(0)
    published = channel.transfer(0, copy)
    received = channel.receive(published, device)
    assert addresses(received) == addresses(copy)
    assert device_manifest(received) == host_manifest(jax.device_get(received))
