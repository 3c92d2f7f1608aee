"""The servers of a run in its report."""

from areal_jax.report.aggregates import server_rows, tabulate_servers
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from tests.telemetry.logs import event_log, two_facts, two_metrics, two_updates

ENTRIES = [
    (0, 'register', {'engine': 'engine/1', 'incarnation': 7, 'url': 'http://a:1'}),
    (0, 'register', {'engine': 'engine/0', 'incarnation': 5, 'url': 'http://a:2'}),
    (1, 'receive', {'engine': 'engine/1', 'request': 'r', 'tokens': 5}),
    (2, 'receive', {'engine': 'engine/1', 'request': 's', 'tokens': 6}),
    (3, 'engine_state', {'engine': 'engine/1', 'state': 'unknown', 'reason': 'it does not answer'}),
    (4, 'engine_state', {'engine': 'engine/1', 'state': 'gone', 'reason': 'it was started again'}),
    (5, 'register', {'engine': 'engine/1', 'incarnation': 8, 'url': 'http://a:3'}),
    (6, 'engine_state', {'engine': 'engine/1', 'state': 'quarantined', 'reason': 'its log-probs differ'}),
]


def test_each_server_has_its_tokens_its_starts_and_its_failures():
    idle, busy = server_rows(event_log(*ENTRIES))
    assert (idle['engine'], idle['tokens'], idle['failures']) == ('engine/0', 0, 0)
    assert busy == {
        'engine': 'engine/1', 'url': 'http://a:3', 'starts': 2, 'tokens': 11, 'failures': 2,
        'last_failure': 'its log-probs differ',
    }  # fmt: skip
    assert tabulate_servers([busy, idle]).rows == [
        ('engine/1', 'http://a:3', '11', '2', '2, the last time: its log-probs differ'),
        ('engine/0', 'http://a:2', '0', '1', '0'),
    ]


def test_the_page_names_servers_where_there_were_some():
    alone = build_report(two_updates(), two_metrics(), two_facts())
    assert alone['servers'] == []
    assert 'tokens received' not in render_page(alone, [])
    served = alone | {'servers': server_rows(event_log(*ENTRIES))}
    assert '| engine/1 | http://a:3 | 11 |' in render_page(served, [])
