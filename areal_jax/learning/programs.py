"""The compiled programs of one learner, by name; train_step.py defines them.

Used by state.py, passes.py and learner.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import jax

from areal_jax.learning.train_step import Programs
from areal_jax.types import Tree

_Shapes = tuple[tuple[int, ...], ...]


class CompiledPrograms:
    """Compiles each program once for every shape of rows that it is called with; from any thread.

    Programs are compiled ahead of their first call, so that warming up runs nothing and needs no memory for results.
    """

    def __init__(self, definitions: Programs):
        self.definitions = definitions
        self._lock = threading.Lock()
        self._programs: dict[tuple[str, _Shapes], Future[jax.stages.Compiled]] = {}  # by name and shapes of its rows

    @property
    def compiled(self) -> dict[tuple[str, _Shapes], jax.stages.Compiled]:
        """The programs by name and the shapes of their rows; waits for those that are being compiled."""
        return {key: program.result() for key, program in self._programs.copy().items()}

    def compile(self, name: str, *args: Tree) -> jax.stages.Compiled:
        """The program `name` (a method of train_step.Programs) for arguments of these shapes, which are all it needs.

        If another thread is compiling it, this one waits for the result.
        """
        shapes = tuple(arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg)
        with self._lock:
            known = (name, shapes) in self._programs
            program = self._programs.setdefault((name, shapes), Future())
        if not known:
            try:
                program.set_result(getattr(self.definitions, name)().lower(*args).compile())
            except BaseException as error:
                program.set_exception(error)
                raise
        return program.result()

    def run(self, name: str, *args: Tree) -> Tree:
        return self.compile(name, *args)(*args)
