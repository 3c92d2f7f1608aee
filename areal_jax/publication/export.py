"""After the loop: the final weights as a directory that transformers and vllm load."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from areal_jax.formats.hf_config import CONFIG, read_json
from areal_jax.formats.hf_directory import WEIGHT_DTYPES
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.directory import write_hf_directory
from areal_jax.publication.errors import PublicationError

FILE_BYTES = 5_000_000_000  # most bytes of a file of weights
# what belongs to a model beside its shape and weights: tokenizer, chat template, how its makers sample from it
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
_TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')  # of config.json: where generation ends


def export_hf(
    directory: str | os.PathLike[str],
    params: Any,
    config: ModelConfig,
    *,
    dtype: str = 'float32',
    file_bytes: int = FILE_BYTES,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Writes `config.json` and safetensors, whole or not at all, replacing an earlier export.

    A value head is left out, since the causal language models of Hugging Face have none: a checkpoint keeps it.

    Two shapes that transformers runs are not for vllm 0.32: it refuses the Qwen families with windows in some layers
    only, and computes qwen2 with heads of d_model / n_heads, silently, where head_dim is another.

    Args:
      params: nested dict of arrays in list form, without adapters.
      dtype: of the files: float32, bfloat16 or float16.
      file_bytes: weights of more bytes than this become several files with `model.safetensors.index.json`.
      source: the directory the weights came from; its COMPANIONS are copied and its special token ids kept.

    Raises PublicationError for an unknown `dtype` or one that cannot hold the values, a `source` that is the directory
    itself, lack of space, or a foreign directory in the way; HfError for a shape that the family cannot have;
    WeightsError for adapters that are not merged.
    """
    target = pathlib.Path(directory)
    if dtype not in WEIGHT_DTYPES:
        raise PublicationError(f'dtype={dtype!r} is unknown; use one of {", ".join(WEIGHT_DTYPES)}')
    copied: list[pathlib.Path] = []
    token_ids: dict[str, Any] = {}
    if source is not None:
        source = pathlib.Path(source)
        if source.resolve() == target.resolve():
            raise PublicationError(f'{target} is where the weights came from; export to another directory')
        copied = [source / name for name in COMPANIONS if (source / name).is_file()]
        said = read_json(source / CONFIG)
        token_ids = {name: said[name] for name in _TOKEN_IDS if said.get(name) is not None}
    write_hf_directory(target, params, config, dtype=dtype, file_bytes=file_bytes, copied=copied, token_ids=token_ids)
