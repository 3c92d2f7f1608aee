"""One page of HTML: nothing from a run is markup, and nothing is fetched."""

from __future__ import annotations

import re

import pytest

from areal_jax.installation import describe_install
from areal_jax.report.pages.blocks import Absent, Chart, Folded, Grid, Items, Line, Section, Table, Text, Tile, Tiles
from areal_jax.report.pages.colors import BLUE, dark_colors
from areal_jax.report.pages.figures import plain_text
from areal_jax.report.pages.web_page import describe_missing_library, render_web_page

EVIL = '<script>alert("x")</script>'


def test_every_text_is_escaped_and_code_is_marked():
    blocks = [
        Text(f'{EVIL} `{EVIL}`'), Items([EVIL]), Table((EVIL, ''), [(EVIL, '1')]), Absent(EVIL),
        Folded(EVIL, Table(('a', 'b'), [(EVIL, EVIL)])), Text(''),
    ]  # fmt: skip
    page = render_web_page(EVIL, [Text(EVIL)], [Section('one', EVIL, blocks)])
    assert page.count('<script') == 1  # that of the colours
    assert EVIL not in page
    assert page.count('&lt;script&gt;') == 14
    assert '<code>&lt;script&gt;' in page


def test_an_empty_section_still_stands():
    page = render_web_page('t', [], [Section('one', 'One', [Table(('a', 'b'), [])])])
    assert '<section id="one"' in page
    assert '<table' not in page


def test_the_page_forbids_requests():
    page = render_web_page('t', [], [])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert 'http' not in policy[1]


def test_texts_of_a_run_are_never_tex():
    assert '$$' not in plain_text('a $$x$$ b')
    assert plain_text('engine/0 costs $5') == 'engine/0 costs $5'
    assert all(opening not in plain_text(r'\(x\) \[y\]') for opening in ('\\(', '\\['))


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    assert describe_missing_library('report.html') == ''
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    sentence = describe_missing_library('report.html')
    assert sentence == f'report.html needs the package bokeh, which is not installed: {describe_install("plots")}'


def test_a_tile_shows_its_number_its_reading_and_where_the_detail_is():
    tile = Tile('gain', 'Did it learn?', '+0.609', 'accuracy', ('sampled 0.059 → 0.668',), 'Yes.', 'good', 'learning')
    page = render_web_page('t', [], [Section('headline', 'At a glance', [Tiles([tile])])], ('finished', 'good'))
    told = page[page.index('<article') : page.index('</article>')]
    for text in ('class="tile good"', '>Did it learn?<', '>+0.609<', '>accuracy<', '0.059 → 0.668', '>Yes.<'):
        assert text in told
    assert 'href="#learning"' in told
    assert '<span class="state good">finished</span>' in page


def test_a_chart_is_told_and_has_its_numbers_and_a_legend_in_both_themes():
    line = Line('a', [1], [2.0], BLUE, 1)
    chart = Chart(title='Title', unit='nats', marks=[line], alt='What it shows.', table=Table(('x', 'y'), [('1', '2')]))
    page = render_web_page('t', [], [Section('one', 'One', [Grid({'name': chart})])])
    told = page[page.index('<figure') : page.index('</figure>')]
    assert 'role="img" aria-label="Title. What it shows."' in told
    assert '<th scope="row">1</th><td>2</td>' in told
    assert 'data-glyphs="Title/a"' in told
    assert f'--light: {BLUE}; --dark: {dark_colors()[BLUE.lower()]}' in told
