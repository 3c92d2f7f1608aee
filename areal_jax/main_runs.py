"""areal-runs: lists the runs below a directory with state, updates, scores and differing config fields."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Parser, local_path, parse
from areal_jax.errors import ExitCode

# keys of run_list.ORDERS, which --help does not import
_ORDERS = ('active', 'name', 'reward', 'score', 'size', 'started', 'state', 'update', 'wall')


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _list(options), doing=f'reading {options.directory}')


def _list(options: argparse.Namespace) -> int:
    from areal_jax.app.workdir.run_list import ORDERS, as_json, find_differences, list_runs, render_runs, select_runs
    from areal_jax.config import default_config, flatten

    entries = select_runs(list_runs(pathlib.Path(options.directory)), options.filters)
    if options.sort != 'name':
        entries = sorted(entries, key=ORDERS[options.sort])
    defaults = dict(flatten(default_config()))
    differences = find_differences(entries, defaults if options.all else None)
    if options.json:
        print(json.dumps(as_json(entries, differences), indent=1))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(render_runs(entries, differences, defaults, time.time(), width))
    return ExitCode.FINISHED


def _build_parser() -> Parser:
    parser = Parser('areal-runs')
    parser.add_argument(
        'directory', metavar='DIR', type=local_path, help='A directory with workdirs in it, at any depth, or one.'
    )
    parser.add_argument(
        'filters', nargs='*', metavar='FILTER', help='Only such runs: staleness.eta=4, state=failed, name=tiny*.'
    )
    parser.add_argument('--sort', choices=_ORDERS, default='name', help='By name, sweeps together.')
    parser.add_argument('--all', action='store_true', help='Every field that differs from its default.')
    parser.add_argument('--json', action='store_true', help='All that is known, with the whole config of each run.')
    return parser


COMMAND = Command(
    program='areal-runs',
    purpose='Lists the runs below a directory: state, updates, scores, and the fields in which their configs differ.',
    usage=('DIR [FILTER ...] [--sort=ORDER] [--all] [--json]',),
    flags=_build_parser,
    examples="""
    # all runs
    areal-runs runs
    # the finished ones of an eta
    areal-runs runs staleness.eta=4 state=finished
    """,
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
