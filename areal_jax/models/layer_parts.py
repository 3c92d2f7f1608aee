"""The parts of layers that some models have, with their sizes: experts, gated delta nets, latent attention."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.config.fields import COUNT, NOT_NEGATIVE, POSITIVE, ConfigError

# tokens that the rule of a delta net computes at once: more lose digits, because it subtracts logs of decays, which are
# large where the decay is fast
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The activation of gpt-oss's experts: gate and up are clamped, and (up + 1) gate sigmoid(alpha gate)."""

    limit: float
    alpha: float

    def __post_init__(self) -> None:
        for name in ('limit', 'alpha'):
            POSITIVE.require(f'experts.swiglu.{name}', getattr(self, name))


@dataclasses.dataclass(frozen=True)
class SigmoidRouter:
    """A router whose scores are sigmoids; each layer has a correction of them that takes part in the choice alone.

    The experts of a layer are in groups of equal size, and a token chooses among the experts of the best groups (arXiv
    2412.19437, section 2.1.2).
    """

    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0  # of the weights of the chosen experts

    def __post_init__(self) -> None:
        for name in ('groups', 'kept_groups'):
            COUNT.require(f'experts.sigmoid.{name}', getattr(self, name))
        POSITIVE.require('experts.sigmoid.scale', self.scale)
        if self.kept_groups > self.groups:
            raise ConfigError(f'a token cannot keep {self.kept_groups} of {self.groups} groups of experts')


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The sizes of gated delta nets (arXiv 2412.06464): a state of fixed size in place of keys and values."""

    key_heads: int
    value_heads: int  # a multiple of key_heads; value head h reads key head h // (value_heads / key_heads)
    key_dim: int  # of a head; so is value_dim
    value_dim: int
    taps: int = 4  # tokens of the convolution by channel before the rule, the token itself included

    def __post_init__(self) -> None:
        for name in ('key_heads', 'value_heads', 'key_dim', 'value_dim', 'taps'):
            COUNT.require(f'delta.{name}', getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f'delta.value_heads={self.value_heads} is not a multiple of delta.key_heads={self.key_heads}'
            )

    def state_bytes(self, itemsize: int) -> int:
        """Returns the bytes of a sequence's state in one layer; the convolution's inputs have `itemsize` bytes each."""
        inputs = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return 4 * self.value_heads * self.key_dim * self.value_dim + (self.taps - 1) * inputs * itemsize

    @property
    def rule_flops(self) -> int:
        """The arithmetic of the rule for one token of a forward pass in chunks."""
        keys, values = self.key_dim, self.value_dim
        return self.value_heads * (6 * keys * values + CHUNK * (4 * keys + 3 * values))


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Attention over latents (MLA, arXiv 2405.04434, section 2.1): keys and values are products of one vector by token.

    In the expanded form every head has its keys and values. In the absorbed form the queries are multiplied with the
    keys' matrix instead and the outputs with the values' matrix, and one head of latents is all that a cache holds.
    """

    rank: int  # numbers of a latent
    plain_dim: int  # of a query and key, not rotated
    rotated_dim: int  # of a query and key, behind these; the key's is one for all heads
    value_dim: int  # of a head
    query_rank: int = 0  # numbers of a latent of the queries; 0 = there is none
    interleaved: bool = True  # the rotated pairs are (2j, 2j + 1), not (j, j + n/2)
    absorbs: bool = False  # which form is computed

    def __post_init__(self) -> None:
        NOT_NEGATIVE.require('latent.query_rank', self.query_rank)
        for name in ('rank', 'plain_dim', 'rotated_dim', 'value_dim'):
            COUNT.require(f'latent.{name}', getattr(self, name))

    @property
    def scale(self) -> float:
        """The factor of the scores, but for what YaRN multiplies it with."""
        return float((self.plain_dim + self.rotated_dim) ** -0.5)

    @property
    def head_dim(self) -> int:
        """The size of the heads that attention computes: shorter queries and keys, or values, end with zeros."""
        if self.absorbs:
            return self.rank + self.rotated_dim
        return max(self.plain_dim + self.rotated_dim, self.value_dim)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts that replace the MLP, and how a token chooses among them; see models/experts.py."""

    count: int
    per_token: int  # experts that a token reaches
    d_expert: int  # width of an expert
    normalised: bool = True  # the scores of the chosen experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # ascending; these have an MLP
    # clamped, with biases of router and experts, and gate and up in one matrix; None = SwiGLU without biases
    swiglu: ClampedSwiglu | None = None
    d_shared: int = 0  # width of the expert that every token reaches; 0 = there is none
    sigmoid: SigmoidRouter | None = None  # None = softmax

    def __post_init__(self) -> None:
        if router := self.sigmoid:
            size = self.count // router.groups
            # a group's score is the sum of its two best
            if self.count % router.groups or size < 2 or router.kept_groups * size < self.per_token:
                raise ConfigError(
                    f'{self.count} experts do not make {router.groups} equal groups of two or more, of which '
                    f'{router.kept_groups} have the {self.per_token} that a token reaches'
                )
        NOT_NEGATIVE.require('experts.d_shared', self.d_shared)
        for name in ('count', 'per_token', 'd_expert'):
            COUNT.require(f'experts.{name}', getattr(self, name))
        if self.per_token > self.count:
            raise ConfigError(f'a token cannot reach {self.per_token} of {self.count} experts; lower experts_per_token')

    @property
    def route_dtype(self) -> str:
        """The dtype of recorded routes: the smallest integers that hold all experts and one more value, for none."""
        return 'uint8' if self.count <= np.iinfo(np.uint8).max else 'uint16'
