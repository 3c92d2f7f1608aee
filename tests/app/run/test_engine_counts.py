"""The work of the engines between two updates, counted event by event."""

from __future__ import annotations

import json

from areal_jax.app.run.engine_counts import EngineCounts
from areal_jax.telemetry import names
from tests.telemetry.logs import event_log

ENGINE = {'engine': 'engine/0'}


def events():
    decode = {**ENGINE, 'dispatch': 1, 'bucket': 2, 'steps': 4, 'version': 1}
    return event_log(
        (1, 'prefill', {**ENGINE, 'requests': ['a', 'b'], 'bucket': 64, 'tokens': 30}),
        (2, 'decode', {**decode, 'slots': ['a', 'b'], 'tokens': 8, 'positions': 40, 'positions_read': 50}),
        (3, 'interrupt', {**ENGINE, 'requests': ['a', 'b'], 'from_version': 0, 'to_version': 1}),
        (3, 'prefill', {**ENGINE, 'requests': ['a', 'b'], 'bucket': 64, 'tokens': 25, 'rebuilt': 20}),
        (4, 'preempt', {**ENGINE, 'request': 'b', 'tokens': 9}),
        (5, 'decode', {**decode, 'slots': ['a', None], 'tokens': 4, 'positions': 10, 'positions_read': 10}),
        (8, 'decode', {**decode, 'slots': ['a', 'b'], 'tokens': 8, 'positions': 30, 'positions_read': 40}),
    )


# 30 and 25 - 20 prompt tokens; pauses of a: 5 - 3, of b: 8 - 3, median 3.5; 100 positions read of 80
EXPECTED = {
    names.TOKENS_GENERATED: 20,
    names.TOKENS_PREFILLED: 35,
    names.TOKENS_REBUILT: 20,
    names.PREEMPTIONS: 1,
    names.POSITIONS_READ: 1.25,
    names.REQUEST_PAUSE_MEDIAN: 3.5,
    names.REQUEST_PAUSE_MAX: 5,
}


def test_the_metrics_are_those_of_the_events_since_the_last_call():
    counts = EngineCounts()
    for event in events():
        counts.apply(event)
    assert counts.generated == 20
    assert counts.take() == EXPECTED
    assert counts.take() == {
        names.TOKENS_GENERATED: 0,
        names.TOKENS_PREFILLED: 0,
        names.TOKENS_REBUILT: 0,
        names.PREEMPTIONS: 0,
    }


def test_a_resumed_run_counts_on_wherever_it_was_stopped():
    for stopped_at in range(len(events())):
        counts = EngineCounts()
        for index, event in enumerate(events()):
            if index == stopped_at:
                state = json.loads(json.dumps(counts.state()))
                counts = EngineCounts()
                counts.restore(state)
            counts.apply(event)
        assert counts.take() == EXPECTED
