"""Which kind of model a path names. Reads no weights and imports no jax."""

from __future__ import annotations

import pathlib
import re
from typing import Literal

from areal_jax import files
from areal_jax.config import CONFIG
from areal_jax.config.ranges import ConfigError
from areal_jax.installation import PACKAGE

Source = Literal['run', 'hf', 'gguf']  # of model.source
_KINDS = 'the --workdir of a run, one of its checkpoints, a directory of Hugging Face files, or a GGUF file'
_GGUF_MAGIC = b'GGUF'
_STEP = re.compile(r'step_(\d{8,})(_\d+)?$')


def choose_source(name: str) -> tuple[Source, str]:
    """(model.source, model.path) of RUN | CHECKPOINT | HF_DIR | GGUF, also of 'package:NAME/FILE'.

    Raises ConfigError for any other path.
    """
    files.require_local('--model', name)
    if name.startswith(PACKAGE):
        return 'gguf', name
    if not name or '\0' in name:
        raise ConfigError(f'--model={name!r} names no model: give {_KINDS}')
    path = pathlib.Path(name)
    if path.is_file():
        return _choose_file(path)
    if not path.is_dir():
        raise ConfigError(f'--model={name}: there is no such file or directory; give {_KINDS}')
    if read_version(path) is not None and (path.resolve().parents[1] / CONFIG).is_file():
        return 'run', name
    if not (path / CONFIG).is_file():
        raise ConfigError(f'--model={name}: the directory has no {CONFIG}; give {_KINDS}')
    return ('run' if _is_config_of_run(path / CONFIG) else 'hf'), name


def read_version(checkpoint: pathlib.Path | None) -> int | None:
    """The number of updates that a directory of a checkpoint, RUN/checkpoints/step_00000012, has in its name."""
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
