"""A run by one call: `build_run(config, workdir).train()`, whatever loss.objective asks for."""

from __future__ import annotations

import pathlib
from collections.abc import Collection

from ml_collections import config_dict

from areal_jax.app.interrupt import StopRequests
from areal_jax.app.run import Run
from areal_jax.app.session import Session
from areal_jax.app.sft import SftSession


def build_run(
    config: config_dict.ConfigDict,
    workdir: pathlib.Path,
    *,
    resume: bool = False,
    source: str = '',
    overrides: Collection[str] = (),
    interrupts: StopRequests | None = None,
) -> Run:
    """Builds the run that a config describes; `train` runs it, `close` gives it up. Arguments and errors as for Run."""
    kind = SftSession if config.loss.objective == 'sft' else Session
    return kind(config, workdir, resume=resume, source=source, overrides=overrides, interrupts=interrupts)
