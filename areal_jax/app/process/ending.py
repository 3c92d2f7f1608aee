"""How a command ends: exceptions become one sentence and an exit code; every main_*.py runs inside `end_command`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.errors import ExitCode, LostPeerError, UserError, describe_disk_trouble, describe_memory_trouble

STOPPED_CODE = 'AREAL_JAX_STOPPED_CODE'  # environment variable
RESUME = 'the same command with --resume goes on'
_EXIT_DEADLINE_S = 120.0  # for exit handlers, among them the barrier of jax.distributed


class ProcessEnd:
    """Ends the process after its exit handlers and before the interpreter is torn down; make it before importing jax.

    Threads of XLA, tensorstore and orbax outlive the interpreter's own threads. Destructors that meet them abort the
    process ("terminate called", exit code 134).
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)  # handlers run last in, first out: this one runs after the handlers of jax

    def note(self, code: int) -> int:
        """Sets the exit code of the process. If an exit handler hangs, the process ends with it after two minutes."""
        self._code = code
        guard = threading.Timer(_EXIT_DEADLINE_S, os._exit, [code])
        guard.daemon = True
        guard.start()
        return code

    def _leave(self) -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed when the process was started
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self._code is not None:
            os._exit(self._code)


def end_command(command: Callable[[], int], doing: str, again: str = '') -> int:
    """The exit code of `command`, or of the exception that it raises; see errors.ExitCode.

    Args:
      doing: what the command does to a disk, for errors that carry no file name: 'writing to runs/tiny'.
      again: how the user goes on with a command that Ctrl-C has ended: RESUME; '' = by starting it again.
    """
    try:
        return command()
    except UserError as error:
        _print_error(str(error))
        return ExitCode.STOPPED if isinstance(error, LostPeerError) else ExitCode.USER_ERROR
    except KeyboardInterrupt:
        _print_error(f'stopped; {again}' if again else 'stopped')
        return ExitCode.STOPPED
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return ExitCode.STOPPED
    except Exception as error:
        if sentence := describe_disk_trouble(error, doing) or describe_memory_trouble(error):
            _print_error(sentence)
            return ExitCode.USER_ERROR
        traceback.print_exc()
        return ExitCode.BUG


def code_of_stopped_server() -> int:
    """The exit code of an engine or exporter that a signal has ended: 0, or what STOPPED_CODE says.

    An executor sets it where a signal means that the process moves to another machine, and not that the run is over.
    """
    return int(os.environ.get(STOPPED_CODE) or ExitCode.FINISHED)


def judge_training(report: Mapping[str, Any]) -> ExitCode:
    """The exit code of a finished run, by its report; one without an optimizer step is named on stderr."""
    steps = report['optimizer_steps']
    if steps['applied']:
        return ExitCode.FINISHED
    _print_error(_describe_untrained(report['steps'], steps['skipped']))
    return ExitCode.NOTHING_TRAINED


def _describe_untrained(updates: int, skipped: int) -> str:
    """The sentence for a run without an optimizer step, `skipped` of which had a gradient that was not finite."""
    why = (
        f'all {skipped} were skipped because their gradient was not finite'
        if skipped
        else 'no update held a token to train: all rewards of every group were equal, or all tokens too old'
    )
    return f'{updates} updates made no optimizer step: {why}. The weights are those of the start'


def _print_error(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f'error: {sentence}', file=sys.stderr, flush=True)
