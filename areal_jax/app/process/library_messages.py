"""Silences messages of libraries that a user cannot act on, so that a clean run leaves stderr empty."""

from __future__ import annotations

import logging
import os
import sys

import absl.logging


def silence_libraries() -> None:
    """Shows only errors of XLA's C++ code and of matplotlib, and nothing that is logged through absl.

    Call it before jax is imported. Orbax logs every exception that it raises through absl, with a traceback.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # read once, when jaxlib is loaded
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('matplotlib').setLevel(logging.ERROR)  # it warns while it builds its cache of fonts
    _drop_late_futures()


def _drop_late_futures() -> None:
    """Drops the message 'Event loop is closed'.

    When reading one array of a damaged checkpoint fails, orbax closes its event loop, to which other
    reads still report.
    """
    hook = sys.unraisablehook

    def print_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != 'Event loop is closed':
            hook(unraisable)

    sys.unraisablehook = print_others
