"""areal-export: the weights of a run as a directory that other programs load."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import ProcessEnd, end_command
from areal_jax.commands.command import EXITS, Command, Example, Parser
from areal_jax.commands.help import answer
from areal_jax.config.declarations import DTYPES
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, export, say where; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    answer(COMMAND, arguments)
    options = _build_parser().parse_args(arguments)

    def export() -> int:
        import jax

        from areal_jax.app.export import export_run
        from areal_jax.telemetry.bar import Bar

        jax.config.update('jax_platforms', 'cpu')  # an accelerator is not needed, and may be in use
        bar = Bar()
        bar.begin(f'exporting {options.workdir}')
        try:
            out = export_run(
                pathlib.Path(options.workdir),
                pathlib.Path(options.out),
                step=options.step,
                dtype=options.dtype,
                announce=bar.count_bytes,
            )
        finally:
            bar.end()
        print(out)
        return ExitCode.FINISHED

    return end_command(export, doing=f'writing to {options.out}')


def _build_parser() -> Parser:
    parser = Parser('areal-export')
    parser.add_argument('--workdir', required=True, help='Of a run, finished or not, or one of its checkpoints.')
    parser.add_argument('--out', required=True, help='The directory to make.')
    parser.add_argument('--step', type=int, help='Which checkpoint, by its updates; without it the newest.')
    parser.add_argument('--dtype', default='float32', help='Of the weights.')
    return parser


COMMAND = Command(
    program='areal-export',
    purpose='Writes the weights of a run as a Hugging Face directory, with tokenizer and model card.',
    usage=('--workdir=RUN --out=DIR [--step=N] [--dtype=DTYPE]',),
    flags=_build_parser,
    examples=(
        Example('the newest weights of a run', 'areal-export --workdir=runs/tiny --out=exports/tiny'),
        Example(
            'those of its last update, in bfloat16',
            'areal-export --workdir=runs/tiny --step=20 --dtype=bfloat16 --out=exports/tiny_bf16',
        ),
    ),
    choices={'dtype': DTYPES},
    exits=EXITS,
)


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    sys.exit(end.note(main()))


if __name__ == '__main__':
    run()
