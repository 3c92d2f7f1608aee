"""The starts of a run: config, environment, data and earlier scores of each, to replay every start as it was.

A run writes WORKDIR/starts.json; a replay reads it.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.workdir.environment import Environment, read_environment
from areal_jax.app.workdir.run_directory import sample_digest
from areal_jax.config import TrackedConfig, default_config, flatten
from areal_jax.config.declarations import FIELDS, FREE
from areal_jax.config.ranges import ConfigError
from areal_jax.config.simulation_fields import TASK as PROMPTS_OF_TASK
from areal_jax.config.splits import FIELD, OFF, plan_file
from areal_jax.config.structure import require_saved, unknown_field, with_former
from areal_jax.errors import show
from areal_jax.events.records import check_of
from areal_jax.telemetry.facts import EVALUATIONS
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord

FILE = 'starts.json'  # in the workdir
TASK, SCHEDULE, PLAN, MODEL = 'task.path', 'staleness.schedule', FIELD, 'model.path'  # fields that name files
_FIX = 'restore the file as the run wrote it'
_TRACE = re.compile(r'trace\((.+)\)')


class DataFile(TypedDict):
    """A file that a start read."""

    path: str
    sha256: str  # of task.path, a trace and a plan; of model.path, workdir.sample_digest


class Start(TypedDict):
    """One start of the program."""

    seq: int  # number of its first event, `log`
    config: Mapping[str, Any]  # resolved, nested by section
    environment: Environment
    data: dict[str, DataFile]  # by config field
    # evaluations.json at that time: which versions the starts before had evaluated after their last checkpoint
    evaluations: files.JsonObject | None
    sandbox: NotRequired[SandboxRecord | None]  # of the scorer; absent in records of earlier versions


_REQUIRED = frozenset({'seq', 'config', 'environment', 'data'})  # of every version
_CHECKS = {
    'seq': check_of(int),
    'config': check_of(Mapping[str, Mapping[str, Any]]),
    'environment': check_of(Environment),
    'data': check_of(Mapping[str, DataFile]),
    'evaluations': check_of(Mapping[str, Any] | None),
    'sandbox': check_of(SandboxRecord | None),
}


def note_start(
    workdir: pathlib.Path,
    seq: int,
    config: TrackedConfig,
    weights: pathlib.Path | None,
    sandbox: SandboxRecord | None = None,
    environment: Environment | None = None,
) -> None:
    """Adds the start whose first event is `seq`; starts whose events were cut off the log are dropped.

    Args:
      weights: the file or directory that the run begins from; None = drawn by config and seed.
      sandbox: of the task's scorer; None = it has none.
      environment: None = the environment of this process.
    """
    path = workdir / FILE
    before = read_starts(path.read_bytes(), str(path)) if seq and path.exists() else []
    values = config.as_dict()
    data = {field: DataFile(path=str(file), sha256=digest(file)) for field, file in data_files(values).items()}
    if weights is not None:
        data[MODEL] = DataFile(path=str(weights), sha256=sample_digest(weights))
    scores = workdir / EVALUATIONS
    evaluations = files.read_json(scores, _FIX) if scores.exists() else None
    start = Start(
        seq=seq, config=values, environment=environment or read_environment(), data=data, evaluations=evaluations,
        sandbox=sandbox,
    )  # fmt: skip
    kept = [earlier for earlier in before if earlier['seq'] < seq]
    files.write_json(path, {'starts': [*kept, start]}, indent=None, allow_nan=True)  # eta may be infinite


def read_starts(content: bytes, name: str) -> list[Start]:
    """The starts in the bytes of a starts.json; raises FileError, which begins with `name`."""
    starts = files.parse_object(content, name, _FIX).get('starts')
    if not isinstance(starts, list):
        raise files.FileError(f"{name} has no list 'starts'; {_FIX}")
    for number, start in enumerate(starts, start=1):
        for field, fits in _CHECKS.items():
            if not isinstance(start, dict) or (field not in start and field in _REQUIRED):
                raise files.FileError(f'{name}: start {number} has no {field!r}; {_FIX}')
            if field in start and not fits(start[field]):
                raise files.FileError(
                    f'{name}: start {number} has {field}={show(start[field])}, where a part is missing or of another '
                    f'type; {_FIX}'
                )
        require_saved(start['config'], f'{name}: start {number}', _FIX)
    return starts


def data_files(values: Mapping[str, Any]) -> dict[str, pathlib.Path]:
    """The files that a config names, by field, except the files of the model."""
    found, simulation = {}, values.get('simulation', {})
    has_task = not simulation.get('prices') or simulation.get('prompts') == PROMPTS_OF_TASK
    if values['task']['path'] and has_task:
        found[TASK] = pathlib.Path(values['task']['path'])
    if match := _TRACE.fullmatch(values['staleness']['schedule']):
        found[SCHEDULE] = pathlib.Path(match[1])
    if file := plan_file(values.get('cluster', {}).get('reallocate', OFF)):
        found[PLAN] = file
    return found


def digest(file: pathlib.Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open('rb') as content:
        return hashlib.file_digest(content, 'sha256').hexdigest()


def restore_config(values: Mapping[str, Any], where: str) -> config_dict.ConfigDict:
    """The config whose resolved values these are; a field that they lack has its default, or what runs did without it.

    Raises ConfigError, which begins with `where`, for a field that this version does not know, or of another type.
    """
    config = default_config()
    for field, value in flatten(with_former(dict(values))):
        given = tuple(value) if isinstance(value, list) else value
        free, _, key = field.rpartition('.')
        try:
            if free in FREE:
                section, _, name = free.partition('.')
                with config[section][name].ignore_type():
                    config[section][name][key] = given
            elif field in FIELDS:
                config.update_from_flattened_dict({field: given})
            else:
                raise ConfigError(f'{where} is of another version of this program: {unknown_field(field)}')
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f'{where} has {field}={value!r}, which is not of the type of that field; {_FIX}'
            ) from error
    return config
