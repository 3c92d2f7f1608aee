"""The check of the products of experts: what is wrong, does not run or is dense is rejected with one sentence."""

from __future__ import annotations

import functools

import jax
import pytest

from areal_jax.models import expert_check
from areal_jax.models.expert_check import Demand, choose_checked_mixer, find_fault, find_waste, measure_cost
from areal_jax.models.expert_products import mix_blocks, mix_grouped, mixers_for
from areal_jax.models.grouped.products import Hardware

CPU = jax.devices()[0]
DEMAND = Demand('float32', per_token=2, experts=4, width=8, d=16)
mix_ragged = functools.partial(mix_grouped, jax.lax.ragged_dot)  # right everywhere, and dense on a CPU


@pytest.fixture(scope='module')
def cost():
    return measure_cost(mix_ragged, CPU, DEMAND)


def test_the_cost_is_that_of_the_compiled_layer(cost):
    assert cost.tokens == 2048
    assert cost.needed == 3 * 3 * 2 * 4096 * 16 * 8
    assert 4 < cost.operations / cost.needed < 6  # each of 4 experts multiplies all rows, and masks them


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_check_passes_what_is_right_and_not_dense(dtype, cost, monkeypatch):
    monkeypatch.setattr(expert_check, 'measure_cost', lambda *_: cost._replace(operations=cost.needed, temporaries=0))
    assert find_fault(mix_ragged, CPU, DEMAND._replace(dtype=dtype)) == ''


def test_a_dense_product_is_rejected_by_its_bytes_and_by_its_operations(cost):
    bytes_said = (
        f'need {cost.temporaries / 1e9:.3g} GB of temporaries for 2,048 tokens and 4 experts, allowed are 0.00197'
    )
    assert find_waste(cost, DEMAND) == bytes_said
    said = 'times what their formula needs for 2,048 tokens and 4 experts, allowed are 1.2'
    small = cost._replace(temporaries=0)
    assert find_waste(small, DEMAND) == f'compute {cost.operations / cost.needed:.3g} {said}'
    assert find_waste(small._replace(operations=1.2 * cost.needed), DEMAND) == ''


def find(mix):
    return find_fault(mix, CPU, DEMAND)


def _fails(*_):
    raise NotImplementedError('no such kernel')


@pytest.mark.parametrize(
    ('mix', 'said'),
    [
        (_fails, 'do not run here: no such kernel'),
        (lambda x, experts, *rest: mix_ragged(x, experts.at[:, 0].set(0), *rest), 'output is off by'),
        (lambda x, experts, weights, *rest: mix_ragged(x, experts, weights, *rest) + 1e-9 * rest[0][4].sum(), 'unused'),
        (lambda x, experts, weights, *rest: mix_ragged(x, experts, jax.lax.stop_gradient(weights), *rest), 'weights'),
    ],
    ids=['raises', 'foreign expert', 'gradient of an unused expert', 'no gradient of weights'],
)
def test_the_check_rejects_what_is_wrong(mix, said):
    assert said in find(mix)


def test_cpus_are_not_checked():
    assert choose_checked_mixer(CPU, DEMAND)[1:] == (
        next(iter(mixers_for(Hardware('cpu'), 'float32', ()).values())),
        (),
    )


class Pretended:
    """A GPU by its attributes."""

    platform, compute_capability, core_count = 'gpu', '9.0', 132


HOPPER, WIDE = Pretended(), DEMAND._replace(dtype='bfloat16', d=128, width=64)


def test_what_is_only_described_is_not_checked(monkeypatch):
    monkeypatch.setattr(expert_check, 'find_fault', _fails)
    assert choose_checked_mixer(HOPPER, WIDE)[::2] == ('mosaic', ())


@pytest.mark.parametrize(('wrong', 'name'), [((), 'mosaic'), (('mosaic',), 'triton'), (('mosaic', 'triton'), 'blocks')])
def test_one_way_after_the_other_is_tried_and_the_last_one_runs_everywhere(wrong, name, monkeypatch):
    left = list(wrong)
    monkeypatch.setattr(jax, 'local_devices', lambda: [HOPPER])
    monkeypatch.setattr(expert_check, 'find_fault', lambda *_: 'do not run here: ' + left.pop(0) if left else '')
    chosen = choose_checked_mixer(HOPPER, WIDE)
    assert chosen.name == name
    assert [fault.partition(',')[0] for fault in chosen.faults] == list(wrong)
    assert all(' is tried' in fault for fault in chosen.faults)
    assert (chosen.mix is mix_blocks) == (name == 'blocks')
