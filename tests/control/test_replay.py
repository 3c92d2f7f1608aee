"""Replays of runs of the real clock with the toy engine: equal to the event, or refused with the line that differs."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import signal
import time

import pytest

from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import EndOfLogError, ReplayClock
from areal_jax.control.event_writer import (
    COMPLETIONS,
    EventLog,
    Recording,
    ReplayError,
    check_of,
    find_starts,
    require_whole,
)
from areal_jax.types import Work
from tests.toys import ToyRun


def as_read(events):
    """As they come from a file."""
    return [json.loads(json.dumps(event)) for event in events]


def slow_down(run, seconds=0.0005):
    """Dispatches take time, so that new weights meet unfinished answers."""
    for backend in run.backends:

        def generate(*arguments, generate=backend.generate):
            time.sleep(seconds)
            return generate(*arguments)

        backend.generate = generate
    return run


def real_run(**fields):
    """A run of the real clock, not begun."""
    return slow_down(ToyRun(make_clock=lambda lanes, log, start_s: RealClock(lanes, log, 30.0, start_s), **fields))


def replay(events, first=0, **fields):
    """The replay of a start, run to its end; raises ReplayError where it differs."""
    recording = Recording(events, first, len(events), 'log')
    made = {}

    def make_clock(lanes, log, start_s):
        made['clock'] = ReplayClock(lanes, log, recording, start_s=start_s, failures={})
        return made['clock']

    try:
        run = made['run'] = ToyRun(make_clock=make_clock, **fields)
        run.clock.stop_requested = run.controller.stop_requested
        run.run()
    except BaseException as error:
        if recording.fault:
            raise recording.fault from error
        if not isinstance(error, EndOfLogError):
            raise
    if recording.checked < recording.end:
        raise recording.refuse(recording.checked, 'more events', 'has ended')
    return made['run']


CASES = {
    'two engines': {'engines': 2, 'steps': 8},
    'drops': {'engines': 2, 'eta': 4, 'max_token_age': 0, 'over_age': 'drop', 'decode_steps': 1},
    'verifiers that fail': {'fail': (1, 4), 'delays': (1.0, 3.0)},
    'evaluation beside training': {'engines': 2, 'evaluation_every': 2, 'every_dispatches': 2},
    'filter': {'max_filtered': 30},
    'kept KV': {'kv_policy': 'keep', 'eta': 8},
    'no interruption': {'kv_policy': 'wait', 'engines': 2, 'eta': 8},
    'lock-step': {'schedule': 'uniform(0,2)', 'engines': 2},
    'checkpoints': {'checkpoint_every': 2, 'engines': 2},
}


@pytest.mark.parametrize('fields', CASES.values(), ids=CASES)
def test_a_replay_is_equal_to_the_run(fields):
    run = real_run(**fields).run()
    events = as_read(run.log.events)
    require_whole(events, 'log')
    again = replay(events, **fields)
    assert as_read(again.log.events) == events
    assert (again.learner.w, again.learner.trained) == (run.learner.w, run.learner.trained)
    assert [record.time_s for record in again.steps] == [record.time_s for record in run.steps]


def test_the_runs_that_are_replayed_are_interrupted_and_drop_groups():
    kinds = [event['kind'] for event in real_run(**CASES['drops']).run().log.events]
    assert {'interrupt', 'drop', 'route', 'load', 'run_done'} <= set(kinds)


def test_a_stop_by_a_signal_is_replayed():
    fields = {'engines': 2, 'steps': 200, 'checkpoint_every': 50}
    run = real_run(**fields)
    on_step = run.steps.append
    run.note_step = lambda record: (
        on_step(record),
        record.step == 4 and run.clock.post_signal(signal.SIGTERM, run.controller.stop_requested),
    )
    run.run()
    assert not run.finished
    events = as_read(run.log.events)
    assert [event['name'] for event in events if event['kind'] == 'signal'] == ['SIGTERM']
    again = replay(events, **fields)
    assert (again.finished, again.learner.w) == (False, run.learner.w)
    assert as_read(again.log.events) == events


def die_after(run, step):
    """Runs until update `step` is published, then ends at once."""
    on_step = run.steps.append

    def die(record):
        on_step(record)
        if record.step == step:
            raise KeyboardInterrupt

    run.note_step = die
    with pytest.raises(KeyboardInterrupt):
        run.run()
    return run


def test_a_run_killed_twice_is_replayed_over_its_restores():
    fields = {'engines': 2, 'steps': 9, 'checkpoint_every': 2}
    events, resume = [], None
    for step in (3, 6, None):
        run = real_run(resume=resume, **fields)
        run = run.run() if step is None else die_after(run, step)
        resume = run.checkpoints[-1]
        last = len(run.log.events) if step is None else resume['run_state']['next_seq'] - len(events)
        events += as_read(run.log.events)[:last]
    require_whole(events, 'log')
    starts = find_starts(events)
    assert len(starts) == 3
    again, resume = None, None
    for first, end in zip(starts, [*starts[1:], len(events)], strict=True):
        again = replay(events[:end], first, resume=resume, **fields)
        resume = again.checkpoints[-1]
    assert (again.learner.w, again.finished) == (run.learner.w, True)


FIELDS = {'engines': 2, 'steps': 2, 'max_running': 4}


@pytest.fixture(scope='module')
def events():
    return as_read(real_run(**FIELDS).run().log.events)


def line_of(error):
    return int(re.search(r'line (\d+)', str(error)).group(1))


def find_line(events):
    """The line that a replay of these events names."""
    try:
        require_whole(events, 'log')
        replay(events, **FIELDS)
    except ReplayError as error:
        return line_of(error)
    raise AssertionError('no line was named')


def renumbered(events):
    """With the numbers and check sums that an editor who knows them would write."""
    events = [{**event, 'seq': seq} for seq, event in enumerate(events)]
    return [{**event, 'check': check_of(event)} if 'check' in event else event for event in events]


def sample(events, count):
    """Indices over the whole log, every kind among them."""
    first = {event['kind']: index for index, event in reversed(list(enumerate(events)))}
    return sorted({*first.values(), *range(0, len(events), max(1, len(events) // count))})


def test_a_log_is_equal_to_itself(events):
    assert replay(events, **FIELDS).finished


def test_a_lost_line_is_named(events):
    for index in sample(events, 20):
        if index < len(events) - 1:  # of a log without its last line nothing shows it but facts.json
            assert find_line(events[:index] + events[index + 1 :]) == index + 1


def test_an_invented_line_is_named(events):
    for index in sample(events, 20):
        assert find_line([*events[: index + 1], events[index], *events[index + 1 :]]) == index + 2


def test_two_swapped_lines_are_named(events):
    for index in sample(events[:-1], 20):
        swapped = [*events[:index], events[index + 1], events[index], *events[index + 2 :]]
        assert find_line(swapped) == index + 1


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, value[0] if value else 0] if isinstance(value, list) else f'{value}x'


def test_an_altered_field_is_named(events):
    seen = set()
    for index, event in enumerate(events):
        for field in event:
            if (event['kind'], field) in seen or field == 'kind' or (event['kind'], field) == ('log', 'version'):
                continue
            seen.add((event['kind'], field))
            edited = copy.deepcopy(events)
            edited[index][field] = changed(event[field])
            assert find_line(edited) in (index + 1, index + 2), (event, field)  # a time: the line below it is earlier
    assert len(seen) > 60


def test_an_editor_who_knows_the_check_sums_is_found_out(events):
    """By the first event that the program does not write again; what the clock measured stays in the editor's hand."""
    for index in sample(events[:-1], 12)[1:]:
        assert find_line(renumbered(events[:index] + events[index + 1 :])) >= index + 1
        twice = renumbered([*events[: index + 1], events[index], *events[index + 1 :]])
        assert find_line(twice) >= index + 1
        if events[index]['kind'] not in COMPLETIONS:
            swapped = [*events[:index], events[index + 1], events[index], *events[index + 2 :]]
            assert find_line(renumbered(swapped)) in (index + 1, index + 2)  # the second where time would go back
    reward = next(index for index, event in enumerate(events) if event.get('reply'))
    edited = copy.deepcopy(events)
    edited[reward]['reply'] = json.dumps({'reward': 7.0})
    line = find_line(renumbered(edited))
    assert events[line - 1]['kind'] == 'reward'


def test_a_replay_stops_where_the_log_does(events):
    cut = events[: len(events) // 2]
    recording = Recording(cut, 0, len(cut), 'log')
    run = ToyRun(make_clock=lambda lanes, log, s: ReplayClock(lanes, log, recording, start_s=s, failures={}), **FIELDS)
    with pytest.raises(EndOfLogError, match='the log has no further completion: '):
        run.run()
    assert (recording.fault, recording.checked) == (None, len(cut))


def test_another_program_is_found_out(events):
    with pytest.raises(ReplayError, match=r'log: line \d+ has .* where the replay '):
        replay(events, **{**FIELDS, 'decode_steps': 1})
    with pytest.raises(ReplayError, match=r'log: line \d+ has .* where the replay '):
        replay(events, **{**FIELDS, 'eta': 0})


def test_a_sentence_names_line_field_and_both_values(events):
    index = next(index for index, event in enumerate(events) if event['kind'] == 'publish')
    edited = copy.deepcopy(events)
    edited[index]['manifest'] = 'other'
    with pytest.raises(ReplayError) as caught:
        replay(edited, **FIELDS)
    assert str(caught.value) == (
        f"log: line {index + 1} has manifest='other' of 'publish', where the replay has "
        f'manifest={events[index]["manifest"]!r}'
    )


def test_a_log_of_an_earlier_version_cannot_be_replayed():
    log = [{'seq': 0, 'time': 0.0, 'lane': None, 'kind': 'log', 'version': 5}]
    with pytest.raises(ReplayError, match='log: line 1 says that the event log has version 5, which lacks what a'):
        require_whole(log, 'log')


def test_calls_that_failed_fail_again():
    lanes = {'a': 1}
    log = EventLog()
    clock = RealClock(lanes, log, 30.0)

    class ScorerError(Exception):
        pass

    async def fail():
        raise ScorerError('no')

    async def never():
        await asyncio.Event().wait()

    async def program(clock):
        found = []
        for call, deadline_s in ((fail, 5.0), (never, 0.02)):
            try:
                await clock.call('a', call, Work('x', recorded=True), deadline_s)
            except (ScorerError, TimeoutError) as error:
                found.append(type(error).__name__)
        return found

    assert clock.execute(program(clock)) == ['ScorerError', 'TimeoutError']
    events = as_read(log.events)
    recording = Recording(events, 0, len(events), 'log')
    again = ReplayClock(lanes, EventLog(), recording, failures={'ScorerError': ScorerError})
    assert again.execute(program(again)) == ['ScorerError', 'TimeoutError']


def test_deadlines_are_replayed():
    log = EventLog()
    clock = RealClock({'a': 1}, log, 30.0)

    async def program(clock):
        late, done = clock.event('late'), await clock.run('a', lambda: 3, Work('x'))
        return done, await clock.wait(late, 0.01), clock.now()

    found = clock.execute(program(clock))
    events = as_read(log.events)
    again = ReplayClock({'a': 1}, EventLog(), Recording(events, 0, len(events), 'log'), failures={})
    assert again.execute(program(again)) == found
    assert found[:2] == (3, False)
