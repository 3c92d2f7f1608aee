"""A function of the user's own gets every row once, in a thread of its own, whatever it does."""

from __future__ import annotations

import json
import math
import pathlib
import textwrap
import threading
import time

import pytest

from areal_jax.errors import UserError
from areal_jax.plugins import load_function
from areal_jax.telemetry import hook as row_thread
from areal_jax.telemetry.hook import FIELD, MetricsHook, RowFacts, warn_of_rows
from areal_jax.telemetry.metrics import MetricsWriter, read_metrics


class Calls(list):
    """A hook that remembers (step, row, workdir), and raises for the steps in `fails`."""

    def __init__(self, *fails: int):
        super().__init__()
        self._fails = fails

    def __call__(self, row, step, workdir):
        self.append((step, row, workdir))
        if step in self._fails:
            raise ConnectionError('no route to host')

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self]


def write(workdir: pathlib.Path, hook: MetricsHook, *steps: int, resume_after: int | None = None) -> RowFacts:
    """An attempt that writes rows for `steps`; a resumed one goes on after `resume_after`."""
    writer = MetricsWriter(workdir, tensorboard=False)
    writer.truncate(resume_after or 0)
    writer.listeners.append(hook.put)
    hook.start(read_metrics(workdir / 'metrics.jsonl'))
    for step in steps:
        writer.write(step, {'reward/mean': step / 2})
    writer.close()
    hook.close()
    return hook.facts()


def test_a_row_has_the_finite_numbers_of_an_update(tmp_path: pathlib.Path):
    calls = Calls()
    hook = MetricsHook(calls, 'mine.py:log', tmp_path)
    hook.start([])
    hook.put(3, {'step': 3, 'reward/mean': 0.5, 'loss/value': math.nan, 'mismatch/mean_abs': None, 'ages': [1, 2]})
    hook.close()
    assert hook.facts() == {'calls': 1, 'failed': 0, 'left_out': 0, 'first_error': ''}
    assert calls == [(3, {'reward/mean': 0.5}, tmp_path)]
    hook.close()  # the second time: nothing
    assert hook.facts()['left_out'] == 0


def test_a_resumed_run_repeats_no_step_and_hands_over_what_was_not(tmp_path: pathlib.Path):
    first, second, other = Calls(), Calls(), Calls()
    write(tmp_path, MetricsHook(first, 'mine.py:log', tmp_path), 1, 2, 3, 4)
    # killed after update 4, resumed from a checkpoint after update 2: updates 3 and 4 are made again
    write(tmp_path, MetricsHook(second, 'mine.py:log', tmp_path), 3, 4, 5, resume_after=2)
    assert (first.steps, second.steps) == ([1, 2, 3, 4], [5])
    write(tmp_path, MetricsHook(other, 'other.py:log', tmp_path), 6, resume_after=5)  # another hook has seen no row
    assert other.steps == [1, 2, 3, 4, 5, 6]
    assert other[0][1] == {'reward/mean': 0.5}


def test_rows_that_a_kill_kept_from_the_hook_come_first(tmp_path: pathlib.Path):
    """The hook was at update 2 when the run was killed after update 4, whose rows its checkpoint kept."""
    write(tmp_path, MetricsHook(Calls(), 'mine.py:log', tmp_path), 1, 2, 3, 4)
    (tmp_path / 'hook.json').write_text(json.dumps({'hook': 'mine.py:log', 'last_step': 2}))
    calls = Calls()
    write(tmp_path, MetricsHook(calls, 'mine.py:log', tmp_path), 5, resume_after=4)
    assert calls.steps == [3, 4, 5]


def test_a_hook_that_raises_is_warned_of_once_with_file_and_line_and_counted(tmp_path: pathlib.Path, capsys):
    file = tmp_path / 'mine.py'
    file.write_text(
        textwrap.dedent("""\
            seen = []

            def log(row, step, workdir):
                seen.append(step)
                if step in (2, 3):
                    raise ConnectionError('no route to host')
            """)
    )
    function = load_function(f'{file}:log', FIELD)
    facts = write(tmp_path, MetricsHook(function, f'{file}:log', tmp_path), 1, 2, 3, 4)
    assert function.__globals__['seen'] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    sentence = f'{FIELD}={file}:log: line 6 of {file} raises ConnectionError: no route to host'
    assert facts == {'calls': 4, 'failed': 2, 'left_out': 0, 'first_error': sentence}
    warned = capsys.readouterr().err
    assert warned == f'warning: {sentence} (the run goes on; further failures are counted)\n'
    assert warn_of_rows(FIELD, facts).startswith(f'{FIELD} failed for 2 of 4 rows (the first: {sentence}), and 0 more')
    assert (
        warn_of_rows(FIELD, {'calls': 4, 'failed': 0, 'left_out': 0, 'first_error': ''})
        == warn_of_rows(FIELD, {})
        == ''
    )


def test_a_hook_that_exits_fails_like_any_other(tmp_path: pathlib.Path, capsys):
    def leave(row, step, workdir):
        raise SystemExit(3)

    facts = write(tmp_path, MetricsHook(leave, 'mine.py:log', tmp_path), 1, 2)
    assert (facts['calls'], facts['failed']) == (2, 2)
    assert 'raises SystemExit: 3' in capsys.readouterr().err


def test_nothing_waits_for_a_hook_and_rows_beyond_the_bound_are_counted(tmp_path: pathlib.Path, monkeypatch, capsys):
    monkeypatch.setattr(row_thread, 'MOST_WAITING', 5)
    monkeypatch.setattr(row_thread, 'FLUSH_S', 0.2)
    release, entered = threading.Event(), threading.Event()
    calls = Calls()

    def hang(row, step, workdir):
        entered.set()
        release.wait(30)
        calls(row, step, workdir)

    hook = MetricsHook(hang, 'mine.py:log', tmp_path)
    hook.start([])
    hook.put(1, {'x': 1.0})
    assert entered.wait(10)
    began = time.monotonic()
    for step in range(2, 12):
        hook.put(step, {'x': 1.0})
    hook.close()
    facts = hook.facts()
    assert time.monotonic() - began < 5
    # row 1 is being handed over; 5 of the next 10 found no place, and 5 waited when the run ended
    assert (facts['calls'], facts['left_out']) == (0, 10)
    assert 'left out 5 rows: it took more than 0 s' in capsys.readouterr().err
    release.set()


def test_rows_that_wait_at_the_end_are_handed_over(tmp_path: pathlib.Path):
    calls = Calls()

    def slowly(row, step, workdir):
        time.sleep(0.02)
        calls(row, step, workdir)

    assert write(tmp_path, MetricsHook(slowly, 'mine.py:log', tmp_path), *range(1, 11))['left_out'] == 0
    assert calls.steps == list(range(1, 11))


@pytest.mark.parametrize('text', ['{"hook": "mine.py:log"}', '{"hook": "mine.py:log", "last_step": "two"}', '{'])
def test_a_file_that_is_not_whole_is_named(tmp_path: pathlib.Path, text: str):
    (tmp_path / 'hook.json').write_text(text)
    with pytest.raises(UserError, match=r'hook\.json .*remove it: the hook then gets all rows again'):
        MetricsHook(Calls(), 'mine.py:log', tmp_path)
