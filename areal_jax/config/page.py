"""The declared fields as text: the page docs/config.md, and the output of areal-config on a terminal.

python -m areal_jax.config.page > docs/config.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from areal_jax.config.declarations import FIELDS, SECTIONS
from areal_jax.config.fields import ConfigError, Field
from areal_jax.errors import suggest

COMMAND = 'python -m areal_jax.config.page > docs/config.md'
_HEAD = f"""# Every field of the config

After this page you can set any field of a run; `areal-config WORD` prints the fields that match a word. It is made from
[`areal_jax/config/declarations.py`](../areal_jax/config/declarations.py) by `{COMMAND}`.

An experiment file starts from `areal_jax.config.default_config()` and sets what differs; the command line sets any
field with `--config.SECTION.FIELD=VALUE`. In the last column, a word before a colon names the choice, the task
or the optimizer that reads the field. Rules that join several fields are in
[`areal_jax/config/__init__.py`](../areal_jax/config/__init__.py).
"""


def render() -> str:
    """The page: a heading and a table for each section."""
    return '\n'.join([_HEAD, *(_render_section(name) for name in SECTIONS)])


def find_fields(words: Sequence[str]) -> list[str]:
    """The fields that match each of the words; fields whose name is or contains the first word come first.

    Args:
      words: 'staleness.eta' or 'staleness' matches that field or section only; others match in name, rule or meaning.

    Raises ConfigError if no field matches.
    """
    found = [path for path in FIELDS if all(_matches(path, word.casefold()) for word in words)]
    if not found:
        shown, known = ' '.join(words), [*FIELDS, *SECTIONS, *(path.partition('.')[2] for path in FIELDS)]
        near = suggest(shown, known) or '; areal-config without words lists the sections'
        raise ConfigError(f'no field of the config matches {shown!r}{near}')
    first = words[0].casefold()
    return sorted(found, key=lambda path: (first not in path.split('.'), first not in path))


def render_fields(paths: Sequence[str], columns: int = 100) -> str:
    """Default, rule and meaning of each field, in lines of at most `columns` characters."""
    return '\n\n'.join('\n'.join(_describe(path, FIELDS[path], columns)) for path in paths)


def render_sections() -> str:
    """A line for each section: name, number of fields, title."""
    return '\n'.join(f'  {name:<16}{len(section):>2}  {section.title}' for name, section in SECTIONS.items())


def _matches(path: str, word: str) -> bool:
    if word in FIELDS or word in SECTIONS:
        return path == word or path.startswith(f'{word}.')
    field = FIELDS[path]
    return any(word in text.casefold() for text in (path, field.rule(), field.meaning))


def _describe(path: str, field: Field, columns: int) -> list[str]:
    lines = [f'--config.{path}={field.default!r}']
    for text in (f'must {field.rule()}', field.meaning):
        lines += textwrap.wrap(text, columns, initial_indent='    ', subsequent_indent='    ', break_long_words=False)
    return lines


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
