"""Rotary positions of a model: the base of the wavelengths, and their stretching for long contexts."""

from __future__ import annotations

import dataclasses
import math

from areal_jax.config.fields import COUNT, POSITIVE, ConfigError


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
class LinearScaling:
    """Rotary scaling that divides every frequency by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        POSITIVE.require('factor', self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): pairs that turn slowly are divided by `factor`, fast ones are kept.

    It changes every position alike: also a short sequence has other rotations than without it.
    """

    factor: float
    original_context_tokens: int  # of the model before stretching
    beta_fast: float = 32.0  # a pair with more turns in the original context is kept
    beta_slow: float = 1.0  # a pair with fewer turns is divided
    truncate: bool = True  # the range between the two is widened to whole pairs
    attention_factor: float | None = None  # multiplies cosine and sine; None = by the formula, from `factor`
    mscale: float | None = None  # of the formula
    mscale_all_dim: float | None = None  # likewise

    def __post_init__(self) -> None:
        for name in ('factor', 'beta_fast', 'beta_slow'):
            POSITIVE.require(name, getattr(self, name))
        for name in ('attention_factor', 'mscale', 'mscale_all_dim'):
            if (value := getattr(self, name)) is not None:
                POSITIVE.require(name, value)
        COUNT.require('original_context_tokens', self.original_context_tokens)
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(f'beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}')

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine, with which transformers and vLLM multiply them too."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = lambda by: 1.0 if self.factor <= 1 else 0.1 * by * math.log(self.factor) + 1.0
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: the base of the wavelengths, and their stretching."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        POSITIVE.require('rope_theta', self.theta)
