"""report.html: the tables of report.md and figures, of a run with everything and of one with nothing."""

from __future__ import annotations

import html
import json
import pathlib
import re

import pytest

from areal_jax.app.run.reports import read_run
from areal_jax.report.pages.curves import CURVES, EXPERTS, describe_undrawn
from areal_jax.report.pages.headline import tell_headline
from areal_jax.report.pages.html_page import render_html
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import HTML_PAGE, load_run, write_report
from areal_jax.telemetry.facts import RunFacts
from launch.page_check import SECTIONS
from tests.report.busy_run import write_busy_run
from tests.report.test_report import write_logs
from tests.telemetry.logs import two_facts

EVIL = '<script>alert(1)</script>'


@pytest.fixture(scope='module')
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp('runs') / 'busy <script>'
    write_busy_run(workdir, 5, task__system_prompt=EVIL)
    return workdir


@pytest.fixture(scope='module')
def page(workdir: pathlib.Path) -> str:
    write_report(workdir, RunFacts.load(workdir))
    return (workdir / HTML_PAGE).read_text()


def body(page: str) -> str:
    """What is shown, without the scripts."""
    return re.sub(r'<script.*?</script>', '', page[page.index('<body>') :], flags=re.DOTALL)


def figures(page: str) -> set[str]:
    return set(re.findall(r'data-figure="(\w+)"', page))


def absent(page: str) -> list[str]:
    return re.findall(r'<p class="absent">(.*?)</p>', page)


def test_every_cell_of_report_md_is_on_the_page(workdir: pathlib.Path, page: str):
    report = read_run(workdir).report
    markdown = render_page(report, [])
    rows = [line for line in markdown.splitlines() if line.startswith('| ') and '---' not in line]
    cells = {cell for row in rows for cell in row.strip('| ').split(' | ') if cell.strip('| ')}
    assert len(cells) > 80
    tiles = tell_headline(report)
    cells -= {tile.answer for tile in tiles}  # a cell of report.md, several lines of a tile
    cells |= {text for tile in tiles for text in (tile.value, tile.unit, *tile.details)}
    told = html.unescape(body(page))
    assert [cell for cell in cells if cell not in told] == []


def test_the_headline_comes_first_and_warnings_before_the_detail(workdir: pathlib.Path, page: str):
    warnings = read_run(workdir).report['warnings']
    assert warnings
    order = re.findall(r'<section id="(\w+)"', page)
    assert order == SECTIONS['report']
    first = html.unescape(page[page.index('<section id="warnings"') : page.index('<section id="learning"')])
    assert [warning for warning in warnings if warning not in first] == []


def test_a_run_with_everything_has_every_figure(page: str):
    drawn = figures(page)
    assert {
        'slots',
        'fates',
        'fates_by_age',
        'fates_by_version',
        'age_in_publications',
        'age_in_optimizer_steps',
    } <= drawn
    assert {'split_by_step', 'split_by_age', 'split_by_update', 'split_by_engine'} <= drawn
    assert {'reward', 'loss', 'clipped_tokens', 'kl', 'effective_sample_size', 'token_age', 'throughput'} <= drawn
    assert {'time', 'evaluation'} <= drawn
    *no_answers, undrawn = absent(page)
    assert [text.partition(':')[0] for text in no_answers] == ['No answer is kept']  # of a run made of events
    assert undrawn == 'Not drawn:'  # the buffer and what else never changed


def test_no_panel_is_empty_or_a_straight_line(workdir: pathlib.Path, page: str):
    told = html.unescape(body(page))
    metrics = read_run(workdir).metrics
    assert 'id="experts"' not in page  # a dense model
    for curve in CURVES:
        if curve.group == EXPERTS:
            continue
        reason = describe_undrawn(metrics, curve)
        assert (curve.name in figures(page)) == (not reason), curve.title
        assert not reason or reason in told


def test_the_tiles_have_the_numbers_of_report_json_as_report_md_writes_them(workdir: pathlib.Path, page: str):
    report = json.loads((workdir / 'report.json').read_text())
    rows = (workdir / 'report.md').read_text()
    tiles = dict(re.findall(r'data-tile="(\w+)">(.*?)</article>', page, re.DOTALL))
    gain, age, mismatch = report['accuracy']['sampled']['gain'], report['token_age'], report['mismatch']
    expected = {
        'gain': f'{gain["mean"]:+.3f}',
        'speed': f'{report["time"]["ideal"] / report["time"]["achieved"]:.0%}',
        'age': f'{age["mean"]:.3g}',
        'agreement': f'{mismatch["mean"]:.3g}',
        'memory': f'{report["peak_memory_bytes"] / 2**30:.2f} GiB',
        'data': f'{report["token_fates"]["fates"]["trained"] / report["token_fates"]["generated"]:.0%}',
    }
    assert {name: re.search(r'class="value">(.*?)<', tile)[1] for name, tile in tiles.items()} == expected
    for name, value in expected.items():
        places = [line for line in rows.splitlines() if value in line]
        assert len(places) >= 2, (name, value)  # in the headline of report.md, and where it has the detail
    assert set(re.findall(r'<a href="#(\w+)" aria-label="Detail', page)) <= set(SECTIONS['report'])


def test_what_comes_from_the_run_is_escaped(page: str):
    assert EVIL not in page
    assert 'busy <script>' not in page
    assert html.escape(EVIL) in page.replace('&#34;', '&quot;')
    assert '<title>Run busy &lt;script&gt;</title>' in page


def test_a_request_cannot_end_the_script_that_it_is_data_of(tmp_path: pathlib.Path):
    write_busy_run(tmp_path, 2)
    log = tmp_path / 'events.jsonl'
    log.write_text(log.read_text().replace('0/1/0', '</script><b>'))
    page = render_html(read_run(tmp_path))
    assert '</script><b>' not in page


def test_nothing_is_fetched(page: str):
    assert not re.search(r'<(link|img|iframe)\b|<script[^>]+\bsrc=', page)
    assert 'connect-src' not in page  # so that default-src 'none' holds for it
    assert 'cdn.bokeh.org' not in re.sub(r'<script.*?</script>', '', page, flags=re.DOTALL)


def test_a_run_that_did_nothing_says_so_in_every_section(tmp_path: pathlib.Path):
    facts = two_facts(evaluation_before=None, evaluation_after=None)
    page = render_html(load_run(tmp_path, facts))
    assert figures(page) == set()
    assert len(absent(page)) >= 7
    assert all(sentence.endswith('.') for sentence in absent(page))
    for part in ('No update was published', 'no dispatch of decoding', 'did not split', 'no config.json', 'no ages'):
        assert any(part in sentence for sentence in absent(page)), part


def test_an_earlier_run_lacks_ledger_and_split(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    page = render_html(load_run(tmp_path, two_facts()))
    assert {'slots', 'reward', 'age_in_publications'} <= figures(page)
    assert any(sentence.startswith('There is no ledger') for sentence in absent(page))


def test_without_the_library_report_md_is_written(tmp_path: pathlib.Path, monkeypatch, caplog):
    write_logs(tmp_path)
    sentence = 'report.html needs the package bokeh'
    monkeypatch.setattr('areal_jax.report.report.describe_missing_library', lambda file: sentence)
    monkeypatch.setattr('areal_jax.report.report.write_plots', lambda *arguments: [])
    write_report(tmp_path, two_facts())
    assert (tmp_path / 'report.md').exists()
    assert not (tmp_path / HTML_PAGE).exists()
    assert caplog.messages == [sentence]


def test_without_plots_there_is_no_page(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    write_report(tmp_path, two_facts(), plots=False)
    assert not (tmp_path / HTML_PAGE).exists()
