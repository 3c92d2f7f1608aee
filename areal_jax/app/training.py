"""Training by one call: the kind of run that loss.objective asks for, from its config to its report."""

from __future__ import annotations

import pathlib
from collections.abc import Collection

from ml_collections import config_dict

from areal_jax.app.interrupt import Interrupts
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
    interrupts: Interrupts | None = None,
) -> Run:
    """The run that a config describes, built; `train` runs it, `close` gives it up. Arguments as for Run."""
    kind = SftSession if config.loss.objective == 'sft' else Session
    return kind(config, workdir, resume=resume, source=source, overrides=overrides, interrupts=interrupts)
