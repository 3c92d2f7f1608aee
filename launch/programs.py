"""A program under a keeper, and a server that is started again when it dies."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

from areal_jax.app.process.ending import SIGNALS
from areal_jax.errors import ExitCode
from areal_jax.installation import build_python_path
from areal_jax.workers.descendants import end_processes, list_descendants, list_marked

from . import heartbeats
from .heartbeats import Signs
from .keeper import SIGNALLED, describe_code

_STEADY_S = 60.0  # a server that lived so long has started well
_MOST_FAILURES = 5  # in a row, of a server that ends by itself
LONGEST_PAUSE_S = 30.0  # before a restart
_KEEPER_S = 10.0  # for a keeper to kill what it keeps, and for what is left when the keeper itself was killed
Variables = Mapping[str, str]  # of the environment
_NONE: Variables = {}
_MARK = 'AREAL_JAX_PROGRAM'  # environment variable: which program a process descends from


def say(sentence: str) -> None:
    """On the terminal, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, flush=True)


class Program:
    """A running command; its output goes to `log`, or where this process's output goes.

    Args:
      variables: added to the environment.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes] | None = None, variables: Variables = _NONE):
        self._started_s, self._has_registered = time.monotonic(), False
        self._mark = secrets.token_hex(8)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the keeper has handlers
        self._keeper = subprocess.Popen(
            [sys.executable, '-m', f'{__package__}.keeper', *command],
            stdin=subprocess.PIPE,  # closed by the kernel when this process dies
            stdout=log,
            stderr=log,
            env={**os.environ, **(variables or {}), 'PYTHONPATH': build_python_path(), _MARK: self._mark},
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """The exit code, 128 + number after a signal; None while it runs."""
        code = self._keeper.poll()
        if code is None or code >= 0:
            return code
        self._end_what_is_left()
        return SIGNALLED - code

    def send(self, number: signal.Signals) -> None:
        """Sends the signal to the command; nothing where it has ended."""
        self._keeper.send_signal(number)

    def hangs(self, signs: Signs, *, registers: bool = True) -> bool:
        """Whether the command, or what it started, has given no sign of life for too long.

        Args:
          registers: the command is in the registry soon after its start.
        """
        if signs.silent and self._runs_any(signs.silent):
            return True
        if not registers or self._has_registered or time.monotonic() - self._started_s < heartbeats.REGISTER_S:
            return False
        self._has_registered = self._runs_any(signs.registered)
        return not self._has_registered

    def _runs_any(self, processes: Collection[int]) -> bool:
        """Whether the command is one of the processes, or started one of them."""
        return any(process.pid in processes for process in list_descendants(self._keeper.pid))

    def kill(self) -> None:
        """Ends the command and all that it started, at once; returns when they are gone."""
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(_KEEPER_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
            self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """Kills the descendants of a keeper that was killed."""
        end_processes(lambda: list_marked(self._mark, _MARK), _KEEPER_S)


def describe_command(command: Sequence[str], variables: Variables = _NONE) -> str:
    """As a shell takes it: 'NAME=value python -m ...'."""
    return ' '.join(
        [*(f'{name}={shlex.quote(value)}' for name, value in (variables or {}).items()), shlex.join(command)]
    )


def start_logged(command: Sequence[str], path: pathlib.Path, variables: Variables = _NONE) -> Program:
    """Its output is appended to the file, after a line with the command."""
    with path.open('ab') as log:
        log.write(f'--- {" ".join(command)}\n'.encode())
        log.flush()
        return Program(command, log, variables)


class Server:
    """A server that is started again when it dies or hangs.

    One that a signal ended is started again always, one that ends by itself at most _MOST_FAILURES times in a row. One
    that ends with code 0 was told to stop and stays away; so does one that ends with ExitCode.USER_ERROR.

    Args:
      next_log: gives the file to which the output of the next start is appended.
      variables: added to its environment.
      registers: it is in the registry soon after its start, and not only when it serves.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        next_log: Callable[[], pathlib.Path],
        variables: Variables = _NONE,
        *,
        registers: bool = True,
    ):
        self.name, self._command, self._next_log, self._variables = name, command, next_log, variables
        self._registers = registers
        self._log = pathlib.Path()
        self.program: Program | None = None
        self.is_over = False  # it will not be started again
        self._started_s = self._due_s = time.monotonic()
        self._deaths = self._failures = 0  # in a row

    def describe(self) -> str:
        """Its command as a shell takes it."""
        return describe_command(self._command, self._variables)

    def look(self, signs: Signs | None) -> None:
        """Notices the end of the program, kills it if it hangs, and starts it when due."""
        if signs and self.program is not None and self.program.hangs(signs, registers=self._registers):
            say(f'server {self.name} has given no sign of life for a long time: it is killed')
            self.program.kill()
        if self.program is not None and (code := self.program.poll()) is not None:
            self._note_end(code)
        if self.program is None and not self.is_over and time.monotonic() >= self._due_s:
            self._start()

    def _start(self) -> None:
        self._log = self._next_log()
        self.program = start_logged(self._command, self._log, self._variables)
        self._started_s = time.monotonic()

    def _note_end(self, code: int) -> None:
        self.program = None
        lived_s = time.monotonic() - self._started_s
        if lived_s >= _STEADY_S:
            self._deaths = self._failures = 0
        self._deaths += 1
        self._failures += code < SIGNALLED
        end = f'server {self.name} {describe_code(code)} after {lived_s:.0f} s'
        self.is_over = code in (ExitCode.FINISHED, ExitCode.USER_ERROR) or self._failures >= _MOST_FAILURES
        if code == ExitCode.FINISHED:
            say(f'{end}: it was told to stop')
        elif code == ExitCode.USER_ERROR:
            say(f'{end}, as it would again: it is not started again; see {self._log}')
        elif self.is_over:
            say(f'{end}, {self._failures} failures in a row: it is not started again; see {self._log}')
        else:
            pause_s = min(2.0 ** (self._deaths - 1), LONGEST_PAUSE_S)
            self._due_s = time.monotonic() + pause_s
            say(f'{end}: it is started again in {pause_s:.0f} s; see {self._log}')
