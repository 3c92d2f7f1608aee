"""areal-watch: shows a run live in a terminal, from the files of its workdir."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Parser, local_path, parse
from areal_jax.errors import ExitCode

if TYPE_CHECKING:
    from areal_jax.app.watch.live_run import LiveRun

_LEAST_S = 0.1
_PIPE = (100, 40)  # columns and lines where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows the run until q, Ctrl-C, or in a pipe the end of the run; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _watch(options), doing=f'reading {options.workdir}')


def _watch(options: argparse.Namespace) -> int:
    from areal_jax.app.watch.live_run import LiveRun
    from areal_jax.errors import UserError

    if options.every < _LEAST_S:
        raise UserError(f'--every={options.every:g} must be at least {_LEAST_S:g} seconds')
    run = LiveRun(pathlib.Path(options.workdir))
    if options.once and not run.exists:
        raise UserError(f'there is no {run.workdir} yet: a run makes it when it starts')
    with contextlib.suppress(KeyboardInterrupt), _ended_by_signals():
        if options.once:
            run.read()
            _print_frame(run)
        elif sys.stdout.isatty():
            _show_live(run, options.every)
        else:
            _print_frames(run, options.every)
    return ExitCode.FINISHED


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the view as Ctrl-C does, so that the terminal is as it was."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_frame(run: LiveRun) -> None:
    """Prints one frame, in colour only on a terminal."""
    from rich.console import Console

    from areal_jax.app.watch.frame import render_frame

    width, height = shutil.get_terminal_size(_PIPE)
    console = Console(file=sys.stdout, width=width, highlight=False, legacy_windows=False)
    for line in render_frame(run, width, height, _is_plain(sys.stdout)):
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


def _print_frames(run: LiveRun, every_s: float) -> None:
    """Prints frames until no process uses the workdir any more."""
    while True:
        run.read()
        _print_frame(run)
        if run.exists and not run.is_running:
            return
        print(flush=True)
        time.sleep(every_s)


def _show_live(run: LiveRun, every_s: float) -> None:
    """Draws frames over each other until q is pressed."""
    from rich.console import Console, Group
    from rich.live import Live

    from areal_jax.app.watch.frame import render_frame

    console = Console(highlight=False, legacy_windows=False)
    plain = _is_plain(sys.stdout)
    with _keys() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            run.read()
            live.update(Group(*render_frame(run, console.width, console.height, plain)), refresh=True)
            if wait_for_key(every_s) in ('q', 'Q'):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits some seconds for a key and returns it; '' for none."""
    import select
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return sys.stdin.read(1) if ready else ''

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ''


def _is_plain(stream: TextIO) -> bool:
    """Whether the stream cannot take blocks and arrows."""
    return 'utf' not in (stream.encoding or '').lower()


def _build_parser() -> Parser:
    parser = Parser('areal-watch')
    parser.add_argument('workdir', metavar='RUN', type=local_path, help='The workdir of a run; it need not exist yet.')
    parser.add_argument('--once', action='store_true', help='Prints one frame and ends.')
    parser.add_argument('--every', type=float, default=1.0, help='Seconds between two frames.')
    return parser


COMMAND = Command(
    program='areal-watch',
    purpose='Shows a run live in a terminal: lanes, slots, buffer, ages, rates, reward, newest answers.',
    usage=('RUN [--once] [--every=SECONDS]',),
    flags=_build_parser,
    examples="""
    # until q or Ctrl-C
    areal-watch runs/tiny
    # one frame, for a pipe or a log
    areal-watch runs/tiny --once
    """,
    notes=(
        'It reads the files of the workdir alone, so it works over ssh, and on a finished or a killed run. In a '
        'pipe it prints one frame after the other until the run ends.'
    ),
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
