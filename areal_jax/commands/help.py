"""--help and --version of every command, in one form and without importing jax."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from areal_jax.app.workdir.environment import git_commit
from areal_jax.commands.command import Command, Flag, list_flags
from areal_jax.errors import ExitCode
from areal_jax.installation import __version__

WIDTH = 80  # columns where there is no terminal
_HELP = ('--help', '-help', '-h', '-?', '--helpfull', '--helpshort')
_NARROW, _INDENT, _MOST_TERM = 40, 2, 30
_DIGITS = 12  # of a commit


def answer(command: Command, words: Sequence[str]) -> None:
    """Prints the help or the version where the words after the program ask for it, and ends the process."""
    words = words[: words.index('--')] if '--' in words else words
    if any(word in _HELP for word in words):
        print(render_help(command, find_width()))
    elif '--version' in words:
        print(describe_version())
    else:
        return
    raise SystemExit(ExitCode.FINISHED)


def find_width() -> int:
    """Columns of the terminal."""
    return max(_NARROW, shutil.get_terminal_size((WIDTH, 24)).columns)


def describe_version() -> str:
    """'areal_jax 0.1.0 (commit 1f0c52b6a9de), jax 0.10.2, python 3.11.9'."""
    commit = git_commit()
    shown = f' (commit {commit[:_DIGITS]}{"-dirty" if commit.endswith("-dirty") else ""})' if commit else ''
    try:
        jax = importlib.metadata.version('jax')
    except importlib.metadata.PackageNotFoundError:
        jax = 'not installed'
    return f'areal_jax {__version__}{shown}, jax {jax}, python {platform.python_version()}'


def render_help(command: Command, width: int = WIDTH) -> str:
    """Purpose, usage, flags with defaults, fields of the config, two examples or more, exit codes."""
    parts = [
        _wrap(command.purpose, width),
        _render_usage(command, width),
        *([_wrap(command.notes, width)] if command.notes else []),
        _render_section('Flags', [(flag.form, describe_flag(flag)) for flag in list_flags(command)], width),
        *(_render_fields(command, width) if command.fields else []),
        _render_examples(command, width),
        _render_section('Exit codes', [(str(int(code)), text) for code, text in sorted(command.exits.items())], width),
    ]
    return '\n\n'.join(parts)


def describe_flag(flag: Flag) -> str:
    """What a flag means, whether it must be given, and its default: a sentence each."""
    listed = f' One of {", ".join(flag.choices)}.' if flag.choices else ''
    default = f' Default: {flag.default}.' if flag.default else ''
    return f'{flag.meaning}{listed}{" Required." if flag.required else default}'


def describe_sections() -> str:
    """'run 10, model 14, ...': the sections of the config, with their numbers of fields."""
    from areal_jax.config.declarations import SECTIONS

    return ', '.join(f'{name} {len(fields)}' for name, fields in SECTIONS.items())


def list_fields(command: Command) -> list[tuple[str, str]]:
    """('run.steps=20', what it means) of the fields that users of a command set most, with their defaults."""
    from areal_jax.config.declarations import FIELDS

    return [(f'{name}={_show_value(FIELDS[name].default)}', FIELDS[name].meaning) for name in command.fields]


def _show_value(value: object) -> str:
    """As the command line would give it."""
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    return str(value) or "''"


def _render_usage(command: Command, width: int) -> str:
    module = f'\n{" " * _INDENT}(the same: python -m areal_jax {command.word} ...)' if command.word else ''
    lines = [
        textwrap.fill(
            f'{command.program} {form}'.strip(),
            width,
            initial_indent=' ' * _INDENT,
            subsequent_indent=' ' * 3 * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for form in command.usage
    ]
    return '\n'.join(['Usage:', *lines]) + module


def _render_fields(command: Command, width: int) -> list[str]:
    sections = (
        f'Sections of the config, with their numbers of fields: {describe_sections()}. areal-config FIELD explains a '
        'field, and docs/config.md lists them all.'
    )
    title = f'Fields most used, with their defaults (--config.{list_fields(command)[0][0]})'
    return [_wrap(sections, width), _render_section(title, list_fields(command), width)]


def _render_examples(command: Command, width: int) -> str:
    """With a backslash at the end of a line that goes on, as a shell reads it."""
    lines = ['Examples, in a clone of the repository:']
    for example in command.examples:
        purpose = textwrap.wrap(example.purpose, width - 2 * _INDENT, break_long_words=False)
        lines += [f'{" " * _INDENT}# {part}' for part in purpose]
        lines += _break_line(example.line, width - _INDENT)
    return '\n'.join(lines)


def _break_line(line: str, width: int) -> list[str]:
    """The lines of a command; an argument in quotes is not broken."""
    words, lines = re.findall(r'(?:[^\s"]|"[^"]*")+', line), ['']
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += ' \\'
            lines.append(' ' * _INDENT + word)
        else:
            lines[-1] += f' {word}' if lines[-1] else word
    return [' ' * _INDENT + part for part in lines]


def _render_section(title: str, rows: Sequence[tuple[str, str]], width: int) -> str:
    return '\n'.join([f'{title}:', *render_rows(rows, width)])


def render_rows(rows: Sequence[tuple[str, str]], width: int) -> Iterable[str]:
    """Two columns; a term that is longer than its column has a line of its own."""
    longest = max((len(term) for term, _ in rows), default=0)
    column = longest if longest <= max(_MOST_TERM, width // 2) else _MOST_TERM
    if width - column < _NARROW:
        column = min(column, _INDENT)
    indent = ' ' * (2 * _INDENT + column)
    for term, text in rows:
        lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False) or ['']
        if len(term) > column:
            yield f'{" " * _INDENT}{term}'
            yield from (f'{indent}{line}' for line in lines)
        else:
            yield f'{" " * _INDENT}{term:<{column}}{" " * _INDENT}{lines[0]}'.rstrip()
            yield from (f'{indent}{line}' for line in lines[1:])


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
