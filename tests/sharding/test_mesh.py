from __future__ import annotations

import jax
import pytest

from areal_jax.sharding.rules import make_mesh


def test_mesh_takes_the_first_devices():
    mesh = make_mesh(data=2, fsdp=3)
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 3, 'expert': 1, 'context': 1, 'tensor': 1}
    assert list(mesh.devices.ravel()) == jax.devices()[:6]


def test_neighbours_lie_along_tensor():
    mesh = make_mesh(fsdp=2, context=2, tensor=2)
    assert [d.id for d in mesh.devices[0, 0, 0, 0]] == [0, 1]
    assert [d.id for d in mesh.devices[0, :, 0, 0, 0]] == [0, 4]


def test_too_many_devices_names_both_numbers():
    with pytest.raises(ValueError, match=r"cluster.learner='data=4,fsdp=4' needs 16 devices; the platform 'cpu' has 8"):
        make_mesh(data=4, fsdp=4)


def test_no_devices_is_refused():
    with pytest.raises(
        ValueError, match=r"cluster.learner='context=0': the size of context must be a whole number, at least 1"
    ):
        make_mesh(context=0)
