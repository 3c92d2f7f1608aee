"""Seconds by state and joules, by arithmetic."""

from __future__ import annotations

import pytest

from areal_jax.telemetry.energy_meters import (
    POWER,
    STATES,
    ChipPower,
    Energy,
    Occupation,
    Phase,
    Watts,
    decode_activity,
    find_phases,
    joules,
)

CHIP = ChipPower(
    idle=Watts(50, 70),
    decode_one=Watts(100, 200),
    decode_full=Watts(300, 600),
    prefill=Watts(500, 700),
    train=Watts(400, 600),
)


def test_three_lanes_by_hand():
    # 20 s: engine/0 decodes 2..12, engine/1 16..20, with half the activity: 200 to 400 W; the learner trains 10..15.
    # Own devices: engine/0 10 s decode 10 idle; engine/1 4 s decode, 16 idle; learner 5 s train, 15 idle
    lanes = [
        Occupation('engine/0', 'decode', 2, 12),
        Occupation('engine/1', 'decode', 16, 20),
        Occupation('learner', 'train', 10, 15),
    ]
    active = {'engine/0': 0.5, 'engine/1': 0.5}
    own = {lane: find_phases(lanes, [lane], 0, 20, active) for lane in ('engine/0', 'engine/1', 'learner')}
    assert own['engine/0'] == [Phase('decode', 10, 0.5), Phase('idle', 10)]
    assert own['engine/1'] == [Phase('decode', 4, 0.5), Phase('idle', 16)]
    assert own['learner'] == [Phase('idle', 15), Phase('train', 5)]
    # low: (10 + 4) * 200 + 5 * 400 + (10 + 16 + 15) * 50; high: 14 * 400 + 5 * 600 + 41 * 70
    total = joules([phase for phases in own.values() for phase in phases], CHIP)
    assert total == Energy(2800 + 2000 + 2050, (6850 + 11470) / 2, 5600 + 3000 + 2870)
    # two devices each take twice as much
    assert joules(own['learner'], CHIP, 2) == Energy(2 * (2000 + 750), 2 * (2500 + 900), 2 * (3000 + 1050))


def test_lanes_on_one_device_take_turns():
    # the learner 10..15 is on the same device: 2..10 decode, 10..15 train, 15..16 idle, 16..20 decode of engine/1
    lanes = [
        Occupation('engine/0', 'decode', 2, 12),
        Occupation('engine/1', 'decode', 16, 20),
        Occupation('learner', 'train', 10, 15),
        Occupation('reward', 'train', 0, 20),  # is on no device
    ]
    found = find_phases(lanes, ['engine/0', 'engine/1', 'learner'], 0, 20, {'engine/0': 0.25, 'engine/1': 1.0})
    assert found == [Phase('decode', 8, 0.25), Phase('decode', 4, 1.0), Phase('idle', 3), Phase('train', 5)]
    # of two that decode at once the more active one counts, and prefill comes before both
    lanes = [Occupation('a', 'decode', 0, 4), Occupation('b', 'decode', 1, 3), Occupation('b', 'prefill', 3, 4)]
    found = find_phases(lanes, ['a', 'b'], 0, 4, {'a': 0.1, 'b': 0.9})
    assert found == [Phase('decode', 1, 0.1), Phase('decode', 2, 0.9), Phase('prefill', 1)]


def test_occupations_are_cut_to_the_span():
    lanes = [Occupation('a', 'train', 0, 5), Occupation('a', 'train', 5, 30), Occupation('a', 'train', 40, 41)]
    assert find_phases(lanes, ['a'], 4, 10, {}) == [Phase('train', 6)]
    assert find_phases([], ['a'], 4, 10, {}) == [Phase('idle', 6)]
    assert find_phases(lanes, ['a'], 4, 4, {}) == []


def test_decoding_follows_its_batch():
    # 16 rows are 4 of the 7 doublings up to 128
    assert [decode_activity(rows) for rows in (0, 1, 128, 1000)] == [0, 0, 1, 1]
    assert decode_activity(16) == pytest.approx(4 / 7)
    assert CHIP.draw('decode', 4 / 7).low == pytest.approx(100 + 200 * 4 / 7)
    assert CHIP.draw('decode', 0.0) == Watts(100, 200)
    with pytest.raises(KeyError):
        CHIP.draw('sleep')


def test_every_row_of_the_table_is_an_interval_with_a_source():
    for kind, power in POWER.items():
        for state in STATES:
            assert 0 < power.draw(state).low <= power.draw(state).mid <= power.draw(state).high <= 700, (kind, state)
        assert power.idle.high <= power.decode_one.low, kind
        assert power.decode_one.high <= power.decode_full.high <= power.train.high, kind
        assert all(' W: ' in text and len(text) > 20 for text in power.sources.values()), kind
    assert not any(kind.startswith(('TPU v5', 'TPU v6', 'TPU7')) for kind in POWER)  # nobody has published any
