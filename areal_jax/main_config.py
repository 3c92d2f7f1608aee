"""Look up fields of the config: areal-config FIELD|SECTION|WORD ...

FIELD is 'staleness.eta', SECTION is 'staleness'; other words find the fields that have them in name, rule or meaning,
and of several words all. Without words it lists the sections, and the configs that come with the package.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence

from areal_jax.app.ending import end_command
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog='areal-config', description=__doc__)
    parser.add_argument('words', nargs='*', metavar='FIELD|SECTION|WORD', help='what to look up')
    words = parser.parse_args(arguments).words
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


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
