"""Meters and trackers: which a run opens, and that its weights are the weights without them."""

from __future__ import annotations

import importlib.util
import pathlib
import sqlite3
import sys
import types
from typing import Any

import pytest

from areal_jax.app.library import build_run
from areal_jax.app.parts.host import UsedDevices, build_energy, group_devices, headline, list_devices
from areal_jax.config import TrackedConfig
from areal_jax.errors import UserError
from areal_jax.telemetry.energy_meters import DeviceSet
from areal_jax.telemetry.trackers import TRACKERS
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, small_config, start_killed_and_resumed
from tests.telemetry.energy_drivers import FakeNvml, write_zone
from tests.telemetry.fake_trackers import install


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


# `telemetry.tracker` in a run: every row arrives, the weights are those without it, real libraries keep every step.


SCORED = {'evaluation__problems': 2, 'evaluation__samples': 2}


@pytest.mark.parametrize('kind', sorted(TRACKERS))
def test_a_tracked_run_is_told_whole_and_trains_the_same(tmp_path: pathlib.Path, monkeypatch, kind: str):
    store = install(kind, monkeypatch, tmp_path)
    plain = SmallRun(tmp_path / 'plain', **SCORED).train()
    tracked = SmallRun(tmp_path / 'tracked', telemetry__tracker=kind, **SCORED).train()
    assert tracked.report['weights_sha256'] == plain.report['weights_sha256']
    assert store.steps() == [1, 2, 3, 4, 5]
    assert [step for step, row in store.rows if 'evaluation/greedy_accuracy' in row] == [0, 5]
    assert store.summary['summary/steps'] == 5.0
    assert tracked.report['tracker'] == {'calls': 6, 'failed': 0, 'left_out': 0, 'first_error': ''}
    assert plain.report['tracker'] == {}
    assert not (tmp_path / 'plain' / 'tracker.json').exists()


def test_a_killed_run_goes_on_in_its_tracker(tmp_path: pathlib.Path, monkeypatch):
    store = install('trackio', monkeypatch, tmp_path)
    fields = {'telemetry__tracker': 'trackio', 'checkpoint__every': 2}
    start_killed_and_resumed(tmp_path / 'run', 3, **fields).train()
    assert store.steps() == [1, 2, 3, 4, 5]
    assert len({begun['name'] for begun in store.begun}) == 1


def test_supervised_training_is_tracked_too(tmp_path: pathlib.Path, monkeypatch):
    store = install('mlflow', monkeypatch, tmp_path)
    build_run(sft_config(telemetry__tracker='mlflow', telemetry__project='mine'), tmp_path / 'run').train()
    assert store.steps('loss/nll') == [1, 2, 3, 4, 5, 6]
    assert store.ended == ['FINISHED']


def test_a_library_that_cannot_be_imported_is_refused_before_anything_is_written(tmp_path: pathlib.Path, monkeypatch):
    install('wandb', monkeypatch, tmp_path)
    monkeypatch.setattr('importlib.import_module', lambda name: (_ for _ in ()).throw(ImportError('broken')))
    with pytest.raises(UserError, match=r"telemetry\.tracker='wandb': the package wandb cannot be imported .*broken"):
        SmallRun(tmp_path / 'run', telemetry__tracker='wandb')
    assert not (tmp_path / 'run').exists()


def test_the_headline_has_the_numbers_that_a_report_has():
    report = {'steps': 3, 'accuracy': {'sampled': {'gain': {'mean': 0.5}}, 'greedy': None}, 'reward': {'last': None}}
    assert headline(report) == {'summary/steps': 3.0, 'summary/accuracy/sampled/gain/mean': 0.5}
    assert headline({'held_out_nll': {'0': 2.0, '6': 1.5}}) == {'summary/held_out_nll/last': 1.5}


def _stored(kind: str, directory: pathlib.Path) -> list[int]:
    """The steps with a reward that the real library holds."""
    if kind == 'wandb':
        from wandb.proto.wandb_internal_pb2 import Record

        from areal_jax.telemetry.trackers import read_records

        files = sorted(directory.glob('run/wandb/offline-run-*/*.wandb'))
        found = [Record.FromString(content) for file in files for content in read_records(file.read_bytes())]
        rows = [record.history for record in found if record.WhichOneof('record_type') == 'history']
        return [row.step.num for row in rows if any('reward/mean' in (i.key, *i.nested_key) for i in row.item)]
    if kind == 'mlflow':
        query = "select step from metrics where key = 'reward/mean' order by step"
        return [step for (step,) in sqlite3.connect(directory / 'mlflow.db').execute(query)]
    (file,) = (directory / 'trackio').glob('*.db')
    rows = sqlite3.connect(file).execute('select step, metrics from metrics order by id').fetchall()
    return [step for step, metrics in rows if b'"reward/mean"' in bytes(metrics)]


@pytest.mark.slow
@pytest.mark.parametrize('kind', sorted(TRACKERS))
def test_the_real_library_keeps_every_step_once(tmp_path: pathlib.Path, monkeypatch, kind: str):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"pip install 'areal_jax[{kind}]'")
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
    monkeypatch.chdir(tmp_path)  # artifacts are stored below the working directory
    monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))
    library = importlib.import_module(kind)
    assert isinstance(library, types.ModuleType)
    fields = {'telemetry__tracker': kind, 'checkpoint__every': 2}
    start_killed_and_resumed(tmp_path / 'run', 3, **fields).train()
    assert _stored(kind, tmp_path) == [1, 2, 3, 4, 5]
