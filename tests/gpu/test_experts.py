"""The products of experts that accelerators use, alone and chosen while a program is traced."""

import jax
import jax.numpy as jnp
import pytest

from areal_jax.models import experts as expert_check
from areal_jax.models.expert_products import choose_mixer
from areal_jax.models.experts import make_mix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_product_of_the_device_is_that_of_plain_jax(dtype, device):
    assert expert_check.find_fault(choose_mixer(device.platform, dtype, 1), dtype) == ''


def test_it_is_chosen_inside_of_a_program_without_a_warning(device, capsys):
    mix = make_mix(device.platform)
    x, gate, down = jnp.ones((64, 32)), jnp.ones((4, 32, 16)), jnp.ones((4, 16, 32))
    experts = jnp.tile(jnp.arange(2, dtype=jnp.int32), (64, 1))
    y = jax.jit(lambda x: mix(x, experts, jnp.full((64, 2), 0.5), gate, gate, down))(x)
    assert bool(jnp.isfinite(y).all())
    assert 'warning' not in capsys.readouterr().err
