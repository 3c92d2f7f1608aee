"""areal-export: exports the weights of a run to a directory that other programs load, and to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from areal_jax.app.process.ending import ProcessEnd, end_command
from areal_jax.commands.command import Command, Parser, local_path, parse, run_path
from areal_jax.config.declarations import DTYPES
from areal_jax.errors import ExitCode, UserError

_OF_PUSH = ('private', 'revision', 'message')


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports the weights and prints where; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _export(options), doing=f'writing to {options.out or tempfile.gettempdir()}')


def _export(options: argparse.Namespace) -> int:
    if not options.out and not options.push:
        raise UserError('--out is missing: name the directory to make, or a repository with --push=OWNER/NAME')
    if not options.push:
        if given := next((name for name in _OF_PUSH if getattr(options, name)), ''):
            raise UserError(f'--{given} belongs to --push=OWNER/NAME, which is missing: add it, or leave --{given} out')
        print(write_export(options, pathlib.Path(options.out)))
        return ExitCode.FINISHED

    from areal_jax.app.export.finished_export import PushError, open_destination, push_export
    from areal_jax.app.model.text_model import split_checkpoint

    destination = open_destination(options.push, private=options.private, revision=options.revision)
    workdir, _ = split_checkpoint(options.workdir)
    with tempfile.TemporaryDirectory(prefix='areal-export-') as unnamed:
        out = write_export(options, pathlib.Path(options.out or f'{unnamed}/export'))
        if options.out:
            print(out, flush=True)
        try:
            print(push_export(destination, out, workdir, options.message or ''))
        except PushError as error:
            kept = f'. The export is in {out}: `hf upload {options.push} {out}` uploads it' if options.out else ''
            raise PushError(f'{error}{kept}') from error
    return ExitCode.FINISHED


def write_export(options: argparse.Namespace, out: pathlib.Path) -> pathlib.Path:
    """Exports a version of the run to `out`, with a progress bar; returns the directory."""
    import jax

    from areal_jax.app.export.run_export import export_run
    from areal_jax.app.workdir.mirrored_run import locate_run
    from areal_jax.telemetry.progress import Bar

    jax.config.update('jax_platforms', 'cpu')  # an accelerator is not needed, and may be in use
    bar = Bar()
    bar.begin(f'exporting {options.workdir}')
    try:
        workdir = locate_run(options.workdir)
        return export_run(workdir, out, step=options.step, dtype=options.dtype, announce=bar.count_bytes)
    finally:
        bar.end()


def _build_parser() -> Parser:
    parser = Parser('areal-export')
    parser.add_argument(
        '--workdir',
        required=True,
        type=run_path,
        help='Of a run, finished or not, its run.mirror, or one of its checkpoints.',
    )
    parser.add_argument('--out', type=local_path, help='The directory to make; may be left out with --push.')
    parser.add_argument('--step', type=int, help='Which checkpoint, by its updates; without it the newest.')
    parser.add_argument('--dtype', default='float32', help='Of the weights.')
    parser.add_argument('--push', metavar='OWNER/NAME', help='Upload it to this repository of the Hugging Face Hub.')
    parser.add_argument('--private', action='store_true', help='With --push: only into a private repository.')
    parser.add_argument('--revision', help='With --push: a branch, made where it is missing; without it main.')
    parser.add_argument('--message', help='With --push: of the commit; without it the run, its update and the version.')
    return parser


COMMAND = Command(
    program='areal-export',
    purpose='Writes the weights of a run as a Hugging Face directory, with tokenizer and model card, and uploads it.',
    usage=(
        '--workdir=RUN --out=DIR [--step=N] [--dtype=DTYPE]',
        '--workdir=RUN --push=OWNER/NAME [--private] [--revision=BRANCH] [--message=TEXT] [--out=DIR]',
    ),
    flags=_build_parser,
    examples="""
    # the newest weights of a run
    areal-export --workdir=runs/tiny --out=exports/tiny
    # the weights of its update 20 in bfloat16, to a private repository
    areal-export --workdir=runs/tiny --step=20 --dtype=bfloat16 --push=me/tiny --private
    """,
    choices={'dtype': DTYPES},
)


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    sys.exit(end.note(main()))


if __name__ == '__main__':
    run()
