"""Plain English: how docstrings begin, and turns of phrase in code and pages that must be read twice."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
# a docstring begins with a verb, or with the noun that it describes
REFUSED = re.compile(r'(What|Of|How|The same|Those|Where|From|Which|Whether those|As|For who|Beside|With)\b')
TURNS = re.compile(
    r'\b(those of|that of|is none|are none|none of the|of its own|of their own|so many|so much|beside|goes on|go on'
    r'|nobody|what it)\b'
)
MOST_REFUSED = 0.01  # of all docstrings
MOST_IN_CODE, MOST_IN_PAGES = 1.5, 6.0  # turns in a thousand lines
GENERATED = ('config.md', 'commands.md')  # made from texts of the code


@functools.cache
def list_docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text for text in found if text]


def list_comments(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def count_turns(texts: list[str]) -> int:
    return sum(len(TURNS.findall(text)) for text in texts)


def test_docstrings_begin_with_a_verb_or_a_noun():
    sources = [path.read_text() for path in sorted((ROOT / 'areal_jax').rglob('*.py'))]
    texts = [text for source in sources for text in list_docstrings(source)]
    refused = [text.splitlines()[0] for text in texts if REFUSED.match(text)]
    assert len(refused) <= MOST_REFUSED * len(texts), refused[:20]


def test_the_code_is_read_once():
    sources = [path.read_text() for path in sorted((ROOT / 'areal_jax').rglob('*.py'))]
    turns = sum(count_turns(list_docstrings(source) + list_comments(source)) for source in sources)
    assert turns <= MOST_IN_CODE * sum(source.count('\n') for source in sources) / 1000


def test_pages_are_read_once():
    """Pages of the log keep the words of their day."""
    pages = [path for path in (ROOT / 'docs').rglob('*.md') if path.parent.name != 'log' and path.name not in GENERATED]
    texts = [path.read_text() for path in pages]
    assert count_turns(texts) <= MOST_IN_PAGES * sum(text.count('\n') for text in texts) / 1000


def test_what_is_refused_is_seen():
    source = 'def f():\n    """Of those of a run, what it keeps."""\n    return 1  # nobody goes on\n'
    assert [bool(REFUSED.match(text)) for text in list_docstrings(source)] == [True]
    assert count_turns(list_docstrings(source) + list_comments(source)) == 4
    assert not REFUSED.match('Offers a slot.')
