"""The production controller around toys whose every token can be predicted (tests/toys.py)."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.config.fields import ConfigError
from areal_jax.control.buffer import NoSignalError
from areal_jax.control.clocks.loop import DeadlockError
from areal_jax.control.groups import UnverifiedError
from areal_jax.types import NOT_GENERATED, Trajectory, TrajectoryGroup
from tests.diagonal import diagonal
from tests.toys import PRICES, STOP, ToyLearner, ToyRun, length, logprob, token, toy_prompt

STATES = {'draw': 'pending', 'admit': 'running', 'buffer': 'buffered', 'drop': 'dropped'}
ALLOWED = {
    ('none', 'pending'), ('pending', 'running'), ('running', 'buffered'), ('buffered', 'trained'),
    ('running', 'dropped'), ('buffered', 'dropped'),
}  # fmt: skip


def assert_conserved(events):
    """Each draw is in exactly one state after every event, and moves along the arrows of the loop only."""
    state = collections.defaultdict(lambda: 'none')
    for event in events:
        moves = {event['draw']: STATES[event['kind']]} if event['kind'] in STATES else {}
        if event['kind'] == 'consume':
            moves = dict.fromkeys(event['draws'], 'trained')
        for draw, new in moves.items():
            assert (state[draw], new) in ALLOWED, (event, state[draw])
            state[draw] = new
    return collections.Counter(state.values())


def weights_by_version(run):
    """w of each version, recovered by training a fresh toy learner on the recorded batches."""
    learner, versions = ToyLearner(), [0]
    for step in run.steps:
        learner.update(step.groups, step.step - 1)
        versions.append(learner.w)
    return versions


def test_every_token_logprob_and_version_is_predicted():
    run = ToyRun(steps=8).run()
    w = weights_by_version(run)
    assert w[-1] == run.learner.w
    assert sum(e['kind'] == 'interrupt' for e in run.log.events) > 0
    assert any(len(t.segments) > 1 for g in run.groups for t in g.trajectories)
    for group in run.groups:
        for trajectory in group.trajectories:
            assert_predicted(trajectory, w)


def assert_predicted(trajectory: Trajectory, w, stale=None):
    draw, sample, prompt = trajectory.prompt.draw, trajectory.sample, len(trajectory.prompt.tokens)
    versions = trajectory.policy_versions
    assert len(trajectory.answer_tokens) == length(draw, sample)
    assert trajectory.answer_tokens[-1] == STOP
    assert trajectory.finish_reason == 'stop'
    assert list(versions[prompt:]) == sorted(versions[prompt:])
    assert (versions[:prompt] == NOT_GENERATED).all()
    for position in range(prompt, len(trajectory.tokens)):
        version = versions[position]
        if position + 1 < len(trajectory.tokens):
            assert trajectory.tokens[position] == token(w[version], draw, sample, position)
        np.testing.assert_allclose(trajectory.behavior_logprobs[position], logprob(w[version], position), rtol=1e-6)


def test_kept_kv_is_stale_and_recomputed_kv_is_not():
    # a stale cache shows as -1000 per version in the toy's log-probs
    lowest = {}
    for policy in ['recompute', 'keep']:
        run = ToyRun(steps=8, kv_policy=policy).run()
        lowest[policy] = min(t.behavior_logprobs.min() for g in run.groups for t in g.trajectories)
    assert lowest['recompute'] > -10
    assert lowest['keep'] < -1000


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, 2.0, 4.0, math.inf]),
    st.integers(1, 2),
    st.floats(0.0001, 0.02),
    st.sampled_from([None, 0, 1, 3]),
    st.lists(st.integers(0, 20), max_size=3),
    st.booleans(),
)
def test_staleness_and_conservation_in_any_order_of_arrival(delays, eta, engines, train_token_s, max_age, fail, refill):
    run = ToyRun(
        steps=5, eta=eta, engines=engines, delays=delays, fail=fail, max_token_age=max_age,
        over_age='off' if max_age is None else 'drop', prices=PRICES | {'train': train_token_s},
        max_filtered=99 * refill,
    ).run()  # fmt: skip
    counts = assert_conserved(run.log.events)
    assert counts['trained'] == 5 * 3
    assert counts['trained'] + counts['dropped'] == sum(counts.values())  # nothing is left over at the end
    assert_admission_bound(run.log.events, groups_per_update=3, eta=eta)
    drawn = [e['draw'] for e in run.log.events if e['kind'] == 'draw']
    assert drawn == list(range(len(drawn)))
    assert not {g.draw for g in run.groups} & set(fail)
    assert not (refill and any(g.has_equal_rewards() for g in run.groups))
    if max_age is not None:
        assert max(s.metrics['staleness/token_age_max'] for s in run.steps) <= max_age


def assert_admission_bound(events, groups_per_update, eta):
    """Equation 3 recounted from the log alone."""
    admitted, version = 0, 0
    for event in events:
        if event['kind'] == 'admit':
            admitted += 1
            assert (admitted - 1) // groups_per_update <= version + eta
        elif event['kind'] == 'drop':
            admitted -= 1
        elif event['kind'] == 'publish':
            version = event['version']


def synchronous_loop(steps, groups_per_update, group_size, filters=False):
    """A plain loop: generate B groups with the current weights, train, repeat.

    With `filters` it draws on until B groups have different rewards: dynamic sampling (DAPO, arXiv 2503.14476).
    """
    learner, draw = ToyLearner(), 0
    for version in range(steps):
        groups = []
        while len(groups) < groups_per_update:
            trajectories = tuple(generate_plainly(learner.w, version, draw, sample) for sample in range(group_size))
            group = TrajectoryGroup(draw, trajectories)
            groups += [] if filters and len({t.reward for t in trajectories}) == 1 else [group]
            draw += 1
        learner.update(groups, version)
    return learner.w


def generate_plainly(w, version, draw, sample):
    from areal_jax.types import Segment

    prompt, count = toy_prompt(draw), length(draw, sample)
    positions = range(len(prompt.tokens), len(prompt.tokens) + count)
    tokens = [token(w, draw, sample, p) for p in positions[:-1]] + [STOP]
    logprobs = np.array([logprob(w, p) for p in positions], np.float32)
    segment = Segment(np.array(tokens, np.int32), logprobs, version)
    return Trajectory(prompt, sample, (segment,), float(sum(tokens) % 2), 'stop', '', 0.0, 0.0)


@pytest.mark.parametrize('engines', [1, 2])
def test_eta_0_equals_the_synchronous_loop(engines):
    run = ToyRun(steps=5, eta=0, engines=engines, delays=[1, 9, 4]).run()
    assert run.learner.w == synchronous_loop(5, 3, 2)
    assert ToyRun(steps=5, eta=1).run().learner.w != run.learner.w  # the comparison can fail


def test_two_virtual_runs_are_equal_event_by_event():
    first, second = ToyRun(steps=6, engines=2, delays=[1, 3]).run(), ToyRun(steps=6, engines=2, delays=[1, 3]).run()
    assert first.log.events == second.log.events
    assert first.learner.w == second.learner.w


def test_a_token_may_be_older_than_eta():
    slow = {'steps': 8, 'eta': 1, 'engines': 2, 'delays': [30.0, 2.0, 5.0, 2.0], 'prices': PRICES | {'train': 0.001}}
    ages = lambda run: [step.metrics['staleness/token_age_max'] for step in run.run().steps]
    assert max(ages(ToyRun(**slow))) == 2  # Eq. 3 counts groups: one that takes long may be overtaken
    assert max(ages(ToyRun(**slow, max_token_age=1, over_age='drop'))) == 1


@pytest.mark.parametrize('delay', [0, 1, 3])
def test_fixed_k_is_a_spike_at_k(delay):
    run = ToyRun(steps=8, eta=math.inf, schedule=f'fixed({delay})', max_running=3).run()
    for step in run.steps:
        version_before = step.step - 1
        expected = version_before - max(0, version_before - delay)
        histogram = step.metrics['staleness/token_age_histogram']
        assert histogram[:-1] == [0] * expected
        assert len(histogram) == expected + 1
    assert not any(e['kind'] == 'interrupt' for e in run.log.events)


@pytest.mark.parametrize('schedule', ['fixed(0)', 'fixed(2)', 'every(2)', 'uniform(0,2)'])
def test_a_lock_step_batch_is_refilled_with_its_own_version(schedule):
    run = ToyRun(steps=4, eta=math.inf, schedule=schedule, fail=[0, 4, 5, 11]).run()
    assert_conserved(run.log.events)
    assert run.steps[-1].dropped == {'verifier_failed': 4}
    for step in run.steps:
        ages = step.metrics['staleness/token_age_histogram']
        assert ages[:-1] == [0] * (len(ages) - 1)  # one version a batch
    whole = ToyRun(steps=4, eta=math.inf, schedule=schedule).run()
    assert [s.metrics['staleness/token_age_max'] for s in run.steps] == [
        s.metrics['staleness/token_age_max'] for s in whole.steps
    ]


@pytest.mark.parametrize('how', [{}, {'schedule': 'fixed(2)', 'eta': math.inf}])
def test_at_the_end_every_engine_holds_the_last_version(how):
    run = ToyRun(steps=4, engines=2, **how).run()
    assert [engine.params for engine in run.engines] == [(run.learner.w, 4)] * 2


def test_fixed_0_equals_eta_0():
    fixed = ToyRun(steps=5, eta=math.inf, schedule='fixed(0)').run()
    assert fixed.learner.w == synchronous_loop(5, 3, 2)


def test_uniform_draws_every_delay_and_trace_follows_its_file(tmp_path):
    run = ToyRun(steps=20, eta=math.inf, schedule='uniform(0,2)').run()
    assert {s.metrics['staleness/token_age_max'] for s in run.steps[2:]} == {0, 1, 2}
    (tmp_path / 'delays').write_text('0 0 2 1')
    run = ToyRun(steps=4, eta=math.inf, schedule=f'trace({tmp_path}/delays)').run()
    assert [s.metrics['staleness/token_age_max'] for s in run.steps] == [0, 0, 2, 1]


@pytest.mark.parametrize('how', [{'eta': 0}, {'eta': math.inf, 'schedule': 'fixed(0)'}])
def test_a_synchronous_run_that_filters_is_dynamic_sampling(how):
    run = ToyRun(steps=5, max_filtered=99, delays=[1, 9, 4], **how).run()
    assert run.learner.w == synchronous_loop(5, 3, 2, filters=True) != synchronous_loop(5, 3, 2)
    assert all(len(step.groups) == 3 for step in run.steps)  # batches stay full
    counts = assert_conserved(run.log.events)
    assert counts == {'trained': 15, 'dropped': run.steps[-1].dropped['equal_rewards']}
    drops = [e for e in run.log.events if e['kind'] == 'drop']
    assert {(e['reason'], e['detail']) for e in drops} == {('equal_rewards', f'2 rewards of {r}') for r in (0, 1)}


def test_the_filtered_rate_counts_the_groups_that_finished_since_the_last_update():
    run = ToyRun(steps=6, eta=0, max_filtered=99).run()
    dropped = 0
    for step in run.steps:  # synchronous: an update has 3 kept groups and those dropped before them
        new, dropped = step.dropped.get('equal_rewards', 0) - dropped, step.dropped.get('equal_rewards', 0)
        assert step.filtered_rate == new / (new + 3)
    assert dropped > 0
    assert {step.filtered_rate for step in ToyRun(steps=2).run().steps} == {None}


@pytest.mark.parametrize('schedule', ['fixed(2)', 'uniform(0,2)'])
def test_a_lock_step_batch_that_is_filtered_is_refilled_with_its_own_version(schedule):
    run = ToyRun(steps=6, eta=math.inf, schedule=schedule, max_filtered=99, fail=[4]).run()
    assert set(run.steps[-1].dropped) == {'equal_rewards', 'verifier_failed'}
    for step in run.steps:
        assert len(step.groups) == 3
        ages = step.metrics['staleness/token_age_histogram']
        assert ages[:-1] == [0] * (len(ages) - 1)  # one version a batch


@pytest.mark.parametrize('how', [{'engines': 2}, {'schedule': 'fixed(2)', 'eta': math.inf}])
def test_a_run_that_filters_resumed_from_any_checkpoint_equals_the_uninterrupted_one(how):
    options = {'steps': 8, 'max_filtered': 99, 'delays': [1, 4], 'checkpoint_every': 1, **how}
    options['prices'] = PRICES | {'train': 0.0005}
    whole = ToyRun(**options).run()
    for checkpoint in whole.checkpoints[:-1]:
        seq, time_s = checkpoint['run_state']['next_seq'], checkpoint['run_state']['clock_s']
        resumed = ToyRun(**options, resume=checkpoint).run()
        assert resumed.learner.w == whole.learner.w
        rest = whole.steps[checkpoint['step'] :]
        assert [(s.filtered_rate, s.dropped) for s in resumed.steps] == [(s.filtered_rate, s.dropped) for s in rest]
        later = [e for e in whole.log.events if e['seq'] >= seq]
        assert what_happened(resumed.log.events, time_s) == what_happened(later, time_s)
        assert_conserved([e for e in whole.log.events if e['seq'] < seq] + resumed.log.events)
    counted = [c['run_state']['filter'] for c in whole.checkpoints]
    if 'engines' in how:  # in lock-step a save follows the last kept group of a batch
        assert any(c['dropped'] for c in counted), 'no checkpoint fell between a drop and the update that counts it'


def test_a_policy_that_answers_everything_alike_ends_the_run():
    """Rewards differ in groups of the first 20 draws only: the run ends at the 30th drop in a row, not before."""
    run = ToyRun(steps=40, max_filtered=30, checkpoint_every=1)
    verify = run.verifier.verify

    async def score(prompt, answer_tokens, finish_reason, describe_episode):
        verdict = await verify(prompt, answer_tokens, finish_reason)
        return verdict if prompt.draw < 20 else dataclasses.replace(verdict, reward=0.0)

    run.verifier.verify = score
    message = r"^30 groups in a row \(task\.max_filtered_groups\) were dropped by task\.filter='equal_rewards'"
    with pytest.raises(NoSignalError, match=message):
        run.run()
    assert run.steps, 'groups with a signal were trained before'
    last = [e['kind'] for e in run.log.events if e['kind'] in ('buffer', 'drop')][-31:]
    assert last == ['buffer'] + ['drop'] * 30
    assert_conserved(run.log.events)
    checkpoint = run.checkpoints[-1]  # what was saved before is whole: with a task that gives a signal it goes on
    assert ToyRun(steps=40, max_filtered=99, resume=checkpoint).run().finished


@pytest.mark.parametrize(
    ('options', 'bounds'),
    [
        ({'eta': 0}, {'eta'}),
        ({'eta': 1, 'max_running': 2}, {'eta', 'max_running_groups'}),
        ({'eta': math.inf, 'max_running': 3}, {'max_running_groups'}),
        ({'eta': math.inf, 'max_running': math.inf}, {'slots'}),
        ({'eta': 1, 'max_running': math.inf}, {'eta', 'slots'}),
        ({'eta': math.inf, 'max_running': math.inf, 'slots': 8, 'buffer_capacity': 4}, {'buffer_capacity'}),
        ({'eta': math.inf, 'max_running': 9, 'buffer_capacity': 4}, {'buffer_capacity'}),
        ({'eta': 0, 'checkpoint_every': 2}, {'eta', 'checkpoint'}),
        ({'eta': math.inf, 'schedule': 'fixed(1)', 'max_running': 2}, {'schedule', 'max_running_groups'}),
    ],
)
def test_every_second_without_an_admission_is_put_down_to_the_bound_that_closed_it(options, bounds):
    run = ToyRun(steps=6, **options).run()
    held = collections.Counter()
    for step in run.steps:
        held.update(step.held_s)
        assert min(step.held_s.values(), default=0) >= 0
    assert set(held) - {'steps'} == bounds  # at the end every group of the run is admitted
    assert sum(held.values()) == pytest.approx(run.steps[-1].time_s)  # a group starts as soon as it may
    if options['eta'] == 0 and 'checkpoint' not in bounds:
        # closed by eta from the third admission of an update to its publication; by the steps during the last update
        admitted = [e['time'] for e in run.log.events if e['kind'] == 'admit']
        starts = [admitted[3 * update] for update in range(6)]
        closed = sum(step.time_s - start for step, start in zip(run.steps[:5], starts, strict=False))
        assert held['eta'] == pytest.approx(closed)


def test_a_dropped_group_is_refilled_and_labelled():
    run = ToyRun(steps=4, fail=[0, 5]).run()
    assert run.steps[-1].dropped == {'verifier_failed': 2}
    assert assert_conserved(run.log.events) == {'trained': 12, 'dropped': 2}


def test_a_missing_publication_is_a_deadlock_that_names_its_waiters():
    run = ToyRun(steps=4, eta=0)
    run.gate.publish = lambda version: None  # admission never reopens
    with pytest.raises(DeadlockError, match=r"'a full batch in the buffer.*'admission \(staleness"):
        run.run()


def count_partial(groups):
    """Episodes with segments that have not ended."""
    open_episodes = [e for g in groups for e in g.episodes if e.sample not in {*g.finished, *g.failed}]
    return sum(bool(e.segments) for e in open_episodes)


_LOADS = [
    (engines, running, policy)
    for engines in (1, 2)
    for running in (8, math.inf)
    for policy in ('recompute', 'keep', 'wait')
]


@pytest.mark.parametrize(
    ('engines', 'max_running', 'kv_policy', 'save_s'),
    diagonal(_LOADS, (0.03, 1.0)),  # 1 s: the next checkpoint waits until this one is written
)
def test_resume_from_every_checkpoint_equals_the_uninterrupted_run(engines, max_running, kv_policy, save_s):
    options = {'steps': 8, 'engines': engines, 'delays': [1, 4], 'checkpoint_every': 1, 'kv_policy': kv_policy}
    options['max_running'] = max_running
    # generation is the slower side: something is always under way
    options['prices'] = PRICES | {'train': 0.0005, 'save': save_s}
    options['top_k'] = engines - 1  # with two engines answers have log-probs of a cut softmax too
    whole = ToyRun(**options).run()
    assert len(whole.checkpoints) == 8
    partial = 0
    for checkpoint in whole.checkpoints[:-1]:
        state = checkpoint['run_state']
        partial += count_partial(state['running'])
        seq, time_s = state['next_seq'], state['clock_s']
        resumed = ToyRun(**options, resume=checkpoint).run()
        assert resumed.learner.w == whole.learner.w
        assert [s.held_s for s in resumed.steps] == [s.held_s for s in whole.steps if s.step > state['version']]
        idle = [s.idle_slots_s for s in whole.steps if s.step > state['version']]
        assert [s.idle_slots_s for s in resumed.steps] == idle
        later = [e for e in whole.log.events if e['seq'] >= seq]
        assert what_happened(resumed.log.events, time_s) == what_happened(later, time_s)
        assert_conserved([e for e in whole.log.events if e['seq'] < seq] + resumed.log.events)
    assert partial > 0 or kv_policy == 'wait'  # some answers were in the middle, unless new weights waited for them


@pytest.mark.parametrize(
    ('schedule', 'engines', 'save_s'),
    diagonal(('fixed(0)', 'fixed(2)', 'every(3)', 'uniform(0,3)', 'trace'), (1, 2), (0.03, 1.0)),
)
def test_a_lock_step_run_resumed_from_any_checkpoint_equals_the_uninterrupted_one(tmp_path, schedule, engines, save_s):
    (tmp_path / 'delays').write_text('0 3 1 2 0')
    options = {'steps': 8, 'engines': engines, 'delays': [1, 4], 'fail': [3, 11, 13], 'checkpoint_every': 1}
    options |= {'eta': math.inf, 'schedule': f'trace({tmp_path}/delays)' if schedule == 'trace' else schedule}
    options['prices'] = PRICES | {'train': 0.0005, 'save': save_s}
    whole = ToyRun(**options).run()
    assert len(whole.checkpoints) == 8
    partial = held = 0
    for checkpoint in whole.checkpoints:
        state = checkpoint['run_state']
        partial += count_partial(state['running'])
        held += len(checkpoint['earlier'])
        resumed = ToyRun(**options, resume=checkpoint).run()
        assert resumed.finished is True
        assert resumed.learner.w == whole.learner.w
        later = [e for e in whole.log.events if e['seq'] >= state['next_seq']]
        assert what_happened(resumed.log.events, state['clock_s']) == what_happened(later, state['clock_s'])
        for step, expected in zip(resumed.steps, whole.steps[checkpoint['step'] :], strict=True):
            assert step.metrics == expected.metrics
    assert (partial > 0) == (schedule != 'fixed(0)')  # where generation runs ahead, answers were in the middle
    assert (held > 0) == (schedule != 'fixed(0)')


def test_a_trace_that_was_changed_before_the_resume_is_named(tmp_path):
    delays = tmp_path / 'delays'
    delays.write_text('1')
    options = {'steps': 6, 'eta': math.inf, 'schedule': f'trace({delays})', 'checkpoint_every': 1}
    checkpoint = ToyRun(**options).run().checkpoints[3]
    delays.write_text('4')
    with pytest.raises(ConfigError, match=r'staleness\.schedule asks for version 0, and the run holds \[3, 4\]'):
        ToyRun(**options, resume=checkpoint).run()


def test_a_run_is_saved_after_its_last_update():
    for options in ({}, {'checkpoint_every': 4}, {'checkpoint_every': 3}, {'schedule': 'fixed(1)', 'eta': math.inf}):
        run = ToyRun(steps=6, **options).run()
        every = options.get('checkpoint_every', 6)
        assert [c['step'] for c in run.checkpoints] == sorted({*range(every, 7, every), 6})
        assert [e['update'] for e in run.log.events if e['kind'] == 'save'][-1] == 6


def test_a_scorer_that_always_fails_ends_the_run():
    """A group with a verified answer starts the count again: of draws 0 to 69 all fail but 31."""
    run = ToyRun(steps=40, fail=[*range(31), *range(32, 70)])
    with pytest.raises(UnverifiedError, match=r'32 groups in a row .*max_failed_groups\).* draw 63, ended in: crash'):
        run.run()


def what_happened(events, after_s):
    """Without the restart's own events and the numbers that these and the restart move: of events and dispatches."""
    kinds = ('admit', 'decode', 'finish', 'consume', 'publish', 'buffer', 'run_start', 'run_done')
    fields = ('seq', 'dispatch')
    events = [e for e in events if e['time'] > after_s and e['kind'] in kinds]
    return [{key: value for key, value in e.items() if key not in fields} for e in events]


def test_a_stop_saves_what_is_running_and_the_resumed_run_ends_as_if_never_stopped():
    run = ToyRun(steps=6)
    stop = run.controller.stop_requested
    run.log.listeners.append(lambda e: stop.set() if (e['kind'], e.get('version')) == ('publish', 3) else None)
    run.run()
    assert run.finished is False
    (checkpoint,) = run.checkpoints
    assert checkpoint['step'] in (3, 4)
    resumed = ToyRun(steps=6, resume=checkpoint).run()
    assert resumed.finished is True
    counts = assert_conserved([*run.log.events, *resumed.log.events])
    assert counts == {'trained': 18}
    assert [s.step for s in [*run.steps, *resumed.steps]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    'how',
    [pytest.param({}, marks=pytest.mark.slow), {'checkpoint_every': 1}, {'schedule': 'fixed(1)', 'eta': math.inf}],
)
def test_a_stop_at_any_moment_saves_and_ends(how):
    """Also while a checkpoint is being taken, when the engines stand still already."""
    options = {'steps': 3, 'engines': 2, **how}
    whole = ToyRun(**options).run()
    outcomes = set()
    for seq in range(0, whole.log.events[-1]['seq'], 3):
        run = ToyRun(**options)
        stop = run.controller.stop_requested
        run.log.listeners.append(lambda e, seq=seq, stop=stop: stop.set() if e['seq'] == seq else None)
        run.run()
        saved = [checkpoint['step'] for checkpoint in run.checkpoints]
        assert saved == sorted(set(saved)), 'an update was saved twice'
        if stop.is_set():  # also after the last update: what follows may be cut short
            assert saved[-1] == len(run.steps)
        outcomes.add((run.finished, len(run.steps)))
    assert outcomes >= {(False, 0), (False, 1), (False, 2), (True, 3)}


@pytest.mark.parametrize('how', [{}, {'schedule': 'fixed(2)', 'eta': math.inf}])
def test_nothing_is_admitted_after_a_stop(how):
    options = {'steps': 3, 'max_running': 2, **how}
    for seq in range(7, ToyRun(**options).run().log.events[-1]['seq'], 7):
        run = ToyRun(**options)
        stop = run.controller.stop_requested
        run.log.listeners.append(lambda e, seq=seq, stop=stop: stop.set() if e['seq'] == seq else None)
        stopped_s = next(e['time'] for e in run.run().log.events if e['seq'] == seq)
        assert not [e for e in run.log.events if e['kind'] == 'admit' and e['time'] > stopped_s]


def test_a_finished_run_whose_last_evaluation_is_stopped_can_be_saved_and_resumed():
    run = ToyRun(steps=3)
    loop = run.program

    async def stop_after_the_loop():
        await loop()
        run.controller.stop_requested.set()
        await run.controller.save_for_good()
        await run.controller.save_for_good()  # nothing has moved: not written twice

    run.program = stop_after_the_loop
    (checkpoint,) = run.run().checkpoints
    resumed = ToyRun(steps=3, resume=checkpoint).run()
    assert (resumed.finished, resumed.steps, resumed.learner.w) == (True, [], run.learner.w)


@pytest.mark.parametrize('call', [1, 3])
@pytest.mark.parametrize(
    ('part', 'method'),
    [
        *(('learner', method) for method in ('update', 'publish', 'save')),
        *(('channel', method) for method in ('transfer', 'release')),
        *(('backend', method) for method in ('prepare', 'prefill', 'copy', 'generate')),
        *(('run', method) for method in ('note_step', 'save_checkpoint', 'receive')),
        *(('stream', method) for method in ('draw', 'state')),
        ('verifier', 'verify'),
    ],
)
def test_an_error_of_any_part_ends_the_run_with_nothing_half_published(part, method, call):
    run = ToyRun(steps=5, engines=2, checkpoint_every=1)
    owner = {'run': run, 'backend': run.backends[1]}.get(part) or getattr(run, part)
    answer, calls = getattr(owner, method), itertools.count(1)

    def fail_once(*args, **kwargs):
        if next(calls) == call:
            raise OSError('worn out')
        return answer(*args, **kwargs)

    setattr(owner, method, fail_once)
    with pytest.raises(OSError, match='worn out'):
        run.run()
    assert [step.step for step in run.steps] == list(range(1, len(run.steps) + 1))
    assert len(run.steps) <= run.gate.version <= len(run.learner.trained)
    assert [checkpoint['step'] for checkpoint in run.checkpoints] == list(range(1, len(run.checkpoints) + 1))
    assert_conserved(run.log.events)


@pytest.mark.parametrize('samples', [(1,), (0, 1)])
def test_a_cancelled_answer_reaches_neither_verifier_nor_buffer(samples):
    """A group of two: with one cancelled it is partial, with both it is dropped and refilled."""
    run = ToyRun(steps=4, slots=2, decode_steps=1)
    verified, verify = [], run.verifier.verify

    async def note(prompt, answer_tokens, finish_reason, describe_episode):
        verified.append((prompt.draw, finish_reason))
        return await verify(prompt, answer_tokens, finish_reason)

    def cancel(event):
        if event['kind'] == 'admit' and event['draw'] == 2:
            cancel.due = True
        elif event['kind'] == 'decode' and cancel.due:
            cancel.due = False
            for sample in samples:
                run.engines[0].cancel(f'0/2/{sample}')

    cancel.due = False
    run.verifier.verify = note
    run.log.listeners.append(cancel)
    run.run()
    ends = [(e['sample'], e['reason']) for e in run.log.events if e['kind'] == 'finish' and e['draw'] == 2]
    assert sorted(ends) == [(s, 'cancelled' if s in samples else 'stop') for s in (0, 1)]
    assert len([draw for draw, _ in verified if draw == 2]) == 2 - len(samples)
    assert {reason for _, reason in verified} == {'stop'}
    trained = [t.sample for g in run.groups if g.draw == 2 for t in g.trajectories]
    assert trained == [s for s in (0, 1) if s not in samples]
    assert run.steps[-1].dropped == ({'cancelled': 1} if len(samples) == 2 else {})
    assert assert_conserved(run.log.events)['trained'] == 12


def test_every_engine_fetches_weights_on_a_lane_of_its_own():
    run = ToyRun(steps=3, engines=3).run()
    loads = [(e['time'], e['lane']) for e in run.log.events if e['kind'] == 'run_start' and e['work'] == 'load']
    assert [lane for _, lane in loads] == ['publish/0', 'publish/1', 'publish/2'] * 3
    assert len({time for time, _ in loads}) == 3  # all three at the same time, after each update
