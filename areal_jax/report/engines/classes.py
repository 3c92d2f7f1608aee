"""The engines of a pool by class: engines of equal hardware. Made from the events, and the metrics of mismatch.

The table appears if the engines of a run differ. Of the pool's numbers, only the age would reveal a slow class.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict

from areal_jax.events.schema import Event, FinishEvent
from areal_jax.labels import SCORED
from areal_jax.report.aggregates import EngineMismatch, MeanMax, Metrics, mismatch
from areal_jax.report.engines.engine_presence import find_presence, restrict
from areal_jax.report.event_log import Window, busy_share, group_by_lane, lane_intervals
from areal_jax.report.pages.blocks import Table, tabulate
from areal_jax.telemetry.progress import format_number, format_percent
from areal_jax.types import NOT_GENERATED, UNSCORED

_LOST = ('cancelled', 'lost', *UNSCORED)  # reasons of a finish without an answer
_Key = tuple[int, int]  # draw and sample
_Tokens = collections.Counter[tuple[str, int]]  # by class and version
UNKNOWN = ''  # class of tokens whose class the log does not tell


class BatchTokens(NamedTuple):
    """Tokens of the batch of one update."""

    update: int
    tokens: Mapping[tuple[str, int], int]  # by class and policy version


class _Path:
    """The classes that generated an answer, each with its first token."""

    def __init__(self, hardware: str):
        self.places = [(0, hardware)]  # (first token, class)
        self.moved_at: int | None = None  # tokens when it left an engine, until it has the next one
        self.is_clear = True

    def go_on(self, hardware: str) -> None:
        at, self.moved_at = self.moved_at, None
        if hardware == self.places[-1][1]:
            return
        self.is_clear = self.is_clear and at is not None
        self.places.append((at or 0, hardware))

    def split(self, event: FinishEvent) -> _Tokens:
        """Counts the tokens of the answer by class and version."""
        found: _Tokens = collections.Counter()
        one_row = len(event.get('rows', ())) < 2
        clear = len(self.places) == 1 or (self.is_clear and one_row)
        ends = [*(first for first, _ in self.places[1:]), event['tokens'] + sum(event.get('lengths', ()))]
        begin = 0
        for version, length in zip(event['versions'], event.get('lengths', ()), strict=False):
            end = begin + length
            if version != NOT_GENERATED and not clear:
                found[UNKNOWN, version] += length
            elif version != NOT_GENERATED:
                for (first, hardware), last in zip(self.places, ends, strict=True):
                    found[hardware, version] += max(0, min(end, last) - max(begin, first))
            begin = end
        return +found


def split_batches(events: Sequence[Event], hardware: Mapping[str, str]) -> Iterator[BatchTokens]:
    """Yields the batches in their order.

    Args:
      events: the events of training, without evaluations.
      hardware: class by engine.
    """
    paths: dict[_Key, _Path] = {}
    answers: dict[int, dict[int, _Tokens]] = {}  # answers that ended, by draw and sample
    for event in events:
        if event['kind'] == 'route':
            key, one = (event['draw'], event['sample']), hardware.get(event['engine'], UNKNOWN)
            if key in paths:
                paths[key].go_on(one)
            else:
                paths[key] = _Path(one)
        elif event['kind'] == 'move' and (path := paths.get(_read_key(event['request']))):
            path.moved_at = event['tokens']
        elif event['kind'] == 'finish':
            path = paths.pop((event['draw'], event['sample']), _Path(UNKNOWN))
            if event['reason'] not in _LOST:
                answers.setdefault(event['draw'], {})[event['sample']] = path.split(event)
        elif event['kind'] == 'reward' and event['label'] not in SCORED:
            answers.get(event['draw'], {}).pop(event['sample'], None)
        elif event['kind'] == 'drop':
            answers.pop(event['draw'], None)
        elif event['kind'] == 'consume':
            tokens: _Tokens = collections.Counter()
            for draw in event['draws']:
                for found in answers.pop(draw, {}).values():
                    tokens.update(found)
            yield BatchTokens(event['update'], tokens)


def _read_key(request: str) -> _Key:
    """Parses 'SEED/DRAW/SAMPLE', which the row of an episode may follow."""
    _, draw, sample, *_ = request.split('/')
    return int(draw), int(sample)


class ClassRow(TypedDict):
    """Engines of equal hardware."""

    hardware: str  # number and kind of the devices of each: '4 x H800/3'
    engines: int
    tokens: int  # generated in training
    share: float | None  # of the tokens of all classes
    tokens_per_second: float | None  # of the window
    idle: float | None  # share of the seconds in which its engines were in the pool
    trained_tokens: int  # in the batches of published updates; tokens of groups that a batch left out count too
    age: MeanMax  # of these tokens, in versions
    mismatch: EngineMismatch | None  # of the answers that its engines ended; None if it was not measured
    left_out: float | None  # share of the window in which it got no new requests (rollout.slow_engines='spare')
    times_left_out: int


def find_hardware(events: Iterable[Event]) -> dict[str, str]:
    """The class of each engine; empty if the log names fewer than two classes."""
    found = {event['engine']: event['hardware'] for event in events if event['kind'] == 'join' and 'hardware' in event}
    return found if len(set(found.values())) > 1 else {}


def summarize_classes(
    events: Sequence[Event], training: Sequence[Event], metrics: Metrics, within: Window
) -> list[ClassRow]:
    """One row per class, in the order in which they joined; [] for a pool of one class.

    Args:
      events: all events of the run; `training` leaves out evaluations.
    """
    hardware = find_hardware(events)
    if not hardware:
        return []
    tokens, in_window = _count_tokens(training, hardware, within)
    ages, idle = _count_ages(training, hardware, len(metrics)), _measure_idle(events, hardware, within)
    spans, by_engine = find_spared(events), mismatch(metrics).get('by_engine', {})
    rows: list[ClassRow] = []
    for one in dict.fromkeys(hardware.values()):
        engines = [engine for engine, other in hardware.items() if other == one]
        trained = sum(ages[one].values())
        mean = sum(age * count for age, count in ages[one].items()) / trained if trained else None
        left_out = sum(within.overlap(*span) for span in spans.get(one, ()))
        rows.append({
            'hardware': one,
            'engines': len(engines),
            'tokens': tokens[one],
            'share': tokens[one] / tokens.total() if tokens.total() else None,
            'tokens_per_second': in_window[one] / within.seconds if within.seconds else None,
            'idle': idle[one],
            'trained_tokens': trained,
            'age': {'mean': mean, 'max': max(ages[one], default=None)},
            'mismatch': _join_mismatch([by_engine[engine] for engine in engines if engine in by_engine]),
            'left_out': left_out / within.seconds if within.seconds else None,
            'times_left_out': len(spans.get(one, ())),
        })  # fmt: skip
    return rows


def find_spared(events: Sequence[Event]) -> Mapping[str, list[tuple[float, float]]]:
    """Spans in which a class got no new requests, by class; an open span ends at infinity."""
    since: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in events:
        if event['kind'] != 'spare':
            continue
        if event['mode'] == 'start':
            since[event['hardware']] = event['time']
        elif event['hardware'] in since:
            spans[event['hardware']].append((since.pop(event['hardware']), event['time']))
    for hardware, start in since.items():
        spans[hardware].append((start, math.inf))
    return dict(spans)


def _count_tokens(
    training: Sequence[Event], hardware: Mapping[str, str], within: Window
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Generated tokens by class: all, and in the window."""
    tokens, in_window = collections.Counter[str](), collections.Counter[str]()
    for event in training:
        if event['kind'] in ('decode', 'receive') and (one := hardware.get(event['engine'])) is not None:
            tokens[one] += event['tokens']
            in_window[one] += event['tokens'] * within.contains(event['time'])
    return tokens, in_window


def _count_ages(
    training: Sequence[Event], hardware: Mapping[str, str], updates: int
) -> Mapping[str, collections.Counter[int]]:
    """Tokens of the published batches by class and age."""
    ages: dict[str, collections.Counter[int]] = {one: collections.Counter() for one in hardware.values()}
    for batch in split_batches(training, hardware):
        for (one, version), count in batch.tokens.items():
            if batch.update <= updates and one in ages:
                ages[one][batch.update - 1 - version] += count
    return ages


def _measure_idle(events: Sequence[Event], hardware: Mapping[str, str], within: Window) -> Mapping[str, float | None]:
    """By class: 1 - busy seconds of its engines / seconds in which they were in the pool."""
    by_lane, presence = group_by_lane(lane_intervals(events)), find_presence(events)
    busy: dict[str, float] = collections.defaultdict(float)
    there: dict[str, float] = collections.defaultdict(float)
    for engine, one in hardware.items():
        own = restrict(within, presence, engine)
        busy[one] += (busy_share(by_lane.get(engine, ()), engine, own) or 0.0) * own.seconds
        there[one] += own.seconds
    return {one: 1 - busy[one] / there[one] if there[one] else None for one in set(hardware.values())}


def _join_mismatch(found: Sequence[EngineMismatch]) -> EngineMismatch | None:
    known = [(one['mean'], one['n']) for one in found if one['mean'] is not None and one['n']]
    total = sum(count for _, count in known)
    return {'mean': sum(mean * count for mean, count in known) / total, 'n': total} if total else None


def tabulate_classes(rows: Sequence[ClassRow]) -> Table:
    """Returns the page's table of classes."""
    columns: dict[str, Callable[[ClassRow], str]] = {
        'class of engines': lambda row: row['hardware'],
        'engines': lambda row: str(row['engines']),
        'tokens generated': lambda row: str(row['tokens']),
        'share': lambda row: format_percent(row['share']),
        'tokens a second': lambda row: format_number(row['tokens_per_second']),
        'idle': lambda row: format_percent(row['idle']),
        'age, mean': lambda row: format_number(row['age']['mean']),
        'oldest': lambda row: format_number(row['age']['max']),
        'mismatch, mean (nats)': lambda row: format_number(row['mismatch']['mean'] if row['mismatch'] else None),
        'left out': lambda row: f'{format_percent(row["left_out"])} of the time' if row['times_left_out'] else '-',
    }
    return tabulate(rows, columns)


def describe_left_out(rows: Sequence[ClassRow]) -> str:
    """The sentence on classes that added nothing but age; '' if no class was left out."""
    named = [
        f'{row["hardware"]} got no new requests in {format_percent(row["left_out"])} of the window'
        for row in rows
        if row['times_left_out']
    ]
    if not named:
        return ''
    return (
        f"{'; '.join(named)} (rollout.slow_engines='spare'): the slots of the other classes held all open answers, so "
        'it added nothing but age.'
    )
