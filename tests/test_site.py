"""The documentation site: no warning, no request to the network, every page reached, docstrings laid out."""

import dataclasses
import html.parser
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parent.parent / 'docs'


def test_a_page_links_no_text_outside_the_site():
    """A Markdown file that is no page of docs/ is a warning, which ends the build; other files are copied."""
    outside = [
        f'{page.relative_to(DOCS)}: {link}'
        for page in DOCS.rglob('*.md')
        for link in re.findall(r'\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)', page.read_text())
        if not (page.parent / link).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


def test_every_page_is_in_a_table_of_contents_and_links_no_folder():
    """Both are warnings of the build, which is slow."""
    pages = {page: page.read_text() for page in DOCS.rglob('*.md') if '_build' not in page.parts}
    listed = {DOCS / 'index.md'}
    for page, text in pages.items():
        for table in re.findall(r'```\{toctree\}\n(.*?)```', text, re.DOTALL):
            entries = [line for line in table.splitlines() if line and not line.startswith(':')]
            listed |= {found for entry in entries for found in page.parent.glob(f'{entry}.md')}
    assert sorted(str(page.relative_to(DOCS)) for page in pages.keys() - listed) == []
    assert [page for page, text in pages.items() if re.search(r'\]\((?!https?:)[^)\s]+/\)', text)] == []


@dataclasses.dataclass
class Fields:
    """A class whose fields are documented."""

    count: int  # of `answers`
    # the name
    # of a run
    name: str = 'a'
    _hidden: int = 0


class Requests(html.parser.HTMLParser):
    """Collects what a browser fetches to show a page; a link that a reader may follow is none."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        names = ('src', 'srcset', 'poster', 'data') if tag == 'a' else ('src', 'srcset', 'poster', 'data', 'href')
        self.found += [value for name, value in attrs if name in names and re.match(r'(https?:)?//', value or '')]


def list_requests(page: str) -> list[str]:
    parser = Requests()
    parser.feed(page)
    return parser.found


def test_requests_are_seen():
    page = '<script src="https://a/b.js"></script><link href="//a/c.css"><a href="https://a"></a><img src="d.png">'
    assert list_requests(page) == ['https://a/b.js', '//a/c.css']


def test_docstrings_and_comments_of_fields_are_laid_out():
    settings = runpy.run_path(str(DOCS / 'conf.py'))
    assert settings['read_fields'](Fields) == [
        ('count', '`int`, of `answers`'),
        ('name', "`str = 'a'`, the name of a run"),
    ]
    assert settings['escape']('a * b_ of `c_`, FILE:NAME') == r'a \* b\_ of ``c_``, FILE\:NAME'
    assert settings['lay_out_part']('Args:\n  a: one') == ['Args:', '  a: one']
    assert settings['lay_out_part']('a  table')[:2] == ['::', '']


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_the_network_for_nothing(tmp_path):
    command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-b', 'html', str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent)
    assert (built.returncode, built.stderr) == (0, '')
    pages = {page.relative_to(DOCS).with_suffix('') for page in DOCS.rglob('*.md') if '_build' not in page.parts}
    assert pages <= {page.relative_to(tmp_path).with_suffix('') for page in tmp_path.rglob('*.html')}
    assert {request for page in tmp_path.rglob('*.html') for request in list_requests(page.read_text())} == set()
    styles = [page.read_text() for page in tmp_path.rglob('*.css')]
    assert [text for text in styles if re.search(r"""url\(["']?(https?:)?//|@import ["'](https?:)?//""", text)] == []
    assert '<math' in (tmp_path / 'staleness.html').read_text()
