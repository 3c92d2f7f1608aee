"""Exports the final weights of a run as a directory that transformers and vllm load; app/ calls it after the loop."""

from __future__ import annotations

import os
import pathlib

from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.hf_directory import WEIGHT_DTYPES
from areal_jax.formats.hf_export import HfCompanions, plan_hf_files
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.publication.export import write_hf_directory
from areal_jax.publication.versions import PublicationError

FILE_BYTES = 5_000_000_000  # largest file of weights


def export_hf(
    directory: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    dtype: str,
    file_bytes: int | None = None,
    companions: HfCompanions | None = None,
    announce: Announce = announce_nothing,
) -> None:
    """Writes `config.json` and safetensors, atomically; replaces an earlier export.

    vllm 0.32 does not run two configs that transformers does. It refuses Qwen models with windows in some layers only.
    It assumes head_dim = d_model / n_heads for qwen2 and computes wrong results, silently, for any other head_dim.

    Args:
      params: nested dict of arrays in list form, without adapters.
      dtype: of the files: float32, bfloat16 or float16.
      file_bytes: more bytes of weights than this become several files with `model.safetensors.index.json`; None =
        FILE_BYTES.
      companions: tokenizer, chat template and so on; None = nothing besides config and weights.
      announce: hears of the bytes written, and of all.

    Raises PublicationError for an unknown `dtype` or one that cannot hold the values, a source that is the directory
    itself, lack of space, or a foreign directory in the way; HfError for a config that the family cannot have;
    WeightsError for adapters that are not merged.
    """
    target, original = pathlib.Path(directory), None if companions is None else companions.source
    if dtype not in WEIGHT_DTYPES:
        raise PublicationError(f'dtype={dtype!r} is unknown; use one of {", ".join(WEIGHT_DTYPES)}')
    if original is not None and original.resolve() == target.resolve():
        raise PublicationError(f'{target} is where the weights came from; export to another directory')
    contents = plan_hf_files(
        params,
        config,
        dtype=dtype,
        file_bytes=file_bytes or FILE_BYTES,
        companions=companions,
    )
    write_hf_directory(target, contents, elsewhere='write to another disk', announce=announce)
