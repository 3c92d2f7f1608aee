"""The levels of task.sandbox that confine: how a command is started at each, and what else it has.

A new level is an entry here, a module of its own, and its name in config/sandbox_fields.py and confinement.py, by which
the process that it starts confines itself.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from areal_jax.workers.sandbox.confinement import BUBBLEWRAP, LANDLOCK, SandboxError

PROGRAM = 'bwrap'
NAMESPACES = ('mnt', 'net', 'ipc', 'uts')  # that the command has to itself; where /proc can be mounted also 'pid'
_VIEW = ('--ro-bind', '/', '/', '--dev', '/dev')
_OWN = ('--unshare-net', '--unshare-ipc', '--unshare-uts', '--unshare-cgroup-try')
_PROCESSES, _PROC_OF_MACHINE = ('--unshare-pid', '--proc', '/proc'), ('--bind', '/proc', '/proc')
_ENDS = ('--die-with-parent', '--new-session')
# of root, until a confined process becomes another user: that change, a kill of that user, and its files
_CAPABILITIES = ('CAP_SETUID', 'CAP_SETGID', 'CAP_KILL', 'CAP_CHOWN', 'CAP_DAC_OVERRIDE')
_NO_PROC = 'mount proc'  # in what bwrap says where a container has covered parts of /proc
LONGEST_S = 20.0


def wrap_bubblewrap(command: Sequence[str], writable: Sequence[str]) -> list[str]:
    """The command line that starts the command inside; see levels.wrap_command.

    The first process has another pid inside, and the one outside ends when the thread that starts it ends. Raises
    SandboxError that says why bubblewrap does not run here.
    """
    folders = [word for folder in writable for word in ('--bind', folder, folder)]
    return [*_find_prefix(os.environ.get('PATH', '')), *folders, '--', *command]


def has_own_processes(wrapped: Sequence[str]) -> bool:
    """Whether the command of `wrap_bubblewrap` has pids of its own."""
    return _PROCESSES[0] in wrapped


@functools.cache
def _find_prefix(path: str) -> tuple[str, ...]:
    """The words before the command, which bwrap has taken here once; `path` is the PATH."""
    program = shutil.which(PROGRAM, path=path)
    if program is None:
        raise SandboxError(
            f'bubblewrap is not installed: there is no {PROGRAM} on the PATH (apt-get install bubblewrap)'
        )
    told = ''
    for processes in (_PROCESSES, _PROC_OF_MACHINE):
        prefix = (program, *_VIEW, *processes, *_OWN, *_choose_user(), *_ENDS)
        told = _try(prefix)
        if not told:
            return prefix
        if _NO_PROC not in told:
            break
    raise SandboxError(f'bubblewrap does not run here: {told}')


def _choose_user() -> list[str]:
    """Root keeps its users, so that it can become another one; an ordinary user gets a namespace of its own alone."""
    if os.getuid() != 0:
        return ['--unshare-user']
    return ['--cap-drop', 'ALL', *(word for name in _CAPABILITIES for word in ('--cap-add', name))]


def _try(prefix: Sequence[str]) -> str:
    """What it says when it fails; '' where it starts a command."""
    command = [*prefix, '--', sys.executable, '-I', '-S', '-c', '']
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LONGEST_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f'it starts nothing within {LONGEST_S:g} s'
    except OSError as error:
        return f'{prefix[0]}: {error.strerror}'
    if not done.returncode:
        return ''
    lines = done.stderr.decode(errors='replace').strip().splitlines()
    return lines[-1] if lines else f'it ends with {done.returncode}'


@dataclasses.dataclass(frozen=True)
class Level:
    """An entry of the table."""

    wrap: Callable[[Sequence[str], Sequence[str]], list[str]]  # (command, folders that can be written) -> command line
    has_namespaces: bool = False  # the command does not share those of the machine


LEVELS: Mapping[str, Level] = {
    LANDLOCK: Level(lambda command, writable: list(command)),
    BUBBLEWRAP: Level(wrap_bubblewrap, has_namespaces=True),
}


def wrap_command(level: str, command: Sequence[str], *, writable: Sequence[str] = ()) -> list[str]:
    """The command line that starts the command at the level; at 'none' the command itself.

    Descriptors, environment and working directory pass, and so does the exit code.

    Args:
      level: of confinement.CONFINING, or 'none'.
      writable: folders that can be written inside as outside.

    Raises SandboxError that says why the level does not work here.
    """
    return LEVELS[level].wrap(command, writable) if level in LEVELS else list(command)
