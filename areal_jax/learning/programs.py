"""The compiled programs of one learner, by name; train_step.py defines them.

Used by state.py, passes.py and learner.py.
"""

from __future__ import annotations

import jax

from areal_jax.learning.train_step import Programs
from areal_jax.types import Tree

_Shapes = tuple[tuple[int, ...], ...]


class CompiledPrograms:
    """Compiles each program once for every shape of rows that it is called with.

    Programs are compiled ahead of their first call, so that warming up runs nothing and needs no memory for results.
    """

    def __init__(self, definitions: Programs):
        self.definitions = definitions
        self.compiled: dict[tuple[str, _Shapes], jax.stages.Compiled] = {}  # by name and the shapes of its rows

    def compile(self, name: str, *args: Tree) -> jax.stages.Compiled:
        """The program `name` (a method of train_step.Programs) for arguments of these shapes."""
        shapes = tuple(arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg)
        if (name, shapes) not in self.compiled:
            jitted = getattr(self.definitions, name)()
            self.compiled[name, shapes] = jitted.lower(*args).compile()
        return self.compiled[name, shapes]

    def run(self, name: str, *args: Tree) -> Tree:
        return self.compile(name, *args)(*args)
