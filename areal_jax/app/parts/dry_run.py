"""Describes the placement of a run on its devices from the config and the model's shape: no weights, no workdir."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
from ml_collections import config_dict

from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts.sizes import Sizes, fits, measure, sizes_of_engines, sum_parts, tell_excess, usable_bytes
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines, parse_learner
from areal_jax.config.kinds import IN_PROCESS, find_channel, find_server
from areal_jax.config.objectives import find_objective
from areal_jax.learning.diagnostics.measurement import active_parameters
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import leaf_dtype, logical_axes
from areal_jax.publication.shard_plan import divide_leaves, layouts_of
from areal_jax.sharding.rules import Allocation, allocate, mesh_of, param_shardings, path_name
from areal_jax.telemetry.progress import format_bytes

_LAYER = re.compile(r'^layers/\d+/')


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A run that is laid out and not built."""

    config: config_dict.ConfigDict
    shape: ModelConfig
    allocation: Allocation
    sizes: Sizes


def plan_run(config: config_dict.ConfigDict, devices: Sequence[jax.Device] | None = None) -> DryRun:
    """Lays a run out over `devices`, which may be described only, or over those of this process.

    Engines of a run in roles are among them if they are servers of this project. Raises ConfigError for a layout that
    needs more devices.
    """
    tracked = TrackedConfig(config)
    shape, joined, allocation = read_shape(tracked), join_roles(config), lay_out(config, devices)
    if joined is None:
        return DryRun(config, shape, allocation, measure(tracked, shape, allocation))
    sizes = measure(tracked, shape, Allocation(allocation.learner, ()))
    of_engines = sizes_of_engines(joined, shape, allocation)
    sizes = dataclasses.replace(sizes, engines=next(iter(of_engines.values()), {}), by_devices=of_engines)
    return DryRun(config, shape, allocation, sizes)


def count_devices(config: config_dict.ConfigDict) -> int:
    """Returns the devices of the learner and of its engines, where these are of this project."""
    learner = parse_learner(config.cluster.learner).devices
    return learner + (parse_engines(config.cluster.engines).devices if _has_engines(config) else 0)


def lay_out(config: config_dict.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Allocation:
    """Returns the devices of the learner and its engines as if they were one process.

    Roles of other hosts follow one another over the devices; servers of other projects have none of them.
    """
    learner = dataclasses.replace(parse_learner(config.cluster.learner), hosts=None)
    if not _has_engines(config):
        return Allocation(mesh_of(learner, devices), ())
    return allocate(learner, parse_engines(config.cluster.engines), devices=devices)


def _has_engines(config: config_dict.ConfigDict) -> bool:
    """Whether engines of this project generate in the run."""
    return find_objective(config.loss.objective).generates and find_server(config.rollout.server).has_own_engines


def join_roles(config: config_dict.ConfigDict) -> TrackedConfig | None:
    """Returns the config with its engines in the learner's process; None unless they are servers of this project."""
    learner = parse_learner(config.cluster.learner)
    if find_server(config.rollout.server).in_process or not _has_engines(config):
        return None
    joined = config.copy_and_resolve_references()
    joined.rollout.server = IN_PROCESS.name
    joined.cluster.learner = str(dataclasses.replace(learner, hosts=None))
    return TrackedConfig(joined)


# The tables.


def describe_run(planned: DryRun) -> str:
    """Returns tables of leaves (shapes, shardings on the learner's mesh) and of bytes per device by purpose.

    On a CPU, the sizes of engines include the transposed second copy of their matrices.
    """
    allocation, shape, sizes = planned.allocation, planned.shape, planned.sizes
    decoder = Decoder(shape)
    mesh = ', '.join(f'{name}={size}' for name, size in allocation.learner.shape.items() if size > 1) or '1 device'
    leaves = _leaf_rows(decoder, allocation, planned.config.cluster.strategy)
    lines = [
        f'{shape.family}: {decoder.parameter_count() / 1e9:.2f} billion weights, a token reaches '
        f'{active_parameters(shape) / 1e9:.2f} billion; learner {mesh}, {len(allocation.engines)} engines',
        '',
        *_table(('leaf', 'leaves', 'shape', 'cut over', 'shape on a device'), leaves),
    ]
    of_device = {'learner, of a device': sizes.learner, **_name_engines(sizes), 'host': sizes.host}
    for name, parts in of_device.items():
        if parts:
            lines += ['', *_table((name, 'bytes'), _size_rows(parts))]
    if shares := count_sent_bytes(planned):
        lines += ['', *_tell_links(shares, parse_engines(planned.config.cluster.engines).count)]
    return '\n'.join(lines)


def _name_engines(sizes: Sizes) -> dict[str, Mapping[str, int]]:
    """Returns the sizes on a device by the name of their table; engines of unequal size get one table per size."""
    by_size = {len(devices): parts for devices, parts in sizes.by_devices.items()}
    if len(by_size) < 2:
        return {'engine, of a device': sizes.engines}
    return {f'engine of {size} devices, of a device': parts for size, parts in by_size.items()}


def _leaf_rows(decoder: Decoder, allocation: Allocation, strategy: str) -> list[tuple[str, ...]]:
    """Returns one row per leaf; equal leaves of several layers share a row."""
    params = decoder.abstract()
    placed = param_shardings(params, logical_axes(decoder.config), allocation.learner, strategy)
    rows: collections.Counter[tuple[str, ...]] = collections.Counter()
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placed), strict=True
    ):
        cut = ', '.join('-' if part is None else _axis_names(part) for part in sharding.spec)
        own = sharding.shard_shape(leaf.shape)
        rows[_LAYER.sub('layers/*/', path_name(path)), str(list(leaf.shape)), cut or '-', str(list(own))] += 1
    return [(name, str(count), shape, cut, own) for (name, shape, cut, own), count in rows.items()]


def _axis_names(part: str | Sequence[str]) -> str:
    return part if isinstance(part, str) else ' x '.join(part)


def _size_rows(parts: Mapping[str, int]) -> list[tuple[str, ...]]:
    rows = [(name, format_bytes(size)) for name, size in parts.items() if size]
    return [*rows, ('together', format_bytes(sum(parts.values())))]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, *rows):
        yield '  '.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def count_sent_bytes(planned: DryRun) -> dict[int, int]:
    """Returns the bytes of a whole version that each process of the learner sends to each engine.

    Empty unless several processes send their shards, see publication/shard_plan.py.
    """
    config, mesh, decoder = planned.config, planned.allocation.learner, Decoder(planned.shape)
    learner = parse_learner(config.cluster.learner)
    if learner.processes == 1 or not find_channel(config.publication.channel).sends_records:
        return {}
    placed = param_shardings(decoder.abstract(), logical_axes(planned.shape), mesh, config.cluster.strategy)

    def describe(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, over: jax.sharding.Sharding) -> object:
        dtype = leaf_dtype(path_name(path), config.publication.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, jax.numpy.dtype(dtype), sharding=over)

    order = sorted(mesh.devices.flat, key=lambda device: device.id)  # processes have their devices one after the other
    process_of = {device: place // learner.devices_per_process for place, device in enumerate(order)}
    copy = jax.tree_util.tree_map_with_path(describe, decoder.abstract(), placed)
    layouts = layouts_of(copy, process_of.__getitem__)
    return {
        process: sum(shard.size * layouts[shard.path].itemsize for shard in shards)
        for process, shards in divide_leaves(layouts).items()
    }


def _tell_links(shares: Mapping[int, int], engines: int) -> Iterator[str]:
    """Yields what a whole version takes: the bytes of each link, of the busiest process and of each engine."""
    busiest = max(shares, key=shares.__getitem__)
    yield (
        f'a whole version: at most {format_bytes(shares[busiest])} from each of {len(shares)} learner processes to '
        f'each of {engines} engines'
    )
    yield (
        f'learner process {busiest} sends most, {format_bytes(engines * shares[busiest])}; each engine receives '
        f'{format_bytes(sum(shares.values()))}'
    )


# The verdict for an accelerator.


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a role fits a device of some memory."""

    role: str  # 'learner', 'engine', 'engine of 2 devices'
    parts: Mapping[str, int]  # on a device; with those of the other role where both are on it
    memory_bytes: float

    @property
    def fits(self) -> bool:
        return fits(sum(self.parts.values()), self.memory_bytes)


def judge(planned: DryRun, memory_bytes: float) -> list[Verdict]:
    """Judges each role of a run by the bytes that its fullest device would hold at once, all of them together.

    Only layer inputs are counted of the activations, so a role that fits may still lack room: areal-aot tells.
    """
    sizes, allocation = planned.sizes, planned.allocation
    trains = {*allocation.learner.devices.flat}
    on_learner = [parts for devices, parts in sizes.by_devices.items() if not trains.isdisjoint(devices)]
    verdicts = [Verdict('learner', sum_parts(sizes.learner, *on_learner), memory_bytes)]
    unequal = len({len(devices) for devices in sizes.by_devices}) > 1
    by_role: dict[str, Verdict] = {}
    for devices, parts in sizes.by_devices.items():
        role = f'engine of {len(devices)} device{"s" * (len(devices) > 1)}' if unequal else 'engine'
        beside = {} if trains.isdisjoint(devices) else sizes.learner
        by_role[role] = Verdict(role, sum_parts(beside, parts), memory_bytes)
    return [*verdicts, *by_role.values()]


def render_verdicts(verdicts: Sequence[Verdict], config: config_dict.ConfigDict, devices: str) -> str:
    """Renders the devices, '16 x H100 SXM', and each role: what it needs of one, and what to lower if it has less."""
    memory = verdicts[0].memory_bytes
    lines = [f'{devices} of {format_bytes(int(memory))}, of which {format_bytes(usable_bytes(memory))} may be used']
    for one in verdicts:
        used = format_bytes(sum(one.parts.values()))
        lines.append(
            f'{one.role}  fits: {used}' if one.fits
            else f'{one.role}  DOES NOT FIT: {used}: {tell_excess(one.parts, config)}'
        )  # fmt: skip
    return '\n'.join(lines)
