"""Replays a run of the real clock from its config and its log, and compares every event and weight.

Each start of the program is replayed as it was: the first from update 0, the others from the checkpoints that the
replay itself writes at the same events. control/clocks/virtual.py has the clock.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from ml_collections import config_dict

from areal_jax.app.model.model import Model
from areal_jax.app.parts.compilations import print_warnings
from areal_jax.app.parts.host import lane_widths
from areal_jax.app.process.accelerator import use_xla_flags
from areal_jax.app.run.loop import Loop, Outside
from areal_jax.app.run.own_site import build_own_loop, load_model, require_here
from areal_jax.app.run.run import Built, Run, RunContext, RunKind
from areal_jax.app.workdir.environment import describe_differences, read_environment
from areal_jax.app.workdir.records import (
    MODEL,
    PLAN,
    SCHEDULE,
    STARTS,
    DataFile,
    RecordedRun,
    Start,
    data_files,
    digest,
    load_own_code,
    restore_config,
    task_paths,
)
from areal_jax.app.workdir.run_directory import Report, sample_digest
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_learner
from areal_jax.config.kinds import find_server
from areal_jax.config.objectives import DECOUPLED_PPO, find_objective
from areal_jax.control.clocks.virtual import EndOfLogError, ReplayClock
from areal_jax.control.event_writer import EventLog, Recording, ReplayError, find_starts, require_whole, truncate_events
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import ErrorEvent, Event
from areal_jax.files import FileError, write_json
from areal_jax.tasks.scoring.verifier import RecordedWorker
from areal_jax.telemetry.facts import EVALUATIONS
from areal_jax.telemetry.facts import FILE as FACTS
from areal_jax.workers.worker_process import WorkerDiedError

_QUIET = {
    'telemetry.tensorboard': False, 'telemetry.plots': False, 'telemetry.hook': '', 'telemetry.profile_steps': (),
    'telemetry.tracker': 'none', 'telemetry.project': '', 'telemetry.energy': 'off', 'run.export': False,
    'run.mirror': '',
}  # fmt: skip
_FORMS = {SCHEDULE: 'trace({})', PLAN: 'plan({})'}  # of a field whose value is more than a path
Paths = Mapping[str, str]  # local path of each config field's file: {'task.path': 'data/train.jsonl'}


class Outcome(TypedDict):
    """The result of a replay in which everything was equal."""

    events: int
    starts: int
    finished: bool  # like the run
    ended: str  # how an unfinished run ended, in words; '' for a finished one
    weights_sha256: str | None  # None: the run has not finished; the events hold the digest of every version


def build_replay(
    config: config_dict.ConfigDict, workdir: pathlib.Path, recording: Recording, start: Start, *, resume: bool
) -> Run[Loop]:
    """Builds one start of a run, in the order of its log."""

    def build(context: RunContext) -> Built[Loop]:
        make_clock, sandbox = functools.partial(_build_clock, recording), start.get('sandbox')
        load = functools.partial(_load_model, weights=start['data'].get(MODEL))
        site, loop = build_own_loop(context, Outside(make_clock, RecordedWorker, lambda *asked: sandbox), load)
        if loop:
            clock, controller = loop.parts.host.clock, loop.parts.controller
            assert isinstance(clock, ReplayClock)
            clock.stop_requested = controller.stop_requested
        return site, loop

    return Run(RunKind(require_here, print_warnings, build), config, workdir, resume=resume, source='a replay')


def _load_model(context: RunContext, weights: DataFile | None) -> Model:
    """Loads the weights that the run began from; raises UserError for other weights."""
    model = load_model(context)
    if weights and model.source is not None and sample_digest(model.source) != weights['sha256']:
        raise UserError(
            f'{MODEL}: {model.source} holds other weights than those that the run began from '
            f'({weights["path"]}); say where these are with --data={MODEL}=PATH'
        )
    return model


def _build_clock(
    recording: Recording, config: TrackedConfig, log: EventLog, start_s: float, *, waits_for_work: bool
) -> ReplayClock:
    failures = {'WorkerDiedError': WorkerDiedError}
    return ReplayClock(lane_widths(config), log, recording, start_s=start_s, failures=failures)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One start of a run and its events, `first` to `end` - 1."""

    start: Start
    first: int
    end: int


def replay(run: RecordedRun, out: pathlib.Path, paths: Paths, say: Callable[[str], None]) -> Outcome:
    """Replays the run into the directory `out`, which must be new or empty.

    Args:
      paths: paths of files that are not where the config says.
      say: called with each sentence for the user.

    Raises ReplayError for the first event that differs, with its line; UserError for a run that cannot be replayed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f'--out={out} exists and is not empty: a replay writes nothing over; name another directory')
    require_replayable(run)
    require_whole(run.events, run.where(EVENTS))
    parts = _split(run)
    configs = [_prepare(run, part.start, paths) for part in parts]
    use_xla_flags(configs[-1])
    for sentence in describe_environment(run, [part.start for part in parts]):
        say(sentence)
    for number, (part, config) in enumerate(zip(parts, configs, strict=True), start=1):
        if len(parts) > 1:
            say(f'start {number} of {len(parts)}: events {part.first} to {part.end - 1}')
        outcome = _replay_part(run, part, config, out, is_last=number == len(parts))
    return {**outcome, 'events': parts[-1].end, 'starts': len(parts)}


def require_replayable(run: RecordedRun) -> None:
    """Raises UserError for a run whose log does not determine its numbers, or that needs no log to be repeated."""
    values, where = run.config, run.name
    if not find_objective(values.get('loss', {}).get('objective', DECOUPLED_PPO.name)).generates:
        raise UserError(f'{where}: supervised training has no event log; the same command repeats it')
    if not find_server(server := values.get('rollout', {}).get('server', '')).in_process:
        raise UserError(
            f'{where} has rollout.server={server!r}: the tokens of servers come from outside and are not in the log, '
            "so only runs with rollout.server='in_process' are replayed"
        )
    if (clock := values.get('run', {}).get('clock')) != 'real':
        raise UserError(f'{where} has run.clock={clock!r}, under which the same command repeats the run bit for bit')
    if parse_learner(learner := values.get('cluster', {}).get('learner', 'data=1')).processes != 1:
        raise UserError(f'{where} has cluster.learner={learner!r}: only runs of one process are replayed')
    if not run.starts:
        raise FileError(f'{where} has no {STARTS}, which says how each start was made: restore the file')


def describe_environment(run: RecordedRun, starts: Sequence[Start]) -> list[str]:
    """Returns one sentence about differences from the original run, in environment and own functions."""
    here = read_environment()
    found = [difference for start in starts for difference in describe_differences(start['environment'], here)]
    own = load_own_code(restore_config(starts[-1]['config'], run.where(STARTS))) if run.own_code else {}
    for field, noted in run.own_code.items():
        if field not in own or own[field]['sha256'] != noted['sha256']:
            found.append(f'{field} {noted["function"]} (the file was changed)')
    if not found:
        return []
    return [
        f'warning: this is not where the run was made ({"; ".join(dict.fromkeys(found))}): equal numbers are promised '
        'only where all of that is equal'
    ]


def _split(run: RecordedRun) -> list[_Part]:
    """Returns the starts with their events; a start that was killed before it compiled has nothing to replay."""
    firsts = find_starts(run.events)
    noted = {start['seq']: start for start in run.starts}
    ends = [*firsts[1:], len(run.events)]
    if firsts and firsts[-1] not in noted and len(firsts) > 1:
        firsts, ends = firsts[:-1], ends[:-1]
    if missing := [seq for seq in firsts if seq not in noted]:
        raise ReplayError(
            f'{run.where(EVENTS)}: line {missing[0] + 1} begins a start that {STARTS} does not know: a line was added, '
            'or the files are of two runs'
        )
    if lost := [seq for seq in noted if seq not in firsts]:
        raise ReplayError(
            f"{run.where(EVENTS)}: line {lost[0] + 1} is not the event 'log' of a start, as {STARTS} says: a line was "
            'lost, or the files are of two runs'
        )
    return [_Part(noted[first], first, end) for first, end in zip(firsts, ends, strict=True)]


def _prepare(run: RecordedRun, start: Start, paths: Paths) -> config_dict.ConfigDict:
    """Returns the config of a start with the local paths; raises UserError for a missing or different file."""
    config = restore_config(start['config'], run.where(STARTS))
    for field, path in paths.items():
        if field not in (known := (*task_paths(config), SCHEDULE, PLAN, MODEL)):
            raise UserError(f'--data={field}={path}: {field} names no data; use {", ".join(known[:-1])} or {known[-1]}')
        config.update_from_flattened_dict({field: _FORMS.get(field, '{}').format(path)})
    for field, read in data_files(config.to_dict()).items():
        noted = start['data'].get(field)
        for file in read:
            if not file.is_file():
                raise UserError(f'{field}: the run read {file}, which is not here: give it with --data={field}=FILE')
        if noted and digest(read) != noted['sha256']:
            revision = start.get('revisions', {}).get(field)
            raise UserError(
                f'{field}: {read[0]} is not the file that the run read (sha256 {noted["sha256"][:12]}...): give that '
                f'one with --data={field}=FILE' + (f', or name its revision {revision}' if revision else '')
            )
    config.update_from_flattened_dict(_QUIET)
    return config


def _replay_part(
    run: RecordedRun, part: _Part, config: config_dict.ConfigDict, out: pathlib.Path, *, is_last: bool
) -> Outcome:
    """Replays one start; raises ReplayError if it differs from its log."""
    end, error_event = _cut_error(run.events, part)
    recording = Recording(run.events, part.first, end, run.where(EVENTS))
    raised: BaseException | None = None
    report: Report | None = None
    if part.first > 0 and (evaluations := part.start.get('evaluations')) is not None:
        write_json(out / EVALUATIONS, evaluations, indent=None)  # a start that was killed may have written more
    try:
        with build_replay(config, out, recording, part.start, resume=part.first > 0) as run_again:
            report = run_again.train()
    except BaseException as error:
        if recording.fault:
            raise recording.fault from error
        raised = error
    same_error = error_event is not None and raised is not None and _message(raised) == error_event['message']
    if raised is not None and not isinstance(raised, EndOfLogError) and not same_error:
        raise raised
    if recording.checked < end:
        raise recording.refuse(recording.checked, f'{run.events[recording.checked]["kind"]!r}', 'has ended')
    if not is_last:
        return {'events': end, 'starts': 0, 'finished': False, 'ended': '', 'weights_sha256': None}
    return _conclude(run, recording, report, error_event, out)


def _conclude(
    run: RecordedRun,
    recording: Recording,
    report: Report | None,
    error_event: ErrorEvent | None,
    out: pathlib.Path,
) -> Outcome:
    """Compares the end of the last start, and its weights."""
    end = recording.end
    if run.weights_sha256 is not None:
        if error_event is not None:
            raise recording.refuse(end, "'error'", f'goes on, and the run too, since it left {FACTS}')
        if report is None or recording.beyond is not None:
            further = f' with {recording.beyond["kind"]!r}' if recording.beyond else ''
            raise ReplayError(
                f'{run.where(EVENTS)} ends with line {end}, and the replay goes on{further}: its last lines were lost'
            )
    if report is None or error_event is not None or recording.beyond is not None:
        truncate_events(out / EVENTS, end)  # events that the replay wrote after the end of the log, before it waited
        how = 'the run was stopped or killed there'
        if error_event is not None:
            how = f'the run ended there with {error_event["message"]}'
        return {'events': end, 'starts': 0, 'finished': False, 'ended': how, 'weights_sha256': None}
    found = str(report['weights_sha256'])
    if run.weights_sha256 is not None and found != run.weights_sha256:
        raise ReplayError(
            f'{run.where(FACTS)} has weights_sha256={run.weights_sha256!r}, where the replay ends with {found!r}'
        )
    return {'events': end, 'starts': 0, 'finished': True, 'ended': '', 'weights_sha256': found}


def _cut_error(events: Sequence[Event], part: _Part) -> tuple[int, ErrorEvent | None]:
    """Returns (end, the event `error` that ended the start, or None); its cause may have come from outside."""
    last = events[part.end - 1]
    return (part.end - 1, last) if last['kind'] == 'error' else (part.end, None)


def _message(error: BaseException) -> str:
    """Returns the message of an error, in the form that the loop logs."""
    return f'{type(error).__name__}: {error}'
