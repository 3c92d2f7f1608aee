"""Experts over devices: the all-to-all of chosen tokens against the gather and one device, and the choice of a form."""

from __future__ import annotations

import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.models import expert_parallel, experts
from areal_jax.models.expert_parallel import (
    ALL_TO_ALL,
    GATHER,
    Layer,
    choose_form,
    compare_forms,
    count_hops,
    find_fault,
    form_over,
    mix_by_all_to_all,
    mix_by_gather,
)
from areal_jax.models.experts import make_mix
from areal_jax.sharding.rules import TOKEN_AXES, make_mesh
from tests.models import test_expert_products as products
from tests.models.test_expert_products import NAMES, Case, compute, make_inputs

NEAR = 1e-5  # rounding of float32, of the largest value
ALONE, FOUR = {'expert': 8}, {'expert': 4, 'fsdp': 2}
CASES = [
    (ALONE, Case(16, 3, 24, 20, 48, none=0.2)),
    (ALONE, Case(8, 1, 24, 20, 48, 'one')),  # every token goes to one device, which has room for all
    (FOUR, Case(8, 2, 24, 20, 48, 'few', 0.3)),  # experts without tokens, tokens without experts
    (FOUR, Case(8, 6, 24, 20, 48)),  # more choices than devices
    ({'expert': 2, 'tensor': 2, 'data': 2}, Case(8, 3, 24, 20, 48, none=0.2)),
    ({'expert': 2, 'context': 2, 'fsdp': 2}, Case(8, 3, 24, 20, 48)),
]


def differentiate(mix, inputs):
    """y and its gradients."""
    return jax.device_get(products.differentiate(mix)(*inputs))


def mix_over(axes, form):
    return make_mix(jax.devices()[0], make_mesh(**axes), TOKEN_AXES, form)


def assert_near(found, expected):
    products.assert_near(found, expected, NEAR)


def send_as_documented(operand, output, starts, sizes, theirs, received, *, axis_name):
    """lax.ragged_all_to_all as its documentation has it, by an exchange of everything."""
    everyone = [jax.lax.all_gather(one, axis_name) for one in (operand, starts, sizes, theirs)]
    operands, starts, sizes, theirs = everyone
    me, row = jax.lax.axis_index(axis_name), jnp.arange(operand.shape[0])
    for source in range(len(received)):
        start, size = starts[source, me], sizes[source, me]
        size = jnp.where(size == received[source], size, -1)  # both sides must say the same: else nothing arrives
        place = jnp.where((row >= start) & (row < start + size), theirs[source, me] + row - start, len(output))
        output = output.at[place].set(operands[source], mode='drop')
    return output


@pytest.mark.parametrize(('axes', 'case'), CASES, ids=str)
def test_the_all_to_all_computes_the_formula(axes, case):
    inputs = make_inputs(case)
    found = differentiate(mix_over(axes, ALL_TO_ALL), inputs)
    assert_near(found, compute(*inputs))
    for name, leaf in zip(NAMES[3:], found[3:], strict=True):  # exactly 0 for an expert without tokens
        reached = np.isin(np.arange(case.experts), inputs[1])
        np.testing.assert_array_equal(leaf.any((1, 2)), reached, err_msg=name)


def test_ragged_slices_have_each_token_once_for_each_device_that_it_reaches(monkeypatch):
    """The arguments of lax.ragged_all_to_all, which CPUs do not have, mean what is meant; gradients too."""
    sent = []

    def send(operand, output, starts, sizes, *rest, axis_name):
        jax.debug.callback(lambda size: sent.append(int(size)), sizes.sum())
        return send_as_documented(operand, output, starts, sizes, *rest, axis_name=axis_name)

    monkeypatch.setattr(jax.lax, 'ragged_all_to_all', send)
    monkeypatch.setattr(experts, 'form_over', lambda *_: mix_by_all_to_all)
    inputs = make_inputs(Case(16, 4, 24, 20, 48, none=0.2))
    assert_near(differentiate(mix_over(ALONE, ALL_TO_ALL), inputs), compute(*inputs))
    jax.effects_barrier()
    reached = sum(len({e // 2 for e in token if e < 16}) for token in inputs[1].tolist())
    assert sum(sent) == 4 * reached  # there and back, and the gradients of both
    assert reached < np.sum(inputs[1] < 16)


def test_rows_are_exchanged_and_not_gathered():
    mesh = make_mesh(**ALONE)
    at = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    shardings = (at(TOKEN_AXES),) * 3 + (at('expert'),) * 3
    mix = jax.jit(mix_over(ALONE, ALL_TO_ALL), in_shardings=shardings, out_shardings=at(TOKEN_AXES))
    text = mix.lower(*make_inputs(Case(8, 3, 24, 20, 48))[:-1]).compile().as_text()
    found = re.findall(r'= \(?(\w+\[[\d,]*\]).* (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(', text)
    # 6 tokens a device; of all tokens only the experts and weights of 3 choices are gathered
    assert {one for one in found if one[1] != 'all-to-all'} == {
        ('s32[8,6,3]', 'all-gather'), ('f32[8,6,3]', 'all-gather'),
    }  # fmt: skip
    assert any(kind == 'all-to-all' for _, kind in found)


# Which form moves less.


@pytest.mark.parametrize(('count', 'k', 'devices'), [(128, 8, 8), (8, 2, 8), (512, 10, 64), (32, 4, 2)])
def test_bytes_of_the_all_to_all_are_of_the_devices_that_tokens_reach(count, k, devices):
    """Tokens that draw k distinct experts evenly; a token's own device needs no link."""
    rng, tokens = np.random.default_rng(0), 4000
    drawn = np.argpartition(rng.random((tokens, count)), k, axis=1)[:, :k] // (count // devices)
    rows = np.mean([len({*token} - {0}) for token in drawn.tolist()])
    index = (devices - 1) * k * 8
    moved = Layer(1, k, count, 1000).count_bytes(devices)
    assert moved[GATHER] == 2 * 1000 * (devices - 1) + index
    assert moved[ALL_TO_ALL] - index == pytest.approx(2 * 1000 * rows, rel=0.02)
    farther = Layer(1, k, count, 1000).count_bytes(devices, hops=3)
    assert farther[ALL_TO_ALL] - index == pytest.approx(3 * (moved[ALL_TO_ALL] - index))


def test_no_more_rows_are_sent_than_gathered():
    for devices, k in itertools.product((2, 4, 8, 16), (1, 2, 8, 16)):
        moved = Layer(1, k, 16, 1000).count_bytes(devices)
        assert moved[ALL_TO_ALL] <= moved[GATHER]
    assert moved[ALL_TO_ALL] == moved[GATHER]  # every token chooses every expert


def described_mesh(platform, *shape):
    """A mesh of one axis over chips at the points of a grid."""
    points = itertools.product(*map(range, shape))
    devices = np.array([types.SimpleNamespace(platform=platform, coords=point) for point in points])
    return types.SimpleNamespace(devices=devices, axis_names=('expert',), shape={'expert': math.prod(shape)})


def test_hops_are_the_links_between_chips():
    assert count_hops(described_mesh('tpu', 4, 1, 1), 'expert') == pytest.approx((3 * 1 + 2 * 2 + 1 * 3) / 6)
    assert count_hops(described_mesh('tpu', 2, 2, 2), 'expert') == pytest.approx((3 * 1 + 3 * 2 + 1 * 3) / 7)
    assert count_hops(described_mesh('gpu', 8), 'expert') == 1
    assert count_hops(make_mesh(expert=4, data=2), 'expert') == 1


def test_the_form_that_moves_less_is_chosen():
    qwen, mixtral = Layer(8192, 8, 128, 4096), Layer(8192, 2, 8, 8192)
    choose = lambda layer, *mesh: choose_form('auto', layer, described_mesh(*mesh), 'expert')
    assert choose(qwen, 'gpu', 8) == ALL_TO_ALL
    assert choose(qwen, 'gpu', 4) == GATHER  # nine of ten tokens reach a device
    assert choose(qwen, 'tpu', 2, 2, 2) == GATHER
    assert choose(qwen, 'tpu', 4, 4, 4) == ALL_TO_ALL
    assert choose(mixtral, 'tpu', 2, 2, 2) == ALL_TO_ALL
    assert choose(mixtral, 'cpu', 8) == GATHER
    assert choose_form(ALL_TO_ALL, qwen, described_mesh('cpu', 8), 'expert') == ALL_TO_ALL
    assert choose_form(GATHER, qwen, described_mesh('gpu', 8), 'expert') == GATHER


# The check at start-up.


def test_the_check_finds_equal_forms_and_a_row_at_a_wrong_place(monkeypatch):
    assert compare_forms(make_mesh(**FOUR), 'expert', ragged=False) < 1e-6
    move = expert_parallel.move_slices
    shifted = lambda path, rows, here, there: move(path, rows, here, there._replace(starts=there.starts + 1))
    monkeypatch.setattr(expert_parallel, 'move_slices', shifted)
    assert compare_forms(make_mesh(**FOUR), 'expert', ragged=False) > 0.1


def test_an_all_to_all_that_fails_its_check_is_not_used(monkeypatch, capsys):
    mesh = make_mesh(expert=8)
    assert find_fault(mesh, 'expert') == ''
    monkeypatch.setattr(expert_parallel, 'find_fault', lambda *_: 'does not run here: RuntimeError')
    assert form_over.__wrapped__(mesh, 'expert', ALL_TO_ALL) is mix_by_gather
    assert "warning: the all-to-all of experts' tokens does not run here: RuntimeError; they are gathered" in (
        capsys.readouterr().err
    )
