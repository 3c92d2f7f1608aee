"""Estimates the least memory of a run from shapes alone; a run that cannot fit is refused before weights are drawn."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from ml_collections import config_dict

from areal_jax.app.model.model import build_lora, describe_given_model
from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.learner_builder import build_optimizer
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.kinds import find_channel
from areal_jax.config.objectives import KL, find_objective, is_policy, reads_reference
from areal_jax.learning import weights as trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import DELTA, LayerKind, ModelConfig
from areal_jax.models.weight_rows import MixerKind
from areal_jax.models.weights import Params, leaf_dtype, logical_axes
from areal_jax.rollout.decode.decode_rows import CacheSizes
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.rollout.state_pool import size_states
from areal_jax.rollout.window_blocks import size_windows
from areal_jax.sharding.rules import Allocation, EngineDevices, data_shards, param_shardings, path_name, replicated
from areal_jax.telemetry.progress import format_bytes
from areal_jax.types import Tree

_CGROUP_ROOT, _CGROUPS = pathlib.Path('/sys/fs/cgroup'), pathlib.Path('/proc/self/cgroup')


def memory_limit_bytes() -> int:
    """Returns the bytes that all processes of this run may use together: the machine's or a lower cgroup limit."""
    import psutil

    return min([psutil.virtual_memory().total, *cgroup_limits()])


def cgroup_limits(processes: pathlib.Path = _CGROUPS, root: pathlib.Path = _CGROUP_ROOT) -> list[int]:
    """Lists the limits of the cgroup of this process (version 1 or 2) and of its parents."""
    limits = []
    lines = processes.read_text().splitlines() if processes.exists() else []
    for line in lines:
        _, controllers, group = line.split(':', 2)
        if controllers not in ('', 'memory'):
            continue
        top, name = (root / 'memory', 'memory.limit_in_bytes') if controllers else (root, 'memory.max')
        inside = top / group.lstrip('/')
        for directory in (inside, *inside.parents):
            if directory != top and top not in directory.parents:
                break
            file = directory / name
            if file.is_file() and (text := file.read_text().strip()).isdecimal():  # 'max' is no limit
                limits.append(int(text))
    return limits


_SHARE = 0.95  # the fraction of a memory that a run may use
_ANSWER_BYTES = 1024  # of host objects, per running answer
_KINDS = (
    *('weights', 'optimizer', 'gradients', 'working copy', 'reference model', 'teacher', 'critic', 'publication'),
    *(
        'transposed weights',
        'weights in 8 bits',
        'moments of other blocks',
        'KV cache',
        'prefill',
        'logits',
        'rows',
        'answers',
    ),
    *('earlier versions', 'versions for deltas'),
)


def usable_bytes(memory: float) -> int:
    """Returns the bytes of a memory that a run may use."""
    return int(_SHARE * memory)


def fits(used: float, memory: float) -> bool:
    """Whether so many bytes fit a memory: the one rule of runs, of their dry runs and of what areal-aot compiles."""
    return used <= usable_bytes(memory)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes by purpose."""

    learner: Mapping[str, int]  # on each device of the learner's mesh
    engines: Mapping[str, int]  # on each device of the first engine, which may share one with the learner
    host: Mapping[str, int]
    by_devices: Mapping[EngineDevices, Mapping[str, int]] = dataclasses.field(default_factory=dict)  # of all engines


def require_room(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError, with the sizes and the fields to lower, for a run that exceeds 95% of a memory.

    On accelerators, the limit is the memory of one device; on a CPU, the memory of the machine or its cgroup. Only
    layer inputs are counted of the activations, so a run that passes may still not fit.
    """
    _require_room(*_measure_devices(config), config)


def measure_parts(config: config_dict.ConfigDict) -> dict[str, int]:
    """Returns the bytes by purpose, on the fullest device of this process plus the host; see `require_room`.

    Not all of them are in use at the same time.
    """
    on_device, host = _measure_devices(config)
    fullest = max(on_device.values(), key=lambda parts: sum(parts.values()), default={})
    return sum_parts(fullest, host)


def _measure_devices(
    config: config_dict.ConfigDict,
) -> tuple[dict[jax.Device, Mapping[str, int]], Mapping[str, int]]:
    """Returns the sizes of a run on each device of this process, and on its host."""
    tracked = TrackedConfig(config)  # a separate one: the fields read here do not count as used by the run
    supervised = not find_objective(config.loss.objective).generates
    allocation = Allocation(build.build_mesh(tracked), ()) if supervised else build.build_allocation(tracked)
    sizes = measure(tracked, read_shape(tracked), allocation)
    trains = [device for device in allocation.learner.devices.flat if device.process_index == jax.process_index()]
    decodes = _by_device(sizes.by_devices) if jax.process_index() == 0 else {}
    on_device = dict.fromkeys(trains, sizes.learner)
    for device, parts in decodes.items():
        on_device[device] = sum_parts(on_device.get(device, {}), parts)
    return on_device, sizes.host if decodes else {}


def require_room_to_evaluate(config: config_dict.ConfigDict, allocation: Allocation) -> None:
    """Raises ConfigError if engines without a learner do not fit: their weights, caches and dispatch results."""
    tracked = TrackedConfig(config, purpose=Purpose.EVALUATION)
    _require_room(_by_device(sizes_of_engines(tracked, read_shape(tracked), allocation)), {}, config)


def _require_room(
    on_device: Mapping[jax.Device, Mapping[str, int]], host: Mapping[str, int], config: config_dict.ConfigDict
) -> None:
    """Raises ConfigError if a device, or on a CPU the machine, has too little memory."""
    if limits := {device: limit for device in on_device if (limit := device_memory(device))}:
        for device, limit in limits.items():
            _require(on_device[device], limit, f'of {device.device_kind}', config)
        return
    where = 'of this machine (or the limit of its cgroup)'
    _require(sum_parts(*on_device.values(), host), memory_limit_bytes(), where, config)


def measure(config: TrackedConfig, shape: ModelConfig, allocation: Allocation) -> Sizes:
    """Computes the sizes of a run with a model of this shape; nothing is allocated."""
    learner = _learner_sizes(config, shape, allocation.learner)
    version = learner['publication'] * allocation.learner.size  # upper bound: unsharded leaves count on each
    if not find_objective(config.loss.objective).generates:
        return Sizes(learner, {}, {})
    # the channel keeps earlier versions on the devices where the learner made them
    if allocation.engines and not allocation.engine_shares(0):
        learner['publication'] *= 1 + _held_versions(config) + (1 if config.evaluation.every else 0)
    rollout, eta = config.rollout, config.staleness.eta
    admitted = config.learner.groups_per_update * (eta + 1)
    most = rollout.max_running_groups or config.buffer.capacity
    running = int(min(most, admitted, config.learner.groups_per_update * config.run.steps))
    host = {'answers': running * rollout.group_size * _ANSWER_BYTES}
    if config.publication.delta:
        # the learner's last version and, on accelerators, one buffer per reader; CPU engines decode from the buffers
        readers = [devices for devices in allocation.by_devices() if devices[0].platform != 'cpu']
        host['versions for deltas'] = (1 + len(readers)) * version
    if config.optimizer.blocks > 1:  # moments of the other blocks; an upper bound
        host['moments of other blocks'] = 2 * learner['weights']
    if config.diagnostics.splits_ratio:
        kept = (config.run.steps + 1) * learner.get('working copy', learner['gradients'])
        host['earlier versions'] = min(config.diagnostics.ring_bytes, kept)
    by_devices = sizes_of_engines(config, shape, allocation)
    return Sizes(learner, next(iter(by_devices.values()), {}), host, by_devices)


def state_sizes(config: TrackedConfig, shape: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Returns the bytes on a device of each tree that the learner's programs take or make, once.

    'trained' and 'frozen' are the weights, 'publication' is one version of them. With float32 passes the trained
    weights are their own working copy.
    """
    # only one of several layers with equal shapes is measured: a tree of all of them could itself be too large
    decoder = Decoder(_sample(shape), lora=build_lora(config))
    trained, frozen = trees.split(decoder.abstract(), trees.choose_trained(adapters=bool(decoder.lora)))
    cut = lambda tree: param_shardings(tree, logical_axes(shape), mesh, config.cluster.strategy)
    count = lambda tree, shardings, dtype: _bytes(tree, shardings, _repeats(shape), dtype)
    optimizer = build_optimizer(config)
    state = jax.eval_shape(optimizer.init, trained)
    placed = optimizer.shardings(trained, cut(trained), replicated(mesh))
    supervised = not find_objective(config.loss.objective).generates
    published = 'float32' if supervised else config.publication.dtype
    merged = Decoder(decoder.config).abstract()
    return {
        'trained': count(trained, cut(trained), 'float32'),
        'frozen': count(frozen, cut(frozen), config.learner.dtype),
        'optimizer': _of_largest_block(config, shape, state, placed, None),
        'gradients': _of_largest_block(config, shape, trained, cut(trained), 'float32'),
        'publication': count(merged, cut(merged), published),
        'working copy': count(trained, cut(trained), config.learner.dtype),
    }


def _learner_sizes(config: TrackedConfig, shape: ModelConfig, mesh: Mesh) -> dict[str, int]:
    of_state, dtype = state_sizes(config, shape, mesh), config.learner.dtype
    tokens = (
        config.learner.rows_per_microbatch * config.learner.row_tokens // data_shards(mesh) // mesh.shape['context']
    )
    sizes = {
        'weights': of_state['trained'] + of_state['frozen'],
        **{name: of_state[name] for name in ('optimizer', 'gradients', 'publication')},
        'rows': tokens * shape.n_layers * shape.d_model * _itemsize(dtype),
    }
    if dtype != 'float32':
        sizes['working copy'] = of_state['working copy']
    if reads_reference(config.loss):
        sizes['reference model'] = of_state['working copy']
    if find_objective(config.loss.objective).teacher:
        sizes['teacher'] = _teacher_bytes(config, mesh)
    if config.critic.own_model:
        sizes['critic'] = _critic_bytes(config, shape, mesh)
    return sizes


def _critic_bytes(config: TrackedConfig, shape: ModelConfig, mesh: Mesh) -> int:
    """Returns the bytes of a separate critic model: weights, gradients, optimizer state and working copy."""
    weights = Decoder(_sample(shape)).abstract()
    shardings = param_shardings(weights, logical_axes(shape), mesh, config.cluster.strategy)
    optimizer = build_optimizer(config)
    placed = optimizer.shardings(weights, shardings, replicated(mesh))
    dtype = config.learner.dtype
    of_weights = 2 * _bytes(weights, shardings, _repeats(shape), 'float32')
    working = _bytes(weights, shardings, _repeats(shape), dtype) if dtype != 'float32' else 0
    state = _bytes(jax.eval_shape(optimizer.init, weights), placed, _repeats(shape), None)
    return of_weights + state + working


def _teacher_bytes(config: TrackedConfig, mesh: Mesh) -> int:
    shape = describe_given_model(config, 'loss.teacher').shape
    weights = Decoder(_sample(shape)).abstract()
    shardings = param_shardings(weights, logical_axes(shape), mesh, config.cluster.strategy)
    return _bytes(weights, shardings, _repeats(shape), config.learner.dtype)


def _of_largest_block(config: TrackedConfig, shape: ModelConfig, tree: Tree, shardings: Tree, dtype: str | None) -> int:
    """Returns the bytes of gradients or optimizer state; the learner's devices hold one block at a time."""
    blocks = config.optimizer.blocks
    whole = _bytes(tree, shardings, _repeats(shape), dtype)
    if blocks == 1:
        return whole
    outside = _bytes(tree, shardings, (0, 0), dtype)
    return max(outside, (whole - outside) * -(-shape.n_layers // (blocks - 1)) // shape.n_layers)


def sizes_of_engines(
    config: TrackedConfig, shape: ModelConfig, allocation: Allocation
) -> dict[EngineDevices, dict[str, int]]:
    """Returns the bytes on each device, by the devices of an engine; engines of one size are measured once."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    by_devices: dict[EngineDevices, dict[str, int]] = {}
    for devices, engines in allocation.by_devices().items():
        key = len(devices), len(engines)
        if key not in found:
            found[key] = _engine_sizes(config, shape, allocation, devices, len(engines))
        by_devices[devices] = found[key]
    return by_devices


def _by_device(sizes: Mapping[EngineDevices, Mapping[str, int]]) -> dict[jax.Device, Mapping[str, int]]:
    return {device: parts for devices, parts in sizes.items() for device in devices}


def _engine_sizes(
    config: TrackedConfig, shape: ModelConfig, allocation: Allocation, devices: EngineDevices, engines: int
) -> dict[str, int]:
    """The bytes on each of `devices` with `engines` engines; `tensor` cuts weights and heads, `expert` the experts."""
    rollout, itemsize = config.rollout, _itemsize(config.publication.dtype)
    group = parse_engines(config.cluster.engines).find_group(len(devices))
    slots, cache = rollout.slots, cache_bytes(config, shape, devices)
    if config.evaluation.every:
        slots += config.evaluation.slots
        beside = _cache_blocks(config, shape, config.evaluation.slots, beside=True)
        cache += beside * _block_bytes(config, shape, devices)
        cache += _states_bytes(config, shape, devices, config.evaluation.slots)
    weights, matrices = _engine_weights(shape, devices, group.expert, config.publication.dtype)
    return {
        'publication': _copies(config, allocation, engines) * weights,
        **_prepared_weights(config, devices, matrices),
        'KV cache': engines * cache,
        'prefill': max(rollout.prefill_buckets) * _prefill_width(_of_engines(config, shape)) * itemsize // group.tensor,
        'logits': slots * (shape.vocab_size * 4 + rollout.decode_steps * 9),  # also the results of a dispatch
    }


def version_bytes(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices, *, prefills: bool = False) -> int:
    """Returns the bytes of one version of the published weights on each device of an engine.

    Args:
      prefills: only what a prefill reads. It predicts nothing, so it has no head, and only keys and values of the last
        layer.
    """
    one, repeats = Decoder(_sample(shape)), _repeats(shape)
    placed = _place_engine(one, devices, parse_engines(config.cluster.engines).find_group(len(devices)).expert)
    whole = _bytes(one.abstract(), placed, repeats, config.publication.dtype)
    if not prefills:
        return whole
    kept = 'latent' if shape.latent and config.rollout.mla == 'absorbed' else 'latent|key|value'
    unread = re.compile(rf'head\b|final_norm|layers/{len(repeats) - 1}/(?!attention_norm|attention/({kept}))')
    leaves = zip(jax.tree_util.tree_leaves_with_path(one.abstract()), jax.tree.leaves(placed), strict=True)
    return whole - _itemsize(config.publication.dtype) * sum(
        math.prod(over.shard_shape(leaf.shape)) for (path, leaf), over in leaves if unread.match(path_name(path))
    )


def cache_bytes(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices) -> int:
    """Returns the bytes of an engine's KV cache and states on each of its devices, without those of evaluation."""
    blocks = _cache_blocks(config, shape, config.rollout.slots) * _block_bytes(config, shape, devices)
    return blocks + _states_bytes(config, shape, devices, config.rollout.slots)


def _states_bytes(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices, slots: int) -> int:
    """Returns the bytes on a device of the states of delta nets."""
    if shape.delta is None:
        return 0
    tensor = parse_engines(config.cluster.engines).find_group(len(devices)).tensor
    places = size_states(slots, config.rollout.state_snapshots).places + 1
    return shape.n_delta_layers * places * shape.delta.state_bytes(_itemsize(config.publication.dtype)) // tensor


def _block_bytes(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices) -> int:
    """Returns the bytes on a device of a block of one layer."""
    tensor = parse_engines(config.cluster.engines).find_group(len(devices)).tensor
    shape = _of_engines(config, shape)
    over = 1 if shape.caches_latents else tensor  # latents are on every device
    position = shape.cached_numbers * _itemsize(config.publication.dtype) // over
    return config.rollout.block_tokens * position


def _of_engines(config: TrackedConfig, shape: ModelConfig) -> ModelConfig:
    """Returns the model in the form of latent attention that engines compute."""
    return shape.absorb() if config.rollout.mla == 'absorbed' else shape


def _cache_blocks(config: TrackedConfig, shape: ModelConfig, slots: int, *, beside: bool = False) -> int:
    """Returns the blocks of a backend's cache, summed over the layers; of these some have a pool of their own."""
    rollout = config.rollout
    of_sequences = rollout.count_cache_blocks(slots, beside=beside)
    windows = size_windows(
        max(filter(None, shape.windows), default=None), slots=slots, cache_blocks=of_sequences,
        block_tokens=rollout.block_tokens, steps=rollout.decode_steps, piece_tokens=max(rollout.prefill_buckets),
    )  # fmt: skip
    sizes = CacheSizes(rollout.context_tokens, rollout.block_tokens, of_sequences, windows)
    with_attention = [kind for kind in shape.kinds if kind.mixer == 'attention']
    return sum(sizes.allocated(kind.window) for kind in with_attention) * (shape.n_layers // len(shape.kinds))


def _prepared_weights(config: TrackedConfig, devices: EngineDevices, matrices: int) -> dict[str, int]:
    """Returns the bytes of the matrices' second copy, in decoding layout; engines on the same devices share it."""
    if config.rollout.weights == 'int8':
        return {'weights in 8 bits': _in_use(config) * matrices // _itemsize(config.publication.dtype)}
    return {'transposed weights': _in_use(config) * matrices if devices[0].platform == 'cpu' else 0}


def _copies(config: TrackedConfig, allocation: Allocation, engines: int) -> int:
    """Returns the copies of the weights on an engine's device, not counting the learner's."""
    if not allocation.engine_shares(0):
        return _in_use(config)
    held, pinned = _held_versions(config), _in_use(config) - 2
    if not find_channel(config.publication.channel).shares_copy:
        return max(held, engines) + pinned * engines
    held += pinned
    return held + (allocation.learner.size > 1)  # a learner on one device makes its copy where the engines decode


def _in_use(config: TrackedConfig) -> int:
    """Returns the versions that an engine holds: the current one, the arriving one, and an evaluated one if any."""
    return 2 + (1 if config.evaluation.every else 0)


def _prefill_width(shape: ModelConfig) -> int:
    """Returns the values per layer and token of a packed prefill: two streams, queries, keys, values, the MLP."""
    heads = (2 * shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    chosen = shape.experts.per_token * shape.experts.d_expert if shape.experts else 0
    return 2 * shape.d_model + heads + 2 * max(shape.d_ff, chosen)


def _engine_weights(shape: ModelConfig, devices: EngineDevices, expert: int, dtype: str) -> tuple[int, int]:
    """Returns the bytes per device of (all weights, the layers' matrices, which a CPU backend transposes)."""
    one = Decoder(_sample(shape))
    tree, placed = one.abstract(), _place_engine(one, devices, expert)
    count = lambda tree, placed: _bytes(tree, placed, _repeats(shape), dtype)
    of_matrices = lambda tree, values: jax.tree.map(lambda leaf, v: v if len(leaf.shape) == 2 else None, tree, values)
    layers, over = ({'layers': of_matrices(tree['layers'], values['layers'])} for values in (tree, placed))
    return count(tree, placed), count(layers, over)


def _place_engine(decoder: Decoder, devices: EngineDevices, expert: int) -> Params:
    """Returns the sharding of every published weight over the devices of an engine."""
    if len(devices) > 1:
        return weight_shardings(decoder, devices, expert)
    alone = SingleDeviceSharding(devices[0])
    return jax.tree.map(lambda _: alone, decoder.abstract())


def _held_versions(config: TrackedConfig) -> int:
    """Returns the number of versions before the newest that a schedule may still ask for, or that engines use."""
    schedule = build.build_schedule(config)
    return min(schedule.longest + 1 if schedule else 1, config.run.steps)


def _sample(shape: ModelConfig) -> ModelConfig:
    """Returns the model with one layer of each kind of modules; the kind of the last layer comes last."""
    kinds = list(_count_kinds(shape))
    dense = tuple(index for index, (_, has_experts) in enumerate(kinds) if not has_experts)
    experts = shape.experts and dataclasses.replace(shape.experts, dense_layers=dense)
    mixers = tuple(DELTA if mixer == 'delta' else LayerKind() for mixer, _ in kinds)
    return dataclasses.replace(shape, n_layers=len(kinds), kinds=mixers, experts=experts)


def _repeats(shape: ModelConfig) -> tuple[int, ...]:
    """Returns, for each layer of `_sample`, the number of layers of the model that it represents."""
    return tuple(_count_kinds(shape).values())


def _count_kinds(shape: ModelConfig) -> dict[tuple[MixerKind, bool], int]:
    """Returns the number of layers by (mixer, whether they have experts), the layers without experts first."""
    if len(shape.kinds) == 1:  # layers without number are not listed
        mixer = shape.kinds[0].mixer
        counts = {(mixer, False): shape.n_layers - shape.n_expert_layers, (mixer, True): shape.n_expert_layers}
        return {kind: count for kind, count in counts.items() if count}
    found = collections.Counter((shape.mixer(layer), shape.has_experts(layer)) for layer in range(shape.n_layers))
    last = shape.mixer(shape.n_layers - 1)
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0] == last)))


def _bytes(tree: Params, shardings: Params, repeats: Sequence[int], dtype: str | None) -> int:
    """Returns a model's bytes on one device, from one layer of each kind; `dtype` None: each leaf keeps its own."""
    placed = jax.tree.leaves(shardings)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    own = lambda path, leaf: leaf.dtype if dtype is None else leaf_dtype(path_name(path), dtype)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * _itemsize(own(path, leaf)) * _repeat(path, repeats)
        for (path, leaf), sharding in zip(leaves, placed, strict=True)
    )


def _repeat(path: jax.tree_util.KeyPath, repeats: Sequence[int]) -> int:
    """Returns the number of model leaves that this path represents; optimizer paths may have a longer prefix."""
    found = re.search(r'layers/(\d+)/', path_name(path))
    return repeats[int(found[1])] if found else 1


def _itemsize(dtype: str | np.dtype) -> int:
    return jax.numpy.dtype(dtype).itemsize


def sum_parts(*parts: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for name in _KINDS if any(name in part for part in parts)}


def device_memory(device: jax.Device) -> int | None:
    """Returns the bytes that jax may use on an accelerator; None on a CPU, whose memory is the machine's."""
    return (device.memory_stats() or {}).get('bytes_limit')


def _require(sizes: Mapping[str, int], limit: int, where: str, config: config_dict.ConfigDict) -> None:
    total = sum(sizes.values())
    if fits(total, limit):
        return
    raise ConfigError(
        f'this run needs at least {format_bytes(total)}, activations not counted, but {_SHARE:.0%} of the '
        f'{format_bytes(limit)} {where} are {format_bytes(usable_bytes(limit))}: {tell_excess(sizes, config)}'
    )


def tell_excess(sizes: Mapping[str, int], config: config_dict.ConfigDict) -> str:
    """Tells the parts of sizes that do not fit, the largest first, and what lowers them."""
    total = sum(sizes.values())
    order = sorted(sizes, key=sizes.__getitem__, reverse=True)
    table = ', '.join(f'{name} {format_bytes(sizes[name])}' for name in order if sizes[name] > 0.001 * total)
    fixes = '; '.join(dict.fromkeys(_fix(name, config) for name in order if sizes[name] > 0.1 * total))
    return f'{table}. To fit, {fixes}'


def _fix(name: str, c: config_dict.ConfigDict) -> str:
    """Returns the advice that lowers a size in this config."""
    if name == 'optimizer' and c.optimizer.name in ('adamw', 'lion'):
        return "set optimizer.name='adafactor' or 'adamw8bit'"
    if name == 'versions for deltas':
        return 'set publication.delta=False'
    if name == 'reference model':
        return f'set {KL}=0' if is_policy(c.loss.objective) else 'use a smaller model'
    if name == 'teacher':
        return 'name a smaller model in loss.teacher'
    if name == 'publication' and c.staleness.schedule != 'natural':
        return 'lower the longest delay of staleness.schedule'
    halves = c.publication.dtype == 'float32' and c.rollout.weights != 'int8'  # int8 only takes float32
    if name == 'publication' and halves and find_objective(c.loss.objective).generates:
        return "set publication.dtype='bfloat16'"
    fields = {
        'earlier versions': 'diagnostics.ring_bytes',
        'KV cache': _cache_fields(c),
        'prefill': 'rollout.prefill_buckets',
        'logits': 'rollout.slots or rollout.decode_steps',
        'rows': 'learner.row_tokens or learner.rows_per_microbatch',
        'answers': 'rollout.group_size, rollout.max_running_groups or buffer.capacity',
    }
    if name in fields:
        return f'lower {fields[name]}'
    if name == 'transposed weights' and halves:
        return "set publication.dtype='bfloat16'"
    return 'lower model.n_layers, model.d_model or model.d_ff' if c.model.source == 'random' else 'use a smaller model'


def _cache_fields(c: config_dict.ConfigDict) -> str:
    if c.rollout.cache_tokens:
        return 'rollout.cache_tokens or cluster.engines'
    return 'rollout.slots, rollout.context_tokens or cluster.engines, or set rollout.cache_tokens below their product'
