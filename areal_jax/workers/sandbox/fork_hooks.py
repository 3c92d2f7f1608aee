"""Leaves the at-fork hooks of modules out of forks that do not need them: a dozen lines cost a third of a millisecond.

`random` draws a new seed in each fork, `threading` makes new locks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

# code that may draw at random, or start threads or forks
_NEEDS = re.compile(rb'random|thread|fork|process|concurrent|asyncio')
_kept: list[dict[str, Callable[[], object]]] = []


@contextlib.contextmanager
def keep_hooks() -> Iterator[None]:
    """Keeps the hooks of modules that are imported inside; for a process that has one thread when it forks."""
    register = os.register_at_fork
    os.register_at_fork = lambda **hooks: _kept.append(hooks)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.register_at_fork = register


def run_hooks(code: bytes) -> None:
    """Runs the kept hooks in a fork, and registers them for its own forks, if the code it will run may need them."""
    if _NEEDS.search(code) is None:
        return
    for hooks in _kept:
        os.register_at_fork(**hooks)  # type: ignore[arg-type]
        hooks.get('after_in_child', bool)()
    _kept.clear()
