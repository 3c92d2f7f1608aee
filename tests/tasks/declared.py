"""The declared defaults of task.* fields, for tests that set only what they are about."""

from __future__ import annotations

from areal_jax.config.declarations import SECTIONS
from areal_jax.config.fields import Value


def task_values(*names: str, **changes: Value) -> dict[str, Value]:
    """{'system_prompt': '', ...}: the declared default of each name, but for `changes`."""
    return {name: SECTIONS['task'][name].default for name in names} | changes
