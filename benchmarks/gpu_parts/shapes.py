"""What is measured on a GPU and what it is measured against: model shapes, work, operations, bytes, peak rates.

No arrays: everything here is arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.learning.packed_rows import decoder_cost, visible_pairs
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.telemetry.devices import peak_flops
from benchmarks.workload import Workload

BFLOAT16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a device can do at most, by its data sheet."""

    bfloat16_flops: float  # dense matrix products, a second
    bytes_per_second: float  # of its memory


# Bytes a second of the memory, by the substring of a device kind that names the device, the longest first; SXM boards.
# https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306, https://www.nvidia.com/en-us/data-center/h200/
# and https://www.nvidia.com/en-us/data-center/a100/
BANDWIDTHS = {'H100 PCIe': 2.0e12, 'H100': 3.35e12, 'H200': 4.8e12, 'A100': 2.039e12}


def find_peak(device_kind: str) -> Peak | None:
    """The peak of a device of this kind ('NVIDIA H100 80GB HBM3'); None where a table has none."""
    flops = peak_flops(device_kind, 'bfloat16')
    bandwidth = next((value for name, value in BANDWIDTHS.items() if name in device_kind), None)
    return None if flops is None or bandwidth is None else Peak(flops, bandwidth)


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """A train step of one shape on one micro-batch of one row."""

    model: ModelConfig
    optimizer: str  # optimizer.name
    row_tokens: int
    workload: Workload

    @property
    def row_loss_tokens(self) -> int:
        """The answers' tokens, rounded up to a multiple of 64."""
        return -(-self.workload.answer_tokens // 64) * 64


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """Answers to one prompt, one in each slot."""

    model: ModelConfig
    slots: int
    context_tokens: int
    prompt_tokens: int
    new_tokens: int
    decode_steps: int  # of a dispatch
    prefill_tokens: int  # of a packed prefill


def qwen(d_model: int, n_layers: int, n_heads: int, d_ff: int, head_dim: int, context_tokens: int) -> ModelConfig:
    """The shape of a Qwen2 model with tied embeddings."""
    return ModelConfig(
        vocab_size=151_936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=2,
        head_dim=head_dim,
        d_ff=d_ff,
        rope_theta=1e6,
        rms_eps=1e-6,
        context_tokens=context_tokens,
        family='qwen2',
        qkv_bias=True,
    )


# Qwen/Qwen2.5-0.5B, -1.5B and -3B, config.json
SHAPES = {
    '0.5b': qwen(896, 24, 14, 4864, 64, 32768),
    '1.5b': qwen(1536, 28, 12, 8960, 128, 32768),
    '3b': qwen(2048, 36, 16, 11008, 128, 32768),
}
TINY = dataclasses.replace(qwen(64, 2, 4, 96, 64, 256), vocab_size=512)


def train_case(name: str, tiny: bool) -> TrainCase:
    """12 answers of lognormal length to 3 prompts of 256 tokens, which fill one row of 16,384 tokens.

    3b has Adam's moments in 8 bits, so that weights, gradients, state and activations fit 80 GB.
    """
    optimizer = 'adamw8bit' if name == '3b' else 'adamw'
    if tiny:
        workload = Workload(2, 4, 8, 22, 0.75, TINY.vocab_size)
        return TrainCase(TINY, optimizer, 256, workload)
    return TrainCase(SHAPES[name], optimizer, 16_384, Workload(3, 4, 256, 1104, 0.75, 151_936))


def decode_case(slots: int, context_tokens: int, tiny: bool) -> DecodeCase:
    """1,024 new tokens after 512 of the prompt in a context of 2,048; the last 256 or so of a longer context.

    With 64 slots a step reads 0.6 times as many bytes of keys and values as of weights, or ten times as many (16,384).
    """
    if tiny:
        long = context_tokens > 2048
        return DecodeCase(TINY, max(2, slots // 64), 192 if long else 64, 172 if long else 16, 16, 4, 32)
    new_tokens = 1024 if context_tokens == 2048 else 256
    prompt_tokens = 512 if context_tokens == 2048 else context_tokens - new_tokens - 16
    return DecodeCase(SHAPES['1.5b'], slots, context_tokens, prompt_tokens, new_tokens, 16, 2048)


def train_flops(model: ModelConfig, lengths: Sequence[int], loss_tokens: int) -> float:
    """Operations of one forward and backward pass over segments of these lengths, without what is computed twice.

    6 N for every token, N the parameters of the layers; 6 V d for every loss token, which alone meet the head; and
    12 H D for every layer and visible pair of tokens (learning/packed_rows.py).
    """
    cost = decoder_cost(model)
    head = 6.0 * model.vocab_size * model.d_model
    pairs = sum(visible_pairs(length) for length in lengths)
    return (cost.per_token - head) * sum(lengths) + head * loss_tokens + cost.per_pair * pairs


def attention_flops(model: ModelConfig, lengths: Sequence[int]) -> float:
    """The part of `train_flops` that is attention."""
    return decoder_cost(model).per_pair * sum(visible_pairs(length) for length in lengths)


def activation_bytes(model: ModelConfig, remat: str, tokens: int) -> int:
    """What the layers keep for the backward pass in bfloat16, for each policy of learner.remat."""
    heads, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    values = model.d_model  # the input of a layer
    if remat == 'attention':
        values += heads
    if remat in ('dots', 'none'):
        # query, key, value, attention and its projection, gate, up, down
        values += 2 * heads + 2 * keys + 2 * model.d_model + 2 * model.d_ff
    if remat == 'none':
        values += 3 * model.d_model + 2 * model.d_ff + heads + keys  # norms, residuals, the MLP's product, rotations
    return values * BFLOAT16_BYTES * tokens * model.n_layers


def state_bytes(model: ModelConfig, optimizer: str) -> int:
    """Float32 weights and gradients, a working copy and its gradients in bfloat16, and the optimizer's moments."""
    moments = {'adamw': 8, 'adamw8bit': 2}[optimizer]
    return Decoder(model).parameter_count() * (4 + 4 + 2 + 2 + moments)


def choose_remat(case: TrainCase, limit_bytes: int | None) -> str:
    """The policy that computes least twice of those that fit, with a tenth of the memory left for all else."""
    if limit_bytes is None:
        return 'dots'
    room = 0.9 * limit_bytes - state_bytes(case.model, case.optimizer)
    for remat in ('dots', 'attention'):
        if activation_bytes(case.model, remat, case.row_tokens) <= room:
            return remat
    return 'full'


def key_bytes(model: ModelConfig) -> int:
    """Keys and values of one token in bfloat16."""
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * BFLOAT16_BYTES


def decode_bytes(case: DecodeCase, positions: float) -> float:
    """What one step must read: every weight once, and `positions` keys and values of every slot, in bfloat16."""
    weights = Decoder(case.model).parameter_count() * BFLOAT16_BYTES
    return weights + case.slots * positions * key_bytes(case.model)


def mean_positions(case: DecodeCase) -> float:
    """Positions that a step attends to, on average over the new tokens: its own included."""
    return case.prompt_tokens + (case.new_tokens - 1) / 2
