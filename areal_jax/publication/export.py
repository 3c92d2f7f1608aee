"""After the loop: the final weights as a directory that Hugging Face tools load."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from areal_jax.models.shape import ModelConfig
from areal_jax.publication.files import write_hf_directory


def export_hf(directory: str | os.PathLike[str], params: Any, config: ModelConfig) -> None:
    """Writes `model.safetensors` and `config.json`, whole or not at all, replacing an earlier export.

    `params` is a nested dict of arrays. Raises PublicationError for lack of space or a foreign directory in the way.
    """
    write_hf_directory(pathlib.Path(directory), params, config)
