"""A context of 16,384: memory with SmolLM2's shapes, and answers at its far end."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams
from tests.rollout.decode.long_context import CONTEXT, POSITIONS, SLOTS, STEPS

ROOT = pathlib.Path(__file__).parents[3]
SMALL = ModelConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=8, d_ff=32, rope_theta=1e5,
    context_tokens=CONTEXT,
)  # fmt: skip


@pytest.mark.slow
def test_8_slots_of_16384_run_below_10_gb():
    """Of memory: 6.04 GB of cache and 0.54 GB of weights, some of them a second time in the form of the programs."""
    done = subprocess.run(
        [sys.executable, '-m', 'tests.rollout.decode.long_context'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found['cache_bytes'] >= SLOTS * CONTEXT * 30 * 2 * 3 * 64 * 4
    assert found['cache_bytes'] < found['peak_bytes'] < 10e9, found
    assert found['tokens'] == SLOTS * STEPS * len(POSITIONS)
    assert found['unsound'] == 0
    assert found['last_positions'][-1] == CONTEXT - 1  # its token is the last that the context holds


def score(decoder, params, tokens, new):
    """Log-probs of the last `new` tokens by the learner's forward pass."""
    ones = np.ones((1, len(tokens)), np.int32)
    rows = {'tokens': tokens[None], 'positions': np.arange(len(tokens))[None], 'segment_ids': ones, 'parent_ids': ones}
    rows |= {'sources': np.arange(len(tokens) - new - 1, len(tokens) - 1)[None], 'targets': tokens[None, -new:]}
    return np.asarray(jax.jit(lambda params, rows: forward(decoder, params, rows, 1.0)[0])(params, rows))[0]


@pytest.mark.slow
def test_log_probs_at_the_far_end_equal_a_forward_pass():
    """Two answers whose contexts were prefilled in pieces: one ends with the context, the other half way."""
    decoder, new = Decoder(SMALL), 16
    params = decoder.init(seed=0, scale=2.0)
    backend = JaxDecodeBackend(
        decoder, slots=2, context_tokens=CONTEXT, block_tokens=64, prefill_buckets=(2048,), decode_steps=8,
        filtered=False, dtype='float32',
    )  # fmt: skip
    weights, state = backend.prepare(params), backend.initial_state()
    rows = []
    for number, length in enumerate((CONTEXT - new, CONTEXT // 2)):
        tokens = np.random.default_rng(number).integers(0, SMALL.vocab_size, length).astype(np.int32)
        blocks = range(number * CONTEXT // 64, (number + 1) * CONTEXT // 64)
        for start in range(0, length - 1, backend.largest_piece):
            piece = PrefillPiece(tokens[start : min(start + backend.largest_piece, length - 1)], start, blocks)
            state = backend.prefill(weights, state, [piece])
        request = GenerationRequest(number, 0, 0, tokens, SamplingParams(new, 1.0, 0, 1.0, ()))
        rows.append(DecodeRow(request, int(tokens[-1]), length - 1, length + new, blocks))
    sampled, logprobs = [], []
    for _ in range(new // 8):
        state, output = backend.generate(weights, state, rows, 8)
        assert output.valid.all()
        sampled.append(output.tokens)
        logprobs.append(output.logprobs)
        rows = [
            row._replace(token=int(last), position=row.position + 8)
            for row, last in zip(rows, output.tokens[-1], strict=True)
        ]
    for row, tokens, found in zip(rows, np.concatenate(sampled).T, np.concatenate(logprobs).T, strict=True):
        expected = score(decoder, params, np.concatenate([row.request.prompt_tokens, tokens]), new)
        # sums over 16,384 positions in float32, in another order: 4e-5 were seen
        np.testing.assert_allclose(found, expected, atol=6e-5)
