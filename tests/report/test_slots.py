from __future__ import annotations

from areal_jax.report.timeline import SlotSpan, decode_intervals, slot_spans
from tests.telemetry.logs import dispatch, event_log, two_updates


def test_spans_of_requests_by_slot_and_version():
    # slot 0: two dispatches of 0/0/0 make one span; 0/2/0 is split at the interruption (v0, v1); first and last are
    # evaluations
    slot_0 = [span for span in slot_spans(two_updates()) if span.slot == 0]
    assert slot_0 == [
        SlotSpan('engine/0', 0, '0/-1/0', 0, 0, 2, 1),
        SlotSpan('engine/0', 0, '0/0/0', 0, 10, 18, 2),
        SlotSpan('engine/0', 0, '0/2/0', 0, 18, 24, 1),
        SlotSpan('engine/0', 0, '0/2/0', 1, 24.5, 28, 1),
        SlotSpan('engine/0', 0, '0/3/0', 2, 30.2, 30.8, 1),
        SlotSpan('engine/0', 0, '0/-1/0', 2, 31, 33, 1),
    ]
    slot_1 = [span for span in slot_spans(two_updates()) if span.slot == 1]
    assert slot_1 == [SlotSpan('engine/0', 1, '0/1/0', 0, 10, 18, 2)]


def test_a_request_that_leaves_its_slot_and_returns_has_two_spans():
    entries = [dispatch(t, t + 1, t, [request], 1, 0) for t, request in enumerate(['a', None, 'a', 'a', 'b'])]
    spans = slot_spans(event_log(*(entry for group in entries for entry in group)))
    assert [(span.request, span.start, span.end) for span in spans] == [('a', 0, 1), ('a', 2, 4), ('b', 4, 5)]


def test_a_dispatch_finds_its_occupation_whichever_is_logged_first():
    start, done, decode = dispatch(0, 1, 0, ['a'], 1, 0)
    start_2, done_2, decode_2 = dispatch(1, 2, 1, ['b'], 1, 0)
    for order in ([start, done, decode, start_2, done_2, decode_2], [decode, start, done, decode_2, start_2, done_2]):
        pairs = decode_intervals(event_log(*order))
        assert [(event['dispatch'], interval.start) for event, interval in pairs] == [(0, 0), (1, 1)]


def test_an_occupation_whose_dispatch_is_not_logged_shifts_nothing():
    # the first dispatch was cut off between its run_done and its decode event
    start, done, _ = dispatch(0, 1, 0, ['a'], 1, 0)
    pairs = decode_intervals(event_log(start, done, *dispatch(5, 6, 1, ['b'], 1, 0)))
    assert [(event['dispatch'], interval.start) for event, interval in pairs] == [(1, 5)]
