"""The programs that a run would compile on devices that are only described, by the builders that the run uses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh, SingleDeviceSharding
from ml_collections import config_dict

from areal_jax.aot.expected import UNKNOWN, Expected, bytes_on_device, expect_decoding, expect_learner, expect_prefill
from areal_jax.app.model.model import build_lora
from areal_jax.app.parts import learner_builder
from areal_jax.app.parts.dry_run import join_roles, lay_out
from areal_jax.app.parts.engines import build_backend, build_serving_backend
from areal_jax.config import TrackedConfig
from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.objective import FROM_TEACHER
from areal_jax.learning.programs import CompiledPrograms
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.trained_part import PartMaker, TrainedPart
from areal_jax.learning.weights import choose_trained
from areal_jax.models.decoder import Decoder
from areal_jax.models.expert_check import Demand, choose_checked_mixer
from areal_jax.models.expert_parallel import Layer, choose_form, count_hops
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import leaf_dtype
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, PreparedWeights
from areal_jax.sharding.rules import Allocation, EngineDevices, nearest_device, path_name
from areal_jax.telemetry.progress import format_bytes
from areal_jax.types import Tree

LEARNER, ENGINE = 'learner', 'engine'


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A program of the run, not compiled yet."""

    part: str  # LEARNER or ENGINE
    name: str  # 'accumulate 8 x 16384'
    mesh: Mesh | None  # None = one device
    beside_bytes: int  # on a device, kept there while it runs and not among its arguments
    lower: Callable[[], jax.stages.Lowered]
    expected: Expected = UNKNOWN


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The programs of a run on a topology, and what was chosen for it."""

    programs: Sequence[PlannedProgram]
    choices: Mapping[str, str]  # {'learner.attention': 'splash'}; no self-check has run
    passed_over: Sequence[str]  # why 'auto' did not choose faster ones


def plan_programs(config: config_dict.ConfigDict, shape: ModelConfig, devices: Sequence[jax.Device]) -> PlannedRun:
    """Lists the programs that a run of this config with a model of this shape compiles on such devices.

    Raises ConfigError for a layout that does not fit the devices, and for what cannot be compiled without weights.
    """
    joined = join_roles(config)
    tracked = TrackedConfig(config) if joined is None else joined
    allocation = lay_out(config, devices)
    part, layout = plan_learner(TrackedConfig(config), shape, allocation.learner)
    choices = {'learner.attention': layout.attention, 'learner.packing': layout.packing}
    if shape.experts:
        choices["experts' products of the learner"] = _choose_products(config.learner.dtype, shape, allocation.learner)
        if allocation.learner.shape['expert'] > 1:
            choices['learner.expert_parallel'] = _choose_parallel(config, shape, allocation.learner)
    state = part.described
    kept = jax.tree.leaves((state.params, state.frozen, state.optimizer, state.reference, state.working))
    learner_bytes, engine_bytes = sum(map(bytes_on_device, kept)), 0
    of_engines: list[PlannedProgram] = []
    passed_over = [*layout.passed_over]
    build = build_backend if joined is None else build_serving_backend
    for each in _one_of_each_size(allocation):
        backend = build(tracked, Decoder(shape), each)  # adapters are merged before a version is published
        choices['rollout.attention'] = backend.attention
        passed_over += backend.passed_over
        weights, cache = describe_weights(backend), sum(map(bytes_on_device, jax.tree.leaves(backend.abstract_state())))
        version = sum(map(bytes_on_device, jax.tree.leaves(weights.params)))
        engines = allocation.engines.count(each)
        on_learner = not {*each}.isdisjoint(allocation.learner.devices.flat)
        engine_bytes = max(engine_bytes, 2 * version + engines * cache) if on_learner else engine_bytes
        # the next version, which arrives while this one is in use, and what else is on the devices
        beside = version + (engines - 1) * cache + (learner_bytes if on_learner else 0)
        of_engines += _engine_programs(backend, weights, beside, each, tracked)
    expect = expect_learner(TrackedConfig(config), shape, allocation.learner)
    programs = [*_learner_programs(part, kept, engine_bytes, allocation.learner, expect), *of_engines]
    return PlannedRun(programs, choices, list(dict.fromkeys(passed_over)))


def _choose_products(dtype: str, shape: ModelConfig, mesh: Mesh) -> str:
    experts = shape.experts
    assert experts is not None
    own, width = experts.count // mesh.shape['expert'], experts.d_expert // mesh.shape['tensor']
    demand = Demand(dtype, experts.per_token, own, width, shape.d_model)
    return choose_checked_mixer(nearest_device(mesh), demand).name


def _choose_parallel(config: config_dict.ConfigDict, shape: ModelConfig, mesh: Mesh) -> str:
    """The form of experts over devices, and the bytes of each form."""
    experts, learner = shape.experts, config.learner
    assert experts is not None
    tokens = learner.rows_per_microbatch * learner.row_tokens * mesh.shape['tensor'] // mesh.size
    row = shape.d_model * jax.numpy.dtype(learner.dtype).itemsize
    layer = Layer(tokens, experts.per_token, experts.count, row)
    moved = layer.count_bytes(mesh.shape['expert'], count_hops(mesh, 'expert'))
    listed = ', '.join(f'{name} {format_bytes(int(size))}' for name, size in moved.items())
    form = choose_form(learner.expert_parallel, layer, mesh, 'expert')
    return f'{form} (over the links of a device, a layer and pass: {listed})'


def _one_of_each_size(allocation: Allocation) -> list[EngineDevices]:
    return list({len(devices): devices for devices in reversed(allocation.engines)}.values())


def plan_learner(config: TrackedConfig, shape: ModelConfig, mesh: Mesh) -> tuple[TrainedPart, RowLayout]:
    """Builds the programs of a learner, without weights.

    Raises ConfigError for a teacher, a critic and blocks of the optimizer, whose programs are not listed here yet.
    """
    settings, optimizer = learner_builder.build_learner_settings(config), learner_builder.build_optimizer(config)
    for missing, what in (
        (settings.objective.reads & FROM_TEACHER, 'loss.teacher'),
        (settings.critic is not None, f'the critic of loss.objective={config.loss.objective!r}'),
        (config.optimizer.blocks > 1, f'optimizer.blocks={config.optimizer.blocks}'),
    ):
        if missing:
            raise ConfigError(f'areal-aot does not compile {what} yet; leave it out of the config to compile the rest')
    lora = build_lora(config)
    decoder = Decoder(shape, layers=config.learner.layers, remat=config.learner.remat, lora=lora)
    layout = RowLayout(shape, mesh, settings)
    make = PartMaker(decoder, mesh, settings, optimizer, layout, config.optimizer.learning_rate)
    return make.make(decoder.abstract(), choose_trained(adapters=bool(lora))), layout


def _learner_programs(
    part: TrainedPart,
    kept: Sequence[jax.ShapeDtypeStruct],
    others_bytes: int,
    mesh: Mesh,
    expect: Callable[[str, tuple[Tree, ...]], Expected],
) -> Iterator[PlannedProgram]:
    """The programs of updates and publications; engines on the same devices hold `others_bytes`."""
    # sums of the gradients of earlier micro-batches are like the weights
    sums = sum(map(bytes_on_device, jax.tree.leaves(part.described.params)))
    for programs, name, args in part.declared_programs(exports=True):
        read = args[1:] if name in ('accumulate', 'add') else args  # the first is a sum, described as the weights
        made = part.described.working if name.endswith('cast') else ()  # a new one, counted among its results
        given = {id(leaf) for leaf in jax.tree.leaves((read, made))}
        beside = others_bytes + sum(bytes_on_device(leaf) for leaf in kept if id(leaf) not in given)
        beside += sums if name == 'gradients' else 0
        rows = next((arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg), ())
        named = f'{name} {" x ".join(map(str, rows))}'.strip()
        lower = functools.partial(_lower, programs, name, args)
        yield PlannedProgram(LEARNER, named, mesh if mesh.size > 1 else None, beside, lower, expect(name, args))


def _lower(programs: CompiledPrograms, name: str, args: tuple[Tree, ...]) -> jax.stages.Lowered:
    lowered: jax.stages.Lowered = getattr(programs.definitions, name)().lower(*args)
    return lowered


def _engine_programs(
    backend: JaxDecodeBackend, weights: PreparedWeights, beside: int, devices: EngineDevices, config: TrackedConfig
) -> Iterator[PlannedProgram]:
    """The programs of an engine; where rows without penalties and cuts have programs of their own, 'plain' ones."""
    mesh, size = backend.placement.mesh, f'of {len(devices)}: ' if len(devices) > 1 else ''
    shape = backend.placement.decoder.config
    for bucket in backend.declared_prefills:
        prior = f' after {bucket.prior}' if bucket.prior else ''
        lower = functools.partial(backend.lower_prefill, weights, bucket)
        expected = expect_prefill(config, shape, devices)
        yield PlannedProgram(ENGINE, f'{size}prefill {bucket.tokens}{prior}', mesh, beside, lower, expected)
    for generation in backend.generations:
        kind = 'plain ' if generation is not backend.generations[-1] else ''
        for batch in generation.batches:
            lower = functools.partial(generation.lower, weights, backend.abstract_state(), batch)
            expected = expect_decoding(config, shape, devices, batch)
            yield PlannedProgram(ENGINE, f'{size}generate {kind}{batch}', mesh, beside, lower, expected)


def describe_weights(backend: JaxDecodeBackend) -> PreparedWeights:
    """Describes what `backend.prepare` returns, on accelerators."""
    placement = backend.placement
    decoder, dtype = placement.decoder, backend.dtype
    own = lambda path: jax.numpy.dtype(leaf_dtype(path_name(path), dtype.name))
    describe_published = lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, own(path))
    published = jax.tree_util.tree_map_with_path(describe_published, decoder.abstract())
    prepared = jax.eval_shape(decoder.prepare, published)
    over: Tree = placement.published
    if placement.mesh is None:
        on = next(iter(placement.rows.device_set))
        over = jax.tree.map(lambda leaf: SingleDeviceSharding(on), prepared)
    elif _list_paths(prepared) != _list_paths(published):
        raise ConfigError('areal-aot does not compile weights in 8 bits over several devices of an engine yet')
    describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return PreparedWeights(jax.tree.map(describe, prepared, over))


def _list_paths(tree: Tree) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
