"""The account of the run of two updates in tests/telemetry/logs.py, by arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from areal_jax.telemetry import energy_accounting
from areal_jax.telemetry.energy_accounting import EnergyAccount
from areal_jax.telemetry.energy_meters import POWER, ChipPower, DeviceSet, MeterError, Watts, decode_activity
from tests.telemetry.logs import two_updates

CHIP = ChipPower(
    idle=Watts(50, 70),
    decode_one=Watts(100, 200),
    decode_full=Watts(300, 600),
    prefill=Watts(500, 700),
    train=Watts(400, 600),
)
OWN = (DeviceSet('chip', frozenset(['engine/0']), 2), DeviceSet('chip', frozenset(['learner']), 1))
EVENTS = sorted(two_updates(), key=lambda event: event['time'])  # as a run logs them
UPDATES = {23: {'tokens/generated': 16, 'tokens/trained': 10}, 30: {'tokens/generated': 7, 'tokens/trained': 6}}


class Counter:
    """A meter of 100 W, on the clock of the events."""

    def __init__(self, name: str = 'nvml', fails_at: float = 1e9):
        self.name, self.devices, self.fails_at, self.time = name, '3 x chip', fails_at, 0.0

    def read(self) -> float:
        if self.time >= self.fails_at:
            raise MeterError('GPU is lost')
        return 100 * self.time

    def close(self) -> None: ...


def follow(account: EnergyAccount, meters: list[Counter], events: Any = None) -> dict[int, dict[str, Any]]:
    """The metrics of both updates, by the second of their publication."""
    rows = {}
    for event in EVENTS if events is None else events:
        for meter in meters:
            meter.time = event['time']
        account.apply(event)
        if event['kind'] == 'publish':
            rows[event['time']] = account.take(event['time'], {**UPDATES[event['time']], 'update/useful_tokens': 4})
    return rows


@pytest.fixture
def chip(monkeypatch):
    monkeypatch.setattr(energy_accounting, 'POWER', {**POWER, 'chip': CHIP})
    monkeypatch.setattr('areal_jax.telemetry.energy_meters.POWER', {**POWER, 'chip': CHIP})


def test_an_update_is_accounted_from_lanes_that_go_on_across_it(chip):
    # 10..23: engine decodes 10-18 (two dispatches of 2 rows) and 18-24 (1 row), which goes on: 13 s. The learner trains
    # 18-22: 4 s, 9 s idle (a snapshot counts as idle). Activity of 10..23: of the dispatches that were logged, 2 rows
    account = EnergyAccount(OWN, (), print)
    first, second = follow(account, []).values()
    assert {name: first[f'energy/seconds/{name}'] for name in ('train', 'prefill', 'decode', 'idle')} == {
        'train': 4, 'prefill': 0, 'decode': 26, 'idle': 9,
    }  # fmt: skip
    active = decode_activity(2)
    assert first['energy/decode_activity'] == pytest.approx(active)
    low, high = 26 * (100 + 200 * active) + 4 * 400 + 9 * 50, 26 * (200 + 400 * active) + 4 * 600 + 9 * 70
    assert first['energy/modelled_joules_low'] == pytest.approx(low)
    assert first['energy/modelled_joules_high'] == pytest.approx(high)
    assert first['energy/joules'] == first['energy/modelled_joules'] == pytest.approx((low + high) / 2)
    assert first['energy/joules_per_generated_token'] == pytest.approx((low + high) / 2 / 16)
    assert first['energy/joules_per_useful_token'] == pytest.approx((low + high) / 2 / 4)
    assert (first['energy/idle_joules_low'], first['energy/idle_joules_high']) == (9 * 50, 9 * 70)
    # 23..30: engine decode 23-24 and 24.5-28, prefill 24-24.5, idle 28-30; learner train 24-29, idle 23-24 and 29-30
    assert {name: second[f'energy/seconds/{name}'] for name in ('train', 'prefill', 'decode', 'idle')} == {
        'train': 5, 'prefill': 1, 'decode': 9, 'idle': 6,
    }  # fmt: skip
    assert second['energy/decode_activity'] == pytest.approx(0.0)  # of one row


def test_a_counter_measures_from_the_first_admission_on_and_not_the_evaluations(chip):
    meters = [Counter()]
    account = EnergyAccount(OWN, meters, print)
    first, second = follow(account, meters).values()
    assert (first['energy/nvml_joules'], second['energy/nvml_joules']) == (1300, 700)
    assert (first['energy/joules'], second['energy/joules_per_trained_token']) == (1300, pytest.approx(700 / 6))
    assert 'energy/modelled_joules' not in first  # what is measured is not modelled too, but for the idle part of it
    assert first['energy/idle_joules'] == 9 * 60
    assert account.facts()['note'] == ''
    assert account.state()['joules'] == {'nvml': pytest.approx(100.0)}  # 30..31: then the evaluation begins


def test_a_counter_that_is_lost_costs_its_numbers_and_one_warning(chip):
    warnings: list[str] = []
    meters = [Counter(fails_at=24), Counter('rapl')]
    account = EnergyAccount(OWN, meters, warnings.append)
    first, second = follow(account, meters).values()
    assert (first['energy/joules'], first['energy/rapl_joules']) == (2600, 1300)
    assert 'energy/nvml_joules' not in second
    assert 'energy/joules' not in second  # the sum would lack the devices
    assert (second['energy/rapl_joules'], second['energy/seconds/train']) == (700, 5)
    assert warnings == ["telemetry.energy='auto': GPU is lost: no joules of 3 x chip from here on"]
    assert account.facts()['lost'] == warnings


def test_counters_are_read_often_enough_for_one_that_wraps(chip):
    class Noted(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.reads: list[float] = []

        def read(self) -> float:
            self.reads.append(self.time)
            return super().read()

    meter = Noted()
    account = EnergyAccount(OWN, [meter], print)
    for second in range(100):
        meter.time = float(second)
        account.apply({'seq': second, 'time': float(second), 'lane': None, 'kind': 'admit', 'draw': second})
    assert meter.reads == [0, 30, 60, 90]
    assert account.take(99.0, {})['energy/nvml_joules'] == 9900


def test_a_resumed_run_goes_on_with_the_sums_of_its_checkpoint(chip):
    events = EVENTS
    cut = next(i for i, event in enumerate(events) if event['time'] > 24.5) - 1
    whole_meters, first_meters, later_meters = [Counter()], [Counter()], [Counter()]
    whole = follow(EnergyAccount(OWN, whole_meters, print), whole_meters, events)
    first = EnergyAccount(OWN, first_meters, print)
    follow(first, first_meters, events[: cut + 1])
    state = first.state()
    kept = copy.deepcopy(state)
    first_meters[0].time = 26.0
    first.take(26.0, {})
    assert state == kept  # it is written while the run goes on
    assert state['joules'] == {'nvml': 150.0}
    later = EnergyAccount(OWN, later_meters, print)
    later.restore(state)
    # the learner trains from 24 to 29: half a second is in the state, the rest comes with the end of its work
    again = [{'seq': 0, 'time': 24.5, 'lane': None, 'kind': 'arrive', 'request': '0/2/0'}, *events[cut + 1 :]]
    rows = follow(later, later_meters, again)
    assert rows[30]['energy/nvml_joules'] == whole[30]['energy/nvml_joules'] == 700
    for name in ('train', 'prefill', 'decode', 'idle'):
        assert rows[30][f'energy/seconds/{name}'] == whole[30][f'energy/seconds/{name}'], name


def test_an_update_that_began_without_an_account_has_no_metrics_of_it(chip):
    meters = [Counter()]
    account = EnergyAccount(OWN, meters, print)
    account.restore(None)
    first, second = follow(account, meters).values()
    assert first == {}
    assert second['energy/nvml_joules'] == 700


@pytest.mark.parametrize(
    ('sets', 'meters', 'note'),
    [
        (
            (DeviceSet('TPU v5 lite', frozenset(['learner']), 4),),
            [],
            "No joules of 4 x TPU v5 lite are known (no RAPL; no watts of 'TPU v5 lite' are in the table).",
        ),
        (
            (DeviceSet('TPU v5 lite', frozenset(['learner']), 4),),
            [Counter('rapl')],
            "No joules of 4 x TPU v5 lite are known (no RAPL; no watts of 'TPU v5 lite' are in the table); only those "
            'of 3 x chip are measured.',
        ),
        ((DeviceSet('cpu', frozenset(['learner']), 1),), [Counter('rapl')], ''),
        ((DeviceSet('TPU v4', frozenset(['learner']), 1),), [], ''),
    ],
)
def test_what_is_not_known_is_one_sentence_and_no_number(sets, meters, note):
    account = EnergyAccount(sets, meters, print, reasons=['no RAPL'])
    first, _ = follow(account, meters).values()
    assert account.facts()['note'] == note
    assert ('energy/joules' in first) == (not note)
    assert ('energy/rapl_joules' in first) == bool(meters)
    assert first['energy/seconds/train'] == 4 * sum(found.devices for found in sets)
