"""Reads a checkpoint directory of Hugging Face, tensor by tensor, into sharded arrays; `hf_export` writes one.

Runs use it to load their model, the files channel to load the weights of a version.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.hf_config import HfError, read_hf_config, read_json
from areal_jax.formats.hf_layouts import WeightsError, split_fused, take_text, unpack_mxfp4
from areal_jax.formats.hf_parts import Part, join_parts, parts_of
from areal_jax.formats.safetensors_file import DTYPES, SafetensorsError, StoredTensor, list_tensors
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import (
    FORMS,
    Params,
    WeightSpec,
    at_layer,
    is_adapter,
    is_float32,
    leaf_at,
    leaf_dtype,
    nest,
    weight_table,
)
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree


class HasShape(Protocol):
    """An array, a tensor of a file, or the description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor in a file of Hugging Face, and the leaf that it holds, or one of the leaves that share it."""

    name: str
    path: str  # of the leaf in list form, 'layers/0/attention/query/weight'
    stacked_path: str  # of the leaf in stacked form, 'layers/attention/query/weight'
    shape: tuple[int, ...]  # of the tensor in the file
    transposed: bool  # whether the tensor is the transpose of the leaf, or of the part of its expert
    layer: int | None = None  # None = it is in no layer
    expert: int | None = None  # index in the first axis of the leaf in list form; None = it is the whole leaf
    part: Part | None = None  # the rows of the tensor that are the leaf's; None = all

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the leaf, or of the part of its expert."""
        shape = self.shape if self.part is None else self.part.shape
        return shape[::-1] if self.transposed else shape

    def take_from(self, leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """The tensor's values, or its rows of this leaf, from the leaf in list form; for numpy they are views."""
        values = leaf if self.expert is None else leaf[self.expert]
        return values.T if self.transposed else values

    def give_to(self, tensor: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """The inverse of `take_from`: the values of the leaf, or of the part of its expert."""
        values = tensor if self.part is None else self.part.take_from(tensor)
        return values.T if self.transposed else values

    def find_in(self, stored: StoredTensor) -> StoredTensor:
        """The values of the leaf in the file, transposed if the tensor is."""
        return stored if self.part is None else self.part.find_in(stored)


def by_name(tensors: Iterable[HfTensor]) -> dict[str, list[HfTensor]]:
    """The tensors by name, in their order: one for each leaf that shares it."""
    found: dict[str, list[HfTensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, []).append(tensor)
    return found


def join_leaves(sharing: Sequence[HfTensor], fetch: Callable[[str], np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
    """The values of a tensor from its leaves, `fetch(path)` each; for numpy a view if it has only one."""
    values = [tensor.take_from(fetch(tensor.path)) for tensor in sharing]
    parts = [tensor.part for tensor in sharing if tensor.part is not None]
    return join_parts(parts, values) if parts else values[0]


def to_hf_names(params: Params, config: ModelConfig) -> dict[str, np.ndarray | jax.Array]:
    """{'model.layers.0.self_attn.q_proj.weight': [out, in], ...}; matrices of numpy are transposed views.

    A tensor that several leaves share is a copy. `params` are in list form.

    Raises WeightsError for adapters that are not merged.
    """
    require_merged(params)
    fetch = functools.partial(leaf_at, params)
    return {name: join_leaves(sharing, fetch) for name, sharing in by_name(hf_tensors(config)).items()}


def from_hf_names(tensors: Mapping[str, np.ndarray | jax.Array], config: ModelConfig) -> Params:
    """The inverse of `to_hf_names`, bit for bit, as a nested dict.

    Matrices of numpy are transposed views, but experts are copied, because a leaf holds all experts of a layer; so are
    rows that do not follow each other in a tensor that several leaves share.

    Raises WeightsError that names missing, surplus or wrongly shaped tensors.
    """
    require_tensors(tensors, config)
    parts: dict[str, list[np.ndarray | jax.Array]] = {}
    experts = set()
    for tensor in hf_tensors(config):
        parts.setdefault(tensor.path, []).append(tensor.give_to(tensors[tensor.name]))
        if tensor.expert is not None:
            experts.add(tensor.path)
    return nest((path, _join(values) if path in experts else values[0]) for path, values in parts.items())


def _join(experts: list[np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
    """[E, in, out] of matrices [in, out]."""
    return (np if isinstance(experts[0], np.ndarray) else jnp).stack(experts)


@functools.lru_cache(maxsize=4)  # publication to files lists them for every version
def hf_tensors(config: ModelConfig) -> tuple[HfTensor, ...]:
    """Every tensor of a causal language model, in the order of the forward pass; one for each leaf that shares it."""
    return tuple(_list_tensors(config))


def _list_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    specs = [spec for spec in weight_table(config).values() if spec.hf_name is not None]
    in_layers, parts = [spec for spec in specs if spec.in_layers], parts_of(config)
    for spec in specs:
        if not spec.in_layers:
            yield from _tensors(spec, None, None)
        elif spec is in_layers[0]:  # all layers take the place of the first row of a layer
            for layer in range(config.n_layers):
                own = (row for row in in_layers if layer in row.layers)
                yield from (tensor for row in own for tensor in _tensors(row, layer, parts.get(row.path)))


def _tensors(spec: WeightSpec, layer: int | None, part: Part | None) -> Iterator[HfTensor]:
    """The tensors of a leaf: one, or one per expert."""
    assert spec.hf_name is not None
    path, name = (text if layer is None else at_layer(text, layer) for text in (spec.path, spec.hf_name))
    experts = range(spec.shape[0]) if '*' in name else [None]
    shape = spec.shape[1:] if '*' in name else spec.shape
    for expert in experts:
        own = name if expert is None else name.replace('*', str(expert))
        shaped = shape[::-1] if spec.transposed else shape
        whole = shaped if part is None else part.whole
        yield HfTensor(own, path, spec.stacked_path, whole, spec.transposed, layer, expert, part)


def require_merged(params: Params) -> None:
    """Raises WeightsError for weights with adapters, which files of Hugging Face cannot hold."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(name := path_name(path)):
            raise WeightsError(f'{name} belongs to an adapter, which the interchange form lacks: merge_adapters first')


def require_tensors(tensors: Mapping[str, HasShape], config: ModelConfig) -> None:
    """Raises WeightsError that names the tensors that are missing, surplus or wrongly shaped."""
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(config)}
    faults = [f'missing {name}' for name in shapes if name not in tensors]
    faults += [f'surplus {name}' for name in tensors if name not in shapes]
    faults += [
        f'{name} has shape {list(tensors[name].shape)} instead of {list(shape)}'
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        more = f', and {len(faults) - 8} more' if len(faults) > 8 else ''
        raise WeightsError(f'these are not the weights of the model: {"; ".join(faults[:8])}{more}')


WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
WEIGHT_DTYPES = ('float32', 'bfloat16', 'float16')
BLOCK_BYTES = 16 << 20  # bounds the bytes that are read at once
_EMBEDDING, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
_ROTARY_BUFFER = '.rotary_emb.inv_freq'  # in old Llama files: follows from config.json
# the bits of the exponent: only NaN and infinity have all of them set
_EXPONENTS = {np.dtype(jnp.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}

_Bounds = tuple[tuple[int, int], ...]  # (first, end) along every axis


def load_hf(
    directory: str | os.PathLike[str], *, shardings: Tree = None, dtype: str = 'float32', layers: str = 'list'
) -> tuple[ModelConfig, Params]:
    """Config and weights of a local directory: config.json and model.safetensors, or several files with their index.

    Host memory besides the arrays: this process's shards of one leaf, and a block of 16 MiB. (A leaf is one tensor in
    list form and that tensor of all layers in stacked form.) Every process of a run calls this function and reads the
    rows that its devices hold; it drops the columns that they do not hold after reading.

    Ignored: the rotary buffers of old Llama files, and lm_head.weight if it equals a tied embedding. Of a composite
    model the text part alone is read, and a note on stderr names the other tensors.

    Args:
      shardings: one sharding for all leaves, or a tree of shardings in the form `layers`; None = the default device.
      dtype: of the arrays, one of WEIGHT_DTYPES, except for leaves that are float32 in every copy
        (models/weights.is_float32); files hold float32, bfloat16 or float16.
      layers: 'list' or 'stacked', as Decoder has them.

    Raises HfError that names the file and what is wrong: an option or architecture that is not supported, tensors that
    are missing, surplus, wrongly shaped or of another dtype, a file that is missing or cut short, values that are NaN
    or infinite, and values that `dtype` cannot hold.
    """
    if dtype not in WEIGHT_DTYPES:
        raise HfError(f'dtype={dtype!r} is unknown; use one of {", ".join(WEIGHT_DTYPES)}')
    if layers not in FORMS:
        raise HfError(f'layers={layers!r} is unknown; use one of {", ".join(FORMS)}')
    config = read_hf_config(directory)
    return config, load_hf_weights(directory, config, shardings=shardings, dtype=dtype, layers=layers)


def load_hf_weights(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    *,
    shardings: Tree = None,
    dtype: str | None = None,
    layers: str = 'list',
    announce: Announce = announce_nothing,
) -> Params:
    """The weights of `load_hf`, for a directory whose config is known; dtype None = as in the files.

    `announce` gets (bytes read, bytes of the files).
    """
    directory = pathlib.Path(directory)
    try:
        stored = _require_model(directory, _stored_tensors(directory), config)
        return _place_all(stored, config, shardings, dtype, layers, announce)
    except SafetensorsError as error:
        raise HfError(str(error)) from error


def map_hf_weights(directory: str | os.PathLike[str], config: ModelConfig) -> Params:
    """The weights as numpy arrays over the files, read when they are used and never written; for a known config.

    Raises HfError as `load_hf` does.
    """
    directory = pathlib.Path(directory)
    try:
        stored = _require_model(directory, _stored_tensors(directory), config)
        mapped = {name: tensor.map() for name, tensor in stored.items()}
    except SafetensorsError as error:
        raise HfError(str(error)) from error
    leaf = lambda path, values: values.astype(np.float32) if is_float32(path_name(path)) else values
    return jax.tree_util.tree_map_with_path(leaf, from_hf_names(mapped, config))


def _stored_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory; model.safetensors takes precedence over an index, as in transformers."""
    if (directory / WEIGHTS).is_file():
        return list_tensors(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        raise HfError(
            f'{directory} has neither {WEIGHTS} nor {INDEX}; other kinds of weights are not read: save the model with '
            "transformers' save_pretrained, which writes safetensors"
        )
    places = read_json(directory / INDEX).get('weight_map')
    if not isinstance(places, dict) or not all(_is_file_name(name) for name in places.values()):
        raise HfError(f'{directory / INDEX} has no weight_map from the names of tensors to those of files')
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if not (directory / file).is_file():
            raise HfError(f'{directory / INDEX} names {file}, which is not there; copy all files of the checkpoint')
        for name, tensor in list_tensors(directory / file).items():
            if places.get(name, file) != file:
                raise HfError(f'{directory / file} has {name}, which {INDEX} places in {places[name]}')
            stored[name] = tensor
    if absent := [name for name in places if name not in stored]:
        raise HfError(f'{directory / places[absent[0]]} lacks {absent[0]}, which {INDEX} places there')
    return stored


def _is_file_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and pathlib.PurePath(name).name == name


def _require_model(
    directory: pathlib.Path, stored: Mapping[str, StoredTensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """The tensors of the model, after checking that they are complete; tensors that may be ignored are left out."""
    further = config.n_layers if config.experts and config.experts.sigmoid else None
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(_ROTARY_BUFFER)}
    kept, skipped = take_text(stored, further)
    if skipped:
        parts = ', '.join(f'{count} of {part}' for part, count in skipped.items())
        print(f'note: {directory}: tensors that are not part of the text model are not read: {parts}', file=sys.stderr)
    head = kept.pop(_HEAD, None) if config.tie_embeddings else None
    try:
        kept = unpack_mxfp4(split_fused(kept, config), config)
        require_tensors(kept, config)
    except WeightsError as error:
        raise HfError(f'{directory}: {error}') from error
    if head is not None and not _same_values(head, kept[_EMBEDDING]):
        raise HfError(
            f'{head.path}: {_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings=true: set it to '
            'false, or remove the tensor that is wrong'
        )
    return kept


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    blocks = _row_blocks(one, 0, one.shape[0])
    return all(np.array_equal(one.read_rows(*rows), other.read_rows(*rows)) for rows in blocks)


def _place_all(
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    shardings: Tree,
    dtype: str | None,
    layers: str,
    announce: Announce,
) -> Params:
    leaves = []
    done, total = 0, sum(tensor.nbytes for tensor in stored.values())
    for path, tensors in _leaves(config, layers).items():
        sources = [tensor.find_in(stored[tensor.name]) for tensor in tensors]
        first = tensors[0]
        ranks = {layer: rank for rank, layer in enumerate(dict.fromkeys(tensor.layer for tensor in tensors))}
        places = [_place_in(tensor, ranks[tensor.layer] if layers == 'stacked' else None) for tensor in tensors]
        as_stored = str(DTYPES.get(sources[0].stored_as, np.dtype(np.float32)))
        leaf = _place(
            (*(number + 1 for number in places[-1]), *first.leaf_shape),
            leaf_at(shardings, path) if isinstance(shardings, Mapping) else shardings,
            jnp.dtype(leaf_dtype(path, dtype or as_stored)),
            list(zip(places, sources, strict=True)),
            first.transposed,
        )
        leaves.append((path, leaf))
        done += sum(tensor.nbytes for tensor in sources)
        announce(done, total)
    return nest(leaves)


def _leaves(config: ModelConfig, layers: str) -> dict[str, list[HfTensor]]:
    """The tensors of every leaf by the leaf's path: one, or one per expert, and in stacked form so for every layer."""
    leaves: dict[str, list[HfTensor]] = {}
    for tensor in hf_tensors(config):
        leaves.setdefault(tensor.stacked_path if layers == 'stacked' else tensor.path, []).append(tensor)
    return leaves


def _place_in(tensor: HfTensor, rank: int | None) -> tuple[int, ...]:
    """The place of a tensor in its leaf: its indices along the axes of layers and experts that the leaf has.

    `rank` is the number of its layer among the layers that have the leaf, if that has an axis of them and not None.
    """
    numbers = rank if tensor.layer is not None else None, tensor.expert
    return tuple(number for number in numbers if number is not None)


def _place(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding | None,
    dtype: np.dtype,
    sources: Sequence[tuple[tuple[int, ...], StoredTensor]],
    transposed: bool,
) -> jax.Array:
    """The leaf as an array: fills this process's shards in host memory, moves them to the devices and frees them."""
    whole = tuple((0, size) for size in shape)
    indices = [] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
    wanted = {_bounds(index, shape) for index in indices} or {whole}
    shards = {bounds: np.empty([end - first for first, end in bounds], dtype) for bounds in wanted}
    for place, tensor in sources:
        parts = []
        for bounds, host in shards.items():
            if all(first <= number < end for number, (first, end) in zip(place, bounds, strict=False)):
                at = tuple(number - first for number, (first, _) in zip(place, bounds, strict=False))
                parts.append((bounds[len(place) :], host[at]))
        fill([(b[::-1], host.T) if transposed else (b, host) for b, host in parts], tensor)
    if sharding is None:
        return jax.block_until_ready(jax.device_put(shards[whole]))
    # devices with the same shard share one host buffer; waiting frees the buffers of a leaf before the next is read
    return jax.block_until_ready(
        jax.make_array_from_callback(shape, sharding, lambda index: shards[_bounds(index, shape)])
    )


def fill(parts: Sequence[tuple[_Bounds, np.ndarray]], tensor: StoredTensor) -> None:
    """Copies a tensor of a file into (bounds, buffer), in the axes of the file; reads only the rows that are needed."""
    if not parts:
        return
    first, end = min(b[0][0] for b, _ in parts), max(b[0][1] for b, _ in parts)
    for start, stop in _row_blocks(tensor, first, end):
        wanted = [(b, host) for b, host in parts if b[0][0] < stop and start < b[0][1]]
        if not wanted:
            continue
        block = tensor.read_rows(start, stop)
        if not _is_finite(block):
            wrong = block.size - np.count_nonzero(np.isfinite(block))
            raise HfError(
                f'{tensor.path}: {wrong} values of {tensor.name} are NaN or infinite; get the files again or name '
                'another model'
            )
        for bounds, host in wanted:
            (first_row, end_row), *columns = bounds
            low, high = max(first_row, start), min(end_row, stop)
            part = block[(slice(low - start, high - start), *(slice(*column) for column in columns))]
            _copy(host[low - first_row : high - first_row], part, tensor)


def _is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite; five times as fast as np.isfinite, which writes a flag for each value."""
    if values.dtype not in _EXPONENTS:
        return not values.size or bool(np.isfinite(values.min()) and np.isfinite(values.max()))
    exponent = np.uint16(_EXPONENTS[values.dtype])
    return not np.any((values.view(np.uint16) & exponent) == exponent)


def _copy(host: np.ndarray, part: np.ndarray, tensor: StoredTensor) -> None:
    with np.errstate(over='ignore'):
        host[...] = part
    if host.dtype == np.float16 and part.dtype != np.float16 and not np.isfinite(host).all():
        raise HfError(
            f'{tensor.path}: {tensor.name} has values that float16 cannot hold (its largest is 65504); '
            'load it as bfloat16 or float32'
        )


def _row_blocks(tensor: StoredTensor, first: int, end: int) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * math.prod(tensor.shape[1:])))
    return ((start, min(start + rows, end)) for start in range(first, end, rows))


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    assert index is not None  # only devices of other processes have None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
