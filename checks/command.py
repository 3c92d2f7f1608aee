"""The command line of a check: its flags, the signals of its children, where it ran, what it leaves."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Sequence
from typing import Any

from areal_jax.app.process.ending import SIGNALS
from areal_jax.app.workdir.environment import git_commit, hardware, package_versions


def make_parser(module: str, description: str | None, seed_of: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that every check has, for `python -m checks.MODULE`."""
    parser = argparse.ArgumentParser(prog=f'python -m checks.{module}', description=description)
    parser.add_argument('--seed', type=int, default=0, help=seed_of)
    parser.add_argument('--json', type=pathlib.Path, help='file for what was found')
    return parser


def restore_signals() -> None:
    """Undoes that a shell has what it starts in the background ignore some signals: children would inherit that."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def describe_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the command and where it ran, for the record of --json."""
    return {
        'command': f'{parser.prog} {" ".join(arguments)}', 'commit': git_commit(),
        'versions': package_versions(), 'machine': hardware(),
    }  # fmt: skip


def make_directory(name: str) -> pathlib.Path:
    """Creates the directory in which a check works."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f'{name}_'))


def leave_directory(directory: pathlib.Path, *, failed: bool) -> None:
    """Removes the directory of a check, or says where it is when something failed."""
    if failed:
        print(f'what the failed runs left is in {directory}')
    else:
        shutil.rmtree(directory, ignore_errors=True)
