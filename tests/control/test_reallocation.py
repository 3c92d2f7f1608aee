"""Moves of devices between two updates, with toys: nothing is lost, trained twice or generated anew."""

from __future__ import annotations

import collections
import dataclasses
import statistics

import pytest

from areal_jax.config.cluster import DeviceSplit
from areal_jax.config.generation import RolloutSection
from areal_jax.control.reallocation import Reallocation
from areal_jax.control.split_choice import Automatic, LaneSeconds, Planned, Rung
from areal_jax.lanes import PREPARE, engine_lane, publish_lane, short_name
from areal_jax.report.rules.log_rules import find_violation
from areal_jax.rollout.local_engine import LocalEngine
from tests.control.test_controller import assert_conserved, assert_predicted, weights_by_version, what_happened
from tests.report.rules.toy_logs import LIMITS, log_of, real_clock
from tests.toys import PRICES, ToyBackend, ToyRun

DEVICES = 5  # engine K decodes on device 4 - K, the learner has the others
PLAN = {2: 3, 3: 1, 4: 4, 5: 2, 6: 1}  # engines by update; 2 at first
LANES = {lane(index): 1 for index in range(DEVICES) for lane in (engine_lane, publish_lane)} | {PREPARE: 1}
PRICED = PRICES | {'compile': 0.0, 'reshard': 0.004}


def split(engines, devices_each=1):
    return DeviceSplit(f'fsdp={DEVICES - engines * devices_each}', f'{engines} x tensor={devices_each}')


class ToySite:
    """Implements control.device_site.DeviceSite."""

    def __init__(self, run: ToyRun):
        self.run, self.calls, self.fails_at = run, collections.Counter(), ''
        self.learner = []  # splits that it moved to

    def call(self, name):
        self.calls[name] += 1
        if self.fails_at == f'{name} {self.calls[name]}':
            raise OSError(f'{name} is worn out')

    def engines_of(self, split):
        count, _, each = split.engines.partition(' x tensor=')
        names = [str(device) for device in reversed(range(DEVICES))]
        return {
            engine_lane(k): sorted(names[k * int(each) : (k + 1) * int(each)]) for k in range(int(count))
        }  # fmt: skip

    def prepare(self, split):
        self.call('prepare')

    def move_learner(self, split):
        self.call('move_learner')
        self.learner.append(split)

    def build_engine(self, name, split, published):
        self.call('build_engine')
        run = self.run
        return LocalEngine(
            int(short_name(name)), ToyBackend(4), run.clock, run.log, receive=run.channel.receive,
            version=published.version, params=published.handle, rollout=RolloutSection(decode_steps=2),
        )  # fmt: skip

    def start_engine(self, engine):
        self.call('start_engine')
        engine.start(self.run.supervisor)

    def stop_engine(self, engine):
        self.call('stop_engine')
        assert engine.open_requests() == []
        engine.stop()


def toy_run(plan=PLAN, choice=None, begin=2, resume=None, fails_at='', **options):
    """A run of 6 updates with the splits of a plan, engines by update."""
    sites = []

    def make(run):
        site = ToySite(run)
        site.fails_at = fails_at
        sites.append(site)
        planned = choice or Planned({u: s if isinstance(s, DeviceSplit) else split(s) for u, s in plan.items()})
        return Reallocation(
            run.clock, run.log, run.supervisor, pool=run.pool, site=site, choice=planned, split=now,
            published=run.newest, slots=4, cache_tokens=4 * 32,
        )  # fmt: skip

    now = split(begin)
    if resume:
        saved = resume['run_state']['reallocation']
        now = DeviceSplit(saved['learner'], saved['engines'])
        begin = int(saved['engines'][0])
    options = {'prices': PRICED, 'delays': [1, 4]} | options
    run = ToyRun(engines=begin, make_reallocation=make, more_lanes=LANES, resume=resume, **options)
    (run.site,) = sites
    return run


def of_kind(run, kind):
    return [event for event in run.log.events if event['kind'] == kind]


def assert_exact(events, run):
    assert assert_conserved(events) == {'trained': 18}
    assert find_violation(events, LIMITS) is None
    assert sum(event.get('discarded', 0) for event in events if event['kind'] == 'decode') == 0
    generated = sum(event['tokens'] for event in events if event['kind'] == 'decode')
    assert generated == sum(event['tokens'] for event in events if event['kind'] == 'finish')


@pytest.mark.parametrize('clock', ['virtual', 'real'])
def test_five_moves_lose_nothing_and_generate_nothing_anew(clock):
    run = toy_run(**({'make_clock': real_clock} if clock == 'real' else {})).run()
    moves = of_kind(run, 'reallocate')
    assert [(move['update'], move['engines'][0]) for move in moves] == [
        (2, '3'),
        (3, '1'),
        (4, '4'),
        (5, '2'),
        (6, '1'),
    ]
    assert [(move['left'], move['joined']) for move in moves] == [
        ([], ['engine/2']),
        (['engine/1', 'engine/2'], []),
        ([], ['engine/1', 'engine/2', 'engine/3']),
        (['engine/2', 'engine/3'], []),
        (['engine/1'], []),
    ]
    assert run.site.learner == [split(engines) for engines in PLAN.values()]
    assert sum(move['moved'] for move in moves) == len(of_kind(run, 'move'))
    assert clock == 'real' or len(of_kind(run, 'move')) > 0
    assert_exact(log_of(run), run)
    w = weights_by_version(run)
    for group in run.groups:
        for trajectory in group.trajectories:
            assert_predicted(trajectory, w)


def test_the_cost_of_a_move_is_the_sum_of_its_parts():
    run = toy_run().run()
    for move in of_kind(run, 'reallocate'):
        parts = sum(move[f'{part}_seconds'] for part in ('wait', 'leave', 'learner', 'join'))
        assert move['seconds'] == pytest.approx(parts)
        assert move['learner_seconds'] == pytest.approx(PRICED['reshard'])
        assert move['join_seconds'] == pytest.approx(PRICED['load'] if move['joined'] else 0.0)
    (busy,) = of_kind(toy_run({5: 1}).run(), 'reallocate')  # after updates that were measured
    assert 0 < busy['busy_learner'] <= busy['period']
    assert 0 < busy['busy_engines'] <= busy['period']
    assert busy['needed_engines'] > 0


def test_requests_wait_while_every_engine_changes_its_devices():
    run = toy_run({3: split(2, 2), 5: split(3)}).run()
    assert [(move['left'], move['joined']) for move in of_kind(run, 'reallocate')] == [
        (['engine/0', 'engine/1'], ['engine/0', 'engine/1']),
        (['engine/0', 'engine/1'], ['engine/0', 'engine/1', 'engine/2']),
    ]
    assert_exact(log_of(run), run)


@pytest.mark.parametrize(('train_s', 'save_s'), [(0.0005, 0.03), (0.002, 1.0)])
def test_resume_from_every_checkpoint_goes_through_the_same_moves(save_s, train_s):
    options = {'checkpoint_every': 1, 'prices': PRICED | {'train': train_s, 'save': save_s}}
    whole = toy_run(**options).run()
    assert len(whole.checkpoints) == 6
    for checkpoint in whole.checkpoints[:-1]:
        state = checkpoint['run_state']
        resumed = toy_run(**options, resume=checkpoint).run()
        assert resumed.learner.w == whole.learner.w
        later = [event for event in whole.log.events if event['seq'] >= state['next_seq']]
        assert what_happened(resumed.log.events, state['clock_s']) == what_happened(later, state['clock_s'])
        assert_exact(log_of(whole)[: state['next_seq']] + log_of(resumed), resumed)


_STEPS = ('prepare', 'stop_engine', 'move_learner', 'build_engine', 'start_engine')


@pytest.mark.parametrize('number', [1, 2, 3])
@pytest.mark.parametrize('step', _STEPS)
def test_a_move_that_is_killed_at_any_step_is_made_again_and_nothing_is_lost(step, number):
    killed = toy_run(checkpoint_every=1, fails_at=f'{step} {number}')
    with pytest.raises(OSError, match=f'{step} is worn out'):
        killed.run()
    if not killed.checkpoints:  # it starts again at update 0
        again = toy_run(checkpoint_every=1).run()
        assert_exact(log_of(again), again)
        return
    checkpoint = killed.checkpoints[-1]
    again = toy_run(checkpoint_every=1, resume=checkpoint).run()
    assert_exact(log_of(killed)[: checkpoint['run_state']['next_seq']] + log_of(again), again)
    assert again.learner.w == toy_run(checkpoint_every=1).run().learner.w


def test_a_stop_between_two_updates_leaves_the_next_move_to_the_resumed_run():
    run = toy_run()
    stop = run.controller.stop_requested
    run.log.listeners.append(lambda e: stop.set() if (e['kind'], e.get('update')) == ('reallocate', 4) else None)
    run.run()
    assert run.finished is False
    (checkpoint,) = run.checkpoints
    resumed = toy_run(resume=checkpoint).run()
    assert_exact(log_of(run)[: checkpoint['run_state']['next_seq']] + log_of(resumed), resumed)
    assert [move['update'] for move in of_kind(resumed, 'reallocate')] == [5, 6]


def test_updates_in_which_the_learner_waits_say_how_many_rows_decode_at_a_time():
    """Two engines of four slots, steps of 0.1 s, training for nothing: the engines are the bound."""
    run = toy_run({}, begin=2, prices=PRICED | {'train': 0.0}, checkpoint_every=1).run()
    found = [
        LaneSeconds(*checkpoint['run_state']['reallocation']['measured'][-1]) for checkpoint in run.checkpoints[2:]
    ]
    decodes = of_kind(run, 'decode')
    rows = sum(e['steps'] * sum(slot is not None for slot in e['slots']) for e in decodes)
    mean = rows / sum(event['steps'] for event in decodes)
    assert all(1 <= 1 / seconds.open_share <= 8 for seconds in found)
    assert statistics.fmean(1 / seconds.open_share for seconds in found) == pytest.approx(2 * mean, rel=0.3)
    # and the learner as the bound says nothing of it
    run = toy_run({}, begin=2, prices=PRICED | {'train': 9.0}, checkpoint_every=1).run()
    busy = [LaneSeconds(*one) for one in run.checkpoints[-1]['run_state']['reallocation']['measured'][2:]]
    assert busy
    assert all(seconds.open_share in (0.0, busy[0].open_share) for seconds in busy)


def test_answers_that_end_are_compared_with_those_that_the_update_took():
    run = toy_run({}, begin=2, prices=PRICED | {'train': 0.5}, checkpoint_every=1).run()
    ends, takes = of_kind(run, 'finish'), of_kind(run, 'consume')
    mean = lambda events: statistics.fmean(event['tokens'] for event in events)
    measured = [LaneSeconds(*one) for one in run.checkpoints[-1]['run_state']['reallocation']['measured']]
    bounds = [0, *(take['seq'] for take in takes[1:])]  # the first update begins with the run
    for update in (1, 2, 3, 4):  # behind them nothing ends
        ended = [end for end in ends if bounds[update - 1] < end['seq'] < bounds[update]]
        taken = [end for end in ends if end['draw'] in takes[update - 1]['draws']]
        assert measured[update - 1].growth == pytest.approx(mean(ended) / mean(taken))
    assert measured[4].growth == 1.0


def test_auto_moves_devices_to_the_busier_side_once_they_are_prepared_and_not_back():
    rungs = [Rung(split(engines), DEVICES - engines, engines) for engines in (4, 3, 2, 1)]
    automatic = lambda: Automatic(rungs, gain=0.2, updates=2)
    prices = PRICED | {'train': 0.02}  # the learner is the slower side by far
    run = toy_run(choice=automatic(), begin=4, steps=14, prices=prices, checkpoint_every=1).run()
    moves = of_kind(run, 'reallocate')
    assert [move['engines'][0] for move in moves] == ['2', '1']  # at first it generates what fills the pipeline
    assert all(move['busy_learner'] > move['busy_engines'] for move in moves)
    # two updates are measured, during the third the split is prepared; the first one after a move is not measured
    assert [move['update'] for move in moves] == [4, 8]
    limits = dataclasses.replace(LIMITS, max_admitted=42)
    assert find_violation(log_of(run), limits) is None
    for checkpoint in run.checkpoints[:-1]:
        state = checkpoint['run_state']
        options = {'choice': automatic(), 'steps': 14, 'prices': prices, 'checkpoint_every': 1}
        resumed = toy_run(resume=checkpoint, **options)
        assert resumed.reallocation.state() == state['reallocation']
        resumed.run()
        assert resumed.learner.w == run.learner.w
        assert [move['update'] for move in of_kind(resumed, 'reallocate')] == [
            move['update'] for move in moves if move['update'] > state['version']
        ]  # fmt: skip
