"""Counters in the formats of the drivers: units, wraps, and what cannot be read."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest

from areal_jax.telemetry.energy_meters import POWER, MeterError, NvmlMeter, RaplMeter, open_nvml
from tests.telemetry.energy_drivers import MICRO, FakeNvml, write_zone


def test_rapl_sums_packages_and_leaves_out_their_parts_and_the_platform(tmp_path: pathlib.Path):
    zones = {
        'intel-rapl:0': 'package-0', 'intel-rapl:0:0': 'core', 'intel-rapl:0:1': 'dram', 'intel-rapl:1': 'package-1',
        'intel-rapl:2': 'psys', 'intel-rapl-mmio:0': 'package-0',
    }  # fmt: skip
    for number, (zone, name) in enumerate(zones.items()):
        write_zone(tmp_path, zone, name, number * MICRO)
    meter = RaplMeter(tmp_path)
    assert (meter.devices, meter.read()) == ('2 CPU packages', 0.0)
    for zone, name in zones.items():
        write_zone(tmp_path, zone, name, 10 * MICRO)
    assert meter.read() == 17.0  # 10 - 0 of package 0, 10 - 3 of package 1
    assert meter.read() == 17.0


def test_one_wrap_of_rapl_is_counted_and_a_second_between_two_reads_cannot_be_seen(tmp_path: pathlib.Path):
    # the range is 100 J: 90 -> 5 is 15 J, or 115 J with a second wrap, which no counter tells
    def show(joules: int) -> None:
        write_zone(tmp_path, 'intel-rapl:0', 'package-0', joules * MICRO, wraps_at=100 * MICRO)

    show(90)
    meter = RaplMeter(tmp_path)
    show(5)
    assert meter.read() == 15.0
    show(3)  # wrapped again, and read in between: 98 J more
    assert meter.read() == 15.0 + 98.0


def test_why_rapl_is_not_there(tmp_path: pathlib.Path, monkeypatch):
    with pytest.raises(MeterError, match='has no CPU package, as in most virtual machines'):
        RaplMeter(tmp_path / 'nothing')
    write_zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
    counter, read = tmp_path / 'intel-rapl:0' / 'energy_uj', pathlib.Path.read_text

    def refuse(path: pathlib.Path) -> str:  # as Linux does; the tests may run as root
        if path == counter:
            raise PermissionError(13, 'Permission denied')
        return read(path)

    monkeypatch.setattr(pathlib.Path, 'read_text', refuse)
    with pytest.raises(MeterError, match='energy_uj is readable by root only, as Linux has it since version 5'):
        RaplMeter(tmp_path)


def test_nvml_counts_millijoules_since_the_driver_was_loaded():
    nvml = FakeNvml(A=7_000_000, B=1_000)
    meter = NvmlMeter(nvml, [0, 1], '2 x A')
    assert meter.read() == 0.0
    nvml.millijoules = [7_000_000 + 2_500, 1_000 + 500]
    assert meter.read() == 3.0
    nvml.millijoules[1] = 0
    with pytest.raises(MeterError, match='went back'):
        meter.read()
    nvml.millijoules[1] = None
    with pytest.raises(MeterError, match='nvmlDeviceGetTotalEnergyConsumption: Not Supported'):
        meter.read()


@pytest.mark.parametrize(
    ('visible', 'gpus', 'moved'),
    [
        (None, ((1, 'NVIDIA B'),), 1),
        ('2,1', ((0, 'NVIDIA C'), (1, 'NVIDIA B')), 2),
        ('GPU-2b,GPU-0b1c', ((0, 'NVIDIA C'),), 2),
    ],
)
def test_the_counters_are_those_of_the_gpus_that_cuda_numbers_so(visible, gpus, moved):
    nvml = FakeNvml(NVIDIA_A=0, NVIDIA_B=0, NVIDIA_C=0)
    meter = open_nvml(nvml, gpus, visible)
    nvml.millijoules[moved] = 4_000
    assert meter.read() == 4.0
    meter.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ('visible', 'kind', 'why'),
    [
        ('1,0', 'NVIDIA A', "NVML has 'NVIDIA B' in the place of 'NVIDIA A': set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ('MIG-5c1', 'NVIDIA A', "CUDA_VISIBLE_DEVICES='MIG-5c1' names no whole GPU for device 0"),
        ('', 'NVIDIA A', "CUDA_VISIBLE_DEVICES='' names no whole GPU"),
        ('2', 'NVIDIA C', 'Not Supported'),
    ],
)
def test_a_gpu_without_a_counter_of_its_own_is_refused(visible, kind, why):
    nvml = FakeNvml(NVIDIA_A=0, NVIDIA_B=0, NVIDIA_C=None)
    with pytest.raises(MeterError, match=why):
        open_nvml(nvml, ((0, kind),), visible)
    assert nvml.open == 0


def test_the_counter_of_a_device_is_its_power_times_its_seconds():
    recorded = json.loads(pathlib.Path(__file__).with_name('nvml_h200.json').read_text())
    answers, samples = recorded['answers'], recorded['samples']  # [seconds, millijoules, milliwatts]
    assert answers['types'] == {'name': 'str', 'uuid': 'str', 'millijoules': 'int'}
    nvml = FakeNvml(**{answers['name'].replace(' ', '_'): samples[0][1]})
    meter = open_nvml(nvml, ((0, answers['name']),), None)
    assert meter.devices == '1 x NVIDIA H200'
    nvml.millijoules = [samples[-1][1]]
    stated = sum((b[0] - a[0]) * (a[2] + b[2]) / 2e3 for a, b in itertools.pairwise(samples))
    assert meter.read() == pytest.approx(stated, rel=0.01)
    table, watts = POWER['NVIDIA H200'], [sample[2] / 1000 for sample in samples]
    assert table.idle.low <= min(watts) <= watts[0] <= table.idle.high
    assert table.train.low <= max(watts) <= table.train.high


def test_without_a_driver_there_is_no_counter():
    nvml = FakeNvml(A=0)
    nvml.has_driver = False
    with pytest.raises(MeterError, match='NVML: Driver Not Loaded'):
        open_nvml(nvml, ((0, 'A'),), None)
