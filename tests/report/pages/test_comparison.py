"""Runs side by side: names, differences, one table of all numbers, and the page."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re

import pytest

from areal_jax import main_report
from areal_jax.app.run.reports import read_run
from areal_jax.errors import ExitCode, UserError
from areal_jax.events.schema import VERSION
from areal_jax.report.pages.blocks import Table, Text
from areal_jax.report.pages.colors import order_shades
from areal_jax.report.pages.comparison_page import (
    compare,
    join_tables,
    name_runs,
    render_comparison,
    render_comparison_page,
)
from areal_jax.report.pages.run_page import tell_sections
from launch.page_check import SECTIONS
from tests.app.run.test_supervised import sft_config
from tests.report.busy_run import write_busy_run

EVIL = '<script>alert(1)</script>'


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp('runs')
    write_busy_run(folder / 'one', 3, staleness__eta=1.0)
    write_busy_run(folder / 'two', 5, staleness__eta=4.0, task__system_prompt=EVIL)
    return [folder / 'one', folder / 'two']


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a command that exits with 2."""
    assert main_report.main(arguments) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


def test_runs_have_the_shortest_names_that_tell_them_apart(tmp_path: pathlib.Path):
    paths = [tmp_path / 'a' / 'run', tmp_path / 'b' / 'run', tmp_path / 'b' / 'other']
    assert name_runs(paths) == ['a/run', 'b/run', 'other']


def test_tables_are_joined_by_label():
    one = Table(('fate', 'tokens', 'share'), [('trained', '4', '40%'), ('masked', '6', '')])
    two = Table(('fate', 'tokens', 'share'), [('trained', '5', '50%'), ('filtered', '5', '50%'), ('masked', '0', '0%')])
    joined = join_tables({'a': one, 'b': two})
    assert joined.head == ('', 'a', 'b')
    assert joined.rows == [
        ('trained, tokens', '4', '5'),
        ('trained, share', '40%', '50%'),
        ('filtered, tokens', '-', '5'),
        ('filtered, share', '-', '50%'),
        ('masked, tokens', '6', '0'),
        ('masked, share', '-', '0%'),
    ]


def test_every_number_of_either_report_and_the_fields_that_differ(runs: list[pathlib.Path]):
    found = compare({path.name: read_run(path) for path in runs})
    assert isinstance(found.differences, Table)
    assert {row[0]: row[1:] for row in found.differences.rows} == {
        'run.steps': ('3', '5'),
        'staleness.eta': ('1.0', '4.0'),
        'task.system_prompt': ('', EVIL),
    }
    markdown = render_comparison(found)
    for column, run in enumerate(found.runs.values(), start=2):
        blocks = [block for section in tell_sections(run.report) for block in section.blocks]
        rows = [row for block in blocks if isinstance(block, Table) and block.title for row in block.rows]
        assert len(rows) > 50
        cells = {line.split('|')[column].strip() for line in markdown.splitlines() if line.startswith('| ')}
        assert [cell for row in rows for cell in row[1:] if cell and cell not in cells] == []
    assert '## Caveats' in markdown
    assert [row[0] for row in found.headline.rows][:2] == ['Did it learn?', 'How fast, against the limit?']
    assert all(f'| {" | ".join(row)} |' in markdown for row in found.headline.rows)
    assert f'- one: {found.runs["one"].report["warnings"][0]}' in markdown


def test_equal_configs_are_said_to_be_equal(tmp_path: pathlib.Path):
    for name in ('a', 'b'):
        write_busy_run(tmp_path / name, 1)
    found = compare({name: read_run(tmp_path / name) for name in ('a', 'b')})
    assert found.differences == Text('The configs are equal.')


@pytest.fixture(scope='module')
def told(runs: list[pathlib.Path]) -> tuple[str, str]:
    """What the command prints, and the page."""
    out, printed = runs[0].parent / 'both.html', io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main_report.main(['--compare', *map(str, runs), f'--out={out}']) == ExitCode.FINISHED
    return printed.getvalue(), out.read_text()


def test_the_page_overlays_the_runs(told: tuple[str, str]):
    page = told[1]
    assert '<title>Comparison of 2 runs</title>' in page
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS['compare']
    drawn = set(re.findall(r'data-figure="([^"]+)"', page))
    assert {'reward', 'importance_ratio_drift', 'age_in_publications', 'age_in_steps', 'fates'} <= drawn
    assert EVIL not in page
    assert page.count('&lt;script&gt;alert(1)') >= 1
    assert '<th scope="row">staleness.eta</th><td>1.0</td><td>4.0</td>' in page


def test_runs_that_differ_in_a_number_alone_have_its_shades_in_all_charts(tmp_path: pathlib.Path):
    for eta in (4.0, 1.0):
        write_busy_run(tmp_path / f'eta{eta:g}', 3, staleness__eta=eta)
    page = render_comparison_page(compare({name: read_run(tmp_path / name) for name in ('eta4', 'eta1')}))
    assert 'The colours of the runs follow <code>staleness.eta</code>, from dark to light.' in page
    reward = page[page.index('data-figure="reward"') :]
    keys = re.findall(r'--light: (#\w+); [^>]*></i>(\w+)<', reward[: reward.index('</figure>')])
    assert keys == list(zip(order_shades(2), ('eta1', 'eta4'), strict=True))


def test_the_command_prints_the_tables_and_only_reads_the_runs(runs: list[pathlib.Path], told: tuple[str, str]):
    assert '| staleness.eta | 1.0 | 4.0 |' in told[0]
    assert told[0].endswith('both.html\n')
    assert {path.name for run in runs for path in run.iterdir()} == {
        'config.json', 'events.jsonl', 'facts.json', 'metrics.jsonl',
    }  # fmt: skip


def test_without_the_library_the_tables_are_printed(runs: list[pathlib.Path], tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('areal_jax.report.pages.web_page.describe_missing_library', lambda file: f'{file} needs bokeh')
    assert main_report.main(['--compare', *map(str, runs), f'--out={tmp_path}/none.html']) == ExitCode.FINISHED
    printed = capsys.readouterr()
    assert printed.err == f'{tmp_path}/none.html needs bokeh\n'
    assert '| staleness.eta | 1.0 | 4.0 |' in printed.out
    assert not (tmp_path / 'none.html').exists()


def test_without_plots_no_page_is_written(runs: list[pathlib.Path], tmp_path: pathlib.Path):
    arguments = ['--compare', *map(str, runs), f'--out={tmp_path}/none.html', '--no-plots']
    assert main_report.main(arguments) == ExitCode.FINISHED
    assert not (tmp_path / 'none.html').exists()


def test_bad_input_is_one_sentence_and_nothing_is_written_over(runs: list[pathlib.Path], tmp_path, capsys):
    out = tmp_path / 'compare.html'
    out.write_text('mine')
    one, two = map(str, runs)
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'sft').mkdir()
    (tmp_path / 'sft' / 'config.json').write_text(sft_config().to_json_best_effort())
    for arguments, message in (
        ([one], '--compare got 1 run; give the workdirs of two or more'),
        ([one, two, f'{one}/../one'], f'got the run {one}/../one twice; give each run once'),
        ([one, f'{tmp_path}/empty'], 'holds no run: there is no config.json'),
        ([one, f'{tmp_path}/sft'], 'holds supervised training'),
    ):
        assert message in refused(['--compare', *arguments, f'--out={out}'], capsys)
    assert 'is a directory, or in none' in refused(['--compare', one, two, f'--out={tmp_path}'], capsys)
    assert '--json=x copies' in refused(['--compare', one, two, '--json=x'], capsys)
    assert '--out=x names the page of --compare' in refused([f'--workdir={one}', '--out=x'], capsys)
    assert out.read_text() == 'mine'


def test_runs_of_different_event_schemas_are_refused(runs: list[pathlib.Path], tmp_path: pathlib.Path, capsys):
    write_busy_run(tmp_path / 'earlier', 2)
    log = tmp_path / 'earlier' / 'events.jsonl'
    first, *others = log.read_text().splitlines()
    log.write_text('\n'.join([json.dumps(json.loads(first) | {'version': 4}), *others]) + '\n')
    with pytest.raises(UserError, match=f'one with version {VERSION} .* earlier with version 4, which do not count'):
        compare({'one': read_run(runs[0]), 'earlier': read_run(tmp_path / 'earlier')})
    log.write_text('\n'.join([json.dumps(json.loads(first) | {'version': VERSION + 1}), *others]) + '\n')
    sentence = refused(['--compare', str(runs[0]), f'{tmp_path}/earlier', f'--out={tmp_path}/x.html'], capsys)
    assert f'has version {VERSION + 1}; this program reads versions 1 to {VERSION}' in sentence
