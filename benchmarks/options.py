"""What the benchmarks of serving have in common: options, lists of choices in them, and the report."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.generation import limit_threads, processor
from benchmarks.report import write_report

UNPRINTED = ('calls', 'facts', 'runs')  # parts of a row that are long
Row = dict[str, Any]


def make_parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """With the options of every benchmark; `turns` is how often each side is asked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path, help='where the report is written as JSON')
    parser.add_argument('--turns', type=int, default=turns, help='calls of each side')
    parser.add_argument('--seed', type=int, default=0, help='of prompts, lengths and noise')
    parser.add_argument('--threads', type=int, default=2, help='cores that every side may use, its clients included')
    parser.add_argument('--small', action='store_true', help='a fraction of the work: to try the command')
    return parser


def add_engine(parser: argparse.ArgumentParser, prefill_buckets: str) -> None:
    """Sizes of our engine on this machine."""
    parser.add_argument('--block_tokens', type=int, default=64, help='positions of a block of our cache')
    parser.add_argument('--decode_steps', type=int, default=8, help='tokens of a row in one dispatch of ours')
    parser.add_argument('--prefill_buckets', default=prefill_buckets, help='tokens of our packed prefills')


def read_buckets(options: argparse.Namespace) -> list[int]:
    return [int(tokens) for tokens in options.prefill_buckets.split(',')]


def split_choices(flag: str, given: str, choices: Collection[str]) -> list[str]:
    """The names in 'a,b'; raises UserError for a name that is not one of the choices."""
    names = given.split(',')
    if unknown := [name for name in names if name not in choices]:
        raise UserError(f'--{flag} has {unknown[0]!r}; there are {", ".join(choices)}')
    return names


def show(row: Row) -> None:
    """On the terminal, as soon as it is measured."""
    print({name: value for name, value in row.items() if name not in UNPRINTED}, file=sys.stderr, flush=True)


def report(
    name: str, arguments: Sequence[str] | None, options: argparse.Namespace, measure: Callable[[], list[Row]]
) -> Row:
    """Measures on so many cores, and writes the report of the benchmark `name`."""
    limit_threads(options.threads)
    command = f'python -m benchmarks.{name} {" ".join(sys.argv[1:] if arguments is None else arguments)}'
    return write_report({'rows': measure(), 'command': command, 'processor': processor()}, options.out)


def run(name: str, main: Callable[[], object]) -> None:
    """Ends the process with one sentence for what the user can mend."""
    try:
        main()
    except UserError as error:
        print(f'benchmarks.{name}: {error}', file=sys.stderr)
        sys.exit(2)
