"""What a run leaves on a terminal at its end, eight lines, and in a pipe, the whole report; and an evaluation."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any, cast

from areal_jax.installation import find_command
from areal_jax.report.pages.html_page import FILE as WEB_PAGE
from areal_jax.report.pages.markdown_page import LABEL, summarize_run
from areal_jax.report.report import PAGE
from areal_jax.report.report_keys import Report


def tell_end(report: Mapping[str, Any], workdir: pathlib.Path, *, whole: bool, follow: str = 'areal-eval') -> str:
    """Returns what is printed at the end of a run.

    Args:
      whole: the report itself, in Markdown, also on a terminal; the eight lines follow it there.
      follow: the command that is named as the next one; '' for none.
    """
    page = (workdir / PAGE).read_text()
    if not sys.stdout.isatty():
        return page
    is_short = 'token_age' not in report  # of supervised and of preference training
    width = shutil.get_terminal_size().columns
    lines = [] if is_short else summarize_run(cast(Report, report), width)
    shown = next(file for name in (WEB_PAGE, PAGE) if (file := workdir / name).exists())
    lines.append(f'{"report":<{LABEL}}{shown}')
    if follow:
        lines.append(f'{"next":<{LABEL}}{_name_next(follow, str(report["config"]), workdir)}')
    return '\n'.join([*([page] if whole or is_short else []), *lines])


def tell_results(table: str, file: pathlib.Path) -> str:
    """Returns what is printed at the end of an evaluation: its table, its file, and on a terminal the next command."""
    lines = ['', table, str(file)]
    if sys.stdout.isatty():
        lines.append(f'{"next":<{LABEL}}{find_command("areal-rollouts")} {shlex.quote(str(file.parent))}')
    return '\n'.join(lines)


def _name_next(program: str, config: str, workdir: pathlib.Path) -> str:
    """The command that evaluates the weights of the run, as this shell finds it."""
    flags = {'config': config, 'model': str(workdir), 'workdir': f'{workdir}_eval'}
    return ' '.join([find_command(program), *(f'--{name}={shlex.quote(value)}' for name, value in flags.items())])
