"""The site of a learner in this process: its model, its programs, its engines, and the export of its weights."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import config_dict

from areal_jax.app.export.finished_export import DIRECTORY as EXPORT
from areal_jax.app.export.finished_export import holds_export
from areal_jax.app.export.run_export import replace_export, write_export
from areal_jax.app.model.model import Model, build_model
from areal_jax.app.model.text_model import describe_loading, require_rules_of_origin
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.channels import ChannelParts, PlacedChannel, build_channel
from areal_jax.app.parts.compilations import (
    DIRECTORY,
    CompilationCounter,
    TracedLearner,
    print_passed_over,
    use_compilation_cache,
)
from areal_jax.app.parts.engines import (
    DeviceMoves,
    build_backends,
    build_engines,
    build_evaluation_backends,
    compile_engines,
    describe_caches,
    restore_ring,
)
from areal_jax.app.parts.host import UsedDevices, build_pool, list_devices
from areal_jax.app.parts.learner_builder import build_learner, build_objective, require_finite_weights
from areal_jax.app.parts.sizes import measure_parts, require_room
from areal_jax.app.run.observer import Compilations
from areal_jax.app.run.run import (
    Checkpoint,
    EngineFacts,
    EngineSite,
    LocalRollout,
    RunContext,
    find_split,
    require_sound,
)
from areal_jax.app.workdir.environment import Environment, Hardware, hardware, read_environment
from areal_jax.app.workdir.run_directory import CHECKPOINTS, describe_unexported, note_weights
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit, parse_learner
from areal_jax.config.declarations import require_no_simulation
from areal_jax.config.generation import uses_servers
from areal_jax.config.objectives import find_objective
from areal_jax.config.splits import list_splits, replace_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.distributed import rendezvous
from areal_jax.distributed.handshake import digest_config
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import CommandLeader
from areal_jax.distributed.rendezvous import invite
from areal_jax.errors import UserError
from areal_jax.lanes import LEARNER
from areal_jax.learning.learner import MovingLearner, SpmdLearner
from areal_jax.learning.programs import AHEAD
from areal_jax.learning.weights.finiteness import NonFiniteError
from areal_jax.models.weights import Params
from areal_jax.protocols import Learner
from areal_jax.publication.files_channel import FilesChannel
from areal_jax.publication.manifest import weights_sha256
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.sharding.rules import Allocation, EngineDevices, is_shared
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.types import PublishedWeights, Tree, Work

OwnLearner = SpmdLearner | CommandLeader


def require_here(config: config_dict.ConfigDict) -> None:
    """Raises UserError for a config whose learner, in every split of the devices, does not fit this process."""
    require_sound(config)
    require_no_simulation(config)
    require_rules_of_origin(config)
    for split in list_splits(config):
        require_room(replace_split(config, split))


class OwnSite:
    """See site.LoopSite."""

    awaited_engines = awaited_beside = 0
    allocation: Allocation
    model: Model
    learner: OwnLearner
    channel: PlacedChannel
    split: DeviceSplit | None  # in use; None: devices do not move

    def __init__(self, context: RunContext):
        context.parts.enter_context(use_compilation_cache(context.config))
        self.engine_site: EngineSite | None = self
        self.compilations: Compilations = context.parts.enter_context(CompilationCounter())
        self._context, self._config = context, context.config
        self._backends: Mapping[EngineDevices, JaxDecodeBackend] = {}
        self._evaluation_backends: Mapping[EngineDevices, JaxDecodeBackend] = {}

    def load_model(self) -> Model:
        context = self._context
        context.start.begin(describe_loading(self._config))
        self.model = build_model(self._config, context.start.count_bytes)
        note_weights(context.workdir, self.model.source, resume=context.resume)
        self._exports = self._config.run.export
        self._export_dtype = self._config.run.export_dtype if self._exports else ''
        return self.model

    def build_learner(self, checkpoint: Checkpoint | None) -> OwnLearner:
        """Builds the learner of all processes, with the checkpoint's weights or else the model's; drops the model's."""
        config, context, model = self._config, self._context, self.model
        context.start.begin('building the learner')
        # processes that compile a program for all of them do so at the same time, at a command
        ahead = context.finished is None and parse_learner(config.cluster.learner).processes == 1
        self.split = find_split(config, checkpoint)
        moves = self.split is not None
        mesh = build.build_allocation(config, self.split).learner if moves else build.build_mesh(config)
        own = build_learner(config, model, mesh, compile_ahead=ahead, moves=moves)
        context.parts.callback(own.close, wait=not context.ends_process())
        if not self._trains_later(0 if checkpoint is None else checkpoint.step):
            own.begin_compiling()
        print_passed_over('learner.attention', own.passed_over)
        own.announce = functools.partial(context.start.count_programs, of='learner')
        leader = lead(config, own, context.workdir)
        self.learner = learner = leader if leader is own else context.own(leader)
        model.params = None  # the learner has its copy
        require_finite_weights(config, learner, model)
        if checkpoint is None or context.finished is not None:
            return learner
        try:
            learner.restore(checkpoint.of_learner)
        except NonFiniteError as error:
            raise CheckpointError(f'{context.workdir / CHECKPOINTS}: {error}') from error
        except ValueError as error:
            raise CheckpointError(f'{context.workdir / CHECKPOINTS} is of another model: {error}') from error
        return learner

    def trace(self) -> Learner:
        steps = self._config.telemetry.profile_steps
        if not steps:
            return self.learner
        return self._context.own(TracedLearner(self.learner, steps[0], steps[-1], self._context.workdir / DIRECTORY))

    def find_hardware(self) -> Hardware:
        return hardware()

    # The loop.

    def find_rates(self) -> DeviceRates:
        self.allocation = build.build_allocation(self._config, self.split)
        return build.build_device_rates(self._config, self.allocation)

    def find_devices(self) -> UsedDevices | None:
        return None if uses_servers(self._config) else list_devices(self.allocation, jax.process_index())

    def note_split(self, split: DeviceSplit) -> DeviceRates:
        """Devices were moved: the rates from now on."""
        self.split = split
        return self.find_rates()

    def build_channel(self) -> PlacedChannel:
        parts = ChannelParts(self._config, self._context.workdir, self.model, self.allocation, self.learner.writers)
        self.channel = build_channel(parts)
        if isinstance(self.channel, RecordChannel):
            self._context.own(self.channel)
        return self.channel

    def restore_ring(self, ring: VersionRing, saved: Mapping[str, Tree]) -> None:
        restore_ring(ring, self.channel, saved)

    def build_rollout(
        self, published: PublishedWeights, clock: LoopClock, log: EventLog, supervisor: Supervisor
    ) -> LocalRollout:
        engines = self.build_engines(published, clock, log)
        pool = build_pool(self._config, engines, clock, log, supervisor)
        if self.split is None:
            return LocalRollout(engines, pool)
        assert isinstance(self.learner, MovingLearner)
        moves = DeviceMoves(
            self._config, self.model.decoder, self.learner, self.channel, clock, log, supervisor,
            weights=engines[0].params, backends=self._backends,
        )  # fmt: skip
        return LocalRollout(engines, pool, moves)

    def build_engines(self, published: PublishedWeights, clock: LoopClock, log: EventLog) -> list[LocalEngine]:
        """The engines of this process with the weights `published`."""
        config, decoder = self._config, self.model.decoder
        self._backends = build_backends(config, decoder, self.allocation)
        self._evaluation_backends = build_evaluation_backends(config, decoder, self.allocation)
        backends = self._backends, self._evaluation_backends
        self._context.start.begin(f'building the engines; {describe_caches(*backends)}')
        return build_engines(config, decoder, self.allocation, *backends, self.channel, published, clock, log)

    def compile(self, engines: Sequence[LocalEngine], version: int) -> int:
        """Compiles what trains and what generates side by side: XLA compiles a program on one core for the most part.

        The learner's programs are compiled on a thread of their own, in order; followers do the same.
        Where an evaluation comes before training, they are compiled beside it.
        """
        start = self._context.start
        backends = {'engines': self._backends, 'evaluation': self._evaluation_backends}
        if self._trains_later(version):
            start.begin('compiling what generates:')
            generated = compile_engines(engines, self.allocation, backends, start)
            assert isinstance(self.learner, SpmdLearner)
            self.learner.wait_traced()  # tracing would hold up the loop
            self.learner.begin_compiling()
            return generated
        start.begin('compiling what trains and generates:')
        with concurrent.futures.ThreadPoolExecutor(1, AHEAD) as ahead:
            trained = ahead.submit(self.learner.warm_up)
            generated = compile_engines(engines, self.allocation, backends, start)
            return trained.result() + generated

    async def finish_compiling(self, clock: LoopClock) -> None:
        if self._trains_later(version=0):
            assert isinstance(self.learner, SpmdLearner)
            self._context.start.begin('compiling what trains:')
            programs = await clock.run(LEARNER, self.learner.finish_compiling, Work('compile'))
            self._context.start.end()
            print(f'compiled {programs} programs of the learner', flush=True)

    def _trains_later(self, version: int) -> bool:
        """Whether the learner's programs are compiled after others that an evaluation needs first."""
        config = self._config
        if not find_objective(config.loss.objective).generates:
            return False
        is_alone = parse_learner(config.cluster.learner).processes == 1 and not uses_servers(config)
        return is_alone and version == 0 and config.evaluation.problems > 0

    def copy_version(self, published: PublishedWeights) -> Params:
        copy: Params = jax.device_get(self.channel.receive(published))
        return copy

    def find_final_weights(self) -> tuple[Params, str]:
        """Those of the last version; from its files where no process has them all."""
        weights = self.learner.publish(self._config.run.steps)
        if is_shared(weights):
            assert isinstance(self.channel, FilesChannel)
            weights = self.channel.map_version(self._config.run.steps)
        return weights, weights_sha256(weights)

    def read_environment(self) -> Environment:
        return read_environment()

    def describe_engines(self) -> EngineFacts:
        return {
            'kv_cache_bytes': next((backend.state_bytes for backend in self._backends.values()), None),
            'memory_parts': self.measure_memory(),
            'lanes_own_devices': self.allocation.lanes_own_devices,
            'devices': self.allocation.describe(),
        }

    def describe_simulation(self) -> str:
        return ''

    def measure_memory(self) -> dict[str, int]:
        """Bytes by what they are for: shapes, programs of the learner, the copy for a checkpoint.

        On a CPU the optimizer state is written where it is.
        """
        parts = measure_parts(config_dict.ConfigDict(self._config.as_dict()))
        if self._config.checkpoint.every and jax.default_backend() != 'cpu':
            parts = parts | {'copy for a checkpoint': parts.get('optimizer', 0)}
        if isinstance(self.learner, SpmdLearner):
            parts = parts | {'programs': self.learner.programs.temporary_bytes}
        return parts

    def close_learner(self) -> None:
        """It is closed with the run."""

    # The export.

    def export(self, weights: Tree, digest: str) -> None:
        """Of weights that engines got in a lower precision, or with a critic, the checkpoint has what is exported."""
        if not self._exports:
            return
        context, steps = self._context, self._config.run.steps
        announce, dtype = context.start.count_bytes, self._export_dtype
        context.start.begin_silently('exporting')
        try:
            is_whole = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(weights))
            if is_whole and not build_objective(self._config).trains_values:
                out = context.workdir / EXPORT
                write_export(out, context.workdir, steps, weights, digest, self.model, dtype, announce)
            else:
                replace_export(context.workdir, steps, dtype, announce)
        except UserError as error:
            context.unsaved = context.unsaved or describe_unexported(error, context.workdir)
        finally:
            context.start.end()

    def complete_export(self) -> None:
        context, steps = self._context, self._config.run.steps
        if self._exports and not holds_export(context.workdir, steps):
            context.start.begin_silently('exporting')
            replace_export(context.workdir, steps, self._export_dtype, context.start.count_bytes)
            context.start.end()


def lead(config: TrackedConfig, learner: SpmdLearner, workdir: pathlib.Path) -> SpmdLearner | CommandLeader:
    """The learner of the whole run for process 0, once all followers are there and see its `workdir`.

    Raises CommandError where one does not come.
    """
    distributed = config.distributed
    if parse_learner(config.cluster.learner).processes == 1:
        return learner
    deadline_s = distributed.command_deadline_s
    host = rendezvous.host_of(distributed.coordinator)
    with rendezvous.witness(workdir):
        rendezvous.meet(deadline_s)
    followers = invite(host, workdir, digest_config(config.as_dict()), deadline_s)
    leader = CommandLeader(learner, Peers(followers, deadline_s=deadline_s))
    atexit.register(leader.close)  # also where the run ends before it trains: jax's own waits for the followers
    return leader
