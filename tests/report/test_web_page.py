"""One page of HTML: nothing from a run is markup, and nothing is fetched."""

from __future__ import annotations

import re

import pytest

from areal_jax.installation import describe_install
from areal_jax.report.figures import plain_text
from areal_jax.report.parts import Items, Table, Text
from areal_jax.report.web_page import Absent, Folded, Section, describe_missing_library, render_web_page

EVIL = '<script>alert("x")</script>'


def test_every_text_is_escaped_and_code_is_marked():
    blocks = [
        Text(f'{EVIL} `{EVIL}`'), Items([EVIL]), Table((EVIL, ''), [(EVIL, '1')]), Absent(EVIL),
        Folded(EVIL, Table(('a', 'b'), [(EVIL, EVIL)])), None, Text(''),
    ]  # fmt: skip
    page = render_web_page(EVIL, [Text(EVIL)], [Section('one', EVIL, blocks)])
    assert '<script' not in page  # no figures, so no script of ours either
    assert page.count('&lt;script&gt;') == 14
    assert '<code>&lt;script&gt;' in page


def test_an_empty_section_still_stands():
    page = render_web_page('t', [], [Section('one', 'One', [Table(('a', 'b'), [])])])
    assert '<section id="one">' in page
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
