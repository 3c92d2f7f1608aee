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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-b', 'html', str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent)
    assert (built.returncode, built.stderr) == (0, '')
    pages = {page.relative_to(DOCS).with_suffix('') for page in DOCS.rglob('*.md') if '_build' not in page.parts}
    assert pages <= {page.relative_to(tmp_path).with_suffix('') for page in tmp_path.rglob('*.html')}
