"""What the config.json of another run says of its model. Needs no jax."""

from __future__ import annotations

import pathlib
import re

from areal_jax import files
from areal_jax.app.workdir.run_directory import CHECKPOINTS
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config, flatten
from areal_jax.config.ranges import ConfigError
from areal_jax.config.structure import with_former

FIELD = 'model.path'
# the fields of that run's config that say which weights and tokenizer it has
_READ = ('model.', 'lora.', 'task.symbols', 'loss.objective', 'learner.row_tokens', 'rollout.context_tokens')


def split_checkpoint(path: str) -> tuple[pathlib.Path, str | None]:
    """(workdir, name of the checkpoint's directory) of a path to either; no name for a workdir."""
    given = pathlib.Path(path)
    whole = given.absolute()
    if whole.parent.name == CHECKPOINTS and re.fullmatch(r'step_\d+(_\d+)?', whole.name):
        return given.parent.parent if len(given.parts) > 2 else whole.parent.parent, whole.name
    return given, None


def read_run_config(path: str, field: str = FIELD) -> TrackedConfig:
    """What the config of a run says about its model; raises ConfigError for a path that is not of a run."""
    workdir, _ = split_checkpoint(path)
    file, fix = workdir / CONFIG, 'restore the file as the run wrote it'
    values = files.read_json(file, fix) if file.is_file() else {}
    if not isinstance(values.get('model'), dict):  # a directory of Hugging Face has a config.json too
        files_of_a_model = "; a directory of Hugging Face files needs model.source='hf'" if field == FIELD else ''
        raise ConfigError(
            f'{field}={path!r} is no run: {workdir} has no {CONFIG} of one. Give the --workdir of a run, or one of its '
            f'checkpoints, WORKDIR/{CHECKPOINTS}/step_...{files_of_a_model}'
        )
    if values.get('simulation', {}).get('prices'):
        raise ConfigError(f'{field}={path!r} is a simulation, which has no weights: name a run of areal-train')
    config = default_config()
    known = dict(flatten(config))
    saved = {name: value for name, value in flatten(with_former(values)) if name.startswith(_READ) and name in known}
    try:
        config.update_from_flattened_dict(
            {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f'{file} holds a value of another type than its field ({error}): {fix}') from error
    return TrackedConfig(config)


def find_checkpoint(path: str) -> pathlib.Path:
    """The checkpoint that the path names, or the newest one of that run; whether it is intact is not looked at.

    Raises ConfigError for a run without one, CheckpointError for one that is not there.
    """
    workdir, name = split_checkpoint(path)
    store = CheckpointStore(workdir / CHECKPOINTS)
    newest = store.latest()
    if newest is None:
        raise ConfigError(
            f'{FIELD}={path!r} holds no checkpoint: let that run end, or stop it with Ctrl-C, which saves one'
        )
    return store.path(name or newest)
