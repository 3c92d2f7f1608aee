"""Eight virtual devices: which are the learner's and which each engine's."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from areal_jax.config.cluster import parse_engines, parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.sharding import rules
from areal_jax.sharding.rules import allocate, allocate_engines


def _allocate(learner: str, engines: str) -> rules.Allocation:
    return allocate(parse_learner(learner), parse_engines(engines))


def test_the_default_is_one_device_for_all():
    found = _allocate('data=1', '1 x shared')
    assert found.describe() == {'learner': [0], 'engines': {'engine/0': [0]}}
    assert found.engine_shares(0)
    assert not found.lanes_own_devices


def test_engines_have_the_devices_after_the_learners():
    found = _allocate('data=2,fsdp=2', '2 x tensor=1')
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4], 'engine/1': [5]}}
    assert found.learner.shape == {'data': 2, 'fsdp': 2, 'expert': 1, 'context': 1, 'tensor': 1}
    assert [found.engine_shares(index) for index in (0, 1)] == [False, False]
    assert found.by_devices() == {(jax.devices()[4],): [0], (jax.devices()[5],): [1]}


@pytest.mark.parametrize('axis', ['tensor', 'expert'])
def test_each_engine_has_as_many_devices_as_its_axes(axis):
    found = _allocate('fsdp=4', f'2 x {axis}=2')
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4, 5], 'engine/1': [6, 7]}}
    assert [found.engine_shares(index) for index in (0, 1)] == [False, False]
    assert found.by_devices() == {tuple(jax.devices()[4:6]): [0], tuple(jax.devices()[6:]): [1]}


def test_engines_of_unequal_size_have_theirs_one_after_the_other():
    found = _allocate('fsdp=2', '1 x tensor=2 + 2 x tensor=1 + 1 x tensor=2')
    engines = {'engine/0': [2, 3], 'engine/1': [4], 'engine/2': [5], 'engine/3': [6, 7]}
    assert found.describe() == {'learner': [0, 1], 'engines': engines}
    assert not any(found.engine_shares(index) for index in range(4))


def test_the_learner_of_a_mesh_with_experts():
    found = _allocate('fsdp=2,expert=2', '1 x expert=2,tensor=2')
    assert found.learner.shape == {'data': 1, 'fsdp': 2, 'expert': 2, 'context': 1, 'tensor': 1}
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4, 5, 6, 7]}}


def test_engines_without_a_learner_have_the_first_devices():
    found = allocate_engines(parse_engines('2 x tensor=3'))
    assert found.describe()['engines'] == {'engine/0': [0, 1, 2], 'engine/1': [3, 4, 5]}
    # 3 engines of 3 devices are 9
    with pytest.raises(ConfigError, match=r"cluster.engines='3 x tensor=3' needs 9 devices; the platform 'cpu' has 8"):
        allocate_engines(parse_engines('3 x tensor=3'))


def test_shared_engines_are_on_the_learners_first_device():
    found = _allocate('fsdp=4', '2 x shared')
    assert found.describe()['engines'] == {'engine/0': [0], 'engine/1': [0]}
    assert found.by_devices() == {(jax.devices()[0],): [0, 1]}


def test_virtual_devices_share_the_cores():
    # disjoint devices are the lanes' own on an accelerator; on CPU they are all the same cores
    found = _allocate('data=2', '1 x tensor=1')
    assert not found.lanes_own_devices

    @dataclasses.dataclass(frozen=True)
    class Accelerator:
        id: int
        platform: str = 'gpu'

    class Mesh:
        def __init__(self, *devices):
            self.devices = self
            self.flat = devices

    one, two, three = (Accelerator(index) for index in range(3))
    assert rules.Allocation(Mesh(one), ((two,), (three,))).lanes_own_devices
    assert not rules.Allocation(Mesh(one), ((two,), (two,))).lanes_own_devices
    assert not rules.Allocation(Mesh(one, two), ((two, three),)).lanes_own_devices


def test_too_few_devices_are_refused_with_both_fields():
    with pytest.raises(
        ConfigError, match=r"'fsdp=3' needs 3 devices and cluster.engines='2 x tensor=3' needs 6, 9 tog.* has 8"
    ):
        _allocate('fsdp=3', '2 x tensor=3')


def test_own_devices_in_several_processes_are_not_built(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(ConfigError, match=r"cluster.engines='2 x tensor=1': .*not built yet; use '2 x shared'"):
        _allocate('fsdp=4', '2 x tensor=1')
