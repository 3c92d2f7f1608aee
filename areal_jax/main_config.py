"""areal-config: looks up fields of the config.

FIELD is 'staleness.eta', SECTION is 'staleness'; other words find the fields with all these words in name, rule or
meaning. Without words it lists the sections, and the configs that come with the package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Parser, parse
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the fields; returns the exit code."""
    words = parse(COMMAND, arguments).words
    return end_command(lambda: _print(words), doing='printing fields')


def _print(words: Sequence[str]) -> int:
    from areal_jax.config.page import find_fields, render_fields, render_sections
    from areal_jax.installation import list_configs, locate_file

    if words:
        print(render_fields(find_fields(words)))
        return ExitCode.FINISHED
    print('usage: areal-config FIELD|SECTION|WORD ...\n')
    print(render_sections())
    print(f'\nConfigs for --config=NAME, in {locate_file("configs")}:\n')
    width = max(map(len, list_configs()))
    for name in list_configs():
        path = locate_file(f'configs/{name}.py')
        purpose = (ast.get_docstring(ast.parse(path.read_bytes())) or '').partition('\n')[0]
        print(f'  {name:<{width}}  {purpose}')
    return ExitCode.FINISHED


def _build_parser() -> Parser:
    parser = Parser('areal-config')
    parser.add_argument('words', nargs='*', metavar='WORD', help='A field, a section, or words of a meaning.')
    return parser


COMMAND = Command(
    program='areal-config',
    purpose='Prints fields of the config with default, allowed values and meaning, found by name, section or word.',
    usage=('[WORD ...]',),
    flags=_build_parser,
    examples="""
    # one field
    areal-config staleness.eta
    # all fields that say something of memory
    areal-config memory
    """,
    notes='Without words it lists the sections of the config, and the configs that come with the package.',
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
