"""Messages of libraries that a user can do nothing about: kept off stderr, where a clean run writes nothing."""

from __future__ import annotations

import logging
import os

import absl.logging


def silence_libraries() -> None:
    """Shows errors only of XLA's C++ code, orbax (by absl) and matplotlib; call it before jax is imported."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # read once, when jaxlib is loaded
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger('matplotlib').setLevel(logging.ERROR)  # it warns while it builds its cache of fonts
