"""Under arrow 7: which leaves of the weights are trained, and the working copy that a pass computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

DTYPES = ('float32', 'bfloat16', 'float16')
Trainable = Callable[[str], bool]  # of a leaf's path, 'layers/0/attention/query/weight'


def split(params: Mapping[str, Any], trainable: Trainable, prefix: str = '') -> tuple[dict[str, Any], dict[str, Any]]:
    """(trained, frozen): two nested dicts that `join` puts together again; branches without a leaf are left out."""
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for name, value in params.items():
        path = f'{prefix}{name}'
        if isinstance(value, Mapping):
            for side, part in zip((trained, frozen), split(value, trainable, f'{path}/'), strict=True):
                if part:
                    side[name] = part
        else:
            (trained if trainable(path) else frozen)[name] = value
    return trained, frozen


def join(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that `split` took apart."""
    joined = dict(frozen)
    for name, value in trained.items():
        joined[name] = join(value, frozen[name]) if name in frozen else value
    return joined


def cast(tree: Any, dtype: str) -> Any:
    """Every leaf in `dtype`, where it lies; leaves that have it are not copied."""
    if isinstance(tree, Mapping):
        return {name: cast(value, dtype) for name, value in tree.items()}
    return tree if tree.dtype == jnp.dtype(dtype) else tree.astype(jnp.dtype(dtype))
