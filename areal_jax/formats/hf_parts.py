"""Tensors in files of Hugging Face that several leaves share, each with a part of the rows.

The rows are in groups of equal size, and a group has rows of every leaf, one leaf after the other, in the order of the
table of weights. With D the size of a head and R the value heads of a key head (models/weight_rows.py has the names):

    q_proj                  a group for each head: D rows of its query, D of its gate
    kv_b_proj               a group for each head: the rows of its key, the rows of its value
    in_proj_qkvz, _ba       a group for each key head: query, key, R values, R gates; R betas, R decays
    in_proj_qkv, conv1d     one group: all queries, all keys, all values
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.formats.safetensors_file import StoredTensor
from areal_jax.models.families import ModelConfig
from areal_jax.models.weight_rows import Init
from areal_jax.models.weights import WeightSpec, weight_table


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a tensor that one leaf has: in each of the groups as many, from the row `first` of the group on."""

    whole: tuple[int, ...]  # shape of the tensor
    shape: tuple[int, ...]  # of the rows of the leaf; lacks the axis of size 1 that conv1d has
    groups: int
    first: int

    @property
    def size(self) -> int:
        """The rows of a group that the leaf has."""
        return self.shape[0] // self.groups

    @property
    def stride(self) -> int:
        """The rows of a group."""
        return self.whole[0] // self.groups

    def take_from(self, tensor: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """The leaf's rows; for numpy a view if there is one group, else a copy."""
        groups = tensor.reshape(self.groups, self.stride, *self.shape[1:])
        return groups[:, self.first : self.first + self.size].reshape(self.shape)

    def find_in(self, stored: StoredTensor) -> StoredTensor:
        """The leaf's rows in a file that has the tensor."""
        if self.groups > 1:
            return GroupedRows(stored.path, stored.name, stored.stored_as, self.shape, stored.offset, self)
        offset = stored.offset + stored.nbytes // self.whole[0] * self.first
        return dataclasses.replace(stored, shape=self.shape, offset=offset)


@dataclasses.dataclass(frozen=True)
class GroupedRows(StoredTensor):
    """Rows of a tensor of a file, read as if they followed each other; `offset` is that of the tensor."""

    part: Part

    def read_rows(self, first: int, end: int) -> np.ndarray:
        size, stride = self.part.size, self.part.stride
        runs = []
        for group in range(first // size, -(-end // size)):
            low, high = max(first, group * size), min(end, (group + 1) * size)
            start = group * (stride - size) + self.part.first + low  # in the tensor
            runs.append(super().read_rows(start, start + high - low))
        return np.concatenate(runs)

    def map(self) -> np.ndarray:
        """A copy of the rows, which no view of the file could be."""
        whole = StoredTensor(self.path, self.name, self.stored_as, self.part.whole, self.offset)
        return np.asarray(self.part.take_from(whole.map()))


def join_parts(parts: Sequence[Part], values: Sequence[np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
    """The tensor, of the rows of all its leaves; the inverse of `Part.take_from`."""
    whole, groups = parts[0].whole, parts[0].groups
    runs = [rows.reshape(groups, part.size, *part.shape[1:]) for part, rows in zip(parts, values, strict=True)]
    if not all(isinstance(rows, np.ndarray) for rows in values):
        return jnp.concatenate(runs, axis=1).reshape(whole)
    joined = np.empty((groups, parts[0].stride, *parts[0].shape[1:]), values[0].dtype)  # one copy, whatever the strides
    for part, run in zip(parts, runs, strict=True):
        joined[:, part.first : part.first + part.size] = run
    return joined.reshape(whole)


@functools.lru_cache(maxsize=4)
def parts_of(config: ModelConfig) -> Mapping[str, Part]:
    """The part of each leaf that shares a tensor, by the path of the leaf, 'layers/*/delta/key/weight'; read-only."""
    shared: dict[str, list[WeightSpec]] = {}
    for spec in weight_table(config).values():
        if spec.part is not None and spec.hf_name is not None:
            shared.setdefault(spec.hf_name, []).append(spec)
    parts: dict[str, Part] = {}
    for name, specs in shared.items():
        groups, first = _count_groups(name, config), 0
        shapes = [spec.shape[::-1] if spec.transposed else spec.shape for spec in specs]
        rows = sum(shape[0] for shape in shapes)
        for spec, shape in zip(specs, shapes, strict=True):
            whole = (rows, *((1,) if spec.init is Init.TAPS else ()), *shape[1:])
            parts[spec.path] = Part(whole, shape, groups, first)
            first += shape[0] // groups
    return types.MappingProxyType(parts)


def _count_groups(hf_name: str, config: ModelConfig) -> int:
    module = hf_name.split('.')[-2]
    if module in ('q_proj', 'kv_b_proj'):
        return config.n_heads
    if module in ('in_proj_qkvz', 'in_proj_ba'):
        assert config.delta is not None
        return config.delta.key_heads
    return 1
