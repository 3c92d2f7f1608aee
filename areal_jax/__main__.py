"""`python -m areal_jax` lists the commands, and `python -m areal_jax train ...` runs one."""

from __future__ import annotations

import importlib
import sys

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import describe_version, find_commands, find_width, list_words, render_rows
from areal_jax.errors import ExitCode, UserError

_HELP = ('help', '--help', '-h', '-?')


def main() -> int:
    """Lists, or runs what the first word names; returns the exit code."""
    word, *rest = sys.argv[1:] or ['help']
    if word in _HELP and not rest:
        print(render_list(find_width()))
        return ExitCode.FINISHED
    if word == '--version':
        print(describe_version())
        return ExitCode.FINISHED
    if word in _HELP:
        word, rest = rest[0], ['--help']
    word = word.removeprefix('areal-').replace('_', '-')
    words = list_words()
    if word not in words:
        from areal_jax.errors import suggest

        near = suggest(word, words) or '; python -m areal_jax lists them all'
        raise UserError(f'there is no command {word!r}{near}')
    sys.argv = [f'areal-{word}', *rest]
    importlib.import_module(words[word]).run()
    return ExitCode.FINISHED


def render_list(width: int) -> str:
    """Every command with its purpose."""
    rows = [(command.program, command.purpose) for command in find_commands()]
    return '\n'.join([
        'Asynchronous reinforcement learning for language models in JAX.',
        '',
        'Usage:',
        '  python -m areal_jax COMMAND ...   runs areal-COMMAND; a command answers --help and --version',
        '',
        'Commands:',
        *render_rows(rows, width),
    ])  # fmt: skip


if __name__ == '__main__':
    sys.exit(end_command(main, doing='writing'))
