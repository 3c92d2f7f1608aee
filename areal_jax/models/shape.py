"""The config of a model: the sizes and switches that determine its weights and its computation.

Made by app/model/text_model.py and the readers of formats/, read by every module that computes with a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.config.fields import COUNT, COUNT_OR_OFF, NOT_NEGATIVE, POSITIVE, ConfigError
from areal_jax.models.families import FAMILIES, Weight


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling: long wavelengths are multiplied by `factor`, short ones are kept."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int  # of the model before stretching

    def __post_init__(self) -> None:
        for name in ('factor', 'low_frequency_factor', 'high_frequency_factor'):
            POSITIVE.require(name, getattr(self, name))
        COUNT.require('original_context_tokens', self.original_context_tokens)
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ConfigError(
                f'high_frequency_factor={self.high_frequency_factor} must be above '
                f'low_frequency_factor={self.low_frequency_factor}'
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts that replace the MLP, and how a token chooses among them; see models/experts.py."""

    count: int
    per_token: int  # experts that a token reaches
    d_expert: int  # width of an expert
    normalised: bool = True  # the scores of the chosen experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # ascending; these have an MLP

    def __post_init__(self) -> None:
        for name in ('count', 'per_token', 'd_expert'):
            COUNT.require(f'experts.{name}', getattr(self, name))
        if self.per_token > self.count:
            raise ConfigError(f'a token cannot reach {self.per_token} of {self.count} experts; lower experts_per_token')

    @property
    def route_dtype(self) -> str:
        """The dtype of recorded routes: the smallest integers that hold all experts and one more value, for none."""
        return 'uint8' if self.count <= np.iinfo(np.uint8).max else 'uint16'


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder with RMS norm, rotary positions, grouped queries and SwiGLU, dense or with experts.

    It covers Llama 2 and 3, SmolLM2, Qwen 2, 2.5 and 3, Mistral, Qwen3-MoE, Mixtral, OLMoE and models distilled into
    them.

    `family` decides names in files, see `families`; the computation follows from the other fields alone.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # divides n_heads
    head_dim: int  # even
    d_ff: int  # of the MLP, if a layer has one
    rope_theta: float  # base of the rotary wavelengths
    rms_eps: float = 1e-5
    tie_embeddings: bool = True  # the head is the embedding
    output_size: int | None = None  # rows of a separate head: only the first tokens are predicted; None = all
    context_tokens: int = 8192  # longest sequence the weights were made for
    family: str = 'llama'
    qkv_bias: bool = False  # of the query, key and value projections
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMS norm over every query and key head before its rotation
    whole_qk_norm: bool = False  # RMS norm over all query heads together, and over all key heads
    plain: bool = (
        False  # learned positions (context_tokens of them) and no rotation, ReLU without a gate, no final norm
    )
    rope_scaling: Llama3Scaling | None = None
    sliding_window: int | None = None  # tokens that a token attends to, itself included; None = all before it
    first_window_layer: int = 0  # layers before this one have no window
    experts: Experts | None = None

    def __post_init__(self) -> None:
        counts = ('vocab_size', 'd_model', 'n_layers', 'n_heads', 'n_kv_heads', 'head_dim', 'd_ff', 'context_tokens')
        ranges = dict.fromkeys(counts, COUNT)
        ranges |= {'rope_theta': POSITIVE, 'rms_eps': NOT_NEGATIVE, 'first_window_layer': COUNT_OR_OFF}
        for name, allowed in ranges.items():
            allowed.require(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f'n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}')
        if self.head_dim % 2:
            raise ConfigError(f'head_dim={self.head_dim} is odd; rotary positions need pairs')
        if self.family not in FAMILIES:
            raise ConfigError(f'family={self.family!r} is unknown; use one of {", ".join(FAMILIES)}')
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f'sliding_window={self.sliding_window} must be at least 1, or None for no window')
        if self.qk_norm and self.whole_qk_norm:
            raise ConfigError('qk_norm and whole_qk_norm are two norms of the same vectors: use one')
        if (self.experts is None) == (FAMILIES[self.family].experts is not None):
            has = 'has experts' if self.experts is None else 'has none'
            raise ConfigError(f'family={self.family!r} {has}, and experts={self.experts} does not fit it')
        if self.experts and not set(self.experts.dense_layers) <= set(range(self.n_layers)):
            raise ConfigError(f'dense layers {self.experts.dense_layers} must be layers, 0 to {self.n_layers - 1}')

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in this layer, itself included; None = all before it."""
        return self.sliding_window if layer >= self.first_window_layer else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def n_expert_layers(self) -> int:
        """The number of layers that have experts."""
        return 0 if self.experts is None else self.n_layers - len(self.experts.dense_layers)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that a pass gives for each token; engines record all (rollout.record_routes) or none."""
        return () if self.experts is None else (self.routes,)

    @property
    def routes(self) -> Column:
        """The column of recorded routes of this model, which has experts."""
        assert self.experts is not None
        return ROUTED_EXPERTS.of_model(self.experts.route_dtype, (self.n_expert_layers, self.experts.per_token))


# The rows of its family's table that a model has, and the sizes of their letters; free of jax.


LAYERS = 'layers/*/'  # prefix of the path of a weight that layers have


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
    """The layers that have the weight, ascending; () = it is in no layer."""
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
