"""The controller of a run in roles: the loop whose learner and engines are in other processes. Imports no jax.

Weights and optimizer state stay with the learner processes: they write checkpoints and versions.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ml_collections import config_dict

from areal_jax.app.command_line import CommandLine
from areal_jax.app.export.finished_export import export_in_process, holds_export
from areal_jax.app.model.text_model import describe_source, describe_text_model, find_source, require_rules_of_origin
from areal_jax.app.process.ending import Interrupts, judge_training
from areal_jax.app.roles.roles import RoleProcess, keep_name
from areal_jax.app.run.loop import Loop, build_loop
from areal_jax.app.run.observer import Compilations
from areal_jax.app.run.run import (
    Checkpoint,
    EngineFacts,
    EngineSite,
    NoCompilations,
    RemoteModel,
    Run,
    RunContext,
    RunKind,
)
from areal_jax.app.workdir.environment import Environment, Hardware, describe_hardware, read_environment
from areal_jax.app.workdir.run_directory import CHECKPOINTS, describe_unexported, holds_run, note_weights
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config.cluster import list_roles, parse_learner
from areal_jax.config.declarations import require_no_simulation
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.distributed.attempt import learner_name, read_attempt
from areal_jax.distributed.handshake import Hello, connect, digest_config, key_path, load_key
from areal_jax.distributed.messages import RemoteUserError, RemoteValueError
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import RemoteChannel, RemoteLearner
from areal_jax.errors import ExitCode, UserError
from areal_jax.protocols import Learner
from areal_jax.registry import Entry, await_living
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.tasks.registry import require_known
from areal_jax.telemetry.devices import DeviceRates, peak_flops
from areal_jax.types import Tree

# sections of which the learner processes read what they need, and what the exporter reads
_READ_ELSEWHERE = (
    *('model', 'lora', 'cluster', 'distributed', 'publication'),
    *('run.compilation_cache', 'run.export_every'),
)
ControllerRun: TypeAlias = Run['RemoteSite', Loop]


def control(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    """This process becomes the controller of a run in roles; returns its exit code."""
    run = build_controller_run(
        command.config,
        process,
        resume=holds_run(process.workdir),
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


def build_controller_run(config: config_dict.ConfigDict, process: RoleProcess, **settings: Any) -> ControllerRun:
    """A run whose learner and engines are other processes; it always goes on from what is in the workdir.

    `settings`: see Run.
    """
    kind = RunKind(
        require_startable=_require_startable,
        warn=lambda config: None,  # learner process 0 does
        make_site=lambda context: RemoteSite(context, process, config),
        build=build_loop,
    )
    return Run(kind, config, process.workdir, **settings)


def _require_startable(config: config_dict.ConfigDict) -> None:
    """The command has held the config against its rules and the packages that it needs."""
    require_known(config.task.name)
    require_no_simulation(config)
    require_rules_of_origin(config)


class RemoteSite:
    """See site.LoopSite. The other roles wait for the entry of this process: config.json is there when it appears."""

    learner: RemoteLearner

    def __init__(self, context: RunContext, process: RoleProcess, given: config_dict.ConfigDict):
        self._context, self._config = context, context.config
        self._learners: dict[str, Entry] = {}
        counts = {entry.role: entry.count for entry in list_roles(given)}
        self.awaited_beside = given.evaluation.engines
        self.awaited_engines = counts.get('engine', 0) - given.evaluation.engines
        self.engine_site: EngineSite | None = None
        self.compilations: Compilations = NoCompilations()
        context.config.note_used(_READ_ELSEWHERE)
        context.parts.enter_context(keep_name(process, given))

    # The model and the learner.

    def load_model(self) -> RemoteModel:
        context, config = self._context, self._config
        context.start.begin('reading the tokenizer')
        text, source = describe_text_model(config), find_source(config)
        text.tokenizer.fits(text.shape.vocab_size)
        note_weights(context.workdir, source, resume=context.resume)
        self._exports, self._source = config.run.export, source
        self._export_dtype = config.run.export_dtype if self._exports else ''
        return RemoteModel(text.tokenizer, source, text.shape.vocab_size)

    def build_learner(self, checkpoint: Checkpoint | None) -> RemoteLearner:
        """Connects to the learner processes. Where one is lost this process ends with ExitCode.STOPPED."""
        context, config = self._context, self._config
        context.start.begin('waiting for the learner')
        deadline_s = config.distributed.command_deadline_s
        self._learners = self._find_learners(deadline_s)
        key, digest = load_key(key_path(context.workdir)), digest_config(config.as_dict())
        hello = Hello('the controller', digest)
        connections = [
            (f'learner {entry.index}', connect(entry.address, key, hello, deadline_s).connection)
            for entry in self._learners.values()
        ]
        self._peers = Peers(connections, deadline_s=deadline_s)
        self.learner = learner = RemoteLearner(self._peers)
        learner.require_finite(*describe_source(config, self._source))
        if checkpoint is None or context.finished is not None:
            return learner
        try:
            learner.restore(checkpoint.of_learner)
        except RemoteUserError as error:
            raise CheckpointError(f'{context.workdir / CHECKPOINTS}: {error}') from error
        except RemoteValueError as error:
            raise CheckpointError(f'{context.workdir / CHECKPOINTS} is of another model: {error}') from error
        return learner

    def _find_learners(self, deadline_s: float) -> dict[str, Entry]:
        """Those of the newest attempt, by name in the order of their indices, when all are built."""
        count, workdir = parse_learner(self._config.cluster.learner).processes, self._context.workdir

        def are_ready(found: Mapping[str, Entry]) -> bool:
            attempt = read_attempt(workdir)
            holders = tuple(found[learner_name(index)].holder for index in range(count))
            return attempt is not None and attempt.members == holders and all(e.address for e in found.values())

        return await_living(
            workdir,
            [learner_name(index) for index in range(count)],
            deadline_s,
            what=f'{count} learner processes to be built',
            fix='start them with the same config, and give all roles a --workdir that all their hosts share',
            accept=are_ready,
        )

    def trace(self) -> Learner:
        return self.learner

    def find_hardware(self) -> Hardware:
        """The cores of this machine, the devices of the learner."""
        return describe_hardware(self._list('devices'))

    # The loop.

    def find_rates(self) -> DeviceRates:
        kind = str(next(iter(self._learners.values())).details.get('device_kind', ''))
        devices = parse_learner(self._config.cluster.learner).devices
        return DeviceRates(devices, 0, peak_flops(kind, self._config.learner.dtype))

    def find_devices(self) -> None:
        """They are in other processes."""

    def build_channel(self) -> RemoteChannel:
        directory = self._config.publication.directory or self._context.workdir / 'publication'
        return RemoteChannel(self._peers, pathlib.Path(directory))

    def compile(self, engines: Sequence[LocalEngine], version: int) -> int:
        self._context.start.begin('compiling what trains:')
        return self.learner.warm_up()

    async def finish_compiling(self, clock: LoopClock) -> None:
        """All is compiled at the start."""

    def read_environment(self) -> Environment:
        return read_environment(self._list('devices'))

    def describe_engines(self) -> EngineFacts:
        platforms = {entry.details.get('platform') for entry in self._learners.values()}
        return {
            'kv_cache_bytes': None,
            'memory_parts': {},
            'lanes_own_devices': 'cpu' not in platforms,
            'devices': {'learner': self._list('device_ids'), 'engines': {}},
        }

    def describe_simulation(self) -> str:
        return ''

    def _list(self, detail: str) -> list[Any]:
        return [value for entry in self._learners.values() for value in entry.details.get(detail, ())]

    # The report and the export.

    def find_final_weights(self) -> tuple[None, str]:
        """They are in the files of the last version and in the last checkpoint; the digest is the export's, '' without
        one."""
        context = self._context
        if not self._exports:
            return None, ''
        try:
            return None, export_in_process(context.workdir, self._config.run.steps, self._export_dtype)
        except UserError as error:
            context.unsaved = context.unsaved or describe_unexported(error, context.workdir)
            return None, ''

    def export(self, weights: Tree, digest: str) -> None:
        """Done by `find_final_weights`."""

    def complete_export(self) -> None:
        steps, workdir = self._config.run.steps, self._context.workdir
        if self._exports and not holds_export(workdir, steps):
            export_in_process(workdir, steps, self._export_dtype)
        self.learner.close()

    def close_learner(self) -> None:
        """A run that ends in any other way leaves the learners to notice it, and to start again."""
        self.learner.close()
