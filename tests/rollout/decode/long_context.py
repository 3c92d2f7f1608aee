"""A context of 16,384 with 8 slots, SmolLM2's shapes with random weights, float32; prints what it did as JSON.

    python -m tests.rollout.decode.long_context

Decoding 8 answers of 16,000 tokens would take an hour, so the rows jump: the host names the position of each row, and
dispatches are made where programs behave differently, up to the last position of the context. Every block is written
before, by the fill of the cache, so that the memory is that of the end of a run. One row gets a prefill at the far end,
the largest program of its kind.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams

SMOLLM2 = ModelConfig(
    vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536, rope_theta=1e5,
    context_tokens=16384,
)  # fmt: skip
SLOTS, CONTEXT, BLOCK, PROMPT, STEPS = 8, 16384, 64, 64, 4
POSITIONS = (PROMPT - 1, 1000, 4095, 8192, 12345, CONTEXT - 1 - STEPS)  # of the first token that a dispatch reads


def main() -> None:
    decoder = Decoder(SMOLLM2)
    backend = JaxDecodeBackend(
        decoder, slots=SLOTS, context_tokens=CONTEXT, block_tokens=BLOCK, prefill_buckets=(512,),
        batch_buckets=(SLOTS,), decode_steps=STEPS, filtered=False, dtype='float32',
    )  # fmt: skip
    weights = backend.prepare(decoder.init(seed=0))
    programs = backend.warm_up(weights)
    state = backend.initial_state()
    prompt = np.random.default_rng(0).integers(8, SMOLLM2.vocab_size, PROMPT).astype(np.int32)
    blocks = [range(row * CONTEXT // BLOCK, (row + 1) * CONTEXT // BLOCK) for row in range(SLOTS)]
    state = backend.prefill(weights, state, [PrefillPiece(prompt[:-1], 0, table) for table in blocks])
    tail = np.random.default_rng(1).integers(8, SMOLLM2.vocab_size, 512).astype(np.int32)
    state = backend.prefill(weights, state, [PrefillPiece(tail, CONTEXT - STEPS - 1 - len(tail), blocks[0])])
    sampling = SamplingParams(CONTEXT - PROMPT, 1.0, 0, 1.0, ())
    tokens = unsound = 0
    ends = []
    for position in POSITIONS:
        rows = [
            DecodeRow(GenerationRequest(row, 0, 0, prompt, sampling), int(prompt[row]), position, CONTEXT, table)
            for row, table in enumerate(blocks)
        ]
        state, output = backend.generate(weights, state, rows, STEPS)
        tokens += int(output.valid.sum())
        unsound += len(output.unsound())
        ends.append(position + STEPS)
    status = pathlib.Path('/proc/self/status').read_text().splitlines()
    [peak] = [int(line.split()[1]) * 1024 for line in status if line.startswith('VmHWM')]
    print(
        json.dumps({
            'peak_bytes': peak, 'cache_bytes': backend.state_bytes, 'programs': programs, 'tokens': tokens,
            'unsound': unsound, 'last_positions': ends,
        })
    )  # fmt: skip


if __name__ == '__main__':
    main()
