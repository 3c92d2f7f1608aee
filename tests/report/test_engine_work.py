"""Tokens, seconds and pauses of the engines, out of small logs whose numbers are worked out by hand."""

from __future__ import annotations

import pytest

from areal_jax.report import engine_work as generation
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from tests.telemetry.logs import dispatch, event_log, two_facts, two_metrics, two_updates, work

LOG = (0, 'log', {'version': 4})
WEIGHTS = {'engine': 'engine/0', 'from_version': 0, 'to_version': 1}


def interrupt(time, *requests):
    return (time, 'interrupt', {**WEIGHTS, 'requests': list(requests)})


def prefill(start, end, run, tokens, **fields):
    """A prefill of engine/0: its event, then its occupation of the lane."""
    values = {'engine': 'engine/0', 'requests': ['a'], 'bucket': 64, 'tokens': tokens, **fields}
    return [(start, 'prefill', values), *work('engine/0', 'prefill', start, end, run)]


def decode(start, end, run, slots, tokens, **fields):
    *before, (time, kind, values) = dispatch(start, end, run, slots, tokens, 0)
    return [*before, (time, kind, {**values, **fields})]


def test_a_pause_ends_with_the_dispatch_that_decodes_the_request_again():
    # a: 10 to 12 and 20 to 21; b is decoded again only at 14, c never
    entries = [
        interrupt(10, 'a', 'b', 'c'),
        *decode(11, 12, 1, ['a', None], 1),
        *decode(12, 14, 2, ['a', 'b'], 2),
        interrupt(20, 'a'),
        *decode(20, 21, 3, [None, 'a'], 1),
    ]
    found = generation.RequestPauses()
    assert [pause for event in event_log(*entries) for pause in found.apply(event)] == [2, 4, 1]
    assert generation.request_pauses(event_log(*entries)) == {'median': 2, 'max': 4}
    assert set(found.since) == {'c'}


def test_two_swaps_before_the_next_token_make_one_pause():
    entries = [interrupt(10, 'a'), interrupt(11, 'a'), *decode(12, 13, 1, ['a'], 1)]
    assert generation.request_pauses(event_log(*entries)) == {'median': 3, 'max': 3}


def test_no_interruption_has_no_pause():
    assert generation.request_pauses(event_log(*decode(0, 1, 1, ['a'], 1))) == {'median': None, 'max': None}


def test_rebuilt_tokens_are_apart_from_prompts_and_from_generated_ones():
    # 2 s of 40 prompt tokens; 4 s of 30 rebuilt and 10 of a prompt: 3 s and 1 s; 5 s of decoding
    entries = [
        LOG,
        *prefill(0, 2, 1, 40),
        *decode(2, 5, 2, ['a'], 8),
        *prefill(5, 9, 3, 40, rebuilt=30),
        *decode(9, 11, 4, ['a'], 4),
    ]
    work = generation.engine_work(event_log(*entries))
    assert work == {
        'generated': {'tokens': 12, 'seconds': 5},
        'prefilled': {'tokens': 50, 'seconds': pytest.approx(3)},
        'rebuilt': {'tokens': 30, 'seconds': pytest.approx(3)},
    }
    assert generation.tabulate_work(work).rows == [
        ('generated', '12', '5'),
        ('prompts prefilled', '50', '3'),
        ('rebuilt after an interruption or a preemption', '30', '3'),
    ]


def test_a_log_of_version_3_does_not_know_what_was_rebuilt():
    events = event_log((0, 'log', {'version': 3}), *prefill(0, 2, 1, 40), *decode(2, 5, 2, ['a'], 8))
    work = generation.engine_work(events)
    assert (work['prefilled'], work['rebuilt']) == ({'tokens': 40, 'seconds': 2}, None)
    assert [row[0] for row in generation.tabulate_work(work).rows] == ['generated', 'prompts prefilled']
    assert generation.attention_positions(events) is None
    assert generation.describe_attention(None) == '-'


def test_positions_are_summed_over_the_dispatches_that_have_them():
    # (60 + 90) / (50 + 50) = 1.5
    entries = [
        *decode(0, 1, 1, ['a'], 1),
        *decode(1, 2, 2, ['a'], 1, positions=50, positions_read=60),
        *decode(2, 3, 3, ['a'], 1, positions=50, positions_read=90),
    ]
    positions = generation.attention_positions(event_log(*entries))
    assert positions == {'live': 100, 'read': 150}
    assert generation.describe_attention(positions) == '1.50 of the positions needed'


def test_preemptions_are_a_line_only_where_there_are_any():
    preempt = [(3, 'preempt', {'engine': 'engine/0', 'request': name, 'tokens': 20}) for name in 'ab']
    assert generation.preemptions(event_log(LOG)) is None
    assert generation.preemptions(event_log(LOG, *preempt)) == {'requests': 2, 'tokens': 40}
    events = two_updates()
    for name, count in (('without', 0), ('with', 2)):
        inserted = [{'seq': -1, 'time': 12, 'lane': 'engine/0', 'kind': kind, **f} for _, kind, f in preempt[:count]]
        page = render_page(build_report([*events[:8], *inserted, *events[8:]], two_metrics(), two_facts()), [])
        assert ('| preemptions, tokens to compute again | 2, 40 |' in page) == (name == 'with')


def test_the_page_says_what_memory_is_for_beside_the_peak():
    parts = {'answers': 4096, 'weights': 2**29, 'optimizer': 2**30}
    rows = [
        '| optimizer | 1.00 |', '| weights | 0.50 |', '| all of these together | 1.50 |',
        '| peak of the process tree, with interpreter, libraries and buffers | 3.00 |',
    ]  # fmt: skip
    page = render_page(build_report(two_updates(), two_metrics(), two_facts(memory_parts=parts)), [])
    assert '\n'.join(rows) in page  # largest first; what is too small for the table counts in the sum
    assert '| answers | 0.00 |' not in page
    assert 'memory, by what it is for' not in render_page(build_report(two_updates(), two_metrics(), two_facts()), [])


def test_the_page_shows_pauses_work_and_cache():
    # 0/2/0 was interrupted at 24 s and decoded again until 28 s; 0.5 s of prefill have no event
    report = build_report(two_updates(), two_metrics(), two_facts(kv_cache_bytes=47_200_000))
    assert report['request_pause_seconds'] == {'median': 4, 'max': 4}
    assert report['engine_work']['generated'] == {'tokens': 28, 'seconds': pytest.approx(4 + 4 + 6 + 3.5 + 0.6)}
    page = render_page(report, [])
    assert '| pause of a request, from the swap to its next token, p50 / max (s) | 4 / 4 |' in page
    assert '| KV cache of an engine | 47.2 MB |' in page
    assert '| generated | 28 | 18.1 |' in page
    assert 'KV cache' not in render_page(build_report(two_updates(), two_metrics(), two_facts()), [])
