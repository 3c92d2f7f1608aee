"""A frame of the live view: it fits any terminal, and says what the run says."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from rich.cells import cell_len

from areal_jax.app.watch.frame import draw_sparkline, render_frame
from areal_jax.app.watch.live_run import LiveRun, ShortAnswer
from tests.report.busy_run import write_answers, write_busy_run

LABELS = ['lanes', 'slots', 'groups', 'buffer', 'ages', 'tokens/s', 'reward', 'answers']


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> LiveRun:
    workdir = tmp_path_factory.mktemp('frames') / 'busy'
    write_busy_run(workdir, 40, staleness__eta=0.5)
    write_answers(workdir, 12)
    run = LiveRun(workdir)
    run.read()
    run.answers.append(ShortAnswer(40, 7, '1.2', 0.5, (3, 5), '数字\x1b[2J\nend ' * 30))
    return run


def show(run: LiveRun, width: int, height: int, plain: bool = False) -> list[str]:
    lines = [line.plain for line in render_frame(run, width, height, plain)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    return lines


@pytest.mark.parametrize(('width', 'height'), [(80, 24), (200, 60), (60, 30), (120, 16), (40, 12), (500, 200)])
def test_a_frame_fits_and_has_every_section_that_there_is_room_for(run: LiveRun, width: int, height: int):
    lines = show(run, width, height)
    found = [line.split()[0] for line in lines if line and line.split()[0] in LABELS]
    assert found == (LABELS if height >= 16 else LABELS[: len(found)])
    assert 'killed' in ' '.join(lines[:1]) or width < 100
    if height >= 24:
        assert len(lines) == height or height > 60
        assert any('40     7.1.2   0.500      v3-5  数字\\x1b[2J\\nend' in line[:80] for line in lines)


def test_a_frame_says_what_the_run_says(run: LiveRun):
    text = '\n'.join(show(run, 120, 40))
    assert 'update 40 of 40  version 40' in text
    ages = run.rows[-1]['staleness/token_age_histogram']
    assert f'0 {"█" * round(8 * ages[0] / sum(ages))} {ages[0] / sum(ages):.0%}' in text
    assert f'mean {run.rows[-1]["staleness/token_age_mean"]:.3g}, max {len(ages) - 1}, eta 0.5' in text
    assert '0.100 → 0.521, 40 updates' in text  # 0.6 - 0.5 / sqrt(update)
    share = run.loop.lanes['learner'].share(*run.window)
    assert f' {share:>4.0%}' in next(line for line in text.splitlines() if line.startswith('learner'))


def test_a_terminal_without_unicode_gets_ascii(run: LiveRun):
    text = ''.join(show(run, 100, 30, plain=True))
    assert text.isascii()
    assert '####' in text
    assert '\\u6570\\u5b57' in text


def test_many_engines_share_a_line(run: LiveRun, tmp_path: pathlib.Path):
    shutil.copytree(run.workdir, tmp_path / 'many')
    many = LiveRun(tmp_path / 'many')
    many.read()
    for index in range(64):
        many.loop.lane(f'engine/{index}').add(many.now - 1, many.now)
    small = show(many, 80, 24)
    assert sum(line.startswith('engine') for line in small) == 1
    assert any('64 engines' in line for line in small)
    assert [line.split()[0] for line in small if line.split()[0] in LABELS] == LABELS
    assert sum(line.startswith('engine/') for line in show(many, 200, 120)) == 64


def test_a_run_without_anything_yet(tmp_path: pathlib.Path):
    run = LiveRun(tmp_path / 'none')
    run.read()
    assert show(run, 200, 24) == [f'there is no {tmp_path / "none"} yet: a run makes it when it starts']
    (tmp_path / 'none').mkdir()
    run.read()
    text = show(run, 200, 24)
    assert text[0] == f'{tmp_path / "none"}  never began'
    assert text[-1] == 'answers   none yet'
    (tmp_path / 'none' / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'time': 2.0, 'loss/nll': 3.5}) + '\n{"st')
    run.read()
    assert any(line.startswith('loss (nll)▁ 3.500 → 3.500, 1 updates') for line in show(run, 80, 24))


@pytest.mark.parametrize(
    ('values', 'columns', 'drawn'),
    [
        ([0.0, 1.0], 8, '▁█'),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, '▁▂▃▄▅▆▇█'),
        ([0, 0, 7, 7], 2, '▁█'),  # means of pairs
        ([2.0, 2.0], 8, '▁▁'),
    ],
)
def test_a_sparkline(values, columns, drawn):
    assert draw_sparkline(values, columns) == drawn
