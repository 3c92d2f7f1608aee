"""Rebuild the report, the timeline and the plots of a run: python -m areal_jax.main_report --workdir=DIR.

The run may have finished, have been stopped or killed at any moment, or be running still.
--compare RUN RUN ... sets the reports of several workdirs beside each other, on the terminal and in compare.html.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import end_command
from areal_jax.app.rebuild import read_run, rebuild_report
from areal_jax.errors import ExitCode, UserError
from areal_jax.files import write_text
from areal_jax.report.comparison import compare, name_runs, render_comparison
from areal_jax.report.comparison_page import FILE as COMPARISON
from areal_jax.report.comparison_page import render_comparison_page
from areal_jax.report.report import FILE, PAGE
from areal_jax.report.web_page import describe_missing_library


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, rebuild or compare, say where; returns the exit status."""
    parser = argparse.ArgumentParser(prog='areal_jax.main_report', description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--workdir', help='work directory of a run, finished or not')
    what.add_argument('--compare', nargs='+', metavar='RUN', help='work directories of two or more runs')
    parser.add_argument(
        '--plots', action=argparse.BooleanOptionalAction, default=True, help='draw the pictures and report.html too'
    )
    parser.add_argument('--json', default='', metavar='FILE', help='copy report.json there too')
    parser.add_argument('--out', default='', metavar='FILE', help=f'page of the comparison, {COMPARISON} by default')
    options = parser.parse_args(arguments)
    if options.compare:
        out = pathlib.Path(options.out or COMPARISON)
        return end_command(lambda: _compare(options, out), doing=f'writing to {out}')
    return end_command(lambda: _rebuild(options), doing=f'writing to {options.workdir}')


def _rebuild(options: argparse.Namespace) -> int:
    workdir, copy = pathlib.Path(options.workdir), pathlib.Path(options.json) if options.json else None
    if options.out:
        raise UserError(f'--out={options.out} names the page of --compare; leave it out with --workdir')
    if copy:
        _require_place('--json', copy)
    rebuild_report(workdir, options.plots)
    if copy:
        write_text(copy, (workdir / FILE).read_text())
    print(f'{options.workdir}/{PAGE}')
    return ExitCode.FINISHED


def _compare(options: argparse.Namespace, out: pathlib.Path) -> int:
    if options.json:
        raise UserError(f'--json={options.json} copies the report of --workdir; leave it out with --compare')
    _require_place('--out', out)
    workdirs = [pathlib.Path(workdir) for workdir in options.compare]
    names = name_runs(workdirs)
    comparison = compare({name: read_run(workdir) for name, workdir in zip(names, workdirs, strict=True)})
    missing = describe_missing_library(str(out))
    page = '' if missing or not options.plots else render_comparison_page(comparison)
    print(render_comparison(comparison))
    if page:
        write_text(out, page)
        print(f'\n{out}')
    elif missing:
        print(missing, file=sys.stderr)
    return ExitCode.FINISHED


def _require_place(option: str, path: pathlib.Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f'{option}={path} is a directory, or in none; name a file in a directory that exists')


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
