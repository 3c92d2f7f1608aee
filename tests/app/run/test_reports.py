"""Reports: of supervised training, of seconds alone, and the last screen of a run."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
from typing import Any

import pytest

from areal_jax.app.run.reports import SftFacts, alone_seconds, tell_end, tell_results, write_sft_report
from areal_jax.report.event_log import LaneInterval, Window
from tests.report.pages.test_headline import made


def interval(lane, work, start, end, amount):
    return LaneInterval(lane, work, start, end, amount, 0, {})


def test_work_is_priced_where_the_other_lane_was_idle():
    # decoding alone cost 0.5 s a step, under training 1.0; 2 + 4 steps in 2 updates = 6 * 0.5 / 2 = 1.5 s an update
    # training cost 0.25 s a token alone, 0.4 beside decoding; 10 + 8 tokens = 18 * 0.25 / 2 = 2.25 s an update
    intervals = [
        interval('engine/0', 'decode', 0.0, 1.0, 2),
        interval('engine/0', 'decode', 2.0, 6.0, 4),
        interval('learner', 'train', 2.0, 6.0, 10),
        interval('learner', 'train', 7.0, 9.0, 8),
    ]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 2) == {'generate': 1.5, 'train': 2.25}


def test_work_alone_costs_at_most_what_it_costs_in_the_middle():
    # the only snapshot that ran alone was a checkpoint's of 5 s; those of publications took 0.5 s beside decoding
    intervals = [interval('engine/0', 'decode', 0.0, 4.0, 1)]
    intervals += [interval('learner', 'snapshot', start, start + 0.5, 1) for start in (0.0, 1.0, 2.0)]
    intervals.append(interval('learner', 'snapshot', 4.0, 9.0, 1))
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1)['train'] == 4 * 0.5


def test_a_price_may_come_from_the_evaluation_but_its_work_does_not_count():
    intervals = [interval('engine/0', 'decode', 0.0, 1.0, 2), interval('engine/0', 'decode', 5.0, 9.0, 2)]
    intervals.append(interval('learner', 'train', 5.0, 9.0, 1))
    assert alone_seconds(intervals, Window(((4.0, 10.0),)), 1) == {'generate': 1.0, 'train': None}


def test_several_engines_count_by_the_busiest_at_the_cost_of_one_alone():
    # a step cost 0.5 s on engine/0 alone and 1.0 s beside engine/1; 2 + 1 steps and 5 steps at 0.5 s: 1.5 and 2.5 s
    intervals = [
        interval('engine/0', 'decode', 0.0, 1.0, 2),
        interval('engine/0', 'decode', 2.0, 3.0, 1),
        interval('engine/1', 'decode', 2.0, 7.0, 5),
    ]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1) == {'generate': 2.5, 'train': None}
    # engine/1 has a kind of work that never ran alone: nothing is known about the busiest
    intervals += [interval('engine/1', 'prefill', 7.0, 9.0, 1), interval('engine/0', 'decode', 8.0, 9.0, 1)]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1) == {'generate': None, 'train': None}


# The report of supervised training from facts and metrics that are given.


FACTS = SftFacts(
    config='configs/x.py', seed=0, steps=2, epochs=1.0, demonstrations={'train': 2, 'held_out': 0, 'dropped': 0},
    held_out_nll={}, trained_tokens=20, training_seconds=2.0, wall_seconds=3.0, compilations=0,
    peak_memory_bytes=10**9, weights_sha256='ab' * 32,
)  # fmt: skip


def report(workdir: pathlib.Path, *optimizer_steps: tuple[float, float]) -> tuple[dict, str]:
    """report.json and report.md of a run with (applied, skipped) optimizer steps in its updates."""
    lines = [
        {'step': step, 'loss/nll': 1.5, 'update/optimizer_steps': applied, 'update/skipped_steps': skipped}
        for step, (applied, skipped) in enumerate(optimizer_steps, start=1)
    ]
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    write_sft_report(workdir, FACTS)
    return json.loads((workdir / 'report.json').read_text()), (workdir / 'report.md').read_text()


def test_a_run_that_applied_every_step_warns_of_nothing(tmp_path: pathlib.Path):
    found, page = report(tmp_path, (1.0, 0.0), (1.0, 0.0))
    assert (found['optimizer_steps'], found['warnings']) == ({'applied': 2, 'skipped': 0}, [])
    assert '2 updates (2 optimizer steps applied, 0 skipped because their gradient was not finite), 1 epochs' in page
    assert 'Warning' not in page


def test_skipped_steps_are_counted_and_warned_of(tmp_path: pathlib.Path):
    found, page = report(tmp_path, (2.0, 0.0), (1.0, 1.0))
    assert found['optimizer_steps'] == {'applied': 3, 'skipped': 1}
    (warning,) = found['warnings']
    assert warning.startswith('1 of 4 optimizer steps were skipped because their gradient was not finite: those steps')
    assert f'\n**Warning:** {warning}\n\n2 updates (3 optimizer steps applied, 1 skipped' in page


def test_a_run_that_applied_no_step_says_that_the_weights_never_changed(tmp_path: pathlib.Path):
    (warning,) = report(tmp_path, (0.0, 1.0), (0.0, 1.0))[0]['warnings']
    assert warning.startswith('2 of 2 optimizer steps were skipped')
    assert 'the weights never changed. Look at the weights that the model starts from, learner.loss_scale' in warning


# What stands on the last screen of a run.


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / 'my run'
    folder.mkdir()
    (folder / 'report.md').write_text('# Run report\n')
    return folder


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, is_one: bool = True) -> None:
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_one, raising=False)
    monkeypatch.setattr(shutil, 'get_terminal_size', lambda: os.terminal_size((100, 30)))
    monkeypatch.setattr(shutil, 'which', lambda program: f'/bin/{program}')


def test_a_terminal_gets_eight_lines_that_end_with_page_and_next_command(workdir, monkeypatch):
    at_a_terminal(monkeypatch)
    (workdir / 'report.html').touch()
    *lines, page, following = tell_end(made(config='configs/tiny.py'), workdir, whole=False).split('\n')
    assert len(lines) == 6
    assert page.split(maxsplit=1) == ['report', f'{workdir}/report.html']
    command = f"areal-eval --config=configs/tiny.py --model='{workdir}' --workdir='{workdir}_eval'"
    assert following.split(maxsplit=1) == ['next', command]


def test_a_pipe_gets_the_whole_report_and_a_flag_both(workdir, monkeypatch):
    at_a_terminal(monkeypatch, is_one=False)
    assert tell_end(made(), workdir, whole=False) == '# Run report\n'
    at_a_terminal(monkeypatch)
    first, *_, page = tell_end(made(), workdir, whole=True, follow='').split('\n')
    assert (first, page.split(maxsplit=1)) == ('# Run report', ['report', f'{workdir}/report.md'])


def test_a_report_of_some_lines_is_shown_whole(workdir, monkeypatch):
    at_a_terminal(monkeypatch)
    report: dict[str, Any] = {'config': 'sft.py'}
    assert [line.split()[0] for line in tell_end(report, workdir, whole=False).split('\n') if line] == [
        '#', 'report', 'next',
    ]  # fmt: skip


def test_a_program_that_no_folder_of_the_path_has_is_named_beside_the_interpreter(workdir, monkeypatch):
    at_a_terminal(monkeypatch)
    monkeypatch.setattr(shutil, 'which', lambda program: None)
    monkeypatch.setattr(sys, 'executable', str(workdir / 'bin' / 'python'))
    (workdir / 'bin').mkdir()
    (workdir / 'bin' / 'areal-eval').touch()
    monkeypatch.chdir(workdir)
    assert ' bin/areal-eval --config=' in tell_end(made(), workdir, whole=False)


def test_an_evaluation_ends_with_its_file_and_on_a_terminal_with_the_command_that_shows_its_answers(
    workdir, monkeypatch
):
    at_a_terminal(monkeypatch, is_one=False)
    assert tell_results('greedy 0.5', workdir / 'results.json') == f'\ngreedy 0.5\n{workdir}/results.json'
    at_a_terminal(monkeypatch)
    *_, following = tell_results('greedy 0.5', workdir / 'results.json').split('\n')
    assert following.split(maxsplit=1) == ['next', f"areal-rollouts '{workdir}'"]
