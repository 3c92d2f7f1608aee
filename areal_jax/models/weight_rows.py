"""Which rows of its family's table a model has, and the sizes of their letters; free of jax."""

from __future__ import annotations

import math
from collections.abc import Iterator

from areal_jax.models.families import FAMILIES, Weight
from areal_jax.models.shape import ModelConfig

LAYERS = 'layers/*/'  # how the path of a weight begins that layers have one of their own each


def rows_of(config: ModelConfig) -> list[Weight]:
    """The weights that the model has, in the order of the forward pass."""
    return [row for row in FAMILIES[config.family].weights if _exists(row, config)]


def letter_sizes(c: ModelConfig) -> dict[str, int]:
    """The letters of `families`, in numbers."""
    heads, kv_heads = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    sizes = {'V': c.vocab_size, 'O': c.output_size or c.vocab_size, 'C': c.context_tokens, 'd': c.d_model, 'F': c.d_ff}
    if c.experts:
        sizes |= {'E': c.experts.count, 'M': c.experts.d_expert}
    return {**sizes, 'D': c.head_dim, 'HD': heads, 'KD': kv_heads}


def layers_of(row: Weight, config: ModelConfig) -> tuple[int, ...]:
    """Which layers have the weight, ascending; () = it is in no layer."""
    if not row.path.startswith(LAYERS):
        return ()
    kinds = {'all': (False, True), 'dense': (False,), 'experts': (True,)}[row.layers]
    return tuple(layer for layer in range(config.n_layers) if config.has_experts(layer) in kinds)


def count_parameters(config: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """(row, its parameters in all layers together) of each row that the model has."""
    sizes = letter_sizes(config)
    for row in rows_of(config):
        yield row, math.prod(sizes[letter] for letter in row.shape.split()) * (len(layers_of(row, config)) or 1)


def _exists(row: Weight, config: ModelConfig) -> bool:
    if row.path.startswith(LAYERS) and not layers_of(row, config):
        return False
    return (not row.when or getattr(config, row.when)) and not (row.unless and getattr(config, row.unless))
