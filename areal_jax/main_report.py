"""Rebuild the report, the timeline and the plots of a run: python -m areal_jax.main_report --workdir=DIR."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import end_command
from areal_jax.app.rebuild import rebuild_report
from areal_jax.errors import ExitCode
from areal_jax.report.report import PAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, rebuild, say where; returns the exit status."""
    parser = argparse.ArgumentParser(prog='areal_jax.main_report', description=__doc__)
    parser.add_argument('--workdir', required=True, help='work directory of a run, finished or not')
    parser.add_argument('--plots', action=argparse.BooleanOptionalAction, default=True, help='draw the pictures too')
    options = parser.parse_args(arguments)

    def rebuild() -> int:
        rebuild_report(pathlib.Path(options.workdir), options.plots)
        print(f'{options.workdir}/{PAGE}')
        return ExitCode.FINISHED

    return end_command(rebuild, doing=f'writing to {options.workdir}')


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
