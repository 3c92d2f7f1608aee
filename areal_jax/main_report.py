"""Rebuild the report, the timeline and the plots of a run: python -m areal_jax.main_report --workdir=DIR.

The run may have finished, have been stopped or killed at any moment, or be running still.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import end_command
from areal_jax.app.rebuild import rebuild_report
from areal_jax.errors import ExitCode, UserError
from areal_jax.files import write_text
from areal_jax.report.report import FILE, PAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, rebuild, say where; returns the exit status."""
    parser = argparse.ArgumentParser(prog='areal_jax.main_report', description=__doc__)
    parser.add_argument('--workdir', required=True, help='work directory of a run, finished or not')
    parser.add_argument('--plots', action=argparse.BooleanOptionalAction, default=True, help='draw the pictures too')
    parser.add_argument('--json', default='', metavar='FILE', help='copy report.json there too')
    options = parser.parse_args(arguments)
    workdir, copy = pathlib.Path(options.workdir), pathlib.Path(options.json) if options.json else None

    def rebuild() -> int:
        if copy and (copy.is_dir() or not copy.parent.is_dir()):
            raise UserError(f'--json={copy} is a directory, or in none; name a file in a directory that exists')
        rebuild_report(workdir, options.plots)
        if copy:
            write_text(copy, (workdir / FILE).read_text())
        print(f'{options.workdir}/{PAGE}')
        return ExitCode.FINISHED

    return end_command(rebuild, doing=f'writing to {options.workdir}')


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
