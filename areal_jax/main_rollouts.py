"""areal-rollouts: shows the answers that a run keeps: as a table, in full, side by side, or as a page of tokens."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Parser, local_path, parse, require_place
from areal_jax.errors import ExitCode

# equal to rollout_views.ORDERS, which --help does not import
_ORDERS = tuple(s + name for name in ('update', 'reward', 'advantage', 'age', 'length') for s in ('', '-'))
_WIDTH = 100  # if the output is not a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the answers; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _show(options), doing=f'reading {options.workdir}')


def _show(options: argparse.Namespace) -> int:
    from areal_jax.telemetry import rollout_views

    workdir = pathlib.Path(options.workdir)
    records = _read(workdir)
    groups = rollout_views.select_groups(records, options.step, options.draw, options.source)
    if options.page is not None:
        print(_write_page(workdir, groups, options))
        return ExitCode.FINISHED
    if options.json:
        print(json.dumps(groups, indent=1))
        return ExitCode.FINISHED
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    if options.sample is not None:
        print(_show_answer(groups, options, width))
    elif options.diff:
        print(rollout_views.render_contrast(*rollout_views.choose_contrast(groups), width))
    elif options.group or options.draw is not None:
        chosen = groups[-options.limit :] if options.limit else groups
        print('\n\n'.join(rollout_views.render_group(group, group['answers'], width) for group in chosen))
    else:
        answers = rollout_views.sort_answers(groups, options.sort)
        shown = answers[: options.limit] if options.limit else answers
        print(rollout_views.render_table(shown, width))
        print(f'\n{_describe(workdir, records)}\n{_describe_rest(len(answers) - len(shown))}')
    return ExitCode.FINISHED


def _read(workdir: pathlib.Path) -> list[dict]:
    """Reads the kept groups; raises UserError if the workdir keeps no answer."""
    from areal_jax.config import CONFIG
    from areal_jax.errors import UserError
    from areal_jax.telemetry.rollout_views import EVALUATED, read_rollouts

    if not workdir.is_dir():
        raise UserError(f'there is no directory {workdir}')
    if records := read_rollouts(workdir):
        return records
    if not (workdir / CONFIG).exists() and not (workdir / EVALUATED).exists():
        raise UserError(f'{workdir} holds no run and no evaluation: name the --workdir of one')
    raise UserError(
        f"{workdir} keeps no answers: either no update is finished yet, or the run began with telemetry.rollouts='0', "
        'or is of a kind or version that keeps none'
    )


def _write_page(workdir: pathlib.Path, groups: list[dict], options: argparse.Namespace) -> str:
    """Writes the page of the first groups in the order of --sort; returns a line on the file."""
    from areal_jax import files
    from areal_jax.report.pages.token_page import FILE, render_token_page
    from areal_jax.telemetry import rollout_views
    from areal_jax.telemetry.progress import format_bytes

    path = pathlib.Path(options.page) if options.page else workdir / FILE
    require_place('--page', path)
    if options.sample is not None:
        found = _find_answers(groups, options)
        groups = [{**groups[0], 'answers': found}]
    sorted_answers = rollout_views.sort_answers(groups, options.sort)
    ordered = list({id(one.group): one.group for one in sorted_answers}.values())
    shown = ordered[: options.limit] if options.limit else ordered
    files.write_text(path, render_token_page(workdir.resolve().name, shown, len(ordered) - len(shown)))
    answers = sum(len(group['answers']) for group in shown)
    rest = f'; {len(ordered) - len(shown)} more groups: --limit=0' if len(shown) < len(ordered) else ''
    return f'{path}: {len(shown)} groups, {answers} answers, {format_bytes(path.stat().st_size)}{rest}'


def _find_answers(groups: list[dict], options: argparse.Namespace) -> list[dict]:
    """The rows of the answer --sample of the group --draw; raises UserError if there is none."""
    from areal_jax.errors import UserError
    from areal_jax.telemetry import rollout_views

    if options.draw is None:
        raise UserError(f'--sample={options.sample} needs --draw=N, the group that it is of')
    (group,) = groups
    found = [one for one in group['answers'] if options.sample in (str(one['sample']), rollout_views.name_of(one))]
    if not found:
        names = ', '.join(rollout_views.name_of(one) for one in group['answers'])
        raise UserError(f'--sample={options.sample}: draw {options.draw} has the answers {names}')
    return found


def _show_answer(groups: list[dict], options: argparse.Namespace, width: int) -> str:
    from areal_jax.telemetry import rollout_views

    found = _find_answers(groups, options)
    (group,) = groups
    if options.diff:
        return '\n\n'.join(rollout_views.render_versions(group, one, width) for one in found)
    return rollout_views.render_group(group, found, width)


def _describe(workdir: pathlib.Path, records: list[dict]) -> str:
    """The numbers of kept groups and answers, and the process that uses the workdir."""
    from areal_jax.files import find_holder

    updates = [record['update'] for record in records]
    answers = sum(len(record['answers']) for record in records)
    of = f'of updates {min(updates)} to {max(updates)}' if max(updates) else 'of an evaluation'
    state = f'; in use by {holder}' if (holder := find_holder(workdir)) else ''
    return f'{workdir}: {len(records)} groups {of}, {answers} answers{state}'


def _describe_rest(hidden: int) -> str:
    more = f'{hidden} more: --limit=0; ' if hidden else ''
    return f'{more}one group in full: --draw=N; best and worst of a group: --diff; versions: --draw=N --sample=K --diff'


def _build_parser() -> Parser:
    parser = Parser('areal-rollouts')
    parser.add_argument('workdir', metavar='RUN', type=local_path, help='The workdir of a run or of an evaluation.')
    parser.add_argument('--step', type=int, help='Only of this update.')
    parser.add_argument('--draw', type=int, help='Only this group, in full.')
    parser.add_argument('--source', help='Only of this source of a mixture (task.sources).')
    parser.add_argument('--sample', help='Only this answer of the group, in full.')
    parser.add_argument('--group', action='store_true', help='Groups in full, with their prompts, not a table.')
    parser.add_argument('--diff', action='store_true', help='Best and worst of a group side by side; or by version.')
    parser.add_argument('--sort', choices=_ORDERS, default='update', help='The largest first; -reward: the smallest.')
    parser.add_argument('--limit', type=int, default=20, help='Lines of the table, or groups, of a page too; 0 = all.')
    parser.add_argument(
        '--page', metavar='FILE', nargs='?', const='', type=local_path,
        help='Writes a page with coloured tokens: version, age, ratios, clip, advantage. Without FILE: '
        'RUN/rollouts.html.',
    )  # fmt: skip
    parser.add_argument('--json', action='store_true', help='The groups as the files have them.')
    return parser


COMMAND = Command(
    program='areal-rollouts',
    purpose='Shows the answers that a run keeps, with rewards, advantages, ages and versions; also while it runs.',
    usage=(
        'RUN [--step=N] [--source=NAME] [--draw=N [--sample=K]] [--group] [--diff] [--sort=ORDER] [--limit=N] '
        '[--page[=FILE]] [--json]',
    ),
    flags=_build_parser,
    examples="""
    # the newest answers
    areal-rollouts runs/tiny
    # the worst ones
    areal-rollouts runs/tiny --sort=-reward
    # best and worst of a group of update 12
    areal-rollouts runs/tiny --step=12 --diff
    # the groups of update 12 as a page with coloured tokens
    areal-rollouts runs/tiny --step=12 --page
    """,
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
