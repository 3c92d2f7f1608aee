"""Export a run: python -m areal_jax.main_export --workdir=RUN [--step=N] --out=DIR [--dtype=bfloat16]."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import ProcessEnd, end_command
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, export, say where; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog='areal_jax.main_export',
        description='Write the weights of a run as a Hugging Face directory, with tokenizer and model card.',
    )
    parser.add_argument('--workdir', required=True, help='of a run, finished or not, or one of its checkpoints')
    parser.add_argument('--step', type=int, help='which checkpoint, by its updates; default: the newest')
    parser.add_argument('--out', required=True, help='the directory to make')
    parser.add_argument('--dtype', default='float32', help='of the weights: float32 (default), bfloat16 or float16')
    options = parser.parse_args(arguments)

    def export() -> int:
        import jax

        from areal_jax.app.export import export_run

        jax.config.update('jax_platforms', 'cpu')  # an accelerator is not needed, and may be in use
        out = export_run(
            pathlib.Path(options.workdir), pathlib.Path(options.out), step=options.step, dtype=options.dtype
        )
        print(out)
        return ExitCode.FINISHED

    return end_command(export, doing=f'writing to {options.out}')


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    sys.exit(end.note(main()))


if __name__ == '__main__':
    run()
