"""areal-eval: scores a model on held-out problems or a benchmark."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import EXITS, Command, answer, run_command
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Evaluates the model and prints the table; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import parse_evaluation_command
    from areal_jax.app.evaluate.evaluation_config import adapt_config, set_benchmark
    from areal_jax.app.process.accelerator import use_xla_flags
    from areal_jax.app.process.setup import set_up_process, silence_libraries

    silence_libraries()
    values = _define_flags()
    command = parse_evaluation_command(argv, values)
    if values.benchmark is not None:
        set_benchmark(command.config, values.benchmark, command.overrides)
    adapt_config(command.config, values.model, command.overrides)  # names a wrong model before jax is imported
    copy = _require_place(values.json)

    set_up_process()
    use_xla_flags(command.config)

    if command.config.telemetry.progress:
        print('starting', flush=True)  # importing jax takes seconds

    from areal_jax import files
    from areal_jax.app.evaluate.evaluate import evaluate_model
    from areal_jax.app.run.reports import tell_results
    from areal_jax.app.workdir.run_directory import RESULTS
    from areal_jax.evaluation.results import render_results
    from areal_jax.native.compiled_library import keep_blocks

    keep_blocks()
    workdir = pathlib.Path(values.workdir)
    results = evaluate_model(
        command.config,
        workdir,
        model=values.model,
        resume=values.resume,
        source=command.source,
        overrides=command.overrides,
        interrupts=interrupts,
    )
    if results is None:
        print('the same command with --resume goes on')
        return ExitCode.STOPPED
    if copy is not None:
        files.write_bytes(copy, (workdir / RESULTS).read_bytes())
    print(tell_results(render_results(results), workdir / RESULTS))
    return ExitCode.FINISHED


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_model, define_path

    values = flags.FlagValues()
    define_model(values)
    define_path(values, 'workdir', 'Directory for answers.jsonl and results.json.')
    flags.DEFINE_bool('resume', False, 'Go on after the problems complete in the workdir.', flag_values=values)
    define_path(values, 'benchmark', 'A file of JSON lines with question and answer: all of them are evaluated.')
    define_path(values, 'json', 'Where to copy results.json to.')
    return values


def _require_place(json: str | None) -> pathlib.Path | None:
    """The path of --json; raises UserError if it cannot be written, before anything is evaluated."""
    if json is None:
        return None
    path = pathlib.Path(json)
    if not json or path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f'--json={json} cannot be written: name a file in a directory that exists')
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f'--json={json} cannot be written: {path.absolute().parent} is not writable; choose another')
    return path


COMMAND = Command(
    program='areal-eval',
    purpose='Evaluates a model on held-out problems or on a benchmark: pass@1 and pass@k, with confidence intervals.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--model=RUN|CHECKPOINT|HF_DIR|GGUF] [--benchmark=FILE] [--json=FILE] '
        '[--resume] [--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define_flags,
    examples="""
    # the model of a run on its held-out problems
    areal-eval --config=configs/tiny_cpu.py --model=runs/tiny --workdir=runs/tiny_eval
    # its first eight problems alone, before training
    areal-eval --config=configs/tiny_cpu.py --workdir=runs/eval8 --config.evaluation.problems=8
    """,
    fields=(
        'run.seed', 'task.name', 'task.path', 'task.answer', 'task.system_prompt', 'evaluation.problems',
        'evaluation.samples', 'rollout.slots', 'rollout.context_tokens', 'rollout.max_new_tokens',
        'rollout.temperature', 'rollout.top_p', 'publication.dtype', 'cluster.engines',
    ),
    exits={**EXITS, ExitCode.STOPPED: 'stopped by a signal: the same command with --resume goes on'},
)  # fmt: skip


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing to the workdir')


if __name__ == '__main__':
    run()
