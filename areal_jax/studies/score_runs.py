"""The process that scores the final weights of single runs: python -m areal_jax.studies.score_runs LIST.

LIST is the file that stages.py writes. Each run without a score.json gets one.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import jax
import numpy as np

from areal_jax import files
from areal_jax.app.model.model import EarlierRun, describe_model
from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.app.process.ending import ProcessEnd, end_command
from areal_jax.app.process.setup import silence_libraries
from areal_jax.config import TrackedConfig
from areal_jax.errors import ExitCode
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.score import make_scorer
from areal_jax.studies.stages import SCORE, read_list
from areal_jax.types import Tree


def score_runs(path: pathlib.Path) -> int:
    """Scores the newest checkpoint of each run of the list; returns the exit code."""
    listed = {name: entry for name, entry in read_list(path).items() if not (entry[0] / SCORE).exists()}
    scorers: dict[str, Callable[[Tree], float]] = {}
    for name, (workdir, config) in listed.items():
        key = repr([sorted(config[section].items()) for section in ('model', 'task', 'rollout')])
        with use_compilation_cache(TrackedConfig(config)):
            score = scorers.setdefault(key, make_scorer(Arm(name, config)))
            files.write_json(workdir / SCORE, {'score': score(read_weights(workdir))})
    return ExitCode.FINISHED


def read_weights(workdir: pathlib.Path) -> Tree:
    """Reads the weights of the newest checkpoint of a run, as numpy arrays."""
    run = EarlierRun(str(workdir))
    decoder = describe_model(run.config).decoder
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(np.asarray, run.read_weights(decoder, lambda tree: jax.tree.map(lambda _: device, tree)))


if __name__ == '__main__':
    silence_libraries()
    end = ProcessEnd()
    sys.exit(end.note(end_command(lambda: score_runs(pathlib.Path(sys.argv[1])), doing='writing scores')))
