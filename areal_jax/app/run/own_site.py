"""The site of a learner in this process: its model, its programs, its engines, and the export of its weights."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import pathlib
from collections.abc import Callable

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
from areal_jax.app.parts.host import build_pool, list_devices
from areal_jax.app.parts.learner_builder import build_learner, build_objective, require_finite_weights
from areal_jax.app.parts.sizes import measure_parts, require_room
from areal_jax.app.parts.workflow_builder import require_tools_shown
from areal_jax.app.run.loop import IN_THE_WORLD, Loop, Outside, build_loop
from areal_jax.app.run.observer import Compilations
from areal_jax.app.run.run import (
    BuildRollout,
    Built,
    Checkpoint,
    EngineFacts,
    LocalEngines,
    LoopSite,
    Moves,
    Rollout,
    RunContext,
    Site,
    find_split,
    require_sound,
    restore_learner,
)
from areal_jax.app.workdir.run_directory import describe_unexported, note_weights
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit, parse_learner
from areal_jax.config.declarations import require_no_simulation
from areal_jax.config.generation import uses_servers
from areal_jax.config.objectives import find_objective
from areal_jax.config.splits import list_splits, replace_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
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
from areal_jax.learning.weights import NonFiniteError
from areal_jax.models.weights import Params
from areal_jax.protocols import Learner
from areal_jax.publication.files_channel import FilesChannel
from areal_jax.publication.manifest import weights_sha256
from areal_jax.publication.record_channel import RecordReaders
from areal_jax.publication.shard_channel import ShardChannel
from areal_jax.sharding.rules import Allocation, is_shared
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.telemetry.progress import StartProgress
from areal_jax.types import PublishedWeights, Tree, Work

OwnLearner = SpmdLearner | CommandLeader


def require_here(config: config_dict.ConfigDict) -> None:
    """Raises UserError for a config whose learner does not fit this process in some split of the devices."""
    require_sound(config)
    require_no_simulation(config)
    require_rules_of_origin(config)
    for split in list_splits(config):
        require_room(replace_split(config, split))


def count_compilations(context: RunContext) -> Compilations:
    """Keeps compiled programs in run.compilation_cache, and counts compilations, until the run is closed."""
    context.parts.enter_context(use_compilation_cache(context.config))
    return context.parts.enter_context(CompilationCounter())


def load_model(context: RunContext) -> Model:
    """Loads the weights that the run begins from, and records them in the workdir."""
    context.start.begin(describe_loading(context.config))
    model = build_model(context.config, context.start.count_bytes)
    note_weights(context.workdir, model.source, resume=context.resume)
    return model


def build_own_loop(
    context: RunContext, outside: Outside = IN_THE_WORLD, load: Callable[[RunContext], Model] = load_model
) -> Built[Loop]:
    """Builds a run of the asynchronous loop from the weights that `load` returns."""
    compilations = count_compilations(context)
    require_tools_shown(context.config)
    model = load(context)
    return build_loop(context, model, functools.partial(build_own_site, context, compilations, model), outside)


def build_own_site(
    context: RunContext, compilations: Compilations, model: Model, checkpoint: Checkpoint | None
) -> Site[OwnLearner]:
    """Builds the learner of all processes, from the checkpoint's or else the model's weights; frees the model's."""
    config = context.config
    context.start.begin('building the learner')
    split, trains_later = find_split(config, checkpoint), _trains_later(config, checkpoint)
    learner = _build_learner(context, model, split, begins=not trains_later)
    restore_learner(context, learner, checkpoint, NonFiniteError, ValueError)
    dtype = config.run.export_dtype if config.run.export else ''
    return Site(
        model, learner, compilations,
        functools.partial(_open_loop, context, model, learner, split, trains_later=trains_later),
        trace=functools.partial(_trace, context),
        export=functools.partial(_export, context, model, dtype),
        complete_export=functools.partial(_complete_export, context, dtype),
    )  # fmt: skip


def _trains_later(config: TrackedConfig, checkpoint: Checkpoint | None) -> bool:
    """Whether the learner's programs are compiled later, after the programs that an evaluation needs first."""
    if not find_objective(config.loss.objective).generates:
        return False
    is_alone = parse_learner(config.cluster.learner).processes == 1 and not uses_servers(config)
    is_new = checkpoint is None or checkpoint.step == 0
    return is_alone and is_new and config.evaluation.problems > 0


def _build_learner(context: RunContext, model: Model, split: DeviceSplit | None, *, begins: bool) -> OwnLearner:
    """Builds the learner with the model's weights; `begins`: compilation starts now."""
    config = context.config
    # processes that share a program must compile it at the same time, at a command
    ahead = context.finished is None and parse_learner(config.cluster.learner).processes == 1
    moves = split is not None
    mesh = build.build_allocation(config, split).learner if moves else build.build_mesh(config)
    own = build_learner(config, model, mesh, compile_ahead=ahead, moves=moves)
    context.parts.callback(own.close, wait=not context.ends_process())
    if begins:
        own.begin_compiling()
    print_passed_over('learner.attention', own.passed_over)
    own.announce = functools.partial(context.start.count_programs, of='learner')
    leader = lead(config, own, context.workdir)
    learner: OwnLearner = leader if leader is own else context.own(leader)
    model.params = None  # the learner has its copy
    require_finite_weights(config, learner, model)
    return learner


def _trace(context: RunContext, learner: Learner) -> Learner:
    steps = context.config.telemetry.profile_steps
    if not steps:
        return learner
    return context.own(TracedLearner(learner, steps[0], steps[-1], context.workdir / DIRECTORY))


# The loop.


def _open_loop(
    context: RunContext, model: Model, learner: OwnLearner, split: DeviceSplit | None, *, trains_later: bool
) -> LoopSite:
    config, start = context.config, context.start
    allocation = build.build_allocation(config, split)
    channel = build_channel(
        ChannelParts(config, context.workdir, model, allocation, learner.writers, learner.publish_everywhere)
    )
    if isinstance(channel, RecordReaders):
        context.own(channel)
    is_served = uses_servers(config)
    local = LocalEngines(
        _prepare_rollout(context, model, learner, split, allocation, channel),
        copy_version=lambda published: jax.device_get(channel.receive(published)),
        restore_ring=lambda ring, saved: restore_ring(ring, channel, saved),
    )
    return LoopSite(
        channel,
        build.build_device_rates(config, allocation),
        functools.partial(_compile_generation if trains_later else _compile, start, learner),
        functools.partial(_describe_engines, config, learner),
        None if is_served else local,
        functools.partial(_finish_compiling, start, learner) if trains_later else None,
        find_devices=lambda: None if is_served else list_devices(allocation, jax.process_index()),
        find_final_weights=functools.partial(_find_final_weights, learner, channel, config.run.steps),
    )


def _find_rates(config: TrackedConfig, split: DeviceSplit | None) -> DeviceRates:
    return build.build_device_rates(config, build.build_allocation(config, split))


def _prepare_rollout(
    context: RunContext, model: Model, learner: OwnLearner, split: DeviceSplit | None, allocation: Allocation,
    channel: PlacedChannel,
) -> BuildRollout:  # fmt: skip
    """Returns a function that builds the engines of this process with a version."""
    config, decoder, start = context.config, model.decoder, context.start

    def build_rollout(published: PublishedWeights, clock: LoopClock, log: EventLog, supervisor: Supervisor) -> Rollout:
        backends = build_backends(config, decoder, allocation)
        evaluating = build_evaluation_backends(config, decoder, allocation)
        start.begin(f'building the engines; {describe_caches(backends, evaluating)}')
        engines = build_engines(config, decoder, allocation, backends, evaluating, channel, published, clock, log)
        pool = build_pool(config, engines, clock, log, supervisor)
        moves = None
        if split is not None:
            assert isinstance(learner, MovingLearner)
            site = DeviceMoves(
                config, decoder, learner, channel, clock, log, supervisor, weights=engines[0].params, backends=backends
            )
            moves = Moves(site, split, functools.partial(_find_rates, config))
        kinds = {'engines': backends, 'evaluation': evaluating}
        compile_all = functools.partial(compile_engines, engines, allocation, kinds, start)
        return Rollout(pool, engines, compile_all, next(iter(backends.values())).state_bytes, moves)

    return build_rollout


def _compile(start: StartProgress, learner: OwnLearner, compile_rollout: Callable[[], int]) -> int:
    """Compiles the programs of learner and engines in parallel: XLA mostly uses one core per program.

    The learner's programs are compiled on a separate thread, in order; followers do the same.
    """
    start.begin('compiling what trains and generates:')
    with concurrent.futures.ThreadPoolExecutor(1, AHEAD) as ahead:
        trained = ahead.submit(learner.warm_up)
        generated = compile_rollout()
        return trained.result() + generated


def _compile_generation(start: StartProgress, learner: OwnLearner, compile_rollout: Callable[[], int]) -> int:
    """Compiles the engines' programs for the evaluation that comes first; the learner's compile during it."""
    start.begin('compiling what generates:')
    generated = compile_rollout()
    assert isinstance(learner, SpmdLearner)
    learner.wait_traced()  # tracing would hold up the loop
    learner.begin_compiling()
    return generated


async def _finish_compiling(start: StartProgress, learner: OwnLearner, clock: LoopClock) -> None:
    assert isinstance(learner, SpmdLearner)
    start.begin('compiling what trains:')
    programs = await clock.run(LEARNER, learner.finish_compiling, Work('compile'))
    start.end()
    print(f'compiled {programs} programs of the learner', flush=True)


def _describe_engines(config: TrackedConfig, learner: OwnLearner, split: DeviceSplit | None) -> EngineFacts:
    """Describes memory and devices; bytes cover shapes, learner programs, and off CPU the copy for a checkpoint."""
    memory, allocation = measure_parts(config_dict.ConfigDict(config.as_dict())), build.build_allocation(config, split)
    if config.checkpoint.every and jax.default_backend() != 'cpu':
        memory = memory | {'copy for a checkpoint': memory.get('optimizer', 0)}
    if isinstance(learner, SpmdLearner):
        memory = memory | {'programs': learner.programs.temporary_bytes}
    own, devices = allocation.lanes_own_devices, allocation.describe()
    return {'memory_parts': memory, 'lanes_own_devices': own, 'devices': devices}


def _find_final_weights(learner: OwnLearner, channel: PlacedChannel, steps: int) -> tuple[Params, str]:
    """Returns the weights of the last version, and their digest; through the channel if no process has all of them."""
    weights = learner.publish(steps)
    if isinstance(channel, ShardChannel):
        weights = jax.device_get(channel.read_newest())
    elif is_shared(weights):
        assert isinstance(channel, FilesChannel)
        weights = channel.map_version(steps)
    return weights, weights_sha256(weights)


# The export, if `dtype` is not ''.


def _export(context: RunContext, model: Model, dtype: str, weights: Tree, digest: str) -> None:
    """Exports the weights; from the checkpoint if they are in a lower precision or there is a critic."""
    if not dtype:
        return
    steps, announce = context.config.run.steps, context.start.count_bytes
    context.start.begin_silently('exporting')
    try:
        is_whole = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(weights))
        if is_whole and not build_objective(context.config).trains_values:
            out = context.workdir / EXPORT
            write_export(out, context.workdir, steps, weights, digest, model, dtype, announce)
        else:
            replace_export(context.workdir, steps, dtype, announce)
    except UserError as error:
        context.unsaved = context.unsaved or describe_unexported(error, context.workdir)
    finally:
        context.start.end()


def _complete_export(context: RunContext, dtype: str) -> None:
    steps = context.config.run.steps
    if dtype and not holds_export(context.workdir, steps):
        context.start.begin_silently('exporting')
        replace_export(context.workdir, steps, dtype, context.start.count_bytes)
        context.start.end()


def lead(config: TrackedConfig, learner: SpmdLearner, workdir: pathlib.Path) -> SpmdLearner | CommandLeader:
    """Returns the learner of the whole run for process 0, once all followers are there and see its `workdir`.

    Raises CommandError if a follower does not come.
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
    atexit.register(leader.close)  # also if the run ends before it trains: jax's own handler waits for the followers
    return leader
