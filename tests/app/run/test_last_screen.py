"""What stands on the last screen of a run."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from typing import Any

import pytest

from areal_jax.app.run.last_screen import tell_end, tell_results
from tests.report.pages.test_headline import made


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
