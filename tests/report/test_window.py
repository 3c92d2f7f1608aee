"""The clock seconds over which a run is measured."""

from __future__ import annotations

from areal_jax.report.event_log import Window, busy_share, evaluation_spans, window
from tests.telemetry.logs import event_log, publish, two_updates


def test_window_is_first_admission_to_last_publication():
    assert window(two_updates()) == Window(((10, 30),))


def test_window_leaves_out_evaluation_inside_and_publication_of_the_first_weights():
    # admitted at 10, last trained version at 30; evaluation 5-12 and 20-23 cut 2 s and 3 s: 20 - 5 = 15
    events = event_log(
        publish(0, 0),
        (5, 'evaluate', {'phase': 'before', 'mode': 'start'}),
        (10, 'admit', {'draw': 0}),
        (12, 'evaluate', {'phase': 'before', 'mode': 'done'}),
        (20, 'evaluate', {'phase': 'after', 'mode': 'start'}),
        (23, 'evaluate', {'phase': 'after', 'mode': 'done'}),
        publish(30, 1),
    )
    assert window(events) == Window(((12, 20), (23, 30)))
    assert window(events).seconds == 15
    assert window(events).overlap(11, 24) == 9  # 12-20 and 23-24


def test_no_publication_no_window():
    events = event_log((1, 'admit', {'draw': 0}), publish(2, 0))
    assert window(events).seconds == 0
    assert busy_share([], 'learner', window(events)) is None


def test_an_evaluation_that_never_ended_lasts_to_the_end():
    events = event_log((1, 'evaluate', {'phase': 'before', 'mode': 'start'}), (4, 'error', {'message': 'x'}))
    assert evaluation_spans(events) == [(1, 4)]
