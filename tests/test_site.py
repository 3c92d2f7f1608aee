"""The documentation site is built without a warning, and every page is reached from its first one."""

import pathlib
import re
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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-b', 'html', str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent)
    assert (built.returncode, built.stderr) == (0, '')
    pages = {page.relative_to(DOCS).with_suffix('') for page in DOCS.rglob('*.md') if '_build' not in page.parts}
    assert pages <= {page.relative_to(tmp_path).with_suffix('') for page in tmp_path.rglob('*.html')}
