"""Accelerators are found without jax; their flags are in the environment before jax starts, and a CPU gets none."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jaxlib
import pytest

from areal_jax.app.process import accelerator
from areal_jax.app.process.accelerator import VISIBLE, find_gpus, find_hardware, find_unknown, use_xla_flags
from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.config.xla_flags import GPU, PRESETS, write_flags


def install(monkeypatch, *packages):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name in packages or None)


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A machine with three GPUs and the plugin of jax."""
    install(monkeypatch, 'jax_cuda13_plugin')
    for name in ('nvidia0', 'nvidia1', 'nvidia2', 'nvidiactl', 'nvidia-uvm', 'sda'):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(('environment', 'found'), [
    ({}, ('0', '1', '2')),
    ({'JAX_PLATFORMS': 'cuda,cpu'}, ('0', '1', '2')),
    ({'JAX_PLATFORMS': 'cpu'}, ()),
    ({VISIBLE: '4, GPU-8f'}, ('4', 'GPU-8f')),
    ({VISIBLE: '2,-1,0'}, ('2',)),
    ({VISIBLE: ''}, ()),
])  # fmt: skip
def test_gpus_are_those_that_jax_would_find(devices, environment, found):
    assert find_gpus(environment, devices) == found


def test_without_device_files_or_the_plugin_there_are_none(devices, monkeypatch):
    assert find_gpus({VISIBLE: '0'}, devices / 'elsewhere') == ()
    install(monkeypatch)
    assert find_gpus({}, devices) == ()


@pytest.fixture
def bus(tmp_path, monkeypatch):
    """A host with another device of Google and two chips of v5p, and libtpu."""
    install(monkeypatch, 'libtpu')
    for place, device in (('0', '0x0042'), ('1', '0x0062'), ('2', '0x0062')):
        (tmp_path / place).mkdir()
        (tmp_path / place / 'vendor').write_text('0x1ae0\n')
        (tmp_path / place / 'device').write_text(f'{device}\n')
    return tmp_path


def test_tpus_are_found_by_their_generation_where_jax_may_use_them(bus, monkeypatch):
    nothing = bus / 'none'
    assert find_hardware({}, nothing, bus) == 'v5p'
    assert find_hardware({'JAX_PLATFORMS': 'tpu,cpu'}, nothing, bus) == 'v5p'
    assert find_hardware({'JAX_PLATFORMS': 'cpu'}, nothing, bus) == ''
    assert find_hardware({}, nothing, nothing) == ''
    install(monkeypatch)
    assert find_hardware({}, nothing, bus) == ''


def test_gpus_are_hardware_of_one_kind(devices):
    assert find_hardware({}, devices, devices / 'none') == GPU
    assert find_hardware({VISIBLE: ''}, devices, devices / 'none') == ''


@pytest.fixture
def environment(monkeypatch):
    """An environment that the test may change, on a machine with GPUs."""
    given = {'XLA_FLAGS': '--xla_dump_to=/x'}
    monkeypatch.setattr(accelerator.os, 'environ', given)
    monkeypatch.setattr(accelerator, 'find_hardware', lambda environment: GPU)
    return given


def config_of(text):
    config = default_config()
    config.cluster.xla_flags = text
    return config


def test_the_preset_joins_the_flags_of_the_environment_and_is_told(environment, capsys):
    use_xla_flags(config_of('auto'))
    assert environment['XLA_FLAGS'] == f'--xla_dump_to=/x {write_flags(PRESETS[GPU])}'
    said = capsys.readouterr().out
    assert said.startswith('XLA flags for gpu: auto, --xla_')
    assert said.endswith('; of the environment: --xla_dump_to=/x\n')


def test_a_second_call_changes_nothing(environment):
    use_xla_flags(config_of('auto'))
    before = dict(environment)
    use_xla_flags(config_of('auto'))
    assert environment['XLA_FLAGS'] == before['XLA_FLAGS']


def test_off_is_told_too(environment, capsys):
    use_xla_flags(config_of('off'))
    assert environment['XLA_FLAGS'] == '--xla_dump_to=/x'
    assert capsys.readouterr().out == 'XLA flags for gpu: off, none; of the environment: --xla_dump_to=/x\n'


def test_on_a_cpu_nothing_is_set_and_nothing_said(environment, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, 'find_hardware', lambda environment: '')
    for text in ('auto', 'off', 'xla_a=1'):
        use_xla_flags(config_of(text))
    assert environment['XLA_FLAGS'] == '--xla_dump_to=/x'
    assert capsys.readouterr().out == ''


def test_this_xla_has_every_flag_of_the_preset_for_gpus():
    assert find_unknown(PRESETS[GPU], GPU) == []
    assert find_unknown(['xla_gpu_of_nobody', *PRESETS[GPU]], GPU) == ['xla_gpu_of_nobody']
    assert (pathlib.Path(jaxlib.__file__).parent / 'libjax_common.so').is_file()  # else nothing is looked for


def test_a_flag_that_xla_does_not_have_is_refused_if_own_and_left_out_of_a_preset(environment, monkeypatch):
    sentence = (
        r"cluster.xla_flags='xla_gpu_of_nobody=1': the compiler for gpu .* has no flag xla_gpu_of_nobody; correct"
    )
    with pytest.raises(ConfigError, match=sentence):
        use_xla_flags(config_of('xla_gpu_of_nobody=1'))
    name = next(iter(PRESETS[GPU]))
    monkeypatch.setattr(accelerator, 'find_unknown', lambda names, hardware: [name])
    use_xla_flags(config_of('auto'))
    assert f'--{name}=' not in environment['XLA_FLAGS']
    assert environment['XLA_FLAGS'].count('--xla_') == len(PRESETS[GPU])


STARTED = """
import sys
from areal_jax.app.process import accelerator
from areal_jax.config import default_config

accelerator.find_hardware = lambda environment: 'gpu'
accelerator.use_xla_flags(default_config())
assert 'jax' not in sys.modules
import jax
print(jax.numpy.arange(4).sum())
"""


def test_xla_starts_with_the_preset_which_is_set_before_jax_is_imported():
    variables = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'PYTHONPATH': str(pathlib.Path.cwd())}
    command = [sys.executable, '-c', STARTED]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # XLA ends a process with a flag that it does not know, or a wrong value
    assert done.stdout.splitlines() == [f'XLA flags for gpu: auto, {write_flags(PRESETS[GPU])}', '6']
