"""Other layouts of the tensors in files of Hugging Face, read as if they were those of `hf_directory`.

Files of composite models have a text part under another prefix, some files have the experts of a layer as two fused
tensors, and the files of gpt-oss have experts in 4 bits (MXFP4).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.formats.safetensors_file import SafetensorsError, StoredTensor
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import at_layer, weight_table


class WeightsError(UserError, ValueError):
    """Tensors do not match the model; the message names them."""


# The text part of composite models: its prefix is found in the tensors, because transformers saves the text part of a
# composite directory under the composite's names, with the config of a text model.


_EMBEDDING, _HEAD = 'embed_tokens.weight', 'lm_head.weight'
_TEXT, _OTHER_HEAD = 'model.', 'language_model.lm_head.weight'
# of images and sounds, and of layers that predict several tokens (MTP)
_LAYER = re.compile(r'model\.layers\.(\d+)')
_OTHER_PARTS = re.compile(
    r'(?:model\.)?(vision_tower|vision_model|vision_embed_tokens|multi_modal_projector|visual|audio_tower|mtp)\.'
)


def take_text(
    stored: Mapping[str, StoredTensor], layers: int | None = None
) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """(the tensors under the names of a text model, the number of tensors left out by the part that they belong to).

    `layers`: the number of layers of a model whose files may have further layers, for predicting several tokens.
    """
    kept: dict[str, StoredTensor] = {}
    skipped: dict[str, int] = {}
    embeddings = (name for name in stored if name.endswith(f'.{_EMBEDDING}') and not _OTHER_PARTS.match(name))
    prefix = next(embeddings, _TEXT).removesuffix(_EMBEDDING)
    for name, tensor in stored.items():
        if found := _OTHER_PARTS.match(name):
            skipped[found[1]] = skipped.get(found[1], 0) + 1
        elif layers is not None and (further := _LAYER.match(name)) and int(further[1]) >= layers:
            skipped[further[0]] = skipped.get(further[0], 0) + 1
        elif name == _OTHER_HEAD:
            kept[_HEAD] = tensor
        else:
            kept[_TEXT + name.removeprefix(prefix) if name.startswith(prefix) else name] = tensor
    return kept, skipped


# Files of Hugging Face in which the experts of a layer are two fused tensors: read as if each matrix were a tensor.
#
# `mlp.experts.gate_up_proj` [E, 2 M, d] has gate and up of each expert, one after the other, `mlp.experts.down_proj`
# [E, d, M] has down. The numbers of both are in the order that separate tensors would have. E experts, d model width,
# M width of an expert.


_EXPERTS = 'layers/*/mlp/experts/'
_FUSED = {'gate_up_proj': ('gate', 'up'), 'down_proj': ('down',)}  # the matrices in a fused tensor, in order


def split_fused(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a directory, each fused tensor replaced by one per matrix, at its place in the same file.

    Raises WeightsError for a fused tensor of another shape, and if a layer has experts in both layouts.
    """
    if config.experts is None or config.experts.swiglu is not None:  # whose leaves are fused too
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


# Experts in MXFP4: 32 numbers share a scale of 8 bits, and a byte of blocks has two numbers, the first in its low half.
#
# `gate_up_proj_blocks` [E, 2 M, d / 32, 16] and `gate_up_proj_scales` [E, 2 M, d / 32] are [E, d, 2 M] of the model,
# `down_proj_*` likewise.


_BLOCKS, _SCALES = '_blocks', '_scales'
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BIAS = 127  # of a scale's exponent


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A tensor [E, in, out] in MXFP4 that is read as bfloat16, which holds all its values exactly."""

    scales: StoredTensor
    blocks: StoredTensor

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return unpack_blocks(_bytes_of(self.blocks, first, end), _bytes_of(self.scales, first, end))

    def map(self) -> np.ndarray:
        return self.read_rows(0, self.shape[0])


def unpack_mxfp4(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors, with each pair of blocks and scales as one tensor.

    Raises WeightsError for blocks without scales, and for shapes that do not fit together.
    """
    if config.experts is None or config.experts.swiglu is None:
        return dict(stored)
    unpacked: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name.endswith(_BLOCKS):
            own = name.removesuffix(_BLOCKS)
            unpacked[own] = _pair(own, tensor, stored.get(own + _SCALES))
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in stored):
            unpacked[name] = tensor
    return unpacked


def _pair(name: str, blocks: StoredTensor, scales: StoredTensor | None) -> PackedTensor:
    if scales is None:
        raise WeightsError(f'{blocks.name} has no {name}{_SCALES}: get the files again')
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise WeightsError(
            f'{blocks.name} has shape {list(blocks.shape)} and {scales.name} {list(scales.shape)}: blocks of 16 bytes '
            'with a scale each are read'
        )
    if {blocks.stored_as, scales.stored_as} != {'U8'}:
        raise WeightsError(f'{blocks.name} has dtype {blocks.stored_as} and {scales.name} {scales.stored_as}, not U8')
    experts, out, groups, _ = blocks.shape
    shape = (experts, groups * 32, out)
    return PackedTensor(blocks.path, name, 'BF16', shape, blocks.offset, scales, blocks)


def _bytes_of(tensor: StoredTensor, first: int, end: int) -> np.ndarray:
    row = math.prod(tensor.shape[1:])
    content = np.fromfile(tensor.path, np.uint8, (end - first) * row, offset=tensor.offset + first * row)
    if len(content) < (end - first) * row:
        raise SafetensorsError(f'{tensor.path} became shorter while {tensor.name} was read')
    return content.reshape(end - first, *tensor.shape[1:])


def unpack_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 [E, in, out] of uint8 blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""
    pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1)
    values = np.ldexp(pairs.reshape(*blocks.shape[:3], 32), scales[..., None].astype(np.int32) - _BIAS)
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(jnp.bfloat16)
