"""The products of experts that accelerators use, alone and chosen while a program is traced."""

import jax
import jax.numpy as jnp
import pytest

from areal_jax.models.expert_check import Demand, choose_checked_mixer
from areal_jax.models.experts import make_mix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_kernels_of_the_device_pass_their_check(dtype, device):
    chosen = choose_checked_mixer(device, Demand(dtype, per_token=8, experts=128, width=768, d=2048))
    assert chosen.name != 'blocks'
    assert chosen.faults == ()


def test_it_is_chosen_inside_of_a_program_without_a_warning(device, capsys):
    mix = make_mix(device)
    x, gate, down = jnp.ones((64, 128)), jnp.ones((4, 128, 64)), jnp.ones((4, 64, 128))
    experts = jnp.tile(jnp.arange(2, dtype=jnp.int32), (64, 1))
    y = jax.jit(lambda x: mix(x, experts, jnp.full((64, 2), 0.5), gate, gate, down))(x)
    assert bool(jnp.isfinite(y).all())
    assert 'warning' not in capsys.readouterr().err
