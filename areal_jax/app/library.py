"""areal_jax.train, evaluate and export: the commands as functions, for programs and notebooks.

They leave the process as it was: no signal handlers, no settings of malloc, logging or jax, no exit handlers. Each call
runs in a new thread (process/ending.py) and blocks until it has ended.
"""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ml_collections import config_dict

from areal_jax.app.command_line import find_config_file, load_config, require_workdir
from areal_jax.app.parts.compilations import print_warnings
from areal_jax.app.parts.learner_builder import build_averages
from areal_jax.app.process.ending import CallerInterrupts, call_in_thread
from areal_jax.app.run.loop import Loop
from areal_jax.app.run.own_site import build_own_loop, require_here
from areal_jax.app.run.run import Run, RunKind
from areal_jax.app.run.supervised import SftTraining, build_training
from areal_jax.app.workdir.mirrored_run import locate_run
from areal_jax.app.workdir.run_directory import Report
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.cluster import parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.config.objectives import find_objective
from areal_jax.errors import UserError
from areal_jax.files import is_address, require_local

LoopRun: TypeAlias = Run[Loop]
SftRun: TypeAlias = Run[SftTraining]
LOOP: RunKind[Loop] = RunKind(require_here, print_warnings, build_own_loop)
SFT: RunKind[SftTraining] = RunKind(require_here, print_warnings, build_training)


def build_run(config: config_dict.ConfigDict, workdir: pathlib.Path, **settings: Any) -> LoopRun | SftRun:
    """Builds the run that a config describes; `train` runs it, `close` abandons it. Settings and errors as for Run."""
    if not find_objective(config.loss.objective).generates:
        return Run(SFT, config, workdir, **settings)
    if config.distributed.clients > 1 and config.distributed.average_directory and not settings.get('resume'):
        build_averages(TrackedConfig(config)).require_new()
    return Run(LOOP, config, workdir, **settings)


ConfigSource: TypeAlias = config_dict.ConfigDict | str | os.PathLike[str]
FilePath: TypeAlias = str | os.PathLike[str]
_Result = TypeVar('_Result')

_one_at_a_time = threading.Lock()


def train(config: ConfigSource, workdir: FilePath, resume: bool = False) -> Report:
    """Trains to the end and returns the content of report.json. The weights equal the weights that main_train trains.

    If the report's `optimizer_steps` has `applied` 0, the run trained nothing (exit code 3 of main_train).

    Args:
      config: as `areal_jax.config.default_config()` returns it, or the path of a config file, 'mine.py' or
        'FILE:ARGUMENT', or the name of one that comes with the package, 'tiny_cpu'. It is not changed.
      workdir: the directory for everything that the run leaves.
      resume: continue from the newest checkpoint in `workdir`, or start at update 0 if there is no checkpoint. The
        report of a run that has finished is returned at once.

    Raises UserError, one sentence, for errors that the caller can fix; OSError for a disk that is full; and
    KeyboardInterrupt if it was raised in this thread during the run: the current update is finished and saved first (a
    second interrupt stops without saving), and resume=True continues. After any exception the workdir is unlocked, and
    threads, processes and files of the run are gone.
    """
    loaded, source = load_source(config)
    _require_one_process(loaded)
    directory = _directory(workdir)

    def run(interrupts: CallerInterrupts) -> Report | None:
        return build_run(loaded, directory, resume=resume, source=source, interrupts=interrupts).train()

    return _call('train', run)


def evaluate(
    config: ConfigSource, workdir: FilePath, *, model: FilePath | None = None, resume: bool = False
) -> Mapping[str, object]:
    """Scores a model on the held-out problems of a task as main_eval does, and returns the content of results.json.

    Args:
      config: as for `train`.
      workdir: the directory for the results, which must hold nothing else.
      model: a workdir of `train`, one of its checkpoints, a directory of Hugging Face files, a GGUF file, or
        'package:NAME/FILE'; None = the model that `config.model` names.
      resume: continue after the problems that are already scored.

    Raises the errors that `train` raises; after KeyboardInterrupt, resume=True continues.
    """
    from areal_jax.app.evaluate.evaluate import evaluate_model

    loaded, source = load_source(config)
    directory, name = _directory(workdir), None if model is None else os.fspath(model)

    def run(interrupts: CallerInterrupts) -> Mapping[str, object] | None:
        return evaluate_model(loaded, directory, model=name, resume=resume, source=source, interrupts=interrupts)

    return _call('evaluate', run)


def export(workdir: FilePath, out: FilePath, *, step: int | None = None, dtype: str = 'float32') -> pathlib.Path:
    """Writes a checkpoint of a run as a directory of Hugging Face files as main_export does, and returns its path.

    Args:
      workdir: of the run, one of its checkpoints, or its run.mirror.
      out: the directory to write; it must not exist, or must be empty.
      step: the update whose checkpoint is exported; None = the newest.
      dtype: of the weights in the files: 'float32', 'bfloat16' or 'float16'.

    Raises UserError, one sentence, for errors that the caller can fix; nothing is left half-written.
    """
    from areal_jax.app.export.run_export import export_run

    if not is_address(os.fspath(workdir)):
        require_local('workdir', os.fspath(workdir))
    require_local('out', os.fspath(out))
    return export_run(locate_run(os.fspath(workdir)), pathlib.Path(out), step=step, dtype=dtype)


def load_source(config: ConfigSource) -> tuple[config_dict.ConfigDict, str]:
    """Returns (config, where it came from); raises UserError for a value that is no config."""
    if isinstance(config, config_dict.ConfigDict):
        loaded, source = config, ''
    elif isinstance(config, str | os.PathLike):
        require_local('config', os.fspath(config))
        source = find_config_file(os.fspath(config)).source
        loaded = load_config(source)
    else:
        raise ConfigError(
            f'config is a {type(config).__name__}: give an ml_collections ConfigDict, as '
            'areal_jax.config.default_config() returns it, or the path of a config file'
        )
    return loaded, source


def _require_one_process(config: config_dict.ConfigDict) -> None:
    validate(config)
    if (layout := parse_learner(config.cluster.learner)).processes > 1:
        raise ConfigError(
            f'cluster.learner={config.cluster.learner!r} has {layout.processes} processes, and a call from Python is '
            'one: start python -m areal_jax.main_train in each process, or leave out hosts'
        )


def _directory(workdir: FilePath) -> pathlib.Path:
    require_workdir(os.fspath(workdir))
    return pathlib.Path(workdir)


def _call(name: str, run: Callable[[CallerInterrupts], _Result | None]) -> _Result:
    """Calls `run` in a thread and returns its result. Only an interrupted run returns None, and then it raises."""
    if not _one_at_a_time.acquire(blocking=False):
        raise UserError(
            f'areal_jax.{name}: another run of this process has not ended; wait for it, or start a process for each run'
        )
    try:
        result = call_in_thread(run, f'areal_jax.{name}')
    finally:
        _one_at_a_time.release()
    assert result is not None
    return result
