"""The records of a run that make it replayable: its starts, the user's own code, and one file with all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import pathlib
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.workdir.environment import Environment, read_environment
from areal_jax.app.workdir.run_directory import sample_digest
from areal_jax.config import CONFIG, TrackedConfig, default_config, flatten
from areal_jax.config.declarations import FIELDS, find_free, set_free
from areal_jax.config.declarations import TASK as PROMPTS_OF_TASK
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import CHANNEL, SERVER
from areal_jax.config.near_names import read_saved, require_saved, unknown_field, with_former
from areal_jax.config.objectives import FIELD as OBJECTIVE
from areal_jax.config.objectives import find_objective, is_policy
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.config.sources import find_path, list_tasks
from areal_jax.config.splits import FIELD, OFF, plan_file
from areal_jax.errors import UserError, show
from areal_jax.events.records import fits
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.hub import find_revisions, is_hub_name, locate_dataset
from areal_jax.plugins import is_own, load_function, source_file
from areal_jax.report.event_log import parse_events
from areal_jax.telemetry.facts import EVALUATIONS
from areal_jax.telemetry.facts import FILE as FACTS
from areal_jax.types import Prompt, Trajectory, TrajectoryGroup
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord

OWN_CODE = 'own_code.json'  # in the workdir

Digests = Mapping[str, Mapping[str, str]]  # by config field: {'function': ..., 'file': ..., 'sha256': ...}


def load_own_code(config: config_dict.ConfigDict) -> Digests:
    """Loads every own function that the run uses, and returns the file of each with its digest.

    An own advantage is called once, with rewards 0 and 1 in groups of the run's size. Raises UserError for a function
    that cannot be loaded, and an advantage that does not return one number per reward.
    """
    found = {}
    for field, spec in _own_functions(config):
        function = load_function(spec, field)
        if field == OBJECTIVE:
            from areal_jax.learning.objective.objectives import load_objective  # imports jax

            load_objective(spec, dict(config.loss.options))
        if field == 'loss.advantage':
            from areal_jax.learning.objective.advantages import own_advantages  # imports jax

            example = _example(config)
            own_advantages(example, function, PolicyChoices(advantage=spec))
        if (file := source_file(spec, field)) is not None:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[field] = {'function': spec, 'file': str(file), 'sha256': digest}
    return found


def note_own_code(workdir: pathlib.Path, found: Digests, *, resume: bool) -> None:
    """Writes the digests to the workdir. A resumed run continues with changed files, and prints a warning."""
    path = workdir / OWN_CODE
    before = files.read_json(path, 'remove it: a resume writes it again') if resume and path.exists() else {}
    for field, now in found.items():
        earlier = before.get(field, now)
        if earlier['sha256'] != now['sha256']:
            print(
                f'warning: {field}={now["function"]}: {now["file"]} was changed since the run used it last (sha256 '
                f'{earlier["sha256"][:12]} -> {now["sha256"][:12]}); the run goes on with the new one',
                flush=True,
            )
    if found or before:
        files.write_json(path, found)


def _own_functions(config: config_dict.ConfigDict) -> Iterator[tuple[str, str]]:
    """Yields (field, spec) for each own function."""
    generates = find_objective(config.loss.objective).generates
    fields = ['telemetry.hook', OBJECTIVE]
    if generates:
        fields += ['rollout.workflow', SERVER, CHANNEL]
    if is_policy(config.loss.objective):
        fields.append('loss.advantage')
    named = {field: config[field.partition('.')[0]][field.partition('.')[2]] for field in fields}
    for task in list_tasks(config).values():
        named[find_path(task, 'name')] = task.name
        if generates:
            named[find_path(task, 'reward')] = task.reward
    for field, spec in named.items():
        if is_own(spec):
            yield field, spec
        elif field.endswith('.reward') and spec:
            load_function(spec, field)  # raises: there are no named rewards


def _example(config: config_dict.ConfigDict) -> list[TrajectoryGroup]:
    """Returns an update of full groups whose rewards alternate between 0 and 1."""
    prompt = Prompt(0, np.zeros(0, np.int32), '', {})
    answers = [Trajectory(prompt, i, (), float(i % 2), 'stop', '', 0.0, 0.0) for i in range(config.rollout.group_size)]
    return [TrajectoryGroup(draw, tuple(answers)) for draw in range(config.learner.groups_per_update)]


# The starts of a run: config, environment, data and earlier scores of each, to replay every start as it was.
#
# A run writes WORKDIR/starts.json; a replay reads it.


STARTS = 'starts.json'  # in the workdir
SCHEDULE, PLAN, MODEL = 'staleness.schedule', FIELD, 'model.path'  # fields that name files, next to `task_paths`
_FIX = 'restore the file as the run wrote it'
_TRACE = re.compile(r'trace\((.+)\)')


class DataFile(TypedDict):
    """A file that a start read."""

    path: str
    sha256: str  # of task.path, a trace and a plan; for model.path, run_directory.sample_digest


class Start(TypedDict):
    """One start of the program."""

    seq: int  # number of its first event, `log`
    config: Mapping[str, Any]  # resolved, nested by section
    environment: Environment
    data: dict[str, DataFile]  # by config field
    # evaluations.json at that time: versions that earlier starts had evaluated after their last checkpoint
    evaluations: files.JsonObject | None
    sandbox: NotRequired[SandboxRecord | None]  # of the scorer; absent in records of earlier versions
    revisions: NotRequired[Mapping[str, str]]  # as in RunFacts; absent likewise


_REQUIRED = frozenset({'seq', 'config', 'environment', 'data'})  # of every version
_TYPES = {
    'seq': int,
    'config': Mapping[str, Mapping[str, Any]],
    'environment': Environment,
    'data': Mapping[str, DataFile],
    'evaluations': Mapping[str, Any] | None,
    'sandbox': SandboxRecord | None,
    'revisions': Mapping[str, str],
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
      sandbox: of the task's scorer; None = the scorer has no sandbox.
      environment: None = the environment of this process.
    """
    path = workdir / STARTS
    before = read_starts(path.read_bytes(), str(path)) if seq and path.exists() else []
    values = config.as_dict()
    data = {field: DataFile(path=str(read[0]), sha256=digest(read)) for field, read in data_files(values).items()}
    if weights is not None:
        data[MODEL] = DataFile(path=str(weights), sha256=sample_digest(weights))
    scores = workdir / EVALUATIONS
    evaluations = files.read_json(scores, _FIX) if scores.exists() else None
    start = Start(
        seq=seq, config=values, environment=environment or read_environment(), data=data, evaluations=evaluations,
        sandbox=sandbox, revisions=find_revisions(dict(flatten(values))),
    )  # fmt: skip
    kept = [earlier for earlier in before if earlier['seq'] < seq]
    files.write_json(path, {'starts': [*kept, start]}, indent=None, allow_nan=True)  # eta may be infinite


def read_starts(content: bytes, name: str) -> list[Start]:
    """Parses the bytes of a starts.json into starts; raises FileError, which begins with `name`."""
    starts = files.parse_object(content, name, _FIX).get('starts')
    if not isinstance(starts, list):
        raise files.FileError(f"{name} has no list 'starts'; {_FIX}")
    for number, start in enumerate(starts, start=1):
        for field, kind in _TYPES.items():
            if not isinstance(start, dict) or (field not in start and field in _REQUIRED):
                raise files.FileError(f'{name}: start {number} has no {field!r}; {_FIX}')
            if field in start and not fits(start[field], kind):
                raise files.FileError(
                    f'{name}: start {number} has {field}={show(start[field])}, where a part is missing or of another '
                    f'type; {_FIX}'
                )
        require_saved(start['config'], f'{name}: start {number}', _FIX)
    return starts


def task_paths(config: config_dict.ConfigDict) -> dict[str, str]:
    """Returns the paths that the tasks of a config read, by field; a source without its own has the common one."""
    return {find_path(task, 'path'): task.path for task in list_tasks(config).values()}


def data_files(values: Mapping[str, Any]) -> dict[str, Sequence[pathlib.Path]]:
    """Returns the files that a config names, by field, except the files of the model: one, or those of a data set.

    Raises HubError for a data set of the Hub that is not in the cache and cannot be fetched.
    """
    found: dict[str, Sequence[pathlib.Path]] = {}
    simulation = values.get('simulation', {})
    if not simulation.get('prices') or simulation.get('prompts') == PROMPTS_OF_TASK:
        found = {
            field: locate_dataset(field, path) if is_hub_name(path) else [pathlib.Path(path)]
            for field, path in task_paths(config_dict.ConfigDict({'task': values['task']})).items()
            if path
        }
    if match := _TRACE.fullmatch(values['staleness']['schedule']):
        found[SCHEDULE] = [pathlib.Path(match[1])]
    if file := plan_file(values.get('cluster', {}).get('reallocate', OFF)):
        found[PLAN] = [file]
    return found


def digest(files_read: Iterable[pathlib.Path]) -> str:
    """Returns the SHA-256 over the contents of files, one after another, in hex."""
    found = hashlib.sha256()
    for file in files_read:
        with file.open('rb') as content:
            hashlib.file_digest(content, lambda: found)
    return found.hexdigest()


def restore_config(values: Mapping[str, Any], where: str) -> config_dict.ConfigDict:
    """Returns the config with these resolved values; a missing field gets its default, or its near_names.FORMER value.

    Raises ConfigError, which begins with `where`, for a field that this version does not know, or of another type.
    """
    config = default_config()
    for field, value in flatten(with_former(dict(values))):
        given = tuple(value) if isinstance(value, list) else value
        try:
            if find_free(field):
                set_free(config, field, given)
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


# The parts of a run that a replay needs: read from its workdir, or from the compressed file that `pack` makes of it.


FORMAT = 1  # of a packed run
_INDEX = 'packed.json'  # {'format', 'name', 'sha256': by member}
_PARTS = (CONFIG, EVENTS, STARTS, FACTS, OWN_CODE)  # the last two if the run has them
_PACK_AGAIN = 'pack the run again with main_replay --portable'


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run, read from its files."""

    name: str  # the workdir or the file, for errors
    parts: Mapping[str, bytes]  # contents by name in the workdir
    events: Sequence[Event]
    starts: Sequence[Start]
    config: Mapping[str, Any]  # of the last start
    weights_sha256: str | None  # of the last version; None: the run has not finished
    own_code: Digests

    def where(self, part: str) -> str:
        """Returns the name of one of its files, for errors."""
        return f'{self.name}/{part}'


def read_workdir(workdir: pathlib.Path) -> RecordedRun:
    """Reads the run of a workdir; raises UserError for a directory without a run, and for a run in progress."""
    if not (workdir / CONFIG).is_file() or not (workdir / EVENTS).is_file():
        raise UserError(f'--workdir={workdir} holds no run of asynchronous RL: it has no {CONFIG} with {EVENTS}')
    if holder := files.find_holder(workdir):
        raise UserError(f'{workdir} is in use by {holder}: wait for the run to end, or stop it')
    found = {part: workdir / part for part in _PARTS}
    return parse_run({part: path.read_bytes() for part, path in found.items() if path.is_file()}, str(workdir))


def read_packed(path: pathlib.Path) -> RecordedRun:
    """Reads the run in a file of `pack`; raises FileError for an incomplete file, or a file of another kind."""
    parts: dict[str, bytes] = {}
    try:
        with tarfile.open(path, 'r:xz') as archive:
            for member in archive:
                content = archive.extractfile(member)
                if member.name in (_INDEX, *_PARTS) and content is not None:
                    parts[member.name] = content.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise files.FileError(f'{path} is no packed run, or is cut short ({error}); {_PACK_AGAIN}') from error
    except OSError as error:
        raise files.FileError(f'{path} cannot be read ({error.strerror}); name a file of main_replay') from error
    if _INDEX not in parts:
        raise files.FileError(f'{path} is no packed run: it holds no {_INDEX}; {_PACK_AGAIN}')
    index = files.parse_object(parts.pop(_INDEX), f'{path}/{_INDEX}', _PACK_AGAIN)
    if index.get('format') != FORMAT:
        raise files.FileError(f'{path} has the format {index.get("format")!r}; this program reads {FORMAT}')
    listed = index.get('sha256')
    for part in sorted({*parts, *listed} if isinstance(listed, dict) else parts):
        found = hashlib.sha256(parts[part]).hexdigest() if part in parts else 'nothing'
        if not isinstance(listed, dict) or listed.get(part) != found:
            raise files.FileError(f'{path}/{part} is not what was packed (sha256 {found[:12]}); {_PACK_AGAIN}')
    return parse_run(parts, str(path))


@dataclasses.dataclass(frozen=True)
class Log:
    """An event log with the config of its run."""

    name: str
    events: Sequence[Event]
    config_name: str
    config: Mapping[str, Any]


def read_log(path: pathlib.Path) -> Log:
    """Reads the log of an events.jsonl, a workdir or a packed run; raises FileError for a missing file or no log."""
    file = path / EVENTS if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise files.FileError(
            f'{file} cannot be read ({error.strerror}): name a log, a workdir or a packed run'
        ) from error
    if content.startswith(lzma.compress(b'')[:6]):
        run = read_packed(file)
        log = Log(run.where(EVENTS), run.events, run.where(CONFIG), run.config)
    else:
        config = file.parent / CONFIG
        if not config.is_file():
            raise files.FileError(
                f'{file} has no {CONFIG} beside it, which says what the log must keep: check it in its own workdir'
            )
        log = Log(str(file), parse_events(content, str(file)), str(config), read_saved(config, _FIX))
    if not log.events:
        raise files.FileError(f'{log.name} holds no event: name the log of a run')
    return log


def pack(run: RecordedRun, path: pathlib.Path) -> int:
    """Writes config, seeds, log, verdicts and digests of a run as one compressed file; returns its bytes.

    Raises UserError for a file that exists.
    """
    if path.exists():
        raise UserError(f'--portable={path} exists: name another file')
    if not path.absolute().parent.is_dir():
        raise UserError(f'--portable={path} is in no directory: make {path.parent} first')
    digests = {part: hashlib.sha256(content).hexdigest() for part, content in run.parts.items()}
    index = json.dumps({'format': FORMAT, 'name': run.name, 'sha256': digests}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:xz', preset=9) as archive:
        for name, content in {_INDEX: index, **run.parts}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    files.write_bytes(path, buffer.getvalue())
    return len(buffer.getvalue())


def parse_run(parts: Mapping[str, bytes], name: str) -> RecordedRun:
    """Parses the files' contents into a run; raises UserError for a file that is missing or incomplete."""
    for part in (CONFIG, EVENTS):
        if part not in parts:
            raise files.FileError(f'{name} has no {part}; {_FIX}')
    config = files.parse_object(parts[CONFIG], f'{name}/{CONFIG}', _FIX)
    require_saved(config, f'{name}/{CONFIG}', _FIX)
    facts = files.parse_object(parts[FACTS], f'{name}/{FACTS}', _FIX) if FACTS in parts else {}
    own_code = files.parse_object(parts[OWN_CODE], f'{name}/{OWN_CODE}', _FIX) if OWN_CODE in parts else {}
    events = parse_events(parts[EVENTS], f'{name}/{EVENTS}')
    starts = read_starts(parts[STARTS], f'{name}/{STARTS}') if STARTS in parts else []
    return RecordedRun(name, parts, events, starts, config, facts.get('weights_sha256'), own_code)
