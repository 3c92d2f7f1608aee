"""The levels of task.sandbox that confine: how a command is started at each, and what else it has.

A new level is an entry here, a module of its own, and its name in config/sandbox_fields.py and confinement.py, by which
the process that it starts confines itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from areal_jax.workers.sandbox.confinement import BUBBLEWRAP, LANDLOCK
from areal_jax.workers.sandbox.levels import wrap_bubblewrap


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
