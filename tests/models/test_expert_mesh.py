"""The product of experts over meshes of virtual devices, against one device."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.expert_products import mix_blocks
from areal_jax.models.experts import make_mix
from areal_jax.sharding.rules import TOKEN_AXES, make_mesh
from tests.models.test_expert_products import NAMES, Case, make_inputs

CASE = Case(8, 3, 24, 20, 48, none=0.2)
INPUTS = make_inputs(CASE)
_MESHES = [
    ({'expert': 4, 'fsdp': 2}, TOKEN_AXES),
    ({'expert': 2, 'tensor': 2, 'data': 2}, TOKEN_AXES),
    ({'expert': 2, 'context': 2, 'fsdp': 2}, TOKEN_AXES),
    ({'expert': 3, 'fsdp': 2}, TOKEN_AXES),  # 3 does not divide 8 experts: every device has all
    ({'expert': 2}, ()),  # of an engine
    ({'expert': 2, 'tensor': 2}, ()),
]


def differentiate(mix, x, experts, weights, gate, up, down, dy):
    """y and its gradients."""

    @jax.jit
    def run(x, weights, *matrices):
        y, pull = jax.vjp(lambda x, weights, *rest: mix(x, experts, weights, *rest), x, weights, *matrices)
        return y, *pull(dy)

    return jax.device_get(run(x, weights, gate, up, down))


@pytest.fixture(scope='module')
def expected():
    return differentiate(mix_blocks, *INPUTS)


def _name(value):
    return ','.join(f'{axis}={size}' for axis, size in value.items()) if isinstance(value, dict) else ' '.join(value)


@pytest.mark.parametrize(('axes', 'token_axes'), _MESHES, ids=_name)
def test_a_mesh_computes_the_same_output_and_gradients(expected, axes, token_axes):
    found = differentiate(make_mix('cpu', make_mesh(**axes), token_axes), *INPUTS)
    for name, value, reference in zip(NAMES, found, expected, strict=True):
        assert np.linalg.norm(value - reference) <= 2e-6 * np.linalg.norm(reference), name


def test_an_expert_or_a_token_without_a_choice_has_no_gradient():
    *inputs, dy = make_inputs(Case(8, 2, 24, 20, 64, 'few', 0.3))  # experts of odd number have no token
    found = differentiate(make_mix('cpu', make_mesh(expert=4, fsdp=2), TOKEN_AXES), *inputs, dy)
    y, dx, _, d_gate, d_up, d_down = found
    for leaf in (d_gate, d_up, d_down):
        assert not leaf[1::2].any()
        assert leaf[::2].any()
    idle = (inputs[1] == 8).all(axis=1)
    assert idle.any()
    assert not y[idle].any()
    assert not dx[idle].any()


def test_tokens_are_exchanged_and_experts_stay_where_they_are():
    mesh = make_mesh(expert=4, data=2)
    at = lambda *axes: NamedSharding(mesh, P(*axes))
    by_token, by_expert = at(TOKEN_AXES), at('expert')
    mix = jax.jit(
        make_mix('cpu', mesh, TOKEN_AXES), in_shardings=(by_token,) * 3 + (by_expert,) * 3, out_shardings=by_token
    )
    text = mix.lower(*INPUTS[:-1]).compile().as_text()
    exchanged = re.findall(r'= (\w+\[[\d,]*\])\S* (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(', text)
    # 48 tokens of width 24 with 3 choices, over 2 groups of 4 devices: each gathers 24 and has the sums for 6
    assert sorted(exchanged) == [
        ('f32[24,24]', 'all-gather'), ('f32[24,3]', 'all-gather'), ('f32[6,24]', 'reduce-scatter'),
        ('s32[24,3]', 'all-gather'),
    ]  # fmt: skip
