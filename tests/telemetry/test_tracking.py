"""A tracker gets config, rows, evaluations and the end of a run, each once, and whatever it does the run goes on."""

from __future__ import annotations

import json
import pathlib
import struct
import threading
import time

import pytest

from areal_jax.telemetry import hook
from areal_jax.telemetry.trackers import (
    TRACKERS,
    TrackedRun,
    Tracker,
    TrackerFeed,
    last_step_in,
    read_records,
    read_token,
)
from tests.telemetry.fake_trackers import Store, install

KINDS = sorted(TRACKERS)


def line(step: int) -> dict[str, float]:
    return {'step': step, 'time': float(step), 'reward/mean': step / 2, 'loss/value': float('nan')}


def open_feed(kind: str, workdir: pathlib.Path, tracker: Tracker | None = None) -> TrackerFeed:
    token = read_token(workdir, kind, 'p') or 'abc123'
    run = TrackedRun('p', workdir.name, 'sweep', token, workdir, {'staleness': {'eta': float('inf')}})
    return TrackerFeed(tracker or TRACKERS[kind](), kind, run)


def attempt(kind: str, workdir: pathlib.Path, steps: range, written: list[dict[str, float]] | None = None):
    feed = open_feed(kind, workdir)
    feed.start(written or [])
    for step in steps:
        feed.put(step, line(step))
    feed.drain()
    return feed


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Store:
    return install(kind, monkeypatch, tmp_path)


def test_a_finished_run_is_told_whole(kind: str, store: Store, tmp_path: pathlib.Path):
    workdir = tmp_path / 'run'
    workdir.mkdir()
    (workdir / 'report.md').write_text('# Report')
    feed = attempt(
        kind, workdir, range(1, 4), [{'step': 0, 'evaluation/version': 0, 'evaluation/greedy_accuracy': 0.25}]
    )
    assert feed.facts() == {'calls': 4, 'failed': 0, 'left_out': 0, 'first_error': ''}
    scores = {'evaluation/version': 3, 'evaluation/greedy_accuracy': 0.75}
    pages = [workdir / 'report.md', workdir / 'report.html']
    feed.finish(3, scores, {'summary/gain': 0.5}, pages)
    assert store.steps() == [1, 2, 3]
    accuracies = [(step, row['evaluation/greedy_accuracy']) for step, row in store.rows if 'evaluation/version' in row]
    assert accuracies == [(0, 0.25), (3, 0.75)]
    assert not any('loss/value' in row for _, row in store.rows)
    assert store.summary['summary/gain'] == 0.5
    assert store.ended in ([0], ['FINISHED'], ['finished'])
    assert store.config in ({'staleness': {'eta': float('inf')}}, {'staleness.eta': 'inf'})
    shown = [*store.pages, *store.summary, *(path.name for path in tmp_path.iterdir())]
    assert any(str(page).endswith('report.md') for page in shown)


def test_a_killed_run_goes_on_in_the_same_run_without_gap_or_repetition(
    kind: str, store: Store, tmp_path: pathlib.Path
):
    """Killed after update 4, when rows 3 and 4 were not stored; resumed from a checkpoint after update 3."""
    attempt(kind, tmp_path, range(1, 5))
    store.rows = [(step, row) for step, row in store.rows if step <= 2]
    feed = attempt(kind, tmp_path, range(4, 7), [line(1), line(2), line(3)])
    feed.stop()
    assert store.steps() == [1, 2, 3, 4, 5, 6]
    if kind == 'mlflow':
        assert store.begun[1:] == [{'resumed': 'RUNNING'}]
    else:
        first, second = ((begun.get('id'), begun['name'], begun['resume']) for begun in store.begun)
        assert first == second
        assert 'abc123' in str(first)
        assert first[2] == 'allow'
    assert store.ended[-1] in (1, 'KILLED', 'finished')
    assert json.loads((tmp_path / 'tracker.json').read_text())['last_step'] == 6


def test_rows_that_were_not_taken_follow_the_next_one(kind: str, store: Store, tmp_path: pathlib.Path, capsys):
    store.failing = {2, 3}
    feed = attempt(kind, tmp_path, range(1, 6))
    assert feed.facts()['failed'] == 0
    assert store.steps() == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err == (
        f'warning: telemetry.tracker={kind}: ConnectionError: no route to host (the run goes on; further failures are '
        'counted)\n'
    )
    feed.close()


def test_what_is_never_taken_is_counted(kind: str, store: Store, tmp_path: pathlib.Path):
    store.failing = set(range(1, 100))
    feed = attempt(kind, tmp_path, range(1, 6))
    assert (feed.facts()['calls'], feed.facts()['failed']) == (5, 5)
    assert json.loads((tmp_path / 'tracker.json').read_text())['last_step'] == -1  # a resumed run sends them
    feed.close()


def test_a_row_that_the_tracker_refuses_holds_up_no_other(kind: str, store: Store, tmp_path: pathlib.Path):
    store.failing = {1, 2, 3}
    feed = attempt(kind, tmp_path, range(1, 6))
    assert feed.facts()['failed'] == 1
    assert store.steps() == [2, 3, 4, 5]
    feed.close()


def test_a_tracker_that_hangs_holds_up_the_end_only_so_long(store: Store, kind: str, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hook, 'FLUSH_S', 0.3)
    tracker, release = TRACKERS[kind](), threading.Event()
    monkeypatch.setattr(tracker, 'log', lambda step, row: release.wait(20))
    feed = open_feed(kind, tmp_path, tracker)
    feed.start([])
    began = time.monotonic()
    for step in range(1, 5):
        feed.put(step, line(step))
    feed.drain()
    feed.finish(4, {}, {}, [])
    assert time.monotonic() - began < 3
    assert 'left out 3 rows' in capsys.readouterr().err
    release.set()


def test_another_tracker_or_project_begins_anew(tmp_path: pathlib.Path, monkeypatch):
    install('wandb', monkeypatch, tmp_path)
    attempt('wandb', tmp_path, range(1, 3)).close()
    assert read_token(tmp_path, 'wandb', 'p') == 'abc123'
    assert read_token(tmp_path, 'wandb', 'q') == read_token(tmp_path, 'mlflow', 'p') == ''


def test_records_of_a_file_of_wandb_and_one_that_is_torn():
    """Records of 40,000 bytes lie in two or three parts, of blocks of 32 KiB that the header of the file shortens."""
    whole, position, content = [bytes([n]) * 40000 for n in range(3)], 7, b':W&B123'
    for record in whole:
        rest, kind = record, 2
        while rest:
            left = 32768 - position % 32768
            if left < 7:
                content, position = content + bytes(left), position + left
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            content += struct.pack('<IHB', 0, len(part), kind if rest else 4) + part
            position, kind = position + 7 + len(part), 3
    assert list(read_records(content)) == whole
    assert list(read_records(content[:-1])) == whole[:2]


def test_a_version_of_wandb_with_other_files_says_nothing(tmp_path: pathlib.Path, monkeypatch):
    install('wandb', monkeypatch, tmp_path)
    assert last_step_in([]) is None
