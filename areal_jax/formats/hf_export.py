"""Writes weights as the files of a Hugging Face checkpoint directory; `hf_directory` reads them.

The files are planned before anything is written, so that publication/ can refuse weights that cannot be written, check
the disk's free space and make the directory appear at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import files
from areal_jax.formats.hf_config import CONFIG, HfError, hf_config, read_json
from areal_jax.formats.hf_directory import (
    INDEX,
    WEIGHTS,
    HfTensor,
    by_name,
    hf_tensors,
    join_leaves,
    require_merged,
)
from areal_jax.formats.safetensors_file import write_tensors
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Params, is_float32, leaf_at, leaf_dtype

# the files of a model besides its config and weights: tokenizer, chat template, its makers' sampling parameters
COMPANIONS = (
    'tokenizer.json',
    'tokenizer_config.json',
    'tokenizer.model',
    'vocab.json',
    'merges.txt',
    'added_tokens.json',
    'special_tokens_map.json',
    'chat_template.jinja',
    'chat_template.json',
    'generation_config.json',
)
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')  # of config.json: where generation ends
_HEADER_BYTES = 1 << 20  # more than the headers of the tensors and the JSON files take

_Planned = dict[str, jax.ShapeDtypeStruct]  # the tensors of a file by name


@dataclasses.dataclass(frozen=True)
class HfCompanions:
    """The contents of a directory besides config and weights. Producer: app/export/run_export.py."""

    source: pathlib.Path | None = None  # where the weights came from: its COMPANIONS and special token ids are kept
    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)  # 'bos_token_id'..., if no source has them
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by file name; replace files of the source


@dataclasses.dataclass(frozen=True)
class HfFiles:
    """A checkpoint directory to be written. Producer: `plan_hf_files`."""

    params: Params
    tensors: Mapping[str, Sequence[HfTensor]]  # of all files, by name: one for each leaf that shares it
    weights: Mapping[str, _Planned]  # by file name
    config_json: Mapping[str, object]
    companions: Sequence[pathlib.Path]  # are copied
    texts: Mapping[str, str]  # by file name

    @property
    def nbytes(self) -> int:
        """The size of all files, an upper bound."""
        weights = self.weight_bytes(self.weights)
        texts = sum(len(text.encode()) for text in self.texts.values())
        return weights + _HEADER_BYTES + texts + sum(path.stat().st_size for path in self.companions)

    def weight_bytes(self, names: Collection[str]) -> int:
        """The size of the tensors in these files."""
        return sum(_nbytes(tensor) for name in names for tensor in self.weights[name].values())

    def write(self, directory: pathlib.Path) -> None:
        """Writes every file into an existing directory; see `write_weights` for the errors."""
        for name in self.weights:
            self.write_weights(directory, name)
        self.write_rest(directory)

    def write_weights(
        self,
        directory: pathlib.Path,
        name: str,
        fetch: Callable[[str], np.ndarray] | None = None,
        note: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Writes one file of weights into an existing directory; fetches, transposes and casts one tensor at a time.

        `fetch(path)` returns a leaf on the host; None = from `params`. `note` gets the bytes of each tensor as it is
        written.

        Raises OSError, SafetensorsError for a dtype that the format lacks, and HfError for values that the dtype of
        the files cannot hold.
        """
        fetch = fetch or (lambda path: np.asarray(leaf_at(self.params, path)))
        tensors, planned = self.tensors, self.weights[name]
        fetch_once = functools.lru_cache(maxsize=1)(fetch)  # consecutive tensors may be the experts of one leaf

        def read(key: str) -> np.ndarray:
            note(_nbytes(planned[key]))
            return _host_tensor(np.asarray(join_leaves(tensors[key], fetch_once)), key, planned[key].dtype)

        write_tensors(directory / name, planned, read)

    def write_rest(self, directory: pathlib.Path) -> None:
        """Writes everything but the weights, and syncs all of the directory."""
        for path in self.companions:
            shutil.copyfile(path, directory / path.name)
        for name, text in self.texts.items():
            (directory / name).write_text(text)
        if len(self.weights) > 1:
            write_record(directory / INDEX, _index(self.weights))
        write_record(directory / CONFIG, self.config_json)
        files.sync_tree(directory)


def plan_hf_files(
    params: Params,
    config: ModelConfig,
    *,
    dtype: str | None = None,
    file_bytes: int | None = None,
    file_of: Callable[[str], int] | None = None,
    companions: HfCompanions | None = None,
    separate_head: bool = False,
) -> HfFiles:
    """Plans `config.json`, the safetensors files and their companions; fetches no values.

    Args:
      params: nested dict of float arrays in list form, without adapters.
      dtype: of the files; None = as the arrays have it. Leaves that are float32 in every copy
        (models/weights.is_float32) are float32 in files too.
      file_bytes: more bytes of weights than this are written as several files with an index; None = always one file.
      file_of: path of a leaf -> number of its file; replaces `file_bytes`. Of leaves that share a tensor the first
        decides.
      companions: None = nothing besides config and weights.
      separate_head: writes a head that is the embedding as a separate tensor too, and says so in config.json.

    Raises HfError for a config that the family cannot have, and WeightsError for adapters.
    """
    require_merged(params)
    stored = dataclasses.replace(config, tie_embeddings=False) if separate_head else config
    tensors = by_name(_find_leaf(tensor, config) for tensor in hf_tensors(stored))
    if file_of is None:
        planned = _split(params, tensors, dtype, file_bytes)
    else:
        planned = _assign(params, tensors, file_of)
    all_planned = {name: described for file in planned for name, described in file.items()}
    stored_dtype = str(
        next(all_planned[name].dtype for name, (first, *_) in tensors.items() if not is_float32(first.path))
    )
    companions = companions or HfCompanions()
    config_json = hf_config(stored, stored_dtype) | dict(companions.token_ids)
    copied: list[pathlib.Path] = []
    if (source := companions.source) is not None:
        copied = [source / name for name in COMPANIONS if (source / name).is_file() and name not in companions.texts]
        original = read_json(source / CONFIG)
        config_json |= {name: original[name] for name in TOKEN_IDS if original.get(name) is not None}
    count = len(planned)
    names = [f'model-{n:05d}-of-{count:05d}.safetensors' for n in range(1, count + 1)] if count > 1 else [WEIGHTS]
    return HfFiles(params, tensors, dict(zip(names, planned, strict=True)), config_json, copied, companions.texts)


def write_record(path: pathlib.Path, record: Mapping[str, object]) -> None:
    """Writes a JSON file of the directory."""
    path.write_text(json.dumps(record, indent=1, sort_keys=True))


def _find_leaf(tensor: HfTensor, config: ModelConfig) -> HfTensor:
    """The tensor with the leaf that holds its values in a model of this config."""
    return dataclasses.replace(tensor, path='embedding') if config.tie_embeddings and tensor.path == 'head' else tensor


def _split(
    params: Params, tensors: Mapping[str, Sequence[HfTensor]], dtype: str | None, file_bytes: int | None
) -> list[_Planned]:
    """The tensors of each file; a tensor that is larger than the limit is alone in its file."""
    planned: list[_Planned] = [{}]
    size = 0
    for name, (first, *_) in tensors.items():
        described = _describe(params, first, dtype)
        size += _nbytes(described)
        if file_bytes is not None and size > file_bytes and planned[-1]:
            planned.append({})
            size = _nbytes(described)
        planned[-1][name] = described
    return planned


def _assign(params: Params, tensors: Mapping[str, Sequence[HfTensor]], file_of: Callable[[str], int]) -> list[_Planned]:
    """The tensors of each file, files in the order of their numbers."""
    planned: dict[int, _Planned] = {}
    for name, (first, *_) in tensors.items():
        planned.setdefault(file_of(first.path), {})[name] = _describe(params, first, None)
    return [planned[number] for number in sorted(planned)]


def _describe(params: Params, tensor: HfTensor, dtype: str | None) -> jax.ShapeDtypeStruct:
    own = dtype or str(leaf_at(params, tensor.path).dtype)
    return jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(leaf_dtype(tensor.path, own)))


def _index(weights: Mapping[str, _Planned]) -> dict[str, object]:
    total = sum(_nbytes(tensor) for planned in weights.values() for tensor in planned.values())
    places = {key: name for name, planned in weights.items() for key in planned}
    return {'metadata': {'total_size': total}, 'weight_map': places}


def _host_tensor(given: np.ndarray, name: str, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over='ignore'):
        values = given.astype(dtype, copy=False)
    if values.dtype != given.dtype and not np.isfinite(values).all():
        largest = float(jnp.finfo(values.dtype).max)
        raise HfError(
            f'{name} has values that {values.dtype} cannot hold (its largest is {largest:.5g}); write float32, '
            'or bfloat16 in place of float16'
        )
    return values


def _nbytes(tensor: jax.ShapeDtypeStruct) -> int:
    return tensor.size * np.dtype(tensor.dtype).itemsize
