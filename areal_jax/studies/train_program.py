"""The process of a program of arms: python -m areal_jax.studies.train_program LIST.

LIST is the file that stages.py writes. Each arm gets the files of a run: config.json, metrics.jsonl and, last,
report.json. Metrics and reports that an earlier process left are removed first.
"""

from __future__ import annotations

import pathlib
import sys

from areal_jax import files
from areal_jax.app.model.model import build_model
from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.app.process.ending import ProcessEnd, end_command
from areal_jax.app.process.setup import silence_libraries
from areal_jax.config import TrackedConfig
from areal_jax.errors import ExitCode
from areal_jax.publication.manifest import weights_sha256
from areal_jax.report.report import FILE as REPORT
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.arm_training import ArmResult, train_arms
from areal_jax.studies.score_runs import make_scorer
from areal_jax.studies.stages import read_list
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import number


def train(path: pathlib.Path) -> int:
    """Trains, scores and reports the arms of the list; returns the exit code."""
    listed = read_list(path)
    arms = [Arm(name, config) for name, (_, config) in listed.items()]
    workdirs = [workdir for workdir, _ in listed.values()]
    for workdir in workdirs:
        for file in (REPORT, METRICS):
            (workdir / file).unlink(missing_ok=True)
    with use_compilation_cache(TrackedConfig(arms[0].config)):
        results = train_arms(arms, workdirs[0].parent, announce=lambda done, total: print(done, total, flush=True))
        score = make_scorer(arms[0])
        for result, workdir in zip(results, workdirs, strict=True):
            files.write_json(workdir / REPORT, make_report(result, score(result.params)), allow_nan=True)
    return ExitCode.FINISHED


def make_report(result: ArmResult, score: float) -> files.JsonObject:
    """Makes the fields of a run's report that a study reads, and adds the score."""
    series = lambda name: [number(line, name) or 0.0 for line in result.lines]  # 0: the update trained no token
    trained, ages = series(names.TOKENS_TRAINED), series(names.TOKEN_AGE_MEAN)
    tokens = sum(trained)
    steps = {name: sum(series(f'update/{name}')) for name in ('optimizer_steps', 'skipped_steps')}
    initial = build_model(TrackedConfig(result.arm.config)).params
    assert initial is not None
    return {
        'steps': len(result.lines),
        'finished': True,
        'optimizer_steps': {'applied': steps['optimizer_steps'], 'skipped': steps['skipped_steps']},
        'token_age': {
            'mean': sum(age * count for age, count in zip(ages, trained, strict=True)) / tokens if tokens else None,
            'max': max(series(names.TOKEN_AGE_MAX)),
        },
        'score': score,
        'weights_sha256': result.weights_sha256,
        'initial_weights_sha256': weights_sha256(initial),
    }


if __name__ == '__main__':
    silence_libraries()
    end = ProcessEnd()
    sys.exit(end.note(end_command(lambda: train(pathlib.Path(sys.argv[1])), doing='writing the arms of a program')))
