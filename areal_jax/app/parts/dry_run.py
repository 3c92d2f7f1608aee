"""What a run would place on its devices, from the config and the shape of the model alone: no weights, no workdir."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
from ml_collections import config_dict

from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.sizes import Sizes, measure
from areal_jax.config import TrackedConfig
from areal_jax.config.objectives import find_objective
from areal_jax.learning.diagnostics.flops import active_parameters
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import logical_axes
from areal_jax.sharding.rules import Allocation, param_shardings, path_name
from areal_jax.telemetry.progress import format_bytes

_LAYER = re.compile(r'^layers/\d+/')


def describe_run(config: config_dict.ConfigDict) -> str:
    """Leaves with their shapes and shardings on the learner's mesh, and bytes of a device by what they are for.

    On a CPU the numbers of engines hold what engines on a CPU hold: their matrices once more, transposed.
    """
    tracked = TrackedConfig(config)
    shape = read_shape(tracked)
    generates = find_objective(config.loss.objective).generates
    allocation = build.build_allocation(tracked) if generates else Allocation(build.build_mesh(tracked), ())
    sizes = measure(tracked, shape, allocation)
    decoder = Decoder(shape)
    mesh = ', '.join(f'{name}={size}' for name, size in allocation.learner.shape.items() if size > 1) or '1 device'
    lines = [
        f'{shape.family}: {decoder.parameter_count() / 1e9:.2f} billion weights, a token reaches '
        f'{active_parameters(shape) / 1e9:.2f} billion; learner {mesh}, {len(allocation.engines)} engines',
        '',
        *_table(('leaf', 'leaves', 'shape', 'cut over', 'shape on a device'), _leaf_rows(decoder, allocation, tracked)),
    ]
    of_device = {'learner, of a device': sizes.learner, **_name_engines(sizes), 'host': sizes.host}
    for name, parts in of_device.items():
        if parts:
            lines += ['', *_table((name, 'bytes'), _size_rows(parts))]
    return '\n'.join(lines)


def _name_engines(sizes: Sizes) -> dict[str, Mapping[str, int]]:
    """Sizes on a device by the name of the table; of engines of unequal size a table for each size."""
    by_size = {len(devices): parts for devices, parts in sizes.by_devices.items()}
    if len(by_size) < 2:
        return {'engine, of a device': sizes.engines}
    return {f'engine of {size} devices, of a device': parts for size, parts in by_size.items()}


def _leaf_rows(decoder: Decoder, allocation: Allocation, config: TrackedConfig) -> list[tuple[str, ...]]:
    """Equal leaves of several layers as one."""
    params = decoder.abstract()
    axes = logical_axes(decoder.config)
    placed = param_shardings(params, axes, allocation.learner, config.cluster.strategy)
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
