"""Runs a trainer and its servers together: all end with the trainer, and all end when this process is told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from areal_jax.app.process.ending import Wakeups
from areal_jax.errors import ExitCode

from .heartbeats import Heartbeats
from .keeper import SIGNALLED, describe_code
from .programs import Program, Server, Variables, say

_LOOK_S = 0.2  # between two looks at servers that wait for something
STOP_S = 10.0  # for servers to end after SIGTERM


def run_together(
    command: Sequence[str], servers: Sequence[Server], heartbeats: Heartbeats, variables: Variables
) -> int:
    """Starts the trainer, keeps the servers running until it ends, and returns its exit code.

    `variables` are added to the trainer's environment.

    The first stop signal goes to the trainer, which saves its state while the servers live on. The second one goes to
    it too and ends it at once; the third one kills everything. The code is ExitCode.STOPPED for a trainer that was
    killed, and ExitCode.USER_ERROR for one that lost all servers for good.
    """
    with Wakeups() as wakeups:
        trainer = Program(command, variables=variables)
        try:
            return _supervise(trainer, servers, heartbeats, wakeups)
        finally:
            _end_servers(servers, wakeups)
            trainer.kill()


def _supervise(trainer: Program, servers: Sequence[Server], heartbeats: Heartbeats, wakeups: Wakeups) -> int:
    stops, is_deserted = 0, False
    while (code := trainer.poll()) is None:
        numbers, _ = wakeups.wait(_LOOK_S)
        for number in numbers:
            stops += 1
            if stops > 2:
                say(f'{number.name}: everything is killed')
                trainer.kill()
            else:
                trainer.send(number)
        if stops:
            continue
        signs = heartbeats.look()
        for server in servers:
            server.look(signs)
        if servers and not is_deserted and all(server.is_over for server in servers):
            is_deserted = True
            say('no server is left: the trainer is told to save and stop')
            trainer.send(signal.SIGTERM)
    if is_deserted and not stops:
        return ExitCode.USER_ERROR
    if code > SIGNALLED:
        say(f'the trainer {describe_code(code)}: the same command with --resume goes on')
        return ExitCode.STOPPED
    return code


def _end_servers(servers: Sequence[Server], wakeups: Wakeups) -> None:
    """SIGTERM to all; those that still run after STOP_S or at a further stop signal are killed."""
    programs = [server.program for server in servers if server.program is not None]
    for program in programs:
        program.send(signal.SIGTERM)
    end_s = time.monotonic() + STOP_S
    while any(program.poll() is None for program in programs) and time.monotonic() < end_s:
        numbers, _ = wakeups.wait(_LOOK_S)
        if numbers:
            break
    for program in programs:
        program.kill()
