"""Checkpoints: weights, optimizer and run state of a step on the disk; every process writes its own shards.

`read` gives the arrays of a run to any program.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def read(directory: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint by name, 'params/layers/0/mlp/up/weight', and verifies their checksums.

    `directory` is one step (WORKDIR/checkpoints/step_00000012), or the directory of all steps or a workdir: then the
    newest step is read. Needs memory for all arrays. Raises CheckpointError if it is missing or damaged.
    """
    from areal_jax.checkpoint.store import read_named  # imports jax, which reading a run state must not

    return read_named(directory)
