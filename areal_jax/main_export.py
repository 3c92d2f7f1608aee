"""Export a run: python -m areal_jax.main_export --workdir=RUN [--step=N] --out=DIR [--dtype=bfloat16].

--push=OWNER/NAME uploads the export to the Hugging Face Hub; --out may be left out then.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from areal_jax.app.ending import ProcessEnd, end_command
from areal_jax.app.push import PushError, open_destination, push_export
from areal_jax.app.run_config import split_checkpoint
from areal_jax.errors import ExitCode, UserError

_OF_PUSH = ('private', 'revision', 'message')


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, export, say where; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog='areal_jax.main_export',
        description='Write the weights of a run as a Hugging Face directory, with tokenizer and model card.',
    )
    parser.add_argument('--workdir', required=True, help='of a run, finished or not, or one of its checkpoints')
    parser.add_argument('--step', type=int, help='which checkpoint, by its updates; default: the newest')
    parser.add_argument('--out', help='the directory to make; may be left out with --push')
    parser.add_argument('--dtype', default='float32', help='of the weights: float32 (default), bfloat16 or float16')
    parser.add_argument('--push', metavar='OWNER/NAME', help='upload it to this repository of the Hugging Face Hub')
    parser.add_argument('--private', action='store_true', help='with --push: only in a private repository')
    parser.add_argument('--revision', help='with --push: a branch, made where it is missing; default: main')
    parser.add_argument('--message', help='with --push: of the commit; default: the run, its update and the version')
    options = parser.parse_args(arguments)
    return end_command(lambda: _export(options), doing=f'writing to {options.out or tempfile.gettempdir()}')


def _export(options: argparse.Namespace) -> int:
    if not options.out and not options.push:
        raise UserError('--out is missing: name the directory to make, or a repository with --push=OWNER/NAME')
    if not options.push:
        if given := next((name for name in _OF_PUSH if getattr(options, name)), ''):
            raise UserError(f'--{given} belongs to --push=OWNER/NAME, which is missing: add it, or leave --{given} out')
        print(_write(options, pathlib.Path(options.out)))
        return ExitCode.FINISHED
    destination = open_destination(options.push, private=options.private, revision=options.revision)
    workdir, _ = split_checkpoint(options.workdir)
    with tempfile.TemporaryDirectory(prefix='areal-export-') as unnamed:
        out = _write(options, pathlib.Path(options.out or f'{unnamed}/export'))
        if options.out:
            print(out, flush=True)
        try:
            print(push_export(destination, out, workdir, options.message or ''))
        except PushError as error:
            kept = f'. The export is in {out}: `hf upload {options.push} {out}` uploads it' if options.out else ''
            raise PushError(f'{error}{kept}') from error
    return ExitCode.FINISHED


def _write(options: argparse.Namespace, out: pathlib.Path) -> pathlib.Path:
    import jax

    from areal_jax.app.export import export_run

    jax.config.update('jax_platforms', 'cpu')  # an accelerator is not needed, and may be in use
    return export_run(pathlib.Path(options.workdir), out, step=options.step, dtype=options.dtype)


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    sys.exit(end.note(main()))


if __name__ == '__main__':
    run()
