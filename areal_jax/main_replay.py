"""areal-replay: repeats a run of the real clock from its log.

The replay ends with the weights of the run, or names the first event that differs. --portable=FILE packs a run into one
file, which --from replays elsewhere.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import ProcessEnd, end_command
from areal_jax.commands.command import EXITS, Command, Parser, local_path, parse, require_place
from areal_jax.errors import ExitCode, UserError

# Slow imports come after the command line is parsed.


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays or packs the run and prints the result; returns the exit code."""
    options = parse(COMMAND, arguments)
    source_path = pathlib.Path(options.workdir or options.packed)
    out = pathlib.Path(options.out) if options.out else source_path.with_name(f'{source_path.name}.replay')
    command = (lambda: _pack(options)) if options.portable else (lambda: _replay(options, out))
    return end_command(command, doing=f'writing to {options.portable or out}')


def _pack(options: argparse.Namespace) -> int:
    from areal_jax.app.run.replay import require_replayable
    from areal_jax.app.workdir.records import pack, read_workdir

    if options.packed:
        raise UserError(f'--portable={options.portable} packs a workdir: use --workdir instead of --from')
    run = read_workdir(pathlib.Path(options.workdir))
    require_replayable(run)
    size = pack(run, pathlib.Path(options.portable))
    print(f'{options.portable}: {len(run.events)} events in {size / 1e6:.2f} MB')
    return ExitCode.FINISHED


def _replay(options: argparse.Namespace, out: pathlib.Path) -> int:
    from areal_jax.app.process.setup import set_up_process, silence_libraries

    silence_libraries()

    set_up_process()

    from areal_jax.app.run.replay import replay
    from areal_jax.app.workdir.records import read_packed, read_workdir
    from areal_jax.files import write_json
    from areal_jax.native.compiled_library import keep_blocks

    keep_blocks()
    paths = dict(_parse_path(text) for text in options.data)
    copy = pathlib.Path(options.json) if options.json else None
    if copy:
        require_place('--json', copy)
    run = read_packed(pathlib.Path(options.packed)) if options.packed else read_workdir(pathlib.Path(options.workdir))
    found = replay(run, out, paths, lambda sentence: print(sentence, flush=True))
    if copy:
        write_json(copy, found)
    print(f'equal: {found["events"]} events of {found["starts"]} starts')
    print(f'equal: weights_sha256 {found["weights_sha256"]}' if found['finished'] else found['ended'])
    return ExitCode.FINISHED


def _parse_path(text: str) -> tuple[str, str]:
    field, equals, path = text.partition('=')
    if not equals or not path:
        raise UserError(f'--data={text} must be FIELD=PATH, e.g. --data=task.path=data/train.jsonl')
    return field, path


def _build_parser() -> Parser:
    parser = Parser('areal-replay')
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--workdir', type=local_path, help='Work directory of the run to replay.')
    source.add_argument('--from', dest='packed', type=local_path, help='A run that --portable packed.')
    parser.add_argument('--out', type=local_path,
        help='Directory of the replay, new or empty; without it RUN.replay beside the run.',
    )  # fmt: skip
    parser.add_argument('--portable', type=local_path, help='Pack the run into this file instead of replaying it.')
    parser.add_argument(
        '--data', action='append', default=[], metavar='FIELD=PATH', type=local_path,
        help='Where a file that the config names lies here: task.path=FILE, model.path=PATH, staleness.schedule=FILE, '
        'cluster.reallocate=FILE.',
    )  # fmt: skip
    parser.add_argument('--json', default='', type=local_path, help='Write what was found there too.')
    return parser


COMMAND = Command(
    program='areal-replay',
    purpose='Makes a run of the real clock again from its log, and names the first event or weight that differs.',
    usage=(
        '--workdir=RUN [--out=DIR] [--data=FIELD=PATH ...] [--json=FILE]',
        '--workdir=RUN --portable=FILE',
        '--from=FILE [--out=DIR] [--data=FIELD=PATH ...] [--json=FILE]',
    ),
    flags=_build_parser,
    examples="""
    # pack a run into one file
    areal-replay --workdir=runs/tiny --portable=tiny.replay
    # replay it, here or on another machine
    areal-replay --from=tiny.replay --out=runs/tiny_again
    """,
    exits={
        **EXITS,
        ExitCode.FINISHED: 'equal, event by event and in its weights',
        ExitCode.USER_ERROR: 'something differs, or cannot be replayed',
    },
)


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    sys.exit(end.note(main()))


if __name__ == '__main__':
    run()
