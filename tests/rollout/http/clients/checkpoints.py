"""Two checkpoints of one small model, for servers of others: python -m tests.rollout.http.clients.checkpoints DIR.

Writes DIR/v0 and DIR/v1: Hugging Face directories of equal shapes and different weights, without a tokenizer. The head
is the embedding, written twice as a run does for vLLM on a CPU (app/export/run_export.py, `separates_head`).
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np

from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.publication.export import write_hf_directory

# heads of 64, which vllm has kernels for
CONFIG = ModelConfig(
    vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=256, rope_theta=1e4,
    family='qwen3', qk_norm=True, context_tokens=2048,
)  # fmt: skip


def make_params(seed: int) -> Params:
    """Norms away from 1, and distributions far from uniform, so that other weights are told by every log-prob."""
    random = np.random.default_rng(seed)

    def leaf(like):
        if like.ndim == 2:
            return random.normal(0, 1.5 / np.sqrt(like.shape[0]), like.shape).astype(np.float32)
        return random.uniform(0.5, 1.5, like.shape).astype(np.float32)

    return jax.tree_util.tree_map(leaf, Decoder(CONFIG).abstract())


def write_checkpoints(directory: pathlib.Path) -> None:
    for version in (0, 1):
        write_hf_directory(directory / f'v{version}', plan_hf_files(make_params(version), CONFIG, separate_head=True))


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')
    write_checkpoints(pathlib.Path(sys.argv[1]))
