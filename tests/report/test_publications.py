"""What each version took, from the events of a run."""

from areal_jax.report.event_log import publication_rows, tabulate_publications
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from tests.telemetry.logs import event_log, load, two_facts, two_metrics, two_updates


def work(lane, kind, start, end, run, version):
    common = {'lane': lane, 'run': run, 'work': kind, 'amount': 1.0}
    return [
        (start, 'run_start', {**common, 'version': version}),
        (end, 'run_done', {**common, 'started': start, 'seconds': end - start}),
    ]


def publish(time, version, **size):
    return (time, 'publish', {'version': version, 'manifest': 'm', 'channel': 'files', **size})


EVENTS = event_log(
    load(0, 0, 9.0),
    *work('publish/0', 'publish', 10, 12, 1, 1),
    publish(12, 1, record='whole', bytes=10**9),
    *work('publish/0', 'load', 12, 13, 2, 1),
    *work('publish/1', 'load', 12, 15, 3, 1),  # the slowest engine counts
    (13, 'load', {'engine': 'engine/0', 'version': 1, 'pause_seconds': 0.5}),
    (15, 'load', {'engine': 'engine/1', 'version': 1, 'pause_seconds': 0.25}),
    *work('publish/0', 'publish', 20, 21, 4, 2),
    publish(21, 2, record='delta', bytes=40_000_000, changed=0.03),
    publish(31, 3, record='delta', bytes=60_000_000, changed=0.05),
)


def test_each_version_has_its_bytes_its_seconds_and_its_pause():
    one, two, three = publication_rows(EVENTS)
    assert one == {
        'version': 1, 'channel': 'files', 'record': 'whole', 'bytes': 10**9, 'changed': None,
        'send_seconds': 2.0, 'stage_seconds': 3.0, 'pause_seconds': 0.5,
    }  # fmt: skip
    assert (two['bytes'], two['changed'], two['send_seconds'], two['stage_seconds']) == (40_000_000, 0.03, 1.0, None)
    assert (three['version'], three['pause_seconds']) == (3, None)


def test_the_table_has_a_row_for_each_kind_of_record():
    assert tabulate_publications(publication_rows(EVENTS)).rows == [
        ('files, delta', '2', '50 MB, median', '4%, median', '1 / 1', 'not measured', 'not measured'),
        ('files, whole', '1', '1 GB, median', 'unknown', '2 / 2', '3 / 3', '0.5 / 0.5'),
    ]


def test_a_version_that_was_published_again_counts_once():
    again = [*EVENTS, *event_log(publish(50, 3, record='whole', bytes=10**9))]
    rows = publication_rows(again)
    assert [row['version'] for row in rows] == [1, 2, 3]
    assert rows[2]['record'] == 'whole'


def test_the_page_has_the_table_where_the_channel_says_bytes():
    alone = build_report(two_updates(), two_metrics(), two_facts())
    assert [(row['version'], row['bytes'], row['pause_seconds']) for row in alone['publications']] == [
        (1, None, 0.5), (2, None, 0.1),
    ]  # fmt: skip
    assert 'version sent as' not in render_page(alone, [])
    sized = alone | {'publications': publication_rows(EVENTS)}
    assert '| files, delta | 2 | 50 MB, median | 4%, median |' in render_page(sized, [])
