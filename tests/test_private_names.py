"""Every import of a private module of another package is listed, with its reason, in docs/design/private_names.md."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIST = ROOT / 'docs' / 'design' / 'private_names.md'


def private_imports(source: str) -> set[str]:
    """'jax._src.distributed' of `from jax._src import distributed`: absolute imports with a part that begins with _."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f'{node.module}.{alias.name}' for alias in node.names}
    return {name for name in found if re.search(r'(^|\.)_[a-z]', name)}


def test_private_imports_are_listed():
    used = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / 'areal_jax').rglob('*.py')
        for name in private_imports(path.read_text())
    }
    rows = re.findall(r'^\| `([\w.]+)`.*? \| `([\w./]+)` \|', LIST.read_text(), re.MULTILINE)
    listed = {(path, name) for name, path in rows}
    missing = {(path, name) for path, name in used if not any(p == path and n.startswith(name) for p, n in listed)}
    assert missing == set()
    gone = {
        (p, n) for p, n in listed if '_src' in n and not any(p == path and n.startswith(name) for path, name in used)
    }
    assert gone == set()


@pytest.mark.parametrize(
    ('source', 'found'),
    [
        ('from jax._src import distributed', {'jax._src.distributed'}),
        ('import optax._src.base', {'optax._src.base'}),
        ('from __future__ import annotations', set()),
        ('from areal_jax.learning.learner import SpmdLearner', set()),
        ('from orbax import _private', {'orbax._private'}),
    ],
)
def test_the_check_sees_private_imports(source, found):
    assert private_imports(source) == found
