from __future__ import annotations

import jax
import pytest

from areal_jax.sharding.mesh import make_mesh


def test_mesh_takes_the_first_devices():
    mesh = make_mesh(data=2, fsdp=3)
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 3}
    assert list(mesh.devices.ravel()) == jax.devices()[:6]


def test_too_many_devices_names_both_numbers():
    with pytest.raises(ValueError, match=r'mesh.data=4 x mesh.fsdp=4 needs 16 devices, 8 are available'):
        make_mesh(data=4, fsdp=4)


def test_no_devices_is_refused():
    with pytest.raises(ValueError, match=r'mesh.fsdp=0 must be at least 1'):
        make_mesh(fsdp=0)
