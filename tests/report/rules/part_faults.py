"""Faults planted in the parts of a log that each have rules of their own: requests, engines, servers, runs, verdicts.

A planter returns the changed events, or None where the log has no place for it; see tests/report/planted_faults.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.report.planted_faults import Events, Planter, delete, edit, move, pick

_Event = dict[str, Any]


def _edit_with_others(kind: str, change: Callable[[Events, int], bool]) -> Planter:
    """`change` gets all events and the number of one, at random; False: it fits another one."""

    def planter(events: Events, rng: random.Random) -> Events | None:
        places = [index for index, event in enumerate(events) if event['kind'] == kind]
        rng.shuffle(places)
        return events if any(change(events, index) for index in places) else None

    return planter


def _route_elsewhere(events: Events, index: int) -> bool:
    engines = {event['engine'] for event in events[:index] if event['kind'] == 'join'}
    for event in events[:index]:
        if event['kind'] == 'leave':
            engines.discard(event['engine'])
    others = sorted(engines - {events[index]['engine']})
    events[index]['engine'] = others[0] if others else events[index]['engine']
    return bool(others)


def _arrive_again(events: Events, index: int) -> bool:
    """The request that arrived before arrives again, and this one never."""
    earlier = [event['request'] for event in events[:index] if event['kind'] == 'arrive']
    others = [request for request in earlier if request != events[index]['request']]
    if others:
        events[index]['request'] = others[-1]
    return bool(others)


def _exchange_arrivals(events: Events, index: int) -> bool:
    """Two arrivals tell each other's request."""
    later = [i for i in range(index + 1, len(events)) if events[i]['kind'] == 'arrive']
    if not later or events[later[0]]['request'] == events[index]['request']:
        return False
    one, other = events[index], events[later[0]]
    one['request'], other['request'] = other['request'], one['request']
    return True


def _double_row(event: _Event) -> None:
    first = next(slot for slot in event['slots'] if slot is not None)
    event['slots'] = [first if slot is not None else None for slot in event['slots']]


def _has_two_rows(event: _Event) -> bool:
    return len([slot for slot in event['slots'] if slot is not None]) > 1


def _decode_elsewhere(events: Events, index: int) -> bool:
    """The dispatch is told of another engine; its lane stays."""
    others = [event['engine'] for event in events[:index] if event['kind'] == 'decode']
    others = [engine for engine in others if engine != events[index]['engine']]
    if others:
        events[index]['engine'] = others[0]
    return bool(others)


def _unfetched(events: Events, rng: random.Random) -> Events | None:
    """The work that fetched a version for an engine."""
    index = pick(events, rng, 'run_start', lambda event: event['work'] == 'load')
    if index < 0:
        return None
    number = events[index]['run']
    return [event for event in events if event.get('run') != number]


def _trained_again(events: Events, rng: random.Random) -> Events | None:
    """The work of an update is done a second time, with a number of its own."""
    index = pick(events, rng, 'run_done', lambda event: event['work'] == 'train')
    if index < 0:
        return None
    begin = next(event for event in events if event['kind'] == 'run_start' and event['run'] == events[index]['run'])
    number, time = 10**9, events[index]['time']
    again = [{**begin, 'run': number, 'time': time}, {**events[index], 'run': number, 'started': time, 'seconds': 0.0}]
    return [*events[: index + 1], *again, *events[index + 1 :]]


def _stopped_early(events: Events, rng: random.Random) -> Events | None:
    """A signal comes before a draw is taken."""
    index = pick(events, rng, 'draw')
    time = events[index - 1]['time']
    signal = {'seq': 0, 'time': time, 'lane': None, 'kind': 'signal', 'name': 'SIGTERM'}
    return [*events[:index], signal, *events[index:]]


def _joined_again(events: Events, rng: random.Random) -> Events | None:
    index = pick(events, rng, 'publish')
    joined = next(event for event in events if event['kind'] == 'join')
    return [*events[:index], {**joined, 'time': events[index]['time']}, *events[index:]]


def _start_unsaved(events: Events, rng: random.Random) -> Events | None:
    starts = [index for index, event in enumerate(events) if event['kind'] == 'log' and index]
    if not starts:
        return None
    index = rng.choice(starts)
    return [*events[: index - 1], *events[index:]]


def _attempt_once_more(events: Events, rng: random.Random) -> Events | None:
    """Of a log whose runs tell attempts, in the virtual clock or without the replies."""
    if not any(event['kind'] == 'run_start' and 'attempt' in event for event in events):
        return None
    return edit('reward', _add('attempts', 1))(events, rng)


def _change_age(event: _Event) -> None:
    age, limit = map(int, re.findall(r'\d+', event['detail']))
    event['detail'] = f'age {age + 1} > {limit}'


def _restored_later(event: _Event) -> None:
    event['update'] += 1


def _begin_early(event: _Event) -> None:
    event['started'] -= 1.0
    event['seconds'] += 1.0


def _finish_of_nobody(events: Events, index: int) -> bool:
    """The answer is of a draw that is in a batch."""
    trained = [draw for event in events[:index] if event['kind'] == 'consume' for draw in event['draws']]
    if trained:
        events[index]['draw'] = trained[0]
    return bool(trained)


def _early_move(events: Events, rng: random.Random) -> Events | None:
    """A request moves away before it was sent there."""
    index = pick(events, rng, 'move')
    if index < 0:
        return None
    request = events[index]['request']
    first = next(i for i, event in enumerate(events) if event['kind'] == 'route' and event['request'] == request)
    return move(events, index, first)


def _add(field: str, number: float) -> Callable[[_Event], None]:
    def change(event: _Event) -> None:
        event[field] += number

    return change


def _set(**fields: Any) -> Callable[[_Event], None]:
    return lambda event: event.update(fields)


def _done(phase: str) -> Callable[[_Event], bool]:
    return lambda event: (event['phase'], event['outcome']) == (phase, 'done')


def _first_serving(events: Events, rng: random.Random) -> Events | None:
    """The line that tells that a server serves, before any request is sent."""
    index = next((i for i, e in enumerate(events) if e['kind'] == 'engine_state' and e['state'] == 'serving'), -1)
    return events[:index] + events[index + 1 :] if index >= 0 else None


def _unfenced(events: Events, rng: random.Random) -> Events | None:
    """The fence of a server that comes back: what is new is fenced too, of which no rule knows."""
    states: dict[str, str] = {}
    places = []
    for index, event in enumerate(events):
        if event['kind'] == 'engine_state':
            states[event['engine']] = event['state']
        elif event['kind'] == 'fence' and states.get(event['engine']) in ('unknown', 'quarantined'):
            places.append(index)
    index = rng.choice(places) if places else -1
    return events[:index] + events[index + 1 :] if places else None


def _unstaged(events: Events, rng: random.Random) -> Events | None:
    """The line that tells that a version was staged, of a commit that was acknowledged."""
    index = pick(events, rng, 'stage', _done('acknowledge'))
    if index < 0:
        return None
    commit = events[index]['engine'], events[index]['version']
    staged = [
        i for i in range(index)
        if events[i]['kind'] == 'stage' and _done('stage')(events[i])
        and (events[i]['engine'], events[i]['version']) == commit
    ]  # fmt: skip
    return events[: staged[-1]] + events[staged[-1] + 1 :]


# found by a checker that looks at requests and attempts; each was missed before
NAMED: Mapping[str, Planter] = {
    'a route to another engine than the one where the request arrives': _edit_with_others('route', _route_elsewhere),
    'a request that arrives twice while another never does': _edit_with_others('arrive', _arrive_again),
    'three preempted tokens too many': edit('preempt', _add('tokens', 3)),
    'a reward with 0 attempts': edit('reward', _set(attempts=0)),
}
# in logs of engines in this process and of servers
ANYWHERE: Mapping[str, Planter] = {
    'two arrivals exchanged': _edit_with_others('arrive', _exchange_arrivals),
    'a missing route': delete('route'),
    'an arrival in another lane': edit('arrive', _set(lane='engine/9')),
    'a route as another sample': edit('route', lambda event: event.update(sample=1 - event['sample'])),
    'a finish of a trained draw': _edit_with_others('finish', _finish_of_nobody),
    'a missing move': delete('move'),
    'a move from another engine': edit('move', _set(from_engine='engine/9')),
    'a move after more failures': edit('move', _add('attempt', 2)),
    'a move before the request was there': _early_move,
    'an interruption that changes no version': edit(
        'interrupt', lambda event: event.update(to_version=event['from_version'])
    ),
    'a request in two slots': edit('decode', _double_row, _has_two_rows),
    'more rows than the bucket': edit('decode', _set(bucket=1), _has_two_rows),
    'a slot more than before': edit('decode', lambda event: event['slots'].append(None)),
    'more tokens than the bucket of a prefill': edit('prefill', lambda event: event.update(bucket=event['tokens'] - 1)),
    'an engine that joins twice': _joined_again,
    'an engine that leaves and was not there': edit('leave', _set(engine='engine/9')),
    'a pause of negative seconds': edit('load', _set(pause_seconds=-0.5)),
    'an update trained twice': _trained_again,
    'work for another update': edit('run_start', _add('update', 1), lambda event: event['work'] == 'train'),
    'a version copied before it was trained': edit(
        'run_start', _add('update', 1), lambda event: event['work'] == 'snapshot' and 'update' in event
    ),
    'a draw after a signal': _stopped_early,
    'a run that began before it was asked for': edit('run_done', _begin_early, lambda event: event['started'] > 1.0),
    'a checkpoint of another update': edit('save', _add('update', 1)),
    'a start without its checkpoint': _start_unsaved,
    'a start that does not tell where it goes on': delete('restore'),
    'a start that goes on elsewhere': edit('restore', _restored_later),
    'a label that no verifier gives': edit('reward', _set(label='fine'), lambda event: event['value'] == 0),
    'an age that the group does not have': edit('drop', _change_age, lambda event: event['reason'] == 'over_age'),
    'a drop for another reason': edit('drop', _set(reason='bored')),
    'a drop as if it were in the buffer': edit(
        'drop', _set(reason='over_age', detail='age 2 > 1'), lambda event: event['reason'] != 'over_age'
    ),
    'an answer that ended for another reason': edit('finish', _set(reason='tired')),
}
IN_PROCESS: Mapping[str, Planter] = {  # what servers do in other processes is not in the log
    'a missing arrival': delete('arrive'),
    'a preempted token too few': edit('preempt', _add('tokens', -1)),
    'a preemption on another engine': edit('preempt', _set(engine='engine/9')),
    'a move with a token too many': edit('move', _add('tokens', 1)),
    'a dispatch of another engine': _edit_with_others('decode', _decode_elsewhere),
    'a version that nothing fetched': _unfetched,
    'an evaluation of another version': edit('evaluation_done', _add('version', 1)),
    'a dispatch of another evaluation': edit('evaluation_decode', _add('version', 1)),
}
VERDICTS: Mapping[str, Planter] = {  # in logs whose runs tell attempts
    'an attempt too many': _attempt_once_more,
    'a reply and a failure of one run': edit('run_done', _set(failure='OSError'), lambda event: 'reply' in event),
}
SERVERS: Mapping[str, Planter] = {
    'a version that was not acknowledged': delete('stage', _done('acknowledge')),
    'a version swapped in and not staged': _unstaged,
    'a server that serves and has not joined': delete('join'),
    'a server that comes back without a fence': _unfenced,
    'a server that serves by itself': edit('engine_state', _set(state='serving'), lambda e: e['state'] == 'unknown'),
    'a server that is registered twice': edit('register', _set(incarnation=0)),
    'a request sent to a silent server': _first_serving,
}
ALL: Mapping[str, Planter] = {**NAMED, **ANYWHERE, **IN_PROCESS, **VERDICTS, **SERVERS}
FRICTIONS: Mapping[str, _Event] = {  # what each changes of a sound event of a reward
    'of another draw': {'draw': 10**6},
    'of another sample': {'sample': 9},
    'of another reward': {'before': [7.0]},
    'of more values': {'after': [0.25, 0.5]},
}
