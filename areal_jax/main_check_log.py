"""areal-check-log: checks an event log against the rules of the loop.

FILE is the events.jsonl in a workdir, the workdir itself, or a run that main_replay packed. The first line that breaks
a rule is named, with exit code 2.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import EXITS, Command, Parser, local_path, parse
from areal_jax.errors import ExitCode, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the log and prints the result; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _check(pathlib.Path(options.file)), doing=f'reading {options.file}')


def _check(path: pathlib.Path) -> int:
    from areal_jax.app.workdir.records import read_log
    from areal_jax.report.rules.log_rules import Limits, find_violation

    log = read_log(path)
    try:
        limits = Limits.of(log.config)
    except (KeyError, TypeError, ValueError) as error:
        sentence = f'{log.config_name} is of no run of asynchronous RL ({type(error).__name__}: {error})'
        raise UserError(f'{sentence}: restore the file as the run wrote it') from error
    if found := find_violation(log.events, limits):
        raise UserError(f'{log.name}: line {found[0]}: {found[1]}')
    print(f'{log.name}: {len(log.events)} events keep every rule')
    return ExitCode.FINISHED


def _build_parser() -> Parser:
    parser = Parser('areal-check-log')
    parser.add_argument(
        'file', metavar='FILE', type=local_path, help='events.jsonl, a workdir, or a file of areal-replay --portable.'
    )
    return parser


COMMAND = Command(
    program='areal-check-log',
    purpose='Checks the event log of a run against the rules of the loop, and names the first line that breaks one.',
    usage=('FILE',),
    flags=_build_parser,
    examples="""
    # the log of a run
    areal-check-log runs/tiny
    # the file itself
    areal-check-log runs/tiny/events.jsonl
    """,
    exits={
        **EXITS,
        ExitCode.FINISHED: 'every event keeps the rules',
        ExitCode.USER_ERROR: 'a line breaks a rule, or the log cannot be read',
    },
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
