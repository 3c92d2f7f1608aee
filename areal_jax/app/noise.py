"""Messages of libraries that a user can do nothing about: kept off stderr, where a clean run writes nothing."""

from __future__ import annotations

import logging
import os
import sys

import absl.logging


def silence_libraries() -> None:
    """Leaves errors of XLA's C++ code and of matplotlib, and nothing of absl; call it before jax is imported.

    Orbax logs by absl, with a traceback, what it also raises.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # read once, when jaxlib is loaded
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('matplotlib').setLevel(logging.ERROR)  # it warns while it builds its cache of fonts
    _drop_late_futures()


def _drop_late_futures() -> None:
    """Drops one message: where an array of a damaged checkpoint fails, orbax closes the loop that others report to."""
    hook = sys.unraisablehook

    def print_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != 'Event loop is closed':
            hook(unraisable)

    sys.unraisablehook = print_others
