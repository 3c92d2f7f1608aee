"""The file of a value head, beside the weights that it reads or in their directory `critic`."""

from __future__ import annotations

import os
import pathlib

import jax
import numpy as np

from areal_jax.formats.safetensors_file import SafetensorsError, list_tensors, write_tensors

FILE = 'value_head.safetensors'
DIRECTORY = 'critic'  # of an export: serving programs read every *.safetensors file beside config.json

ValueHead = dict[str, np.ndarray]  # {'weight': float32 [d], 'bias': float32 []}


class ValueHeadError(SafetensorsError):
    """A file that holds no value head of this width; the message names it and the fix."""


def write_value_head(directory: pathlib.Path, head: ValueHead) -> None:
    """Writes the file into a directory, which is made where it is missing; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f'{FILE}.part'
    shapes = {name: jax.ShapeDtypeStruct(values.shape, np.float32) for name, values in head.items()}
    write_tensors(unfinished, shapes, lambda name: np.asarray(head[name], np.float32))
    os.replace(unfinished, directory / FILE)


def read_value_head(directory: pathlib.Path, width: int) -> ValueHead | None:
    """The head of a model in `directory`, or of its `critic`; None where there is no such file.

    Raises ValueHeadError for a head of another width, or with NaN or infinity, and SafetensorsError for a damaged file.
    """
    path = next((p for p in (directory / FILE, directory / DIRECTORY / FILE) if p.is_file()), None)
    if path is None:
        return None
    found = list_tensors(path)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != (wanted := {'weight': (width,), 'bias': ()}):
        raise ValueHeadError(f'{path} holds {shapes}, and the value head of this model is {wanted}: remove the file')
    head = {name: tensor.map().astype(np.float32).reshape(wanted[name]) for name, tensor in found.items()}
    if not all(np.isfinite(values).all() for values in head.values()):
        raise ValueHeadError(f'{path} holds NaN or infinity: remove the file, and the head begins at 0')
    return head
