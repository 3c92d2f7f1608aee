"""Files of Hugging Face in which the experts of a layer are two tensors: read as if each had its own.

`mlp.experts.gate_up_proj` [E, 2 M, d] has gate and up of each expert one behind the other, `mlp.experts.down_proj`
[E, d, M] their outputs; both are rows of numbers in the order in which separate tensors would be. E experts, d model
width, M width of an expert.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from areal_jax.formats.hf_directory import WeightsError
from areal_jax.formats.safetensors_file import StoredTensor
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import at_layer, weight_table

_EXPERTS = 'layers/*/mlp/experts/'
_FUSED = {'gate_up_proj': ('gate', 'up'), 'down_proj': ('down',)}  # what a fused tensor holds, in its order


def split_fused(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a directory with every fused one replaced by one a matrix, at its place in the same file.

    Raises WeightsError for a fused tensor of another shape, and where a layer has experts in both layouts.
    """
    if config.experts is None:
        return dict(stored)
    names = {name: weight_table(config)[_EXPERTS + name].hf_name or '' for name in ('gate', 'up', 'down')}
    module = re.escape(names['gate'].partition('.*.')[2].partition('.*.')[0])  # 'mlp.experts'
    pattern = re.compile(rf'model\.layers\.(\d+)\.{module}\.({"|".join(_FUSED)})')
    split: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        parts = [(name, tensor)]
        if found := pattern.fullmatch(name):
            parts = list(_split(tensor, _FUSED[found[2]], int(found[1]), names, config))
        for own, part in parts:
            if own in split:
                raise WeightsError(f'{own} is there twice, by itself and in a fused tensor: remove one')
            split[own] = part
    return split


def _split(
    tensor: StoredTensor, matrices: tuple[str, ...], layer: int, names: Mapping[str, str], config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    assert config.experts is not None
    width, d = config.experts.d_expert, config.d_model
    shape = (d, width) if matrices == ('down',) else (width, d)
    whole = (config.experts.count, len(matrices) * shape[0], shape[1])
    if tensor.shape != whole:
        raise WeightsError(f'{tensor.name} has shape {list(tensor.shape)} instead of {list(whole)}')
    nbytes = tensor.nbytes // math.prod(whole) * math.prod(shape)
    for number in range(config.experts.count * len(matrices)):
        expert, matrix = divmod(number, len(matrices))
        own = at_layer(at_layer(names[matrices[matrix]], layer), expert)
        yield own, dataclasses.replace(tensor, name=own, shape=shape, offset=tensor.offset + number * nbytes)
