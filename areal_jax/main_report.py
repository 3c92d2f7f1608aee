"""areal-report: rebuilds the report, the timeline and the plots of a run from its files.

The run may have finished, have been stopped or killed at any moment, or still be running.
--compare RUN RUN ... compares the reports of several workdirs side by side, on the terminal and in compare.html.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Parser, local_path, parse, require_place
from areal_jax.errors import ExitCode, UserError
from areal_jax.files import write_text

COMPARISON = 'compare.html'  # default of --out


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuilds the report or compares runs, and prints where; returns the exit code."""
    options = parse(COMMAND, arguments)
    if options.compare:
        out = pathlib.Path(options.out or COMPARISON)
        return end_command(lambda: _compare(options, out), doing=f'writing to {out}')
    return end_command(lambda: _rebuild(options), doing=f'writing to {options.workdir}')


def _rebuild(options: argparse.Namespace) -> int:
    from areal_jax.app.run.reports import rebuild_report
    from areal_jax.report.report import FILE, PAGE

    workdir, copy = pathlib.Path(options.workdir), pathlib.Path(options.json) if options.json else None
    if options.out:
        raise UserError(f'--out={options.out} names the page of --compare; leave it out with --workdir')
    if copy:
        require_place('--json', copy)
    rebuild_report(workdir, options.plots)
    if copy:
        write_text(copy, (workdir / FILE).read_text())
    print(f'{options.workdir}/{PAGE}')
    return ExitCode.FINISHED


def _compare(options: argparse.Namespace, out: pathlib.Path) -> int:
    from areal_jax.app.run.reports import read_run
    from areal_jax.report.pages.comparison_page import compare, name_runs, render_comparison, render_comparison_page
    from areal_jax.report.pages.web_page import describe_missing_library

    if options.json:
        raise UserError(f'--json={options.json} copies the report of --workdir; leave it out with --compare')
    require_place('--out', out)
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


def _build_parser() -> Parser:
    parser = Parser('areal-report')
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--workdir', type=local_path, help='Work directory of a run, finished or not.')
    what.add_argument(
        '--compare', nargs='+', metavar='RUN', type=local_path, help='Work directories of two or more runs.'
    )
    parser.add_argument(
        '--plots', action=argparse.BooleanOptionalAction, default=True,
        help='Draw the pictures and report.html too; --no-plots leaves them out.',
    )  # fmt: skip
    parser.add_argument('--json', default='', type=local_path, help='Copy report.json there too.')
    parser.add_argument('--out', default='', type=local_path, help=f'Page of the comparison; without it {COMPARISON}.')
    return parser


COMMAND = Command(
    program='areal-report',
    purpose='Makes the report, the timeline and the plots of a run again, or sets several runs beside each other.',
    usage=('--workdir=RUN [--no-plots] [--json=FILE]', '--compare RUN RUN ... [--no-plots] [--out=FILE]'),
    flags=_build_parser,
    examples="""
    # the report of a run, finished or not
    areal-report --workdir=runs/tiny
    # two runs on the terminal and in a page
    areal-report --compare runs/tiny runs/other --out=both.html
    """,
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
