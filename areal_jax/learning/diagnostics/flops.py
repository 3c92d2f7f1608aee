"""The work of an update in floating-point operations that the model needs, for its utilisation.

PaLM (arXiv 2204.02311), appendix B, counts per token of a training pass

    6 N + 12 L H D T

N = weights in matrices (a multiplication and an addition for each in the forward pass, twice that in the backward one),
L layers, H query heads of width D, T tokens of the sequence. What is special here:

  - N has no embedding lookup, and the head V d counts for tokens in the loss alone: no other logits are computed.
  - T is the length of the token's own sequence: prompt and answer, or the prompt alone for a prompt that the answers of
    a group share, which is read once. A sliding window bounds T. As in PaLM, the causal mask does not halve T.
  - LoRA needs no gradient of the frozen weights: 4 N for them, 6 for every weight of an adapter.
  - N counts the router, and only the experts that a token reaches.
  - Not counted: recomputation by `learner.remat`, padding, and passes that only compute log-probs (proximal with
    several optimizer steps, reference). So this is the utilisation by the model (MFU), not by the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Lora, WeightSpec, is_adapter, weight_table
from areal_jax.telemetry import names
from areal_jax.types import NOT_GENERATED, TrajectoryGroup


def work_metrics(
    config: ModelConfig, lora: Lora | None, groups: Sequence[TrajectoryGroup], packing: str, epochs: int
) -> dict[str, float]:
    """Tokens that the passes of an update read, and the floating-point operations of these passes.

    Args:
      groups: the trained ones.
      packing: 'shared_prompt' reads the prompt of a group once, 'ordinary' once per answer.
    """
    body, head = matrix_flops(config, lora)
    spans = [span for group in groups for span in _spans(group, packing)]
    tokens = sum(count for count, _ in spans)
    flops = body * tokens + head * sum(map(_loss_tokens, groups))
    flops += sum(count * attention_flops(config, length) for count, length in spans)
    return {names.READ_TOKENS: float(tokens * epochs), names.MODEL_FLOPS: float(flops * epochs)}


def matrix_flops(config: ModelConfig, lora: Lora | None = None) -> tuple[int, int]:
    """Operations of a training pass per token in the matrices of all layers, and per loss token in the head."""
    matrices = [spec for spec in weight_table(config, lora).values() if spec.in_layers and len(spec.shape) > 1]
    frozen = 4 if lora else 6
    cost = sum((6 if is_adapter(spec.path) else frozen) * _active(spec, config) for spec in matrices)
    return cost, frozen * config.vocab_size * config.d_model


def active_parameters(config: ModelConfig) -> int:
    """The number of weights that a token meets: all except the weights of experts that it does not reach."""
    table = weight_table(config, None).values()
    return sum(
        _active(spec, config) if spec.in_layers and len(spec.shape) > 1 else math.prod(spec.shape) * len(spec.paths)
        for spec in table
    )


def _active(spec: WeightSpec, config: ModelConfig) -> int:
    """The number of weights in all layers that a token meets; of experts, only the ones that it reaches."""
    if len(spec.shape) == 2:
        return math.prod(spec.shape) * len(spec.layers)
    assert config.experts is not None
    return config.experts.per_token * math.prod(spec.shape[1:]) * len(spec.layers)


def attention_flops(config: ModelConfig, length: int) -> int:
    """Operations of a training pass per token in a sequence of `length` tokens, for scores and weighted values."""
    seen = sum(min(length, config.window(layer) or length) for layer in range(config.n_layers))
    return 12 * config.n_heads * config.head_dim * seen


def _spans(group: TrajectoryGroup, packing: str) -> Iterator[tuple[int, int]]:
    """(tokens read, length of their sequence); the last token of an answer is predicted and not read."""
    if packing == 'shared_prompt':
        for prompt in {t.prompt.tokens.tobytes(): len(t.prompt.tokens) for t in group.trajectories}.values():
            yield prompt, prompt
    for trajectory in group.trajectories:
        prompt = len(trajectory.prompt.tokens)
        answer = sum(len(segment.tokens) for segment in trajectory.segments) - 1
        yield answer if packing == 'shared_prompt' else prompt + answer, prompt + answer


def _loss_tokens(group: TrajectoryGroup) -> int:
    segments = (segment for trajectory in group.trajectories for segment in trajectory.segments)
    return sum(len(segment.tokens) for segment in segments if segment.policy_version != NOT_GENERATED)
