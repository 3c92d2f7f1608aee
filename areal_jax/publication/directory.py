"""Under arrow 8: weights as a directory that Hugging Face's tools load, whole or absent."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.files import sync
from areal_jax.formats.hf import HfTensor, hf_tensors, leaf_at, require_merged
from areal_jax.formats.hf_config import CONFIG, hf_config
from areal_jax.formats.hf_directory import INDEX, WEIGHTS
from areal_jax.formats.safetensors_file import SafetensorsError, write_tensors
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.errors import PublicationError

_HEADER_BYTES = 1 << 20  # more than the index of the tensors and the JSON files take


def write_hf_directory(
    target: pathlib.Path,
    params: Any,
    config: ModelConfig,
    records: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    file_bytes: int | None = None,
    copied: Sequence[pathlib.Path] = (),
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes float weights, `config.json` and JSON `records` by file name; the directory appears whole or not at all.

    Tensors are fetched, turned and cast one at a time. A value head is left out. A directory of the same name written
    here before is replaced.

    Args:
      params: nested dict of arrays in list form, without adapters.
      dtype: of the files; None = as the arrays are.
      file_bytes: most bytes of a file of several; None = one file.
      copied: files that go along, under their own names.
      token_ids: special ones, for `config.json`.

    Raises PublicationError for a directory in the way that was not written here, for lack of space (naming needed and
    free bytes), for a failed write, and for values that `dtype` cannot hold; HfError for a shape that the family cannot
    have; WeightsError for adapters.
    """
    if target.exists() and not any((target / name).exists() for name in (WEIGHTS, INDEX)) and any(target.iterdir()):
        raise PublicationError(
            f'{target} exists and holds no {WEIGHTS}: it is not ours to replace; choose another name'
        )
    require_merged(params)
    files = _plan(params, config, dtype, file_bytes)
    said = hf_config(config, str(next(iter(files[0].values())).dtype)) | dict(token_ids or {})
    partial = _beside(target, 'partial')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(_nbytes(tensor) for file in files for tensor in file.values()) + _HEADER_BYTES
        _require_free_space(target.parent, needed + sum(path.stat().st_size for path in copied))
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for path in copied:
            shutil.copyfile(path, partial / path.name)
        _write_files(partial, files, params, config)
        _write_records(partial, {CONFIG: said, **(records or {})})
        if target.exists():
            remove_directory(target)
        partial.rename(target)
        sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PublicationError(
            f'writing {target} failed ({error}); the disk has {_free_bytes(target.parent)} bytes free. '
            'Make room or name another publication.directory'
        ) from error
    except (PublicationError, SafetensorsError) as error:  # a value or a dtype that cannot be written
        shutil.rmtree(partial, ignore_errors=True)
        raise PublicationError(f'writing {target} failed: {error}') from error


def remove_directory(path: pathlib.Path) -> None:
    """Out of sight at once: a removal that is cut short leaves nothing that looks like a version."""
    hidden = _beside(path, 'removed.partial')
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _plan(
    params: Any, config: ModelConfig, dtype: str | None, file_bytes: int | None
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The tensors of every file; one that is larger than the limit has a file of its own."""
    files: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = 0
    for tensor in hf_tensors(config):
        planned = jax.ShapeDtypeStruct(tensor.shape, dtype or leaf_at(params, tensor.path).dtype)
        size += _nbytes(planned)
        if file_bytes is not None and size > file_bytes and files[-1]:
            files.append({})
            size = _nbytes(planned)
        files[-1][tensor.name] = planned
    return files


def _write_files(
    directory: pathlib.Path, files: Sequence[Mapping[str, jax.ShapeDtypeStruct]], params: Any, config: ModelConfig
) -> None:
    tensors = {tensor.name: tensor for tensor in hf_tensors(config)}
    names = [WEIGHTS] if len(files) == 1 else [_part_name(number, len(files)) for number in range(1, len(files) + 1)]
    for name, planned in zip(names, files, strict=True):
        write_tensors(directory / name, planned, lambda key: _host_tensor(params, tensors[key], planned[key].dtype))
    if len(files) > 1:
        total = sum(_nbytes(tensor) for planned in files for tensor in planned.values())
        places = {key: name for name, planned in zip(names, files, strict=True) for key in planned}
        _write_records(directory, {INDEX: {'metadata': {'total_size': total}, 'weight_map': places}})


def _host_tensor(params: Any, tensor: HfTensor, dtype: Any) -> np.ndarray:
    leaf = np.asarray(leaf_at(params, tensor.path))
    with np.errstate(over='ignore'):
        values = leaf.astype(dtype, copy=False)
    if values.dtype != leaf.dtype and not np.isfinite(values).all():
        largest = float(jnp.finfo(values.dtype).max)
        raise PublicationError(
            f'{tensor.name} has values that {values.dtype} cannot hold (its largest is {largest:.5g}); write float32, '
            'or bfloat16 in place of float16'
        )
    return values.T if tensor.turned else values


def _part_name(number: int, of: int) -> str:
    return f'model-{number:05d}-of-{of:05d}.safetensors'


def _write_records(directory: pathlib.Path, records: Mapping[str, Any]) -> None:
    for name, record in records.items():
        (directory / name).write_text(json.dumps(record, indent=1, sort_keys=True))
    for path in (*directory.iterdir(), directory):
        sync(path)


def _nbytes(tensor: jax.ShapeDtypeStruct) -> int:
    return tensor.size * np.dtype(tensor.dtype).itemsize


def _require_free_space(directory: pathlib.Path, needed: int) -> None:
    free = _free_bytes(directory)
    if free < needed:
        raise PublicationError(
            f'{directory} has {free} bytes free, one version of the weights needs {needed}: '
            'make room or name another publication.directory'
        )


def _free_bytes(directory: pathlib.Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(f'.{path.name}.{suffix}')
