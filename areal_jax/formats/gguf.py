"""GGUF files: a Llama or Gemma 3 decoder, dequantised to float32, and its tokenizer. Read when a run is built."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.files import Announce, announce_nothing
from areal_jax.installation import describe_install, describe_pip
from areal_jax.models.families import FAMILIES, ModelConfig, default_kinds, rows_of
from areal_jax.models.ropes import Rope

if TYPE_CHECKING:
    import gguf

    from areal_jax.models.weights import Params


_MAGIC = b'GGUF'  # the first bytes of a file
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_TEXT, _ARRAY = 8, 9  # type numbers of the format's key-value section, as in _SCALARS
_LENGTH = struct.Struct('<Q')
_LONGEST = 1 << 32  # entries of an array: if it has more, the file is damaged
_ALIGNMENT = 32  # bytes; the default of the format


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, before it is read."""

    shape: tuple[int, ...]  # first axis first
    kind: int  # number of the type of its stored values
    start: int  # first byte in the file


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Scalars, texts and lists of them by name; tensors by name, in the order of the file."""

    fields: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """The header of a GGUF file; reads no tensor.

    Raises ValueError or EOFError for a file that is not GGUF of version 2 or 3 or is cut short; OSError.
    """
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not content[:32].startswith(_MAGIC):
            raise ValueError(f'it begins with {content[:32]!r}, not with {_MAGIC!r}')
        try:
            return _Reader(content).header()
        except struct.error as error:
            raise EOFError('the file ends inside its header') from error
        except RecursionError as error:
            raise ValueError('its arrays are nested without end') from error


class _Reader:
    """Reads one value after the other; raises struct.error if the content ends."""

    def __init__(self, content: mmap.mmap):
        self._content, self._place = content, len(_MAGIC)

    def header(self) -> GgufHeader:
        version, n_tensors, n_fields = self._numbers('<IQQ')
        if version not in (2, 3):
            raise ValueError(f'version {version} of the format is not known')
        fields: dict[str, object] = {}
        for _ in range(n_fields):
            name = self._text()
            _require_new(name, fields)
            fields[name] = self._value(*self._numbers('<I'))
        relative: dict[str, StoredTensor] = {}
        for _ in range(n_tensors):
            name = self._text()
            _require_new(name, relative)
            (n_axes,) = self._numbers('<I')
            if n_axes > 8:
                raise ValueError(f'tensor {name} has {n_axes} axes')
            shape = self._numbers(f'<{n_axes}Q')[::-1]  # a file lists the last axis first
            relative[name] = StoredTensor(shape, *self._numbers('<IQ'))
        alignment = fields.get('general.alignment', _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f'general.alignment={alignment!r} must be an integer of at least 1')
        data = -(-self._place // alignment) * alignment
        return GgufHeader(fields, {n: dataclasses.replace(t, start=data + t.start) for n, t in relative.items()})

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self._numbers(f'<{_SCALARS[kind]}')[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f'type {kind} of a field is not known')
        element, length = self._numbers('<IQ')
        if length > _LONGEST:
            raise ValueError(f'an array of {length} entries')
        if element in _SCALARS:
            return list(self._numbers(f'<{length}{_SCALARS[element]}'))
        return [self._text() if element == _TEXT else self._value(element) for _ in range(length)]

    def _text(self) -> str:
        start = self._place + _LENGTH.size
        self._place = start + _LENGTH.unpack_from(self._content, self._place)[0]
        if self._place > len(self._content):
            raise EOFError('the file ends inside its header')
        return self._content[start : self._place].decode()

    def _numbers(self, form: str) -> tuple:
        found = struct.unpack_from(form, self._content, self._place)
        self._place += struct.calcsize(form)
        return found


def _require_new(name: str, found: Mapping[str, object]) -> None:
    if name in found:
        raise ValueError(f'it has {name} twice')


_SIZE_END = 2**31  # sizes are int32
_AT_ONCE = 2**17  # values that are dequantised in one call
_OPTIONAL_IDS = {
    'eot_id': 'tokenizer.ggml.eot_token_id',  # ends a turn
    'eom_id': 'tokenizer.ggml.eom_token_id',  # ends a message that calls a tool
    'bos_id': 'tokenizer.ggml.bos_token_id',
    'pad_id': 'tokenizer.ggml.padding_token_id',
    'unk_id': 'tokenizer.ggml.unknown_token_id',
}
_PACKAGE = 'package:'
_FAMILY_OF = {'llama': 'llama', 'gemma3': 'gemma3_text'}  # by general.architecture
_Entry = TypeVar('_Entry', str, int, float)


class GgufError(UserError, ValueError):
    """A model file that is absent, unreadable or not of the supported kind; the message names it and the fix."""


def load_gguf(
    path: str | os.PathLike[str], announce: Announce = announce_nothing
) -> tuple[ModelConfig, Params, dict[str, object]]:
    """(shape, weights as nested dict of float32 numpy arrays, tokenizer fields) of a GGUF file of Llama or Gemma 3.

    Tokenizer fields: see `describe_gguf`. `announce` gets (bytes read, bytes of the file). Raises GgufError.
    """
    from areal_jax.formats.hf_directory import WeightsError, from_hf_names  # needs jax, unlike the rest

    path = pathlib.Path(path)
    header = _read_header(path)
    config, tokenizer_fields = _describe(path, header)
    tensors = _read_tensors(path, header, config, announce)
    try:
        params = from_hf_names(tensors, config)
    except WeightsError as error:
        raise GgufError(f'{path}: {error}') from error
    return config, params, tokenizer_fields


def describe_gguf(path: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, object]]:
    """(shape, tokenizer fields) that `load_gguf` would find; reads no weights, raises GgufError.

    Tokenizer fields: model (its kind), tokens (list of str), token_types (list of int, 3 = special), merges (list of
    'left right') and scores (list of float), of which a file has one, pre (name of the pre-tokenizer), space_prefix
    (whether a text of SentencePiece begins with a blank), eos_id, chat_template and tool_template ('' if the file has
    none), eot_id, eom_id, bos_id, pad_id and unk_id (None if it has none), add_bos and add_eos (whether plain text gets
    them at its ends).
    """
    path = pathlib.Path(path)
    return _describe(path, _read_header(path))


def _describe(path: pathlib.Path, header: GgufHeader) -> tuple[ModelConfig, dict[str, object]]:
    fields = _Fields(path, header.fields)
    return _model_config(fields, _shapes(header)), _tokenizer_fields(fields)


def _shapes(header: GgufHeader) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in header.tensors.items()}


def _read_tensors(
    path: pathlib.Path, header: GgufHeader, config: ModelConfig, announce: Announce
) -> dict[str, np.ndarray]:
    """The tensors under the names of Hugging Face, as they are stored there; raises GgufError for unknown ones."""
    heads = {'blk.*.attn_q.weight': config.n_heads, 'blk.*.attn_k.weight': config.n_kv_heads}
    # only files of Llama have the rotary pairs of a head next to each other
    turned = heads if config.family == 'llama' else {}
    hf_names = {row.gguf_name: row.hf_name for row in rows_of(config) if row.gguf_name and row.hf_name}
    content = np.memmap(path, mode='r').view(np.ndarray)
    tensors = {}
    for full_name, stored in header.tensors.items():
        name, layer = _parse_name(full_name)
        if name not in hf_names:
            raise GgufError(
                f'{path} has a tensor {full_name} that a {config.family} decoder without biases does not know'
            )
        announce(stored.start, len(content))
        values = _dequantize(path, full_name, stored, content)
        if name in heads:
            rows = heads[name] * config.head_dim
            if values.ndim != 2 or len(values) != rows:
                shape = list(values.shape)
                raise GgufError(f'{path}: {full_name} has shape {shape} instead of [{rows}, {config.d_model}]')
            values = unpermute(values, heads[name]) if name in turned else values
        if config.centred_norms and values.ndim == 1:  # the file has 1 + w
            values = values - 1
        tensors[hf_names[name].replace('*', layer)] = values
    return tensors


def read_gguf_shape(path: str | os.PathLike[str]) -> ModelConfig:
    """The shape that `load_gguf` would find, from the header alone; raises GgufError."""
    path = pathlib.Path(path)
    header = _read_header(path)
    return _model_config(_Fields(path, header.fields), _shapes(header))


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
        command = describe_pip('--no-deps', name.replace('_', '-'))
        raise GgufError(f'{spec!r} needs the package {name}, which is not installed: {command}')
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
    """Key-value fields of the file; a field that is missing (and has no default) or of another type is an error."""

    def __init__(self, path: pathlib.Path, fields: Mapping[str, object]):
        self.path, self._fields = path, fields

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value < _SIZE_END:
            raise GgufError(f'{self.path}: {key}={value!r} must be an integer of at least {least} and below 2**31')
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise GgufError(f'{self.path}: {key}={value!r} must be a number')
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise GgufError(f'{self.path}: {key}={value!r} must be a text')
        return value

    def listed(self, key: str, kind: type[_Entry]) -> list[_Entry]:
        values = self._get(key, None)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise GgufError(f'{self.path}: {key} must be a list of {kind.__name__}')
        return values

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise GgufError(f'{self.path}: {key}={value!r} must be true or false')
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def _get(self, key: str, default: object) -> object:
        if key not in self._fields:
            if default is None:
                raise GgufError(f'{self.path} has no field {key}')
            return default
        return self._fields[key]


def _read_header(path: pathlib.Path) -> GgufHeader:
    if path.is_dir():
        raise GgufError(f'{path} is a directory; set model.path to a GGUF file, or model.source=hf for this directory')
    if not path.is_file():
        raise GgufError(f'there is no file {path}; set model.path to a GGUF file')
    try:
        return read_gguf_header(path)
    except (ValueError, EOFError, OSError) as error:
        raise _no_gguf(path, error) from error


def _no_gguf(path: pathlib.Path, error: Exception) -> GgufError:
    return GgufError(
        f'{path} is no GGUF file, or only a part of one ({type(error).__name__}: {error}); download it again'
    )


def _model_config(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The shape of the model; raises GgufError for a file of another kind and numbers that do not fit together."""
    architecture = fields.text('general.architecture', '')
    if architecture not in _FAMILY_OF:
        known = ' and '.join(_FAMILY_OF)
        raise GgufError(f'{fields.path}: general.architecture is {architecture!r}; only {known} are supported')
    if len(shapes.get('token_embd.weight', ())) != 2:
        raise GgufError(f'{fields.path} has no tensor token_embd.weight of two axes')
    vocab_size, d_model = shapes['token_embd.weight']
    own = lambda key: f'{architecture}.{key}'
    n_layers = fields.integer(own('block_count'))
    if n_layers > len(shapes):  # an absurd number would run for hours
        raise GgufError(
            f'{fields.path}: {own("block_count")}={n_layers}, but the file has {len(shapes)} tensors in all'
        )
    heads = fields.integer(own('attention.head_count'))
    head_dim = fields.integer(own('attention.key_length'), d_model // heads)
    rotated = fields.integer(own('rope.dimension_count'), head_dim)
    scaling = fields.text(own('rope.scaling.type'), 'none')
    if rotated != head_dim or scaling != 'none':
        raise GgufError(
            f'{fields.path}: rotary positions over {rotated} of {head_dim} dimensions with scaling {scaling!r}; '
            f'only whole heads without scaling are supported'
        )
    family = _FAMILY_OF[architecture]
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=heads,
            n_kv_heads=fields.integer(own('attention.head_count_kv'), heads),
            head_dim=head_dim,
            d_ff=fields.integer(own('feed_forward_length')),
            rope_theta=fields.number(own('rope.freq_base'), FAMILIES[family].rope_theta),
            rms_eps=fields.number(own('attention.layer_norm_rms_epsilon')),
            tie_embeddings='output.weight' not in shapes,
            context_tokens=fields.integer(own('context_length')),
            family=family,
            **FAMILIES[family].switches
            | (_gemma_fields(fields, n_layers, d_model) if architecture == 'gemma3' else {}),
        )
    except ConfigError as error:
        raise GgufError(f'{fields.path}: {error}') from error


def _gemma_fields(fields: _Fields, n_layers: int, d_model: int) -> dict[str, object]:
    """Which layers have windows, and mostly their rope, are not in the file: they are those of the family.

    Scores are divided by the root of head_dim, as in all models but the one of 27B, whose rotary scaling is refused.
    """
    family = FAMILIES['gemma3_text']
    pattern = 'gemma3.attention.sliding_window_pattern'
    if (every := fields.integer(pattern, family.full_every)) != family.full_every:
        raise GgufError(f'{fields.path}: {pattern}={every}; only {family.full_every} is supported')
    kinds = default_kinds('gemma3_text', n_layers, fields.integer('gemma3.attention.sliding_window'))
    local = Rope(fields.number('gemma3.rope.freq_base_swa', family.window_theta))
    return {
        'kinds': tuple(dataclasses.replace(kind, rope=local) if kind.window else kind for kind in kinds),
        'embedding_factor': math.sqrt(d_model),
        'logit_cap': fields.number('gemma3.final_logit_softcapping', 0.0) or None,
    }


def _tokenizer_fields(fields: _Fields) -> dict[str, object]:
    ids = {name: fields.integer(key, least=0) if key in fields else None for name, key in _OPTIONAL_IDS.items()}
    model = fields.text('tokenizer.ggml.model', '')
    return {
        'model': model,
        'tokens': fields.listed('tokenizer.ggml.tokens', str),
        'token_types': fields.listed('tokenizer.ggml.token_type', int),
        'merges': fields.listed('tokenizer.ggml.merges', str) if 'tokenizer.ggml.merges' in fields else [],
        'scores': fields.listed('tokenizer.ggml.scores', float) if 'tokenizer.ggml.scores' in fields else [],
        'pre': fields.text('tokenizer.ggml.pre', ''),
        'space_prefix': fields.flag('tokenizer.ggml.add_space_prefix', True),
        'eos_id': fields.integer('tokenizer.ggml.eos_token_id', least=0),
        'chat_template': fields.text('tokenizer.chat_template', ''),
        'tool_template': fields.text('tokenizer.chat_template.tool_use', ''),  # for conversations with tools
        **ids,
        # what llama.cpp takes in a file that does not say: a model of SentencePiece begins with BOS
        'add_bos': fields.flag('tokenizer.ggml.add_bos_token', model == 'llama'),
        'add_eos': fields.flag('tokenizer.ggml.add_eos_token'),
    }


def _parse_name(name: str) -> tuple[str, str]:
    """('blk.*.attn_q.weight', '3') of 'blk.3.attn_q.weight'; ('output.weight', '') of 'output.weight'."""
    match = re.fullmatch(r'blk\.(\d+)\.(.+)', name)
    return (f'blk.*.{match[2]}', match[1]) if match else (name, '')


def _dequantize(path: pathlib.Path, name: str, stored: StoredTensor, content: np.ndarray) -> np.ndarray:
    """float32 values of a tensor; `content` is the file, uint8. Raises GgufError."""
    try:
        import gguf
    except ImportError as error:
        raise GgufError(f'reading {path} needs the package gguf: {describe_install("gguf")}') from error
    try:
        kind = gguf.GGMLQuantizationType(stored.kind)
        byte_shape = gguf.quant_shape_to_byte_shape(stored.shape or (1,), kind)
        rows = content[stored.start : stored.start + math.prod(byte_shape)]
        if len(rows) < math.prod(byte_shape):
            raise EOFError(f'the file ends inside {name}')
        return _dequantize_rows(rows.reshape(-1, byte_shape[-1]), kind).reshape(stored.shape)
    except EOFError as error:
        raise _no_gguf(path, error) from error
    except NotImplementedError as error:
        raise GgufError(f'{path}: {name} is of type {kind.name}, not readable here') from error
    except (ValueError, TypeError) as error:
        raise GgufError(f'{path}: {name} cannot be read ({error}); download the file again') from error


def _dequantize_rows(rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """float32 [n, values] of uint8 [n, bytes]; as few calls as the processor's cache allows, because a call is slow."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = np.empty((len(rows), rows.shape[1] // block_bytes * block), np.float32)
    step = max(1, _AT_ONCE // values.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        values[first : first + step] = gguf.dequantize(part.reshape(1, -1), kind).reshape(len(part), -1)
    return values
