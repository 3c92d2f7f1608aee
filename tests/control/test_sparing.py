"""A run whose slow engine is left out: every checkpoint goes on as the whole run, and the log keeps its rules."""

from __future__ import annotations

import dataclasses
import json

import pytest

from areal_jax.checkpoint.store import decode_run_state, encode_run_state
from areal_jax.report.rules.log_rules import find_violation
from tests.report.rules.toy_logs import LIMITS, log_of
from tests.toys import PRICES, ToyRun

STEPS = 10
OPTIONS = {
    'steps': STEPS, 'engines': 2, 'hardware': ('1 x fast', '1 x slow'), 'checkpoint_every': 1, 'delays': [1, 4],
    'decode_steps': 1,
}  # fmt: skip


def priced(train):
    """engine/1 decodes at a fifth of the speed."""
    decode = lambda lane, work: work.amount * (0.05 if lane == 'engine/1' else 0.01)
    return PRICES | {'decode': decode, 'train': train}


def decisions(events):
    return [event for event in events if event['kind'] == 'spare']


@pytest.fixture(scope='module')
def whole():
    """The learner is the bottleneck."""
    return ToyRun(**OPTIONS, prices=priced(0.02)).run()


def test_the_slow_engine_is_left_out_and_the_log_keeps_every_rule(whole):
    [start] = decisions(whole.log.events)
    assert (start['mode'], start['engines'], start['version']) == ('start', ['engine/1'], 4)
    routed = [event for event in whole.log.events if event['kind'] == 'route' and event['seq'] > start['seq']]
    assert {event['engine'] for event in routed} == {'engine/0'}
    assert find_violation(log_of(whole), dataclasses.replace(LIMITS, max_admitted=STEPS * 3)) is None
    assert find_violation(
        [{**event, 'engine': 'engine/1'} if event == routed[0] else event for event in log_of(whole)],
        dataclasses.replace(LIMITS, max_admitted=STEPS * 3),
    ) == (routed[0]['seq'] + 1, f'{routed[0]["request"]} goes to engine/1, which gets no new requests')


@pytest.mark.parametrize('at', [1, 2, 3, 4, 5, 8])
def test_every_checkpoint_goes_on_as_the_whole_run(whole, at):
    checkpoint = whole.checkpoints[at - 1]
    state = decode_run_state(json.loads(json.dumps(encode_run_state(checkpoint['run_state']))))
    resumed = ToyRun(**OPTIONS, prices=priced(0.02), resume={**checkpoint, 'run_state': state}).run()
    assert resumed.learner.w == whole.learner.w
    later = [event for event in decisions(whole.log.events) if event['seq'] >= state['next_seq']]
    plain = lambda events: [{**event, 'seq': 0} for event in events]
    assert plain(decisions(resumed.log.events)) == plain(later)
    assert resumed.checkpoints[-1]['run_state']['pool'] == whole.checkpoints[-1]['run_state']['pool']


def test_it_stays_where_generation_is_the_bottleneck():
    run = ToyRun(**OPTIONS, prices=priced(0.0005), eta=8, slots=2, max_running=float('inf')).run()
    assert decisions(run.log.events) == []
