"""Runs one command and ends it with all its descendants once the launcher is gone: python -m launch.keeper COMMAND...

The launcher holds the other end of this process's standard input and never writes to it: its end, however the launcher
dies, is the sign to kill. Descendants that left the command's session are found on Linux only (workers/descendants.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import SIGNALS, Wakeups
from areal_jax.errors import ExitCode
from areal_jax.workers.descendants import adopt_orphans, die_with_parent, end_descendants

SIGNALLED = 128  # + number: exit code of a keeper whose command was ended by that signal, as in a shell
_KILL_S = 5.0


def keep(command: Sequence[str]) -> int:
    """The exit code of the command, which gets the stop signals that this process gets."""
    adopt_orphans()
    with Wakeups() as wakeups:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until there are handlers
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
        except OSError as error:
            print(f'error: {command[0]} cannot be started ({error.strerror})', file=sys.stderr, flush=True)
            return ExitCode.USER_ERROR
        launcher_is_gone = False
        while not launcher_is_gone and child.poll() is None:
            stops, launcher_is_gone = wakeups.wait(None, sys.stdin.fileno())
            for number in stops:
                child.send_signal(number)
    if launcher_is_gone:
        child.kill()
        child.wait()
    end_descendants(_reap, _KILL_S)
    code = child.returncode
    return SIGNALLED - code if code < 0 else code


def _reap() -> bool:
    """Waits for the children that have ended; False when there are no others."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def describe_code(code: int) -> str:
    """'ended with code 2', 'was ended by SIGKILL': of a keeper's exit code."""
    try:
        return f'was ended by {signal.Signals(code - SIGNALLED).name}'
    except ValueError:
        return f'ended with code {code}'


if __name__ == '__main__':
    sys.exit(keep(sys.argv[1:]))
