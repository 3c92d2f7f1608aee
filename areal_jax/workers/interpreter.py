"""Interpreters of environments that have a serving stack or verifiers, which the interpreter of a run has not."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from areal_jax.errors import UserError
from areal_jax.installation import find_clone


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Where the interpreter of an environment is.

    Args:
      needed_by: the field with the value that needs it, for messages: "rollout.server='sglang'".
      title: of what it has, for messages.
      variable: of the environment, names the interpreter.
      made: the interpreter in a clone where `variable` is not set.
      script: makes that one.
    """

    needed_by: str
    title: str
    variable: str
    made: str
    script: str

    def find(self, beside: pathlib.Path | None = None) -> str:
        """The interpreter; raises UserError where there is none, or only one in the folder `beside`."""
        clone, named = find_clone(), os.environ.get(self.variable)
        python = named or (None if clone is None else str(clone / self.made))
        if python is not None and pathlib.Path(python).is_file() and pathlib.Path(python).parent != beside:
            return python
        found = '' if python is None else f', and {python} is none'
        if clone is None:
            fix = f'install {self.title} into an environment of its own, and name its interpreter in {self.variable}'
        else:
            fix = f'make one with `bash {self.script}`, or name one in {self.variable}'
        raise UserError(f'{self.needed_by} needs an interpreter that has {self.title}{found}: {fix}')
