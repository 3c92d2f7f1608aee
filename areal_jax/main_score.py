"""areal-score: computes the rewards of given answers to the problems of a task, without a model."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import EXITS, Command, answer, run_command
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags

_AGAIN = 'the same command goes on'


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Scores the answers and prints the table; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import parse_command
    from areal_jax.app.process.setup import silence_libraries

    silence_libraries()
    values = _define_flags()
    command = parse_command(argv, values)
    for name in ('answers', 'out'):
        if not values[name].value:
            raise UserError(f'--{name} is missing: name a file of JSON lines, e.g. --{name}={name}.jsonl')

    from areal_jax.app.score.scoring import Scoring, describe_failures, render_summary

    # with --json, stdout carries only the summary, for a program
    redirected = contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext()
    with redirected:
        scoring = Scoring(
            command.config,
            pathlib.Path(values.answers),
            pathlib.Path(values.out),
            workers=values.workers,
            overrides=command.overrides,
            interrupts=interrupts,
        )
        with scoring:
            is_complete = scoring.run()
        if not is_complete:
            print(f'stopped: {scoring.tally.answers} of {scoring.answers_in_all} answers are scored in {values.out}')
            print(_AGAIN, flush=True)
            return ExitCode.STOPPED
    summary = scoring.tally.summarise(scoring.scored_before, scoring.seconds, values.out)
    print(json.dumps(summary) if values.json else f'\n{render_summary(summary)}', flush=True)
    if failures := describe_failures(scoring.tally, values.out):
        raise UserError(failures)
    return ExitCode.FINISHED


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path

    values = flags.FlagValues()
    define_path(values, 'answers', 'JSON lines with question and answer, or answers.jsonl of an evaluation.')
    define_path(values, 'out', 'Where the scores go, a JSON line an answer.')
    flags.DEFINE_integer(
        'workers', None, 'Answers scored at once; without it task.verifier_workers.', flag_values=values
    )
    flags.DEFINE_bool('json', False, 'Prints the summary as JSON.', flag_values=values)
    return values


COMMAND = Command(
    program='areal-score',
    purpose='Scores given answers to the problems of a task, with labels and reasons, without a model.',
    usage=(
        '--config=FILE[:ARGUMENT] --answers=FILE --out=FILE [--workers=N] [--json] '
        '[--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define_flags,
    examples="""
    # the answers of an evaluation once more
    areal-score --config=configs/tiny_cpu.py --answers=runs/tiny_eval/answers.jsonl --out=scores.jsonl
    # answers of your own, by four processes, with numbers for a program
    areal-score --config=configs/tiny_cpu.py --answers=answers.jsonl --out=scores.jsonl --workers=4 --json \
        --config.task.verifier=process
    """,
    fields=(
        'task.name', 'task.path', 'task.answer', 'task.reward', 'task.verifier', 'task.verifier_workers',
        'task.verifier_deadline_s', 'task.verifier_attempts', 'task.verifier_memory_mb', 'model.source', 'model.path',
    ),
    exits={
        **EXITS,
        ExitCode.FINISHED: 'every answer has a reward',
        ExitCode.USER_ERROR: 'an error that you can mend, in one sentence; also answers that could not be scored',
        ExitCode.STOPPED: f'stopped by a signal: {_AGAIN}',
    },
)  # fmt: skip


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing the scores', _AGAIN)


if __name__ == '__main__':
    run()
