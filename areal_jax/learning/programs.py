"""The compiled programs of one learner, by name; train_step.py defines them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar, TypeVar

import jax

from areal_jax.learning.train_step import Programs
from areal_jax.models.attention import jax_settings
from areal_jax.types import Tree

_Shapes = tuple[tuple[int, ...], ...]
_Key = tuple[str, _Shapes]  # of a program: its name and the shapes of its rows
_KeptKey = tuple[Programs, _Key, str]  # and jax's settings
_T = TypeVar('_T')
AHEAD = 'learner warm-up'  # name of the thread that compiles before a program is asked for
MOST_KEPT = 64  # programs, of learners of one process that are equal


class CompiledPrograms:
    """Compiles each program once for every shape of rows that it is called with; from any thread.

    Programs are compiled ahead of their first call, so that warming up runs nothing and needs no memory for results.
    Learners of equal definitions share what one of them has compiled, while jax's settings are the same: a second run
    of a process compiles nothing.
    """

    kept: ClassVar[collections.OrderedDict[_KeptKey, jax.stages.Compiled]] = collections.OrderedDict()

    def __init__(self, definitions: Programs):
        self.definitions = definitions
        self._lock = threading.Lock()
        self.traced: dict[_Key, Future[jax.stages.Lowered]] = {}  # until they are compiled
        self._programs: dict[_Key, Future[jax.stages.Compiled]] = {}

    @property
    def compiled(self) -> dict[_Key, jax.stages.Compiled]:
        """The programs by name and the shapes of their rows; waits for those that are being compiled."""
        return {key: program.result() for key, program in self._programs.copy().items()}

    @property
    def temporary_bytes(self) -> int:
        """The most memory that one of the compiled programs needs on a device while it runs; 0 where it is unknown."""
        found = [program.memory_analysis() for program in self.compiled.values()]
        return max((int(analysis.temp_size_in_bytes) for analysis in found if analysis is not None), default=0)

    def trace(self, name: str, *args: Tree) -> None:
        """The first half of `compile`, and the one that holds the interpreter's lock."""
        if self._kept_key(_key(name, args)) not in self.kept:
            self._trace(name, args)

    def _trace(self, name: str, args: tuple[Tree, ...]) -> jax.stages.Lowered:
        return self._once(self.traced, _key(name, args), lambda: getattr(self.definitions, name)().lower(*args))

    def compile(self, name: str, *args: Tree) -> jax.stages.Compiled:
        """The program `name` (a method of train_step.Programs) for arguments of these shapes, which are all it needs.

        If another thread is compiling it, this one waits for the result.
        """
        key = _key(name, args)

        def compile_traced() -> jax.stages.Compiled:
            if (program := self.kept.get(self._kept_key(key))) is None:
                program = self._trace(name, args).compile()
                self._keep(key, program)
            self.traced.pop(key, None)
            return program

        return self._once(self._programs, key, compile_traced)

    def _kept_key(self, key: _Key) -> _KeptKey:
        return self.definitions, key, jax_settings()

    def _keep(self, key: _Key, program: jax.stages.Compiled) -> None:
        self.kept[self._kept_key(key)] = program
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)

    def run(self, name: str, *args: Tree) -> Tree:
        return self.compile(name, *args)(*args)

    def _once(self, made: dict[_Key, Future[_T]], key: _Key, make: Callable[[], _T]) -> _T:
        """What the first thread that asks for it makes; the others wait. An error is raised in all of them."""
        with self._lock:
            known = key in made
            future = made.setdefault(key, Future())
        if not known:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


def _key(name: str, args: tuple[Tree, ...]) -> _Key:
    return name, tuple(arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg)
