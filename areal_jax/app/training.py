"""A run by one call: `build_run(config, workdir).train()`, whatever loss.objective asks for."""

from __future__ import annotations

import pathlib
from typing import Any, TypeAlias

from ml_collections import config_dict

from areal_jax.app.parts.compilations import print_warnings
from areal_jax.app.parts.learner_builder import build_averages
from areal_jax.app.run.loop import Loop, build_loop
from areal_jax.app.run.own_site import OwnSite, require_here
from areal_jax.app.run.run import Run, RunKind
from areal_jax.app.run.supervised import SftTraining
from areal_jax.config import TrackedConfig
from areal_jax.config.objectives import find_objective

LoopRun: TypeAlias = Run[OwnSite, Loop]
SftRun: TypeAlias = Run[OwnSite, SftTraining]
LOOP: RunKind[OwnSite, Loop] = RunKind(require_here, print_warnings, OwnSite, build_loop)
SFT: RunKind[OwnSite, SftTraining] = RunKind(require_here, print_warnings, OwnSite, SftTraining)


def build_run(config: config_dict.ConfigDict, workdir: pathlib.Path, **settings: Any) -> LoopRun | SftRun:
    """Builds the run that a config describes; `train` runs it, `close` gives it up. Settings and errors as for Run."""
    if not find_objective(config.loss.objective).generates:
        return Run(SFT, config, workdir, **settings)
    if config.distributed.clients > 1 and config.distributed.average_directory and not settings.get('resume'):
        build_averages(TrackedConfig(config)).require_new()
    return Run(LOOP, config, workdir, **settings)
