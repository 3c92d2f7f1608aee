"""Sizes of a model that prices of its work need, counted from its config; published models by name."""

from __future__ import annotations

import dataclasses

from areal_jax.config.ranges import ConfigError
from areal_jax.errors import suggest
from areal_jax.models.shape import LAYERS, Experts, ModelConfig, count_parameters

CACHE_BYTES = 2  # of each number of the KV cache, 16 bit


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; windows of its attention are not known, so that a long context costs as without them."""

    name: str
    parameters: float
    product_parameters: float  # of matrices that tokens are multiplied with: layers and output head, all experts
    head_parameters: float
    layers: int
    attention_width: int  # heads * head_dim
    kv_bytes: int  # of one position, in all layers, 16 bit
    hidden: int  # width of the residual stream
    expert_parameters: float = 0.0  # those of `product_parameters` that are experts
    experts: int = 0  # of a layer; 0 = none
    experts_per_token: int = 0

    @property
    def active_parameters(self) -> float:
        """Of the matrices that one token is multiplied with."""
        return self.product_parameters - self.expert_parameters + self.expert_parameters * self._reached(1)

    def read_parameters(self, tokens: float) -> float:
        """Of the matrices that so many tokens together are multiplied with: experts that none reaches are not read.

        Every token reaches `experts_per_token` experts, all alike and independent of the other tokens.
        """
        return self.product_parameters - self.expert_parameters + self.expert_parameters * self._reached(tokens)

    def _reached(self, tokens: float) -> float:
        """The share of the experts that some of the tokens reach."""
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 1.0


def shape_of(name: str, config: ModelConfig) -> ModelShape:
    """The sizes of any model of a known family, counted from the table of its weights."""
    counts = [(row.path, parameters) for row, parameters in count_parameters(config)]
    of_layers = sum(count for path, count in counts if path.startswith(LAYERS) and _multiplies(path))
    heads = [count for path, count in counts if path == ('embedding' if config.tie_embeddings else 'head')]
    return ModelShape(
        name,
        parameters=sum(count for _, count in counts),
        product_parameters=of_layers + sum(heads),
        head_parameters=sum(heads),
        layers=config.n_layers,
        attention_width=config.n_heads * config.head_dim,
        kv_bytes=2 * config.n_layers * config.n_kv_heads * config.head_dim * CACHE_BYTES,
        hidden=config.d_model,
        expert_parameters=sum(count for path, count in counts if '/experts/' in path),
        experts=config.experts.count if config.experts else 0,
        experts_per_token=config.experts.per_token if config.experts else 0,
    )


def _multiplies(path: str) -> bool:
    """Whether it is a matrix, and no bias or scale of a norm."""
    return path.endswith('/weight') or '/experts/' in path


def _qwen2(name: str, vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> ModelShape:
    """A model that was distilled from R1 into Qwen 2.5: head dimension 128, a head of its own."""
    config = ModelConfig(
        vocabulary, width, layers, heads, kv_heads, 128, mlp, 1e4, family='qwen2', qkv_bias=True, tie_embeddings=False
    )
    return shape_of(name, config)


R1_DISTILL_1_5B = _qwen2('R1-distill-Qwen-1.5B', 151936, 1536, 28, 12, 2, 8960)
R1_DISTILL_7B = _qwen2('R1-distill-Qwen-7B', 152064, 3584, 28, 28, 4, 18944)
R1_DISTILL_14B = _qwen2('R1-distill-Qwen-14B', 152064, 5120, 48, 40, 8, 13824)
R1_DISTILL_32B = _qwen2('R1-distill-Qwen-32B', 152064, 5120, 64, 40, 8, 27648)
QWEN3_0_6B = shape_of(
    'Qwen3-0.6B', ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, 1e6, family='qwen3', qk_norm=True)
)  # fmt: skip
QWEN3_8B = shape_of(
    'Qwen3-8B',
    ModelConfig(151936, 4096, 36, 32, 8, 128, 12288, 1e6, family='qwen3', qk_norm=True, tie_embeddings=False),
)
LLAMA_3_1_8B = shape_of(
    'Llama-3.1-8B', ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 5e5, tie_embeddings=False)
)  # fmt: skip
QWEN3_30B_A3B = shape_of(
    'Qwen3-30B-A3B',
    ModelConfig(
        151936, 2048, 48, 32, 4, 128, 6144, 1e6,
        family='qwen3_moe', qk_norm=True, tie_embeddings=False, experts=Experts(128, 8, 768),
    ),
)  # fmt: skip

SHAPES = (
    *(R1_DISTILL_1_5B, R1_DISTILL_7B, R1_DISTILL_14B, R1_DISTILL_32B),
    *(QWEN3_0_6B, QWEN3_8B, LLAMA_3_1_8B, QWEN3_30B_A3B),
)  # sizes as in the config.json that are published with the models


def find_shape(name: str) -> ModelShape:
    """The published model of that name: 'R1-distill-Qwen-7B', 'r1-distill-7b' and its full name are understood.

    Raises ConfigError that names the models for an unknown one.
    """
    wanted = _plain(name)
    for shape in SHAPES:
        if wanted == _plain(shape.name):
            return shape
    raise ConfigError(
        f'the model {name!r} is not known{suggest(wanted, {_plain(shape.name) for shape in SHAPES})}; use one of '
        f'{", ".join(shape.name for shape in SHAPES)}'
    )


def _plain(name: str) -> str:
    """Small letters, without the maker and without what the distilled models were distilled into."""
    return name.strip().lower().rpartition('/')[2].removeprefix('deepseek-').replace('distill-qwen-', 'distill-')
