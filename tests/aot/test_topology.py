"""Names of topologies, and the text of a GPU that XLA reads."""

import importlib.util

import pytest

from areal_jax.aot import topology
from areal_jax.aot.topology import GPU_NAMES, describe_topology, write_target
from areal_jax.config.fields import ConfigError
from areal_jax.sharding.rules import make_mesh
from areal_jax.simulation.prices import find_chip


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('sixteen', "--topology='sixteen' is not understood: write a TPU slice as 'v5p:2x4x4' or GPUs as '8 x H100'"),
        ('0 x H100', "--topology='0 x H100' is not understood"),
        ('v5p:2x', "--topology='v5p:2x' is not understood"),
        ('v9z:2x2', "--topology='v9z:2x2': the chip 'v9z' is not known"),
        ('8 x H1000', "--topology='8 x H1000': the chip 'H1000' is not known"),
        ('8 x A100', "--topology='8 x A100': GPUs can be compiled for as one of H100 SXM"),
        ('H100', "--topology='H100' is not understood"),
        ('16 x v5e', "--topology='16 x v5e': GPUs can be compiled for as one of H100 SXM"),
        ('12 x H100', "--topology='12 x H100': more than 8 GPUs are whole nodes of 8; use a multiple"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_in_one_sentence(text, said):
    with pytest.raises(ConfigError) as caught:
        describe_topology(text)
    assert said in str(caught.value)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('text', 'devices', 'gigabytes'),
    [
        ('H200', 3, 141), ('a100', 3, 80), ('8 x H100', 8, 80), ('v5p:2x4x4', 32, 95), ('16 x v5e', 16, 16),
        ('v6e', 3, 32), ('v7x:2x2x1', 8, 96), ('v7x', 3, 96), ('4 x tpu7x', 8, 96),
    ],
)  # fmt: skip
def test_an_accelerator_has_its_memory_and_as_many_devices_as_said_or_as_a_run_asks_for(text, devices, gigabytes):
    found = topology.describe_accelerator(text, 3)
    assert (len(found.devices), found.memory_bytes) == (devices, gigabytes * 1e9)
    assert make_mesh(fsdp=3, devices=found.devices).shape['fsdp'] == 3


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('B300', "--accelerator='B300': the chip 'B300' is not known; use one of A100-80 SXM, "),
        ('v5p:2x0', "--accelerator='v5p:2x0' is not understood: write a TPU slice as 'v5p:2x4x4' or GPUs as"),
        ('', "--accelerator='' is not understood"),
    ],
)
def test_an_accelerator_that_cannot_be_is_refused_in_one_sentence(text, said):
    with pytest.raises(ConfigError) as caught:
        topology.describe_accelerator(text, 1)
    assert said in str(caught.value)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(('text', 'extra'), [('v5p:2x4x4', 'aot-tpu'), ('8 x H100', 'aot-gpu')])
def test_a_compiler_that_is_missing_is_named_with_its_extra(text, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=rf"not installed: pip install 'areal_jax\[{extra}\]'"):
        describe_topology(text)


def test_the_text_of_a_gpu_has_the_numbers_of_its_chip():
    for name in GPU_NAMES:
        chip, text = find_chip(name), write_target(find_chip(name))
        assert f'memory_bandwidth: {int(chip.bytes_s)}\n' in text
        assert f'device_memory_size: {int(chip.memory_bytes)}\n' in text
        assert text.count('{') == text.count('}')


def test_another_jax_is_refused_by_the_version_that_is_needed(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.delattr(xla_bridge, 'canonicalize_platform')
    with pytest.raises(ConfigError, match=r'AOT for GPUs needs jax 0\.10\.2, and this is jax '), topology.accept_cuda():
        pass


def test_cuda_is_a_platform_only_inside():
    from jax._src import xla_bridge

    before = xla_bridge.canonicalize_platform
    with topology.accept_cuda():
        assert xla_bridge.canonicalize_platform('cuda') == 'cuda'
        assert xla_bridge.canonicalize_platform('cpu') == before('cpu')
    assert xla_bridge.canonicalize_platform is before


def test_one_process_at_a_time_has_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(topology.tempfile, 'gettempdir', lambda: str(tmp_path))
    waited = []
    with topology.take_turn(lambda: waited.append('first')):
        import fcntl

        with (tmp_path / 'areal_jax_aot.lock').open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with topology.take_turn(lambda: waited.append('second')):
        assert waited == []
