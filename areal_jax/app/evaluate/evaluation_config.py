"""The config of an evaluation: the config of a run, with model and benchmark from the command line. Imports no jax."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection
from typing import Literal

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.workdir.mirrored_run import is_directory_of_copies
from areal_jax.config import CONFIG
from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import ConfigError
from areal_jax.hub import HubError, is_hub_name
from areal_jax.installation import PACKAGE
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import read_objects

Source = Literal['run', 'hf', 'gguf']  # of model.source
_KINDS = (
    'the --workdir or run.mirror of a run, one of its checkpoints, hf:ORG/NAME, a directory of its files, or a GGUF '
    'file'
)
_GGUF_MAGIC = b'GGUF'
_STEP = re.compile(r'step_(\d{8,})(_\d+)?$')


def choose_source(name: str) -> tuple[Source, str]:
    """Returns (model.source, model.path) of RUN | CHECKPOINT | HF_DIR | hf:ORG/NAME | GGUF | 'package:NAME/FILE'.

    Raises ConfigError for any other path.
    """
    if files.is_address(name):
        return 'run', name
    files.require_local('--model', name)
    if name.startswith(PACKAGE):
        return 'gguf', name
    if not name or '\0' in name:
        raise ConfigError(f'--model={name!r} names no model: give {_KINDS}')
    path = pathlib.Path(name)
    if path.is_file():
        return _choose_file(path)
    if is_hub_name(name):
        return 'hf', name
    if not path.is_dir():
        raise ConfigError(f'--model={name}: there is no such file or directory; give {_KINDS}')
    if read_version(path) is not None and (path.resolve().parents[1] / CONFIG).is_file():
        return 'run', name
    if is_directory_of_copies(path):
        return 'run', name
    if not (path / CONFIG).is_file():
        raise ConfigError(f'--model={name}: the directory has no {CONFIG}; give {_KINDS}')
    return ('run' if _is_config_of_run(path / CONFIG) else 'hf'), name


def read_version(checkpoint: pathlib.Path | None) -> int | None:
    """Returns the number of updates in the name of a checkpoint's directory, RUN/checkpoints/step_00000012."""
    match = _STEP.fullmatch(checkpoint.resolve().name) if checkpoint is not None else None
    return int(match[1]) if match else None


def _choose_file(path: pathlib.Path) -> tuple[Source, str]:
    try:
        with path.open('rb') as file:
            begin = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f'--model={path} cannot be read ({error.strerror}); give {_KINDS}') from error
    if begin == _GGUF_MAGIC:
        return 'gguf', str(path)
    if path.suffix == '.safetensors':
        raise ConfigError(f'--model={path}: name the directory that has {CONFIG} beside the safetensors')
    raise ConfigError(f'--model={path} is a file, but not in GGUF format; give {_KINDS}')


def _is_config_of_run(path: pathlib.Path) -> bool:
    """Whether config.json belongs to a run: it has sections. A Hugging Face config is left to its reader."""
    try:
        content = files.read_json(path)
    except files.FileError:
        return False
    return isinstance(content.get('model'), dict) and isinstance(content.get('run'), dict)


# parts that an evaluation does not have, so their devices and packages must not be required
_WITHOUT_TRAINING = {
    'rollout.server': 'in_process',
    'cluster.learner': FIELDS['cluster.learner'].default,
    'telemetry.tensorboard': False,
    'telemetry.plots': False,
}


def adapt_config(
    config: config_dict.ConfigDict, model: str | None, overrides: Collection[str]
) -> config_dict.ConfigDict:
    """Returns a copy whose model.source and model.path name `model` (None = unchanged), without the fields of training.

    Raises ConfigError for a path that is no model, and for a setting that the command line gives twice.
    """
    adapted = config.copy_and_resolve_references()
    if model is not None:
        _require_free('--model', ('model.source', 'model.path'), overrides)
        adapted.model.source, adapted.model.path = choose_source(model)
    if 'cluster.learner' in overrides:
        raise ConfigError('--config.cluster.learner is set, but an evaluation has no learner: remove the setting')
    adapted.update_from_flattened_dict(_WITHOUT_TRAINING)
    return adapted


def set_benchmark(config: config_dict.ConfigDict, file: str, overrides: Collection[str]) -> None:
    """Makes the lines of a JSON-lines file the problems of the evaluation: all of them held out, and all evaluated.

    The command line may set evaluation.problems to evaluate fewer, and task.answer to say how answers are compared.

    Raises ConfigError for a file that cannot be read or has no line, and for a task that the command line gives twice.
    """
    _require_free('--benchmark', ('task.name', 'task.path', 'task.held_out_fraction'), overrides)
    lines = _count_rows(file)
    config.task.name, config.task.path, config.task.held_out_fraction = 'jsonl', file, 1.0
    config.task.sources = config_dict.ConfigDict()
    if 'evaluation.problems' not in overrides:
        config.evaluation.problems = lines


def _require_free(flag: str, fields: tuple[str, ...], overrides: Collection[str]) -> None:
    for field in fields:
        if field in overrides:
            raise ConfigError(f'{flag} and --config.{field} are both given, and both say the same thing: remove one')


def _count_rows(path: str) -> int:
    """Counts the problems of a file or data set if none is repeated."""
    try:
        return sum(1 for _ in read_objects(path))
    except (TaskError, HubError) as error:
        raise ConfigError(str(error).replace(f'task.path={path!r}', f'--benchmark={path}')) from error
