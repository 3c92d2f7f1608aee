"""telemetry.energy: which meters a run opens, for which devices, and what it says where there are none."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest

from areal_jax.app.parts.energy_builder import UsedDevices, build_energy, group_devices, list_devices
from areal_jax.config import TrackedConfig
from areal_jax.telemetry.energy.meters import DeviceSet
from tests.app.small import small_config
from tests.telemetry.energy.drivers import FakeNvml, write_zone


class Device(types.SimpleNamespace):
    __hash__ = object.__hash__


def allocation(platform: str, kind: str, learner: list[int], engines: list[list[int]], others: int = 0) -> Any:
    """Devices by number; `others` of them, the last ones, are of another process."""
    count = 1 + max(number for used in (learner, *engines) for number in used)
    common = {'platform': platform, 'device_kind': kind}
    owners = [int(number >= count - others) for number in range(count)]
    devices = [Device(**common, local_hardware_id=number, process_index=own) for number, own in enumerate(owners)]
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[devices[number] for number in learner]))
    return types.SimpleNamespace(learner=mesh, engines=[tuple(devices[n] for n in own) for own in engines])


def build(used: UsedDevices | None, powercap: pathlib.Path, **fields: Any) -> Any:
    config = TrackedConfig(small_config(**{'telemetry__energy': 'auto', 'run__clock': 'real', **fields}))
    return build_energy(config, lambda: used, powercap)


def test_devices_are_grouped_by_the_lanes_that_use_them():
    # the learner has 0 and 1, both engines share 0 and engine/1 has 2 too
    used = list_devices(allocation('gpu', 'NVIDIA H200', [0, 1], [[0], [0, 2]]), process=0)
    assert set(used.sets) == {
        DeviceSet('NVIDIA H200', frozenset(['learner', 'engine/0', 'engine/1']), 1),
        DeviceSet('NVIDIA H200', frozenset(['learner']), 1),
        DeviceSet('NVIDIA H200', frozenset(['engine/1']), 1),
    }
    assert used.gpus == ((0, 'NVIDIA H200'), (1, 'NVIDIA H200'), (2, 'NVIDIA H200'))
    assert list_devices(allocation('gpu', 'NVIDIA H200', [0, 1], [[0]], others=1), process=0).gpus is None
    on_cpus = list_devices(allocation('cpu', 'cpu', [0], [[0]]), process=0)
    assert (on_cpus.has_counters, on_cpus.gpus) == (False, None)


def test_gpus_and_packages_are_measured_where_their_counters_can_be_read(tmp_path: pathlib.Path, monkeypatch):
    nvml = FakeNvml(NVIDIA_H200=0)
    monkeypatch.setitem(sys.modules, 'pynvml', nvml)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    write_zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
    account = build(list_devices(allocation('gpu', 'NVIDIA H200', [0], [[0]]), 0), tmp_path)
    assert [(s['meter'], s['devices']) for s in account.facts()['sources']] == [
        ('nvml', '1 x NVIDIA H200'), ('rapl', '1 CPU package'),
    ]  # fmt: skip
    assert account.facts()['note'] == ''
    account.close()
    assert nvml.open == 0


def test_without_the_package_a_known_gpu_is_modelled_and_an_unknown_one_is_a_sentence(
    tmp_path: pathlib.Path, monkeypatch
):
    monkeypatch.setitem(sys.modules, 'pynvml', None)  # an import of it fails
    facts = build(list_devices(allocation('gpu', 'NVIDIA H200', [0], [[0]]), 0), tmp_path).facts()
    assert [source['meter'] for source in facts['sources']] == ['modelled']
    assert facts['watts']['NVIDIA H200, idle'].startswith('80 to 134 W')
    facts = build(list_devices(allocation('gpu', 'NVIDIA L4', [0], [[0]]), 0), tmp_path).facts()
    assert facts['sources'] == []
    assert facts['note'].startswith('No joules of 1 x NVIDIA L4 are known (NVML: the package nvidia-ml-py is not inst')
    assert facts['note'].endswith("virtual machines; no watts of 'NVIDIA L4' are in the table).")


@pytest.mark.parametrize(
    ('used', 'fields', 'why'),
    [
        (None, {}, 'learner or engines compute in other processes'),
        (UsedDevices((), False, None), {'run__clock': 'virtual'}, "run.clock='virtual' models the seconds"),
    ],
)
def test_a_run_that_cannot_be_accounted_says_why(tmp_path: pathlib.Path, used, fields, why):
    write_zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
    account = build(used, tmp_path, **fields)
    assert why in account.facts()['note']
    assert account.take(1.0, {}) == {}
    assert build(used, tmp_path, telemetry__energy='off') is None


def test_a_simulation_is_modelled_and_never_measured(tmp_path: pathlib.Path):
    write_zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
    sets = group_devices([(0, 'H100 SXM', 'learner'), (1, 'H100 SXM', 'engine/0'), (2, 'H100 SXM', 'engine/0')])
    assert sets == (
        DeviceSet('H100 SXM', frozenset(['learner']), 1), DeviceSet('H100 SXM', frozenset(['engine/0']), 2),
    )  # fmt: skip
    facts = build(UsedDevices(sets, simulated=True), tmp_path, run__clock='virtual').facts()
    assert [(source['meter'], source['devices']) for source in facts['sources']] == [('modelled', '3 x H100 SXM')]
    assert facts['note'] == ''
    facts = build(UsedDevices((), simulated=True), tmp_path, run__clock='virtual').facts()
    assert facts == {
        'sources': [], 'watts': {}, 'lost': [], 'note': 'No joules: the prices of this simulation name no chip.',
    }  # fmt: skip
