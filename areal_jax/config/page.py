"""The page docs/config.md, made from the declared fields; tests/config/test_config.py compares the two.

python -m areal_jax.config.page > docs/config.md
"""

from __future__ import annotations

from areal_jax.config.declarations import SECTIONS
from areal_jax.config.fields import Field

COMMAND = 'python -m areal_jax.config.page > docs/config.md'
_HEAD = f"""# Every field of the config

This page is made from [`areal_jax/config/declarations.py`](../areal_jax/config/declarations.py) by `{COMMAND}`.

An experiment file starts from `areal_jax.config.default_config()` and sets what differs; the command line sets any
field with `--config.SECTION.FIELD=VALUE`. In the last column, a word before a colon names the choice, the task
or the optimizer that reads the field. Rules that join several fields are in
[`areal_jax/config/constraints.py`](../areal_jax/config/constraints.py).
"""


def render() -> str:
    """The page: a heading and a table for each section."""
    return '\n'.join([_HEAD, *(_render_section(name) for name in SECTIONS)])


def _render_section(name: str) -> str:
    section = SECTIONS[name]
    rows = [_render_row(f'{name}.{key}', field) for key, field in section.items()]
    head = [f'## {name}', '', f'{section.title}.', '', '| field | default | it must | meaning |', '|---|---|---|---|']
    return '\n'.join([*head, *rows, ''])


def _render_row(path: str, field: Field) -> str:
    cells = (f'`{path}`', f'`{field.default!r}`', field.rule(), field.meaning)
    return f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in cells)} |'


if __name__ == '__main__':
    print(render(), end='')
