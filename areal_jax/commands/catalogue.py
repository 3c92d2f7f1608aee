"""All commands: every main_*.py of the package has one, and launch/ has those that start runs on several processes."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib

from areal_jax.commands.command import Command

_LAUNCHERS = ('local', 'slurm', 'ray.main', 'jobset')


def list_words() -> dict[str, str]:
    """{'train': 'areal_jax.main_train', ...}, without importing a module."""
    files = sorted(pathlib.Path(__file__).parents[1].glob('main_*.py'))
    words = {file.stem.removeprefix('main_').replace('_', '-'): f'areal_jax.{file.stem}' for file in files}
    return {**words, 'completion': 'areal_jax.commands.completion'}


def find_commands() -> list[Command]:
    """The declarations of all commands, of this package first; imports no jax."""
    return [_read(module) for module in (*list_words().values(), *list_launchers())]


def list_launchers() -> tuple[str, ...]:
    """Modules of launch/: of the installed package, or of the clone that is the current directory; else none."""
    packages = (name for name in ('areal_jax.launch', 'launch') if importlib.util.find_spec(name))
    package = next(packages, '')
    return tuple(f'{package}.{name}' for name in _LAUNCHERS) if package else ()


def _read(module: str) -> Command:
    command = importlib.import_module(module).COMMAND
    assert isinstance(command, Command)
    return command
