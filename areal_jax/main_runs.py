"""List runs: python -m areal_jax.main_runs DIR [FIELD=VALUE ...] [--sort=ORDER] [--all] [--json].

A line for each run, supervised training and evaluation below DIR: its state, updates, scores, and the fields of the
config in which the listed runs differ.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence

from areal_jax.app.ending import end_command
from areal_jax.app.run_list import list_runs
from areal_jax.app.run_table import ORDERS, as_json, find_differences, render_runs, select_runs
from areal_jax.config import default_config, flatten
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, read, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog='areal_jax.main_runs', description=__doc__.splitlines()[0])
    parser.add_argument('directory', metavar='DIR', help='a directory with workdirs in it, at any depth, or one')
    parser.add_argument(
        'filters', nargs='*', metavar='FIELD=VALUE', help='only such runs: staleness.eta=4, state=failed, name=tiny*'
    )
    parser.add_argument('--sort', choices=sorted(ORDERS), default='name', help='default: by name, sweeps together')
    parser.add_argument('--all', action='store_true', help='every field that differs from its default')
    parser.add_argument('--json', action='store_true', help='all that is known, with the whole config of each run')
    options = parser.parse_intermixed_args(arguments)
    return end_command(lambda: _list(options), doing=f'reading {options.directory}')


def _list(options: argparse.Namespace) -> int:
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


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
