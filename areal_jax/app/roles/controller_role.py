"""The controller of a run in roles: the loop with learner and engines in other processes. Imports no jax."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from areal_jax.app.command_line import CommandLine
from areal_jax.app.export.finished_export import export_in_process, holds_export
from areal_jax.app.model.text_model import describe_source, describe_text_model, find_source, require_rules_of_origin
from areal_jax.app.parts.part_settings import build_shard_versions
from areal_jax.app.parts.task_builder import require_known_tasks
from areal_jax.app.parts.workflow_builder import require_tools_shown
from areal_jax.app.process.ending import Interrupts, judge_training
from areal_jax.app.roles.roles import RoleProcess, keep_name
from areal_jax.app.run.loop import Loop, build_loop
from areal_jax.app.run.run import (
    Built,
    Checkpoint,
    EngineFacts,
    LoopSite,
    NoCompilations,
    RemoteModel,
    Run,
    RunContext,
    RunKind,
    Site,
    restore_learner,
)
from areal_jax.app.workdir.mirrored_run import holds_copy
from areal_jax.app.workdir.run_directory import describe_unexported, holds_run, note_weights
from areal_jax.config.cluster import DeviceSplit, list_roles, parse_learner
from areal_jax.config.declarations import require_no_simulation
from areal_jax.config.kinds import find_channel
from areal_jax.distributed.handshake import (
    Hello,
    connect,
    digest_config,
    key_path,
    learner_name,
    load_key,
    read_attempt,
)
from areal_jax.distributed.messages import RemoteUserError, RemoteValueError
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import RemoteChannel, RemoteLearner, publish_everywhere
from areal_jax.errors import ExitCode, UserError
from areal_jax.publication.shard_versions import ShardVersions
from areal_jax.registry import Entry, await_living
from areal_jax.telemetry.devices import DeviceRates, peak_flops

# sections that the learner processes read, and fields that the exporter reads
_READ_ELSEWHERE = (
    *('model', 'lora', 'cluster', 'distributed', 'publication'),
    *('run.compilation_cache', 'run.export_every'),
)


def control(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    """Makes this process the controller of a run in roles; returns its exit code."""
    run = build_controller_run(
        command.config,
        process,
        resume=holds_run(process.workdir) or holds_copy(command.config),
        source=command.source,
        overrides=command.overrides,
        interrupts=interrupts,
    )
    report = run.train()
    if report is None:
        print(f'stopped; the same roles go on from {process.workdir}/checkpoints', flush=True)
        return ExitCode.STOPPED
    print(f'report: {process.workdir}/report.html', flush=True)
    return judge_training(report)


def build_controller_run(config: config_dict.ConfigDict, process: RoleProcess, **settings: Any) -> Run[Loop]:
    """Builds a run with learner and engines in other processes; it always continues from the state of the workdir.

    `settings`: see Run.
    """
    kind = RunKind(
        require_startable=_require_startable,
        warn=lambda config: None,  # learner process 0 prints the warnings
        build=functools.partial(build_remote_loop, process=process, given=config),
    )
    return Run(kind, config, process.workdir, **settings)


def _require_startable(config: config_dict.ConfigDict) -> None:
    """Checks the rest: the command has already checked the config against its rules and required packages."""
    require_known_tasks(config)
    require_no_simulation(config)
    require_rules_of_origin(config)


def build_remote_loop(context: RunContext, process: RoleProcess, given: config_dict.ConfigDict) -> Built[Loop]:
    """Builds the loop. The other roles wait for this process's entry, which appears after config.json is written."""
    config = context.config
    config.note_used(_READ_ELSEWHERE)
    context.parts.enter_context(keep_name(process, given))
    require_tools_shown(config)
    context.start.begin('reading the tokenizer')
    text, source = describe_text_model(config), find_source(config)
    text.tokenizer.fits(text.shape.vocab_size)
    note_weights(context.workdir, source, resume=context.resume)
    model = RemoteModel(text.tokenizer, source, text.shape.vocab_size)
    return build_loop(context, model, functools.partial(build_remote_site, context, given, model))


def build_remote_site(
    context: RunContext, given: config_dict.ConfigDict, model: RemoteModel, checkpoint: Checkpoint | None
) -> Site[RemoteLearner]:
    """Connects to the learner processes. If one is lost, this process ends with ExitCode.STOPPED."""
    config = context.config
    context.start.begin('waiting for the learner')
    entries = _find_learners(context)
    peers = _connect(context, entries)
    learner = RemoteLearner(peers)
    learner.require_finite(*describe_source(config, model.source))
    restore_learner(context, learner, checkpoint, RemoteUserError, RemoteValueError)
    dtype = config.run.export_dtype if config.run.export else ''
    return Site(
        model, learner, NoCompilations(),
        functools.partial(_open_loop, context, given, peers, entries, learner, dtype),
        devices=_list(entries, 'devices'),
        xla_flags=str(entries[0].details.get('xla_flags', '')),
        complete_export=functools.partial(_complete_export, context, learner, dtype),
    )  # fmt: skip


def _find_learners(context: RunContext) -> Sequence[Entry]:
    """Returns the learner entries of the newest attempt, in the order of their indices, once all are built."""
    config, workdir = context.config, context.workdir
    count = parse_learner(config.cluster.learner).processes

    def are_ready(found: Mapping[str, Entry]) -> bool:
        attempt = read_attempt(workdir)
        holders = tuple(found[learner_name(index)].holder for index in range(count))
        return attempt is not None and attempt.members == holders and all(e.address for e in found.values())

    found = await_living(
        workdir,
        [learner_name(index) for index in range(count)],
        config.distributed.command_deadline_s,
        what=f'{count} learner processes to be built',
        fix='start them with the same config, and give all roles a --workdir that all their hosts share',
        accept=are_ready,
    )
    return list(found.values())


def _connect(context: RunContext, entries: Sequence[Entry]) -> Peers:
    deadline_s = context.config.distributed.command_deadline_s
    key, digest = load_key(key_path(context.workdir)), digest_config(context.config.as_dict())
    hello = Hello('the controller', digest)
    connections = [
        (f'learner {entry.index}', connect(entry.address, key, hello, deadline_s).connection) for entry in entries
    ]
    return Peers(connections, deadline_s=deadline_s)


def _list(entries: Sequence[Entry], detail: str) -> list[Any]:
    return [value for entry in entries for value in entry.details.get(detail, ())]


# The loop.


def _open_loop(
    context: RunContext, given: config_dict.ConfigDict, peers: Peers, entries: Sequence[Entry], learner: RemoteLearner,
    dtype: str,
) -> LoopSite:  # fmt: skip
    config, beside = context.config, given.evaluation.engines
    engines = sum(entry.count for entry in list_roles(given) if entry.role == 'engine')
    kind = str(entries[0].details.get('device_kind', ''))
    rates = DeviceRates(parse_learner(config.cluster.learner).devices, 0, peak_flops(kind, config.learner.dtype))
    directory = config.publication.directory or context.workdir / 'publication'

    def compile_programs(compile_rollout: Callable[[], int]) -> int:
        context.start.begin('compiling what trains:')
        return learner.warm_up()

    channel: RemoteChannel | ShardVersions = RemoteChannel(peers, pathlib.Path(directory))
    if find_channel(config.publication.channel).sends_records:
        channel = build_shard_versions(config, publish_everywhere(peers))
    return LoopSite(
        channel, rates, compile_programs,
        functools.partial(_describe_engines, entries),
        find_final_weights=functools.partial(_export, context, dtype),
        close_learner=learner.close,  # after any other end of the run, the learners notice it themselves and restart
        awaited_engines=engines - beside, awaited_beside=beside,
    )  # fmt: skip


def _describe_engines(entries: Sequence[Entry], split: DeviceSplit | None) -> EngineFacts:
    return {
        'memory_parts': {},
        'lanes_own_devices': all(entry.details.get('platform') != 'cpu' for entry in entries),
        'devices': {'learner': _list(entries, 'device_ids'), 'engines': {}},
    }


# The export, if `dtype` is not ''.


def _export(context: RunContext, dtype: str) -> tuple[None, str]:
    """Makes the export and returns (None, its digest), or '' for the digest if there is no export.

    The weights are already in the files of the last version and in the last checkpoint.
    """
    if not dtype:
        return None, ''
    try:
        return None, export_in_process(context.workdir, context.config.run.steps, dtype)
    except UserError as error:
        context.unsaved = context.unsaved or describe_unexported(error, context.workdir)
        return None, ''


def _complete_export(context: RunContext, learner: RemoteLearner, dtype: str) -> None:
    steps, workdir = context.config.run.steps, context.workdir
    if dtype and not holds_export(workdir, steps):
        export_in_process(workdir, steps, dtype)
    learner.close()
