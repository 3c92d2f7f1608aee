"""Settings of the documentation site; `bash launch/docs.sh` builds it."""

import re

import areal_jax

project = 'areal_jax'
author = 'the areal_jax authors'
release = areal_jax.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc']
exclude_patterns = ['_build', 'notebooks/.ipynb_checkpoints']
html_theme = 'furo'
html_title = f'areal_jax {release}'
myst_enable_extensions = ['colon_fence', 'dollarmath']
myst_heading_anchors = 3
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
nitpicky = False


def lay_out(app, what, name, obj, options, lines):
    """The docstrings of the project are plain text: a sentence, then shapes and tables that keep their lines."""
    first, _, rest = '\n'.join(lines).strip().partition('\n\n')
    text = re.sub(r'`([^`]+)`', r'``\1``', ' '.join(first.split())).replace('*', r'\*')
    lines[:] = [text, '']
    if rest.strip():
        lines += ['::', '', *(f'    {line}' for line in rest.splitlines()), '']


def setup(app):
    app.connect('autodoc-process-docstring', lay_out)
