"""benchmarks/interruption.py: what its policies do with running answers, and its arithmetic."""

import dataclasses

import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from benchmarks import interruption
from benchmarks.host_toys import FastBackend
from benchmarks.interrupted_engine import POLICIES, InterruptedEngine, Load, gain_over_waiting
from benchmarks.side_engine import LANES
from benchmarks.side_interruption import two_mean_lengths_s

LOAD = Load(
    prompt_tokens=8, mean_tokens=64, limit_tokens=256, sigma=0.75, vocabulary=2, seed=0, group_size=1, warm_up=1,
    updates=4,
)  # fmt: skip
STEP_S, TOKEN_S = 0.01, 0.0005


def measure(policy, **changes):
    log = EventLog()
    prices = {'decode': STEP_S, 'prefill': lambda lane, work: TOKEN_S * work.size['tokens'], 'load': 0.1}
    run = InterruptedEngine(
        VirtualClock(LANES, log, prices), log, FastBackend(4, 320), 0, dataclasses.replace(LOAD, **changes), policy,
        decode_steps=2, interval_s=2 * LOAD.mean_tokens * STEP_S,
    )  # fmt: skip
    return run.measure(), log.events


def interruptions(events):
    """How many requests each interrupted."""
    return [len(event['requests']) for event in events if event['kind'] == 'interrupt']


def test_waiting_interrupts_nothing_and_leaves_slots_empty():
    found, events = measure('wait')
    assert interruptions(events) == []
    assert found['held_s'] > 0
    assert found['occupancy'] < 0.9
    assert found['rebuilt'] == 0


@pytest.mark.parametrize('policy', ['recompute', 'keep'])
def test_slots_stay_full_and_tokens_are_computed_again_where_that_is_asked_for(policy):
    found, events = measure(policy)
    assert interruptions(events)
    assert (found['rebuilt'] > 0) == (policy == 'recompute')
    assert found['held_s'] == 0
    assert found['occupancy'] > 0.95


def test_without_new_weights_every_step_decodes_every_slot():
    found, events = measure('none')
    assert not any(event['kind'] in ('interrupt', 'load') for event in events)
    assert found['tokens'] / found['clock_s'] == pytest.approx(4 / STEP_S, rel=0.05)  # but for prompts and last tokens


def test_new_weights_come_on_time_whatever_the_engine_does():
    _, events = measure('recompute')
    loads = [event['time'] for event in events if event['kind'] == 'load']
    assert len(loads) == LOAD.warm_up + LOAD.updates
    assert [round(time / (2 * LOAD.mean_tokens * STEP_S)) for time in loads] == [1, 2, 3, 4, 5]


def test_gains_are_over_waiting():
    assert gain_over_waiting({'none': 4.0, 'wait': 2.0, 'recompute': 3.0}) == {'none': 1.0, 'recompute': 0.5}


def test_an_interval_is_two_mean_lengths_of_every_slot():
    assert two_mean_lengths_s(LOAD, slots=4, tokens_s=128.0) == 4.0


@pytest.mark.parametrize(('speed', 'met'), [(1.2, True), (1.05, False)])
def test_cells_with_the_published_overhead_alone_are_judged(monkeypatch, speed, met):
    speeds = {'none': 2.0, 'wait': 1.0, 'recompute': speed, 'keep': 1.3}
    run = {policy: {'tokens_s': tokens_s} for policy, tokens_s in speeds.items()}
    monkeypatch.setattr(interruption, 'run_h800', lambda *arguments: run)
    rows = list(interruption.measure_h800(interruption.read_options(['--seeds=2'])))
    assert [(row['step_overhead_ms'] > 0, row['met']) for row in rows] == [(True, met)] * 2 + [(False, None)] * 2
    assert rows[0]['gain']['recompute'] == pytest.approx(speed - 1)


def test_policies_are_asked_in_turns():
    class Side:
        asked = 0

        def call(self):
            self.asked += 1
            return self.asked

    calls = interruption.ask(Side(), 2)
    assert calls == {policy: [1 + place, 5 + place] for place, policy in enumerate(POLICIES)}


@pytest.mark.parametrize(('arguments', 'says'), [(['--cells=tpu'], "'tpu'"), (['--overheads=some'], "'some'")])
def test_options_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        interruption.read_options(arguments)
