"""What modules do after a fork, left out of the forks that do not need it: a dozen lines cost a third of a millisecond.

`random` draws a new seed in each fork, `threading` makes new locks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

# code that may draw at random, or start threads and forks of its own
_NEEDS = re.compile(rb'random|thread|fork|process|concurrent|asyncio')
_kept: list[dict[str, Callable[[], object]]] = []


@contextlib.contextmanager
def keep_hooks() -> Iterator[None]:
    """Modules that are imported meanwhile do nothing after a fork; for a process that has one thread where it forks."""
    register = os.register_at_fork
    os.register_at_fork = lambda **hooks: _kept.append(hooks)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.register_at_fork = register


def run_hooks(code: bytes) -> None:
    """In a fork that is about to run this code: does what was kept, for its own forks too, if the code may need it."""
    if _NEEDS.search(code) is None:
        return
    for hooks in _kept:
        os.register_at_fork(**hooks)  # type: ignore[arg-type]
        hooks.get('after_in_child', bool)()
    _kept.clear()
