"""The directory of a run or an evaluation: permitted contents, written files, and rules for resuming."""

from __future__ import annotations

import datetime
import hashlib
import pathlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict, cast

from ml_collections import config_dict

from areal_jax import files
from areal_jax.checkpoint.store import CONTENTS, CheckpointError, CheckpointStore
from areal_jax.config import CONFIG, flatten
from areal_jax.config.cluster import describe_former
from areal_jax.config.declarations import FIELDS, find_free
from areal_jax.config.fields import ConfigError
from areal_jax.config.near_names import FORMER, read_saved
from areal_jax.errors import UserError
from areal_jax.evaluation import results
from areal_jax.events.records import fits
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report import report
from areal_jax.telemetry import metrics
from areal_jax.telemetry.facts import EVALUATIONS
from areal_jax.telemetry.rollout_writer import DIRECTORY

Values = Mapping[str, Any]  # a config as a plain dict, nested by section or flat by 'section.field'
Report = Mapping[str, Any]  # report.json

WEIGHTS = 'weights.json'
CHECKPOINTS = 'checkpoints'
PROLONGATIONS = 'prolongations.json'
# files that an attempt writes while it runs; renamed when the next attempt starts again at update 0
_RECORDS = (EVENTS, metrics.FILE, metrics.LOADS, EVALUATIONS, 'tensorboard', DIRECTORY, PROLONGATIONS)
# the devices and the form of a computation may change between starts: checkpoints are read by regions, one leaf per
# layer
_MAY_CHANGE = (
    *('cluster.learner', 'cluster.strategy', 'cluster.xla_flags', 'distributed.'),
    *('learner.layers', 'learner.remat', 'learner.attention'),
    'learner.rows_per_microbatch',  # a multiple of the mesh
    *('telemetry.', 'checkpoint.', 'evaluation.', 'task.verifier_', 'task.sandbox', 'task.max_filtered_groups'),
    *('run.compilation_', 'run.export', 'run.mirror', 'server.'),
    # the servers may be different ones
    *('rollout.urls', 'rollout.max_retries', 'rollout.max_mismatch', 'rollout.pause_lease_s'),
)
_SCORED = ('evaluation.problems', 'evaluation.samples')  # the scores before and after depend on them
_STEPS, _SCHEDULE = 'run.steps', 'optimizer.schedule'  # the steps may be raised
_DAY = 'model.template_date'
_BLOCKS, _BLOCK_BYTES = 256, 4096
_RESTORE = 'restore the file as the run wrote it, or start anew in another --workdir'


class _Prolongation(TypedDict):
    at_update: int
    from_steps: int
    to_steps: int


class _Count(TypedDict):
    """Counts of optimizer steps."""

    applied: int
    skipped: int


def settle_config(
    config: config_dict.ConfigDict, workdir: pathlib.Path, overrides: Collection[str], *, resume: bool
) -> config_dict.ConfigDict:
    """Returns the config with the fields that a run keeps from its first start filled in, unless they are set.

    These are the fields of near_names.FORMER: the ids that end an answer, and the day that chat templates see. A run
    that was saved without such a field continues as it began.

    Args:
      overrides: the fields that the command line sets.
    """
    saved = _read_config(workdir) if resume else {}
    today = {_DAY: datetime.date.today().isoformat()} if config.model.source != 'random' else {}
    known = saved or today
    unset = {field for field in FORMER if field not in overrides and _value(config, field) == FIELDS[field].default}
    settled = config.copy_and_resolve_references()
    settled.update_from_flattened_dict({field: known[field] for field in unset if field in known})
    return settled


def _value(config: config_dict.ConfigDict, field: str) -> object:
    section, _, name = field.partition('.')
    return config[section][name]


def holds_run(workdir: pathlib.Path) -> bool:
    """Whether a run has started in the directory, so that it can be resumed."""
    return (workdir / CONFIG).exists()


def prepare_workdir(workdir: pathlib.Path, values: Values, *, resume: bool) -> None:
    """Creates the directory, and writes config.json if a run begins.

    Raises ConfigError if an existing run would be overwritten or continued differently.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--workdir={workdir} cannot be made ({error.strerror}); choose another one') from error
    model = values.get('model', {})
    if model.get('source') == 'run':
        path, ours = pathlib.Path(model['path']).resolve(), workdir.resolve()
        if ours == path or ours / CHECKPOINTS == path.parent:
            raise ConfigError(
                f'model.path={model["path"]!r} is the --workdir itself: the run that starts from its weights needs '
                'another --workdir; to go on with it use --resume'
            )
    if resume:
        _require_continuable(workdir, _read_config(workdir), dict(flatten(values)))
        return
    if _holds_updates(workdir):
        step = CheckpointStore(workdir / CHECKPOINTS).latest()
        none = 'which starts again at update 0, since it has no checkpoint yet'
        where = none if step is None else f'from update {step}'
        raise ConfigError(
            f'{workdir} holds a run already: go on with --resume, {where}; or give another --workdir (or remove it)'
        )
    _write_config(workdir, values)


def continue_run(workdir: pathlib.Path, values: Values, update: int) -> None:
    """Prepares the workdir of a run that continues after `update`, and writes config.json.

    If further updates follow, the report is renamed and the score of the last weights removed, since both will be
    outdated. If the fields of evaluations were changed, all earlier scores are renamed. A raised run.steps is noted.
    """
    saved, current = _read_config(workdir), dict(flatten(values))
    changed = [field for field in _SCORED if field in saved and saved[field] != current.get(field)]
    if changed and (names := _put_aside(workdir, [EVALUATIONS])):
        print(
            f'{", ".join(changed)} was changed: the scores until now are in {names[0]}, not in the report', flush=True
        )
    if changed or update < current[_STEPS]:
        _put_aside(workdir, [report.FILE, report.PAGE])
        _remove_score_after(workdir / EVALUATIONS)
    _note_prolongation(workdir, saved, current[_STEPS], update)
    _write_config(workdir, values)


def start_again(workdir: pathlib.Path, values: Values) -> None:
    """Renames the files of an earlier attempt that left no checkpoint, and writes config.json."""
    names = _put_aside(workdir, _RECORDS)
    kept = f'; the records of the attempt before are now {", ".join(names)}' if names else ''
    print(f'--resume found no checkpoint in {workdir}: the run starts at update 0{kept}', flush=True)
    _write_config(workdir, values)


def describe_unsaved(error: CheckpointError, workdir: pathlib.Path) -> CheckpointError:
    """Warns that the checkpoint after the last update failed; returns the error with which the run ends."""
    sentence = f'warning: the checkpoint after the last update failed; the report follows: {error}'
    print(sentence, file=sys.stderr, flush=True)
    return CheckpointError(
        f'the checkpoint after the last update of {workdir} failed: {error}. The same command with --resume makes the '
        'updates since the checkpoint before it again'
    )


def describe_unexported(error: UserError, workdir: pathlib.Path) -> UserError:
    """Returns the error that ends a run whose export failed."""
    return UserError(
        f'the run has finished and its report is in {workdir}, but the export failed: {error}. The same command with '
        '--resume writes it'
    )


def describe_unmirrored(missing: str, workdir: pathlib.Path) -> UserError:
    """Returns the error that ends a finished run whose mirror lacks something."""
    return UserError(
        f'the run has finished and its report is in {workdir}, but run.mirror lacks {missing}. The same command with '
        '--resume copies it'
    )


def read_prolongations(workdir: pathlib.Path) -> list[dict[str, int]]:
    """Reads {'at_update', 'from_steps', 'to_steps'} for every time that run.steps was raised."""
    path = workdir / PROLONGATIONS
    found = files.read_json(path, _RESTORE).get('prolongations') if path.exists() else []
    if not fits(found, list[_Prolongation]):
        raise files.FileError(f"{path} has no list 'prolongations' of updates and steps; {_RESTORE}")
    return cast(list[dict[str, int]], found)


def read_report(workdir: pathlib.Path, steps: int) -> Report | None:
    """Reads report.json of a run that has made all its `steps` updates; None if it was not written."""
    path = workdir / report.FILE
    found = files.read_json(path, 'remove it: --resume writes it again') if path.exists() else {}
    made_by_the_run = found.get('steps') == steps and found.get('finished', True)  # main_report reports unfinished runs
    if made_by_the_run and not fits(found.get('optimizer_steps'), _Count):
        raise files.FileError(f"{path} does not tell 'optimizer_steps'; remove it: --resume writes it again")
    return found if made_by_the_run else None


def note_weights(workdir: pathlib.Path, source: pathlib.Path | None, *, resume: bool) -> None:
    """Records the weights that a run starts from; None = drawn by config and seed.

    Raises ConfigError if a resumed run finds other files there: the reference model is not in a checkpoint, and shapes
    would not reveal the change.
    """
    if source is None:
        return
    path, digest = workdir / WEIGHTS, sample_digest(source)
    if resume and path.exists() and files.read_json(path, _RESTORE).get('samples_sha256') != digest:
        raise ConfigError(
            f'--resume with other weights: the files of model.path={str(source)!r} are not those that the run in '
            f'{workdir} started from; bring them back, or start anew in another --workdir'
        )
    files.write_json(path, {'path': str(source), 'samples_sha256': digest})


def sample_digest(source: pathlib.Path) -> str:
    """SHA-256 over name, size and 256 evenly spaced blocks of 4 KiB of a file, or of each safetensors in a directory.

    Blocks are enough: other weights differ in nearly every block, and reading 60 GB at every start would take minutes.
    For a checkpoint, the digest covers its table of contents, which holds the checksum of every array.
    """
    if (source / CONTENTS).is_file():
        return hashlib.sha256((source / CONTENTS).read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(source.glob('*.safetensors')) if source.is_dir() else [source]:
        size = file.stat().st_size
        digest.update(f'{file.name} {size} '.encode())
        with file.open('rb') as data:
            for block in range(_BLOCKS):
                data.seek(block * max(size - _BLOCK_BYTES, 0) // (_BLOCKS - 1))
                digest.update(data.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _holds_updates(workdir: pathlib.Path) -> bool:
    """Whether there is a checkpoint or an update; an attempt that ended before its first update may be overwritten."""
    written = workdir / metrics.FILE
    return any((workdir / CHECKPOINTS).glob('step_*')) or (written.exists() and written.stat().st_size > 0)


def _read_config(workdir: pathlib.Path) -> Values:
    """Reads the config by 'section.field'; empty if no run has started."""
    path = workdir / CONFIG
    return dict(flatten(read_saved(path, _RESTORE))) if path.exists() else {}


def _write_config(workdir: pathlib.Path, values: Values) -> None:
    files.write_json(workdir / CONFIG, values, allow_nan=True)  # eta may be infinite


def _require_continuable(workdir: pathlib.Path, saved: Values, current: Values) -> None:
    if not saved:
        return
    if former := describe_former(saved):
        raise ConfigError(
            f'--resume: {workdir / CONFIG} is of an earlier version. {former} and start anew in another --workdir, or '
            'finish this run with the version that began it'
        )
    options = [field for field in saved if find_free(field)]  # one of them may have been removed
    fixed = {field for field in (*current, *options) if not field.startswith(_MAY_CHANGE) and field != _STEPS}
    value = lambda config, field: repr(config[field]) if field in config else 'not set'
    if different := sorted(field for field in fixed if value(saved, field) != value(current, field)):
        changes = ', '.join(f'{f}: {value(saved, f)} -> {value(current, f)}' for f in different)
        instead = 'a new workdir' if _holds_updates(workdir) else 'start without --resume'
        raise ConfigError(
            f'--resume with another config than {workdir / CONFIG}: {changes}; use the same, or {instead}'
        )
    before, after = saved.get(_STEPS, 0), current.get(_STEPS, 0)
    if after < before:
        raise ConfigError(f'--resume with {_STEPS}: {before} -> {after}; it may only be raised: use {before} or more')
    if after > before and current[_SCHEDULE] != 'constant':
        raise ConfigError(
            f'--resume with {_STEPS}: {before} -> {after}, but {_SCHEDULE}={current[_SCHEDULE]!r} has set the learning '
            f'rate of every update by {_STEPS}: only a constant schedule can be prolonged; use {_STEPS}={before}'
        )


def _note_prolongation(workdir: pathlib.Path, saved: Values, steps: int, update: int) -> None:
    known = read_prolongations(workdir)
    # after a fallback to an older checkpoint, the updates since it are repeated under the new run.steps
    noted = [entry | {'at_update': min(entry['at_update'], update)} for entry in known]
    before = saved.get(_STEPS, steps)
    if before < steps and (not noted or noted[-1]['to_steps'] != steps):
        noted.append({'at_update': update, 'from_steps': before, 'to_steps': steps})
        print(f'{_STEPS} was raised from {before} to {steps}: the run is prolonged after update {update}', flush=True)
    if noted != known:
        files.write_json(workdir / PROLONGATIONS, {'prolongations': noted})


def _remove_score_after(path: pathlib.Path) -> None:
    """Removes the score 'after': it was measured on weights that are no longer the last ones."""
    scores = files.read_json(path, _RESTORE) if path.exists() else {}
    if scores.pop('after', None) is not None:
        files.write_json(path, scores, indent=None)


def _put_aside(workdir: pathlib.Path, names: Iterable[str]) -> list[str]:
    """Renames existing `names` to events.1.jsonl and so on, with one common free number; returns the new names."""
    paths = [workdir / name for name in names]
    numbered = lambda path, number: path.with_name(f'{path.stem}.{number}{path.suffix}')
    number = 1
    while any(numbered(path, number).exists() for path in paths):
        number += 1
    found = [path for path in paths if path.exists()]
    for path in found:
        path.rename(numbered(path, number))
    files.sync(workdir)
    return [numbered(path, number).name for path in found]


# The directory of one evaluation: permitted contents, and the settings that a resumed evaluation must keep.


RESULTS = 'results.json'
_OWN = {files.LOCK, CONFIG, WEIGHTS, EVENTS, results.FILE, RESULTS}
_EVALUATION_WORKDIR_MAY_CHANGE = (
    'telemetry.',
    'task.verifier',
    'run.compilation_',
    'run.stall_timeout_s',
)  # no answer depends on them
_FIX = 'restore the file as the evaluation wrote it, or start anew in another --workdir'


class EvaluationWorkdir:
    """Files of an evaluation. Nothing is written until `begin`; `discard` removes the files of a failed start."""

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any], *, resume: bool):
        self.path, self.answers, self.results = path, path / results.FILE, path / RESULTS
        self._values, self._resume = values, resume
        self._existed = path.exists()

    @property
    def has_answers(self) -> bool:
        return self.answers.exists() and self.answers.stat().st_size > 0

    def require_usable(self) -> None:
        """Raises ConfigError for a directory with something else, answers without `resume`, or another config."""
        if not self.path.exists():
            return
        self._require_own()
        if not self.has_answers:
            return
        if not self._resume:
            raise ConfigError(
                f'{self.path} holds answers already: go on with --resume, or give another --workdir (or remove it)'
            )
        self._require_same_config()

    def begin(self) -> None:
        """Writes config.json; the caller has locked the directory."""
        files.write_json(self.path / CONFIG, self._values)

    def discard(self) -> None:
        """Removes what this start has written, unless there are answers."""
        if self.has_answers or not self.path.exists():
            return
        for name in _OWN:
            (self.path / name).unlink(missing_ok=True)
        if not self._existed and not any(self.path.iterdir()):
            self.path.rmdir()

    def _require_own(self) -> None:
        if not self.path.is_dir():
            raise ConfigError(f'--workdir={self.path} is a file, not a directory; choose another one')
        names = {path.name for path in self.path.iterdir() if not path.name.endswith('.partial')}
        if others := sorted(names - _OWN):
            raise ConfigError(
                f'--workdir={self.path} holds something else than an evaluation ({others[0]!r}): give an evaluation a '
                'directory of its own'
            )

    def _require_same_config(self) -> None:
        saved = dict(flatten(read_saved(self.path / CONFIG, _FIX)))
        current = dict(flatten(self._values))
        fields = [field for field in current if not field.startswith(_EVALUATION_WORKDIR_MAY_CHANGE)]
        if different := sorted(field for field in fields if saved.get(field) != current[field]):
            changes = ', '.join(f'{field}: {saved.get(field)!r} -> {current[field]!r}' for field in different)
            raise ConfigError(
                f'--resume with another config than {self.path / CONFIG}: {changes}; use the same, or a new --workdir'
            )
