"""Faults planted in a good log: each changes what the log says at one place, then numbers and check sums are made anew.

A planter returns the changed events, or None where the log has no place for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.control.event_writer import check_of

Events = list[dict[str, Any]]
Planter = Callable[[Events, random.Random], Events | None]


def plant(events: Events, planter: Planter, seed: int) -> Events | None:
    """A copy with one fault at a random place; None where there is none for it."""
    own = [{name: value[:] if isinstance(value, list) else value for name, value in e.items()} for e in events]
    changed = planter(own, random.Random(seed))
    if changed is None:
        return None
    for seq, event in enumerate(changed):
        event['seq'] = seq
        if 'check' in event:
            event['check'] = check_of(event)
    return changed


def pick(events: Events, rng: random.Random, kind: str, condition: Callable[[dict[str, Any]], bool] = bool) -> int:
    found = [index for index, event in enumerate(events) if event['kind'] == kind and condition(event)]
    return rng.choice(found) if found else -1


def edit(kind: str, change: Callable[[dict[str, Any]], object], condition: Callable[..., bool] = bool) -> Planter:
    def planter(events: Events, rng: random.Random) -> Events | None:
        if (index := pick(events, rng, kind, condition)) < 0:
            return None
        change(events[index])
        return events

    return planter


def delete(kind: str, condition: Callable[..., bool] = bool) -> Planter:
    def planter(events: Events, rng: random.Random) -> Events | None:
        if (index := pick(events, rng, kind, condition)) < 0:
            return None
        return events[:index] + events[index + 1 :]

    return planter


def double(kind: str) -> Planter:
    def planter(events: Events, rng: random.Random) -> Events | None:
        if (index := pick(events, rng, kind)) < 0:
            return None
        later = rng.choice([index, min(len(events) - 1, index + rng.randrange(40))])
        return [*events[: later + 1], {**events[index], 'time': events[later]['time']}, *events[later + 1 :]]

    return planter


def move(events: Events, source: int, target: int) -> Events:
    """The event stands at `target` instead, with the time of that line."""
    moved = {**events[source], 'time': events[target]['time']}
    rest = events[:source] + events[source + 1 :]
    return [*rest[:target], moved, *rest[target:]]


def _lengthen(event: dict[str, Any]) -> None:
    event['tokens'] += 1
    event['lengths'][-1] += 1


def _forget_version(event: dict[str, Any]) -> None:
    del event['versions'][0]
    first, second, *others = event['lengths']
    event['lengths'] = [first + second, *others]


def _change_reward(event: dict[str, Any]) -> None:
    event['value'] = 1 - event['value'] if event['value'] in (0, 1) else event['value'] / 2


def _without_rebuild(events: Events, rng: random.Random) -> Events | None:
    """The dispatch that computes interrupted answers again, with its run."""
    index = pick(events, rng, 'prefill', lambda event: event['rebuilt'] > 0)
    if index < 0:
        return None
    lane = events[index]['lane']
    run = next(
        event['run']
        for event in events[index:]
        if event['kind'] == 'run_start' and (event['lane'], event['work']) == (lane, 'prefill')
    )
    return [event for place, event in enumerate(events) if place != index and event.get('run') != run]


def _admitted_against_eq_3(batch: int, eta: float) -> Planter:
    def planter(events: Events, rng: random.Random) -> Events | None:
        admitted, tight = 0, {}  # by the version that let it in, the first
        for index, event in enumerate(events):
            admitted += (event['kind'] == 'admit') - (event['kind'] == 'drop')
            if event['kind'] == 'admit' and (admitted - 1) // batch - eta >= 1:
                tight.setdefault(int((admitted - 1) // batch - eta), index)
        if not tight:
            return None
        version, admit = rng.choice(list(tight.items()))
        loaded = next(i for i, event in enumerate(events) if event['kind'] == 'publish' and event['version'] == version)
        return move(move(events, admit - 1, loaded), admit, loaded + 1)

    return planter


def _trained_twice(events: Events, rng: random.Random) -> Events | None:
    batches = [event for event in events if event['kind'] == 'consume']
    late = rng.randrange(1, len(batches))
    again = rng.choice(batches[rng.randrange(late)]['draws'])
    batches[late]['draws'] = sorted([again, *batches[late]['draws'][1:]])
    return events


def _wrong_lowest(events: Events, rng: random.Random) -> Events | None:
    """Two batches exchange a draw."""
    batches = [event for event in events if event['kind'] == 'consume']
    a, b = rng.sample(batches, 2)
    i, j = rng.randrange(len(a['draws'])), rng.randrange(len(b['draws']))
    a['draws'][i], b['draws'][j] = b['draws'][j], a['draws'][i]
    a['draws'].sort()
    b['draws'].sort()
    return events


def _versions_exchanged(events: Events, rng: random.Random) -> Events | None:
    published = [event for event in events if event['kind'] == 'publish']
    a, b = rng.sample(published, 2)
    a['version'], b['version'] = b['version'], a['version']
    return events


def _loaded_early(events: Events, rng: random.Random) -> Events | None:
    index = pick(events, rng, 'load')
    if index < 0:
        return None
    version = events[index]['version']
    published = next((i for i, e in enumerate(events) if e['kind'] == 'publish' and e['version'] == version), index)
    return move(events, index, published) if published < index else None


def _scored_early(events: Events, rng: random.Random) -> Events | None:
    index = pick(events, rng, 'reward')
    answer = events[index]['draw'], events[index]['sample']
    finish = next(i for i, e in enumerate(events) if e['kind'] == 'finish' and (e['draw'], e['sample']) == answer)
    return move(events, index, finish)


def _earlier(events: Events, rng: random.Random) -> Events | None:
    later = [i for i in range(1, len(events)) if events[i - 1]['time'] > 0]
    index = rng.choice(later)
    events[index]['time'] = events[index - 1]['time'] * rng.random()
    return events


def faults(batch: int, eta: float) -> Mapping[str, Planter]:
    """Planters by name, for a run of learner.groups_per_update=batch and staleness.eta."""
    return {
        'a missing reward': delete('reward'),
        'a changed reward': edit('reward', _change_reward, lambda event: event['label'] == 'ok'),
        'a finish with a token too many': edit('finish', _lengthen, lambda event: event['tokens']),
        'a finish that lacks a version': edit('finish', _forget_version, lambda event: len(event['versions']) > 1),
        'a decode event that lacks a token': edit('decode', lambda event: event.update(tokens=event['tokens'] - 1)),
        'a missing rebuild': _without_rebuild,
        'an admission against Eq. 3': _admitted_against_eq_3(batch, eta),
        'a group trained twice': _trained_twice,
        'versions out of order': _versions_exchanged,
        'a load before its publication': _loaded_early,
        'other draws than the lowest': _wrong_lowest,
        'a score given twice': double('reward'),
        'a score before the answer': _scored_early,
        'a run that ends twice': double('run_done'),
        'a time that goes back': _earlier,
        # beyond the fifteen
        'a rebuild of nothing': edit(
            'prefill', lambda event: event.update(rebuilt=0), lambda event: event['tokens'] > event['prompt_tokens']
        ),
        'a rebuild that lacks a token': edit(
            'prefill',
            lambda event: event.update(rebuilt=event['rebuilt'] - 1, tokens=event['tokens'] - 1),
            lambda event: event['tokens'] > event['prompt_tokens'],
        ),
        'a missing prefill': delete('prefill'),
        'a missing interruption': delete('interrupt'),
        'a missing dispatch': delete('decode'),
        'a decode event with a token too many': edit('decode', lambda event: event.update(tokens=event['tokens'] + 1)),
        'a missing finish': delete('finish'),
        'a finish of another reason': edit('finish', lambda event: event.update(reason='cancelled')),
        'a finish with a token too few': edit(
            'finish', lambda event: event.update(tokens=event['tokens'] - 1), lambda event: event['tokens'] > 1
        ),
        'a finish given twice': double('finish'),
        'a group that is partial': edit('buffer', lambda event: event.update(partial=not event['partial'])),
        'a missing admission': delete('admit'),
        'a group that enters the buffer twice': double('buffer'),
        'a missing publication': delete('publish'),
        'another version decoded with': edit('decode', lambda event: event.update(version=event['version'] + 1)),
    }
