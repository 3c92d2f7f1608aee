"""Runs one role of a run on the node where Ray has placed this actor, and starts it again within a budget."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Mapping, Sequence

from areal_jax.errors import ExitCode

from ..cluster_run import STEADY_S
from ..programs import Program

FINAL = (ExitCode.FINISHED, ExitCode.BUG, ExitCode.USER_ERROR, ExitCode.NOTHING_TRAINED)  # not to be started again
_TAIL_LINES, _TAIL_BYTES = 5, 4096
PAUSE_S = 2.0  # before a restart


@dataclasses.dataclass(frozen=True)
class State:
    """Of a role, as its actor sees it."""

    starts: int
    code: int | None  # with which it ended for good; None: it runs, or will be started again
    tail: str = ''  # last lines of its log


class RoleActor:
    """Starts the command, whose process ends with this actor: its keeper notices (launch/keeper.py).

    Args:
      cwd: paths of the config are relative to it.
      host: address of the role; '' = the node's.
      logs: a folder that all nodes share.
      restarts: most restarts in a row.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        logs: str,
        *,
        host: str,
        restarts: int,
    ):
        os.chdir(cwd)
        self._name, self._logs, self._environment = name, pathlib.Path(logs), environment
        self._command = [*command, f'--host={host or _find_address()}']
        self._restarts, self._starts, self._failures = restarts, 0, 0
        self._began_s = self._due_s = 0.0
        self._program: Program | None = None
        self._code: int | None = None
        self._is_told = False
        self._start()

    def look(self) -> State:
        """Notices the end of the role, and starts it again when that is due."""
        if self._program is not None and (code := self._program.poll()) is not None:
            self._program = None
            self._failures = self._failures + 1 if time.monotonic() - self._began_s < STEADY_S else 1
            if code in FINAL or self._is_told or self._failures > self._restarts:
                self._code = code if code in FINAL else ExitCode.STOPPED
            self._due_s = time.monotonic() + PAUSE_S
        if self._program is None and self._code is None and time.monotonic() >= self._due_s:
            self._start()
        return State(self._starts, self._code, '' if self._code is None else self._read_tail())

    def stop(self) -> None:
        """SIGTERM: the role saves its state, and is not started again."""
        self._is_told = True
        if self._program is not None:
            self._program.send(signal.SIGTERM)
        elif self._code is None:
            self._code = ExitCode.STOPPED

    def kill(self) -> None:
        """Ends the role at once."""
        self._is_told = True
        if self._program is not None:
            self._program.kill()

    def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in self._logs.glob(f'{self._name}.*.log'))
        self._log = self._logs / f'{self._name}.{number}.log'
        with self._log.open('ab') as log:
            self._program = Program(self._command, log, self._environment)
        self._starts, self._began_s = self._starts + 1, time.monotonic()

    def _read_tail(self) -> str:
        try:
            with self._log.open('rb') as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
                return '\n'.join(file.read().decode(errors='replace').splitlines()[-_TAIL_LINES:])
        except OSError as error:  # the code must be known all the same
            return f'{self._log} cannot be read: {error.strerror}'


def _find_address() -> str:
    """Of this node, as the others reach it."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
