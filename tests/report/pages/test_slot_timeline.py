"""What the timeline of the slots shows, by hand."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

from areal_jax.report.pages.colors import SHADES
from areal_jax.report.pages.slot_figure import paint
from areal_jax.report.pages.slot_timeline import (
    Interval,
    Mark,
    SlotTimeline,
    build_slot_timeline,
    first_view,
    widest_view,
)
from tests.report.busy_run import BusyRun
from tests.report.rules.sound_logs import SOUND
from tests.telemetry.logs import dispatch, event_log, load, publish, two_updates, work

ENGINE = 'engine/0'


def prefill(time: float, requests: list[str], bucket: int, rebuilt: int) -> tuple[float, str, dict[str, Any]]:
    fields = {'engine': ENGINE, 'requests': requests, 'bucket': bucket, 'tokens': 9 if bucket else 0}
    return (time, 'prefill', {**fields, 'rebuilt': rebuilt})


def small_log() -> list[dict[str, Any]]:
    """a and b are prefilled, nothing is computed for c; b is preempted; new weights interrupt a, which is rebuilt."""
    return event_log(
        *work(ENGINE, 'prefill', 0, 1, 1),
        prefill(1, ['a', 'b'], 16, 0),
        prefill(1, ['c'], 0, 0),
        *dispatch(1, 2, 2, ['a', 'b', 'c'], 12, 0),
        (2, 'preempt', {'request': 'b', 'engine': ENGINE, 'tokens': 20}),
        publish(2, 1),
        (2, 'interrupt', {'engine': ENGINE, 'requests': ['a'], 'from_version': 0, 'to_version': 1}),
        *work(ENGINE, 'prefill', 2, 2.5, 3),
        prefill(2.5, ['a'], 32, 9),
        load(2.5, 1, 0.5),
        *dispatch(2.5, 4, 4, ['a', None, 'c'], 8, 1),
    )


def test_every_interval_and_mark_of_a_small_log():
    found = build_slot_timeline(small_log(), 100)
    assert found.slots == [(ENGINE, 0), (ENGINE, 1), (ENGINE, 2)]
    told = {(i.work, i.slot[1], i.request, i.start, i.end, i.version) for i in found.intervals}
    assert told == {
        ('prefill', 0, 'a', 0, 1, 0), ('prefill', 1, 'b', 0, 1, 0),  # c is not computed and occupies no lane
        ('decode', 0, 'a', 1, 2, 0), ('decode', 1, 'b', 1, 2, 0), ('decode', 2, 'c', 1, 2, 0),
        ('swap', -1, '', 2, 2.5, 1), ('rebuild', 0, 'a', 2, 2.5, 1),
        ('decode', 0, 'a', 2.5, 4, 1), ('decode', 2, 'c', 2.5, 4, 1),
    }  # fmt: skip
    assert [interval.start for interval in found.intervals] == sorted(i.start for i in found.intervals)
    assert found.marks == [
        Mark((ENGINE, 1), 'preempt', 2, 'b', '20 tokens to compute again'),
        Mark((ENGINE, 0), 'interrupt', 2, 'a', 'version 0 to 1'),
    ]
    assert (found.publications, found.left_out) == ([(2, 1)], 0)


def neighbours(events: list[dict[str, Any]]) -> dict[tuple[str, str, float], tuple[float, dict[str, Any]]]:
    """By engine, kind and start of an occupation: its end, and the prefill logged before or the decoding behind it."""
    ended = {event['run']: place for place, event in enumerate(events) if event['kind'] == 'run_done'}
    found = {}
    for place, start in enumerate(events):
        if (
            start['kind'] != 'run_start'
            or not start['work'].endswith(('prefill', 'decode'))
            or start['run'] not in ended
        ):
            continue
        kind, engine, done = start['work'], start['lane'], events[ended[start['run']]]
        around = reversed(events[:place]) if kind.endswith('prefill') else events[ended[start['run']] :]
        event = next((one for one in around if (one['kind'], one['lane']) == (kind, engine)), None)
        if event is not None:  # the log may end between the two
            assert done['amount'] == event['bucket' if kind.endswith('prefill') else 'steps']
            where = f'{engine}, evaluation' if kind.startswith('evaluation') else engine
            found[where, kind.removeprefix('evaluation_'), done['started']] = done['started'] + done['seconds'], event
    return found


def require_drawn(events: list[dict[str, Any]]) -> None:
    """Every interval is that of its event; decoding and prefills are among them."""
    log, drawn = neighbours(events), collections.Counter()
    for interval in build_slot_timeline(events, 10**6).intervals:
        engine, slot = interval.slot
        if interval.work in ('prefill', 'rebuild'):
            end, event = log[engine, 'prefill', interval.start]
            assert (interval.request in event['requests'], interval.end) == (True, end)
            assert (interval.work == 'rebuild') == (event['rebuilt'] > 0)
            assert event['bucket'] > 0
        elif interval.work == 'decode':
            _, event = log[engine, 'decode', interval.start]
            assert (event['slots'][slot], event['version']) == (interval.request, interval.version)
        drawn[interval.work] += 1
    assert drawn['decode'] > 0
    assert drawn['prefill'] + drawn['rebuild'] > 0


@pytest.mark.parametrize('kind', SOUND)
def test_what_is_drawn_happened_then(kind):
    """Over logs of runs that were killed, resumed and stopped, with engines that leave; also without their ends."""
    events = SOUND[kind][0]()
    for cut in (len(events), 5 * len(events) // 7, 3 * len(events) // 7):
        require_drawn(events[:cut])


def test_a_long_run_keeps_its_last_intervals_and_says_how_many_it_leaves_out():
    found = build_slot_timeline(small_log(), 3)
    assert {(i.work, i.request) for i in found.intervals} == {
        ('swap', ''),
        ('rebuild', 'a'),
        ('decode', 'a'),
        ('decode', 'c'),
    }
    assert found.left_out == 5
    assert found.slots == [(ENGINE, 0), (ENGINE, 2)]
    assert [mark.what for mark in found.marks] == ['interrupt']  # b's slot is not shown any more


def test_evaluations_are_left_out_and_a_log_without_decoding_has_no_slots():
    found = build_slot_timeline(two_updates(), 100)
    assert '0/-1/0' not in {interval.request for interval in found.intervals}
    assert build_slot_timeline(event_log(publish(1, 1)), 100).slots == []


def test_the_first_view_of_a_long_run_is_some_versions_in_its_middle():
    busy = build_slot_timeline(event_log(*BusyRun(40).entries), 10**6)
    start, end = first_view(busy)
    inside = [version for time, version in busy.publications if start <= time <= end]
    assert inside == list(range(17, 25))  # 8 of 40: (40 - 8) // 2 = 16 before them
    short = build_slot_timeline(small_log(), 100)
    assert first_view(short) == (0, 4)


def test_the_wheel_zooms_out_to_some_thousands_of_intervals():
    # 12,000 intervals, one every second: 3,000 of them are in 3,000 seconds
    intervals = [Interval((ENGINE, 0), 'decode', t, t + 1, 'a', 0, '') for t in range(12_000)]
    assert widest_view(SlotTimeline([(ENGINE, 0)], intervals, [], [], 0)) == 3000
    assert widest_view(SlotTimeline([(ENGINE, 0)], intervals[:200], [], [], 0)) == 200


def test_the_strip_paints_what_each_slot_decoded():
    picture = paint(build_slot_timeline(small_log(), 100), 0, 4)
    assert picture.shape == (3, 1600)
    rgba = [int.from_bytes(bytes.fromhex(shade[1:]) + b'\xff', 'little') for shade in SHADES]
    slot_0, slot_1 = picture[2], picture[1]  # the last slot comes first
    assert set(slot_0[400:800]) == {rgba[0]}  # version 0 from 1 to 2 s of 4
    assert set(slot_0[1000:]) == {rgba[1]}
    assert set(slot_1[1000:]) == {0}
    assert len(np.unique(slot_0[800:1000])) == 1  # the pause
    assert slot_0[900] not in (*rgba, 0)


def test_the_first_slot_is_the_uppermost_of_the_strip():
    one = Interval((ENGINE, 0), 'decode', 0, 4, 'a', 0, '')
    picture = paint(SlotTimeline([(ENGINE, 0), (ENGINE, 1)], [one], [], [], 0), 0, 4)
    assert picture[1].all()  # rows of a picture go upwards
    assert not picture[0].any()
