"""The real SmolLM2-135M-Instruct against published values, a float64 numpy decoder and transformers with torch."""

from __future__ import annotations

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.logprobs import token_logprobs
from tests.models import record_reference, reference

RECORDED = json.loads(record_reference.OUTPUT.read_text())
ROW = 48  # tokens of a padded row: one compiled program serves every text


@pytest.fixture(scope='module')
def path():
    return find_package_file(record_reference.PACKAGE_FILE)


@pytest.fixture(scope='module')
def model(path):
    """(config, tokenizer fields, outputs): `outputs(tokens)` gives logits [T, V], log-probs and entropies [T - 1]."""
    config, params, fields = load_gguf(path)
    decoder = Decoder(config)
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def run(params, row, segment):
        attend = lambda q, k, v, entry, _: (packed_attention(q, k, v, segment, segment, scale=64**-0.5), entry)
        hidden, _ = decoder.hidden(params, row, jnp.arange(ROW), attend)
        return decoder.logits(params, hidden), *token_logprobs(hidden[:-1], decoder.head(params), row[1:], 1.0)

    def outputs(tokens):
        row, segment = np.zeros((2, ROW), np.int32)
        row[: len(tokens)], segment[: len(tokens)] = tokens, 1
        logits, logprobs, entropies = (np.asarray(x) for x in run(params, row, segment))
        return logits[: len(tokens)], logprobs[: len(tokens) - 1], entropies[: len(tokens) - 1]

    return config, fields, outputs


def test_shape_and_tokenizer_fields(model):
    config, fields, _ = model
    assert config == ModelConfig(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536,
        rope_theta=100000.0, rms_eps=float(np.float32(1e-5)), tie_embeddings=True, context_tokens=8192,
    )  # fmt: skip
    # 49152 * 576 + 30 * (2 * 576 + 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) + 576
    assert Decoder(config).parameter_count() == 134_515_008
    assert (len(fields['tokens']), len(fields['merges']), fields['pre']) == (49152, 48900, 'smollm')
    assert (fields['bos_id'], fields['eos_id'], fields['tokens'][2]) == (1, 2, '<|im_end|>')
    assert 'You are a helpful AI assistant named SmolLM' in fields['chat_template']


@pytest.mark.parametrize('entry', RECORDED['texts'], ids=['prose', 'code', 'chat'])
def test_logprobs_equal_those_of_transformers(model, path, entry):
    # largest difference seen: 2.3e-5 in log-probs, 4.4e-5 in entropies
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RECORDED['sha256']
    logits, logprobs, entropies = model[2](entry['tokens'])
    np.testing.assert_allclose(logprobs, entry['logprobs'], atol=2e-4)
    np.testing.assert_allclose(entropies, entry['entropies'], atol=4e-4)
    assert logits[:-1].argmax(-1).tolist() == entry['most_likely']


@pytest.mark.slow  # 30 layers in numpy; the log-probs of transformers on the same file are compared above
def test_logits_equal_a_float64_decoder_on_the_file_itself(model, path):
    # reads the file with the gguf package and turns rotary pairs as they lie there, so no row is permuted; largest
    # difference seen: 1.5e-4 in logits from -31 to 39
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name.removesuffix('.weight'): tensor for tensor in reader.tensors}

    def weight(name):
        tensor = tensors['token_embd' if name == 'output' else name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    tokens = RECORDED['texts'][0]['tokens']
    expected = reference.forward(
        weight, np.array(tokens), n_layers=30, n_heads=9, n_kv_heads=3, theta=1e5, eps=1e-5, interleaved=True
    )
    logits, logprobs, _ = model[2](tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    chosen = reference.log_softmax(expected)[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(logprobs, chosen, atol=2e-4)
