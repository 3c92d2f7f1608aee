"""Settings of the documentation site; `bash launch/docs.sh` builds it. No page of it asks the network for anything."""

import ast
import inspect
import io
import re
import textwrap
import tokenize

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.writers.html5 import HTML5Translator

import areal_jax

project = 'areal_jax'
author = 'the areal_jax authors'
release = areal_jax.__version__

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx_design',
    'sphinx_copybutton',
]
exclude_patterns = ['_build', 'notebooks/.ipynb_checkpoints']
html_theme = 'furo'
html_title = f'areal_jax {release}'
html_static_path = ['static']
html_css_files = ['site.css']
html_math_renderer = 'mathml'
html_show_sphinx = False
myst_enable_extensions = ['colon_fence', 'dollarmath']
myst_heading_anchors = 3
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autosummary_generate = False
napoleon_numpy_docstring = False
nitpicky = False

SECTION = re.compile(r'(Args|Returns|Raises):$')


def visit_math(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula as MathML, which browsers draw without a script."""
    kind = 'block' if isinstance(node, nodes.math_block) else 'inline'
    formula = convert(node.astext(), display=kind)
    translator.body.append(f'<div class="formula">{formula}</div>\n' if kind == 'block' else formula)
    raise nodes.SkipNode


def lay_out(app, what, name, obj, options, lines):
    """Makes reStructuredText of a docstring, which is plain text: prose, sections, and tables that keep their lines."""
    parts = re.split(r'\n\s*\n', '\n'.join(lines).strip())
    lines[:] = [line for part in parts for line in (*lay_out_part(part), '')]
    if inspect.isclass(obj) and obj.__module__.startswith('areal_jax.'):
        lines += [f'* **{field}**: {escape(text)}' for field, text in read_fields(obj)]


def lay_out_part(part: str) -> list[str]:
    lines = part.splitlines()
    if lines and SECTION.match(lines[0]):
        return [lines[0], *(escape(line) for line in lines[1:])]
    if any(line.startswith(' ') or re.search(r'\S {2,}\S', line) for line in lines):
        return ['::', '', *(f'    {line}' for line in lines)]
    return [escape(line) for line in lines]


def escape(text: str) -> str:
    """Code between backticks stays code; all other signs of reStructuredText are plain."""
    pieces = re.split(r'`([^`]+)`', text)  # every second one is code
    plain = [re.sub(r'([*|\\])|(?<=\w)(_)(?!\w)|(?<=\w)(:)(?=\w)', r'\\\1\2\3', piece) for piece in pieces]
    return ''.join(f'``{pieces[at]}``' if at % 2 else plain[at] for at in range(len(pieces)))


def read_fields(kind: type) -> list[tuple[str, str]]:
    """Name, and type with comment, of every public field of a class, from its source."""
    source = textwrap.dedent(inspect.getsource(kind))
    marks = [m for m in tokenize.generate_tokens(io.StringIO(source).readline) if m.type == tokenize.COMMENT]
    comments = {mark.start[0]: mark.string.lstrip('# ') for mark in marks}
    alone = {mark.start[0] for mark in marks if mark.line.strip().startswith('#')}
    found = []
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        said = [comments[line] for line in range(first, (node.end_lineno or first) + 1) if line in comments]
        is_typed = isinstance(node, ast.AnnAssign)
        name = ast.unparse(node.target if is_typed else node.targets[0])
        parts = [node.annotation, node.value] if is_typed else [node.value]
        shown = ' = '.join(ast.unparse(part) for part in parts if part)
        if not name.startswith('_'):
            found.append((name, f'`{shown}`' + (f', {" ".join(said)}' if said else '')))
    return found


def shorten(app, what, name, obj, options, signature, annotation):
    """A class is shown without its fields, which follow it one by one."""
    return ('', None) if what == 'class' and inspect.isclass(obj) else None


def setup(app):
    app.add_html_math_renderer('mathml', (visit_math, None), (visit_math, None))
    app.connect('autodoc-process-docstring', lay_out, priority=400)  # before napoleon reads the sections
    app.connect('autodoc-process-signature', shorten)
