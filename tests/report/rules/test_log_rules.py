"""The rules of a log: good logs keep them all, and each kind of wrong log breaks one, at its line."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from areal_jax.report.rules.log_rules import Limits, find_violation
from tests.report.planted_faults import faults, plant
from tests.report.rules import part_faults
from tests.report.rules.sound_logs import SOUND
from tests.report.rules.toy_logs import LIMITS, log_of, real_clock
from tests.toys import LONGEST, ToyRun


def limits_of(fields):
    """Of a ToyRun with these fields."""
    return dataclasses.replace(
        LIMITS, eta=fields.get('eta', 2), keeps_cache=fields.get('kv_policy') == 'keep',
        max_token_age=fields.get('max_token_age'),
    )  # fmt: skip


WITH_DROPS = {'engines': 2, 'checkpoint_every': 2, 'max_token_age': 1, 'over_age': 'drop', 'decode_steps': 1}


@pytest.fixture(scope='module')
def events():
    """Of a run with two engines, interruptions and drops."""
    return log_of(ToyRun(**WITH_DROPS).run())


GOOD = {
    'interruptions': {},
    'eta 0': {'eta': 0},
    'drops': {'engines': 2, 'max_token_age': 0, 'over_age': 'drop', 'decode_steps': 1},
    'evaluation': {'engines': 2, 'evaluation_every': 2},
    'filter': {'max_filtered': 30},
    'failed': {'fail': (1, 4)},
    'kept cache': {'kv_policy': 'keep', 'engines': 2, 'decode_steps': 1},
    'answers that are waited for': {'kv_policy': 'wait', 'decode_steps': 1},
    'real clock': {'engines': 2, 'checkpoint_every': 2, 'make_clock': real_clock},
}


@pytest.mark.parametrize('fields', GOOD.values(), ids=GOOD)
def test_a_good_log_keeps_every_rule(fields):
    assert find_violation(log_of(ToyRun(**fields).run()), limits_of(fields)) is None


@pytest.mark.parametrize(('schedule', 'delay'), [('fixed(2)', 2), ('every(3)', 2), ('uniform(0,3)', 3)])
def test_a_good_log_in_lock_step_keeps_every_rule(schedule, delay):
    config = {
        'staleness': {'schedule': schedule, 'eta': 4, 'max_token_age': 2, 'over_age': 'mask'},
        'learner': {'groups_per_update': 3}, 'run': {'steps': 6}, 'task': {'verifier': 'process'},
        'rollout': {
            'max_running_groups': 8, 'server': 'in_process', 'group_size': 2, 'max_new_tokens': LONGEST,
            'kv_policy': 'recompute', 'workflow': 'single_turn',
        }, 'buffer': {'capacity': 64},
    }  # fmt: skip
    limits = Limits.of(config)
    assert (limits.eta, limits.in_order, limits.max_token_age) == (delay, False, None)
    run = log_of(ToyRun(schedule=schedule).run())
    assert find_violation(run, limits) is None
    assert 'Eq. 3' in find_violation(run, dataclasses.replace(limits, eta=0))[1]


def test_a_good_log_of_a_resumed_run_keeps_every_rule():
    first = ToyRun(engines=2, checkpoint_every=2).run()
    saved = first.checkpoints[0]
    second = ToyRun(engines=2, checkpoint_every=2, resume=saved).run()
    log = log_of(first)[: saved['run_state']['next_seq']] + log_of(second)
    assert find_violation(log, LIMITS) is None
    assert [event['kind'] for event in log].count('log') == 2


def test_the_bounds_of_the_config_are_kept(events):
    tighter = {'eta': 0, 'max_running': 2, 'buffer_capacity': 4, 'max_admitted': 9, 'groups_per_update': 4}
    words = ('Eq. 3', 'max_running_groups', 'buffer.capacity', 'run.steps trains 9', 'learner.groups_per_update')
    for (field, value), word in zip(tighter.items(), words, strict=True):
        limits = {**limits_of(WITH_DROPS).__dict__, field: value}
        if field == 'groups_per_update':
            limits |= {'eta': 99}
        line, broken = find_violation(events, Limits(**limits))
        assert word in broken, (field, broken)
        assert events[line - 1]['kind'] == ('consume' if field == 'groups_per_update' else 'admit')


def find(events, kind, number=0, **fields):
    """The index of an event."""
    found = [
        index
        for index, event in enumerate(events)
        if event['kind'] == kind and all(event[name] == value for name, value in fields.items())
    ]
    return found[number]


def without(kind, number=0):
    def mutate(events):
        del events[find(events, kind, number)]
        return renumbered(events)

    return mutate


def edited(kind, number=0, **fields):
    def mutate(events):
        events[find(events, kind, number)] |= fields
        return events

    return mutate


def doubled(kind, number=0):
    def mutate(events):
        index = find(events, kind, number)
        return renumbered([*events[: index + 1], copy.deepcopy(events[index]), *events[index + 1 :]])

    return mutate


def swapped(kind, number=0):
    """An event and the next one of its kind exchange what they say, not their numbers and times."""

    def mutate(events):
        a, b = find(events, kind, number), find(events, kind, number + 1)
        for name in events[a].keys() - {'seq', 'time'}:
            events[a][name], events[b][name] = events[b][name], events[a][name]
        return events

    return mutate


def renumbered(events):
    return [{**event, 'seq': seq} for seq, event in enumerate(events)]


MUTANTS = {
    'a lost line': (lambda events: [*events[:40], *events[41:]], 'has seq=41, where 40 is due'),
    'an added line': (lambda events: [*events[:40], events[39], *events[40:]], 'has seq=39, where 40 is due'),
    'time that goes back': (edited('publish', 2, time=0.0), 'has time=0.0, before '),
    'a lost draw': (without('draw', 3), 'draw 3 goes from unknown to running'),
    'a draw out of turn': (edited('draw', 3, draw=7), 'draw 7 is taken, where 3 is the next of the stream'),
    'a lost admission': (without('admit', 3), 'sample 0 of draw 3 is asked for, and the draw is pending'),
    'a group admitted twice': (doubled('admit', 3), 'draw 3 goes from running to running'),
    'batches in another order': (swapped('consume'), 'goes from running to trained'),
    'an update left out': (edited('consume', 1, update=3), 'the batch of update 3 is formed after that of 1'),
    'a group trained twice': (
        lambda events: edited('consume', 1, draws=events[find(events, 'consume')]['draws'])(events),
        'goes from trained to trained',
    ),
    'a lost group in the buffer': (without('buffer', 4), 'from running to trained'),
    'a lost batch': (
        without('consume', 1),
        'after that of version 1, and 1 is the last of which the batch was formed',
    ),
    'a version left out': (edited('publish', 1, version=3), 'version 3 is published after 1'),
    'a version published twice': (doubled('publish', 1), 'version 2 is published after 2'),
    'a version loaded early': (edited('load', 0, version=5), 'loads version 5, and '),
    'a version loaded twice': (doubled('load', 2), ' after '),
    'decoding with other weights': (edited('decode', 5, version=9), 'decodes with version 9, and it has loaded '),
    'an interruption of other weights': (edited('interrupt', 0, from_version=9), 'is interrupted in version 9'),
    'tokens of the future': (edited('finish', 2, versions=[9]), 'has tokens of versions [9]'),
    'tokens out of order': (edited('finish', -1, versions=[1, 0]), 'which are not in order'),
    'a lost answer': (without('finish', 4), 'is scored before it was finished'),
    'a score given twice': (doubled('reward', 4), 'is scored a second time'),
    'a run begun twice': (doubled('run_start', 7), 'begins a second time'),
    'a run ended twice': (doubled('run_done', 7), 'ends, and it is not under way'),
    'a run that becomes another': (edited('run_done', 7, work='pin'), "ends as 'pin' of "),
    'a run that ends after its end': (edited('run_done', 7, seconds=1e6), 'after its end in the log'),
}


@pytest.mark.parametrize(('mutate', 'words'), MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_log_breaks_a_rule(events, mutate, words):
    limits = limits_of(WITH_DROPS)
    assert find_violation(events, limits) is None
    wrong = mutate(copy.deepcopy(events))
    line, broken = find_violation(wrong, limits)
    assert words in broken
    assert find_violation(wrong[: line - 1], limits) is None


def test_batches_take_the_lowest_draws(events):
    at, waiting = find(events, 'consume', 1), set()
    for event in events[:at]:
        waiting |= {event['draw']} if event['kind'] == 'buffer' else set()
        waiting -= set(event['draws']) if event['kind'] == 'consume' else set()
        waiting -= {event['draw']} if event['kind'] == 'drop' else set()
    others = sorted(waiting - set(events[at]['draws']))
    wrong = copy.deepcopy(events)
    if others:
        wrong[at]['draws'] = [*wrong[at]['draws'][:-1], others[-1]]
    else:
        wrong[at]['draws'] = wrong[at]['draws'][::-1]
    line, broken = find_violation(wrong, limits_of(WITH_DROPS))
    assert line == at + 1
    assert 'where the lowest in the buffer are' in broken


def test_eq_3_counts_published_versions(events):
    """A group that is admitted before its version is published."""
    line = next(
        index
        for index, event in enumerate(events)
        if event['kind'] == 'admit' and any(e['kind'] == 'publish' for e in events[:index])
    )
    of_groups = ('log', 'draw', 'admit', 'finish', 'reward', 'buffer', 'drop', 'consume')
    late = [event for event in events[:line] if event['kind'] in of_groups]
    rest = [event for event in events[line:] if event['kind'] in ('draw', 'admit')]
    wrong = renumbered([*late, *rest])
    found, broken = find_violation(wrong, dataclasses.replace(limits_of(WITH_DROPS), in_process=False))
    assert 'is admitted against Eq. 3: floor((' in broken
    assert wrong[found - 1]['kind'] == 'admit'


def test_a_changed_completion_of_the_real_clock_has_another_check_sum():
    events = log_of(ToyRun(make_clock=real_clock).run())
    wrong = edited('run_done', 3, seconds=0.0)(copy.deepcopy(events))
    line, broken = find_violation(wrong, LIMITS)
    assert line == find(events, 'run_done', 3) + 1
    assert 'its other fields give' in broken


LOGS = {
    'interruptions': {'slots': 3, 'decode_steps': 1, 'eta': 1},
    'checkpoints': {'slots': 3, 'decode_steps': 2, 'checkpoint_every': 2},
    'two engines': {'engines': 2, 'slots': 2, 'decode_steps': 1, 'eta': 1, 'max_token_age': 1, 'over_age': 'drop'},
    'evaluation': {'evaluation_every': 2, 'slots': 3, 'eta': 1},
    'real clock': {'make_clock': real_clock, 'slots': 3, 'decode_steps': 1, 'eta': 1},
}


@pytest.fixture(scope='module', params=LOGS)
def log(request):
    """Of a run with interruptions, and its limits. What the real clock interrupts is up to the machine."""
    fields = LOGS[request.param]
    limits = limits_of(fields)
    for _ in range(20):
        found = log_of(ToyRun(**fields).run())
        assert find_violation(found, limits) is None
        if all(
            plant(found, faults(3, limits.eta)[name], 0)
            for name in ('a missing rebuild', 'a finish that lacks a version')
        ):
            return found, limits
    raise AssertionError('no run has interrupted an answer')


@pytest.mark.parametrize('name', faults(3, 1))
def test_a_planted_fault_is_found_wherever_it_is(log, name):
    """With sequence numbers and check sums made anew."""
    events, limits = log
    planter = faults(limits.groups_per_update, limits.eta)[name]
    wrong = [changed for seed in range(3) if (changed := plant(events, planter, seed)) is not None]
    assert wrong, 'no place for the fault in this log'
    assert [place for place, changed in enumerate(wrong) if find_violation(changed, limits) is None] == []


@pytest.fixture(scope='module')
def sound():
    """Logs of disturbed runs, each made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = SOUND[name][0]()
        return made[name], SOUND[name][1]

    return get


@pytest.mark.parametrize('name', SOUND)
def test_a_disturbed_run_is_not_accused(sound, name):
    events, limits = sound(name)
    assert find_violation(events, limits) is None
    assert find_violation(events[: len(events) // 2], limits) is None  # killed there


IN_PROCESS = ('killed twice', 'engines leave and join', 'evaluations, killed', 'groups over their age', 'a full cache')
WITH_SERVERS = (*IN_PROCESS, 'all servers die and return', 'a request is lost')
PLANTED = {
    **dict.fromkeys(part_faults.NAMED, WITH_SERVERS),
    **dict.fromkeys(part_faults.IN_PROCESS, IN_PROCESS),
    **dict.fromkeys(part_faults.ANYWHERE, WITH_SERVERS),
    **dict.fromkeys(part_faults.SERVERS, ('all servers die and return', 'a request is lost')),
    **dict.fromkeys(part_faults.VERDICTS, ('a worker and its successor die',)),
}


@pytest.mark.parametrize('name', PLANTED)
def test_a_fault_in_a_part_is_found_wherever_it_is(sound, name):
    """With sequence numbers and check sums made anew; the line that is named is not far from the fault."""
    planted = 0
    for log in PLANTED[name]:
        events, limits = sound(log)
        for seed in range(3):
            wrong = plant(events, part_faults.ALL[name], seed)
            planted += wrong is not None
            assert wrong is None or find_violation(wrong, limits) is not None, (log, seed)
    assert planted, 'no log has a place for the fault'


def test_an_inline_scorer_takes_one_attempt(events):
    wrong = edited('reward', 3, attempts=2)(copy.deepcopy(events))
    limits = dataclasses.replace(limits_of(WITH_DROPS), is_inline=True)
    assert find_violation(events, limits) is None
    assert find_violation(wrong, limits)[1].endswith('has attempts=2, and a verdict takes 1 (task.verifier=inline)')


@pytest.mark.parametrize('name', part_faults.FRICTIONS)
def test_a_friction_is_of_an_answer_of_the_batch(events, name):
    """After a sound one, which the rules take."""
    consumed = find(events, 'consume', 1)
    draw = events[consumed]['draws'][0]
    (value,) = {e['value'] for e in events if e['kind'] == 'reward' and (e['draw'], e['sample']) == (draw, 0)}
    friction = {
        'seq': 0, 'time': events[consumed]['time'], 'lane': None, 'kind': 'friction', 'draw': draw, 'sample': 0,
        'friction': 'reward', 'before': [value], 'after': [0.25],
    }  # fmt: skip
    sound = renumbered([*events[: consumed + 1], friction, *events[consumed + 1 :]])
    assert find_violation(sound, limits_of(WITH_DROPS)) is None
    wrong = copy.deepcopy(sound)
    wrong[consumed + 1] |= part_faults.FRICTIONS[name]
    line, broken = find_violation(wrong, limits_of(WITH_DROPS))
    assert line == consumed + 2
    assert broken.startswith('the friction ')
