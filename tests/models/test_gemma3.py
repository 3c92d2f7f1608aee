"""Gemma 3 270M, real weights in 4 to 8 bits: ids of sentencepiece, log-probs of transformers, an export read back."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.formats.gguf import load_gguf
from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import token_logprobs
from areal_jax.publication.export import export_hf
from areal_jax.text.file_tokenizers import GgufTokenizer
from tests.models import record_gemma3
from tests.tasks.texts import TEXTS

pytestmark = pytest.mark.slow
RECORDED = json.loads(record_gemma3.OUTPUT.read_text())


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    pytest.importorskip(record_gemma3.PACKAGE)
    return load_gguf(record_gemma3.assemble(tmp_path_factory.mktemp('gemma3')))


def test_texts_have_the_ids_of_sentencepiece(model):
    tokenizer = GgufTokenizer(model[2])
    for text, ids in zip(TEXTS, RECORDED['ids'], strict=True):
        tokens = tokenizer.encode(text)
        assert tokens.tolist() == ids
        assert tokenizer.decode(tokens) == text
        assert tokenizer.encode_prompt(text).tolist() == [record_gemma3.BOS, *ids]


def test_log_probs_are_those_of_transformers_behind_the_window_too(model):
    config, params, _ = model
    decoder = Decoder(config)

    @jax.jit
    def run(params, tokens):
        positions, ones = jnp.arange(len(tokens), dtype=jnp.int32), jnp.ones(len(tokens), jnp.int32)

        def attend(q, k, v, entry, window):
            scale = q.shape[-1] ** -0.5
            return packed_attention(q, k, v, ones, ones, scale=scale, positions=positions, window=window), entry

        hidden, _ = decoder.hidden(params, tokens, positions, attend)
        return token_logprobs(hidden[:-1], decoder.head(params), tokens[1:], 1.0)[0]

    for text, length in zip(RECORDED['texts'], record_gemma3.LENGTHS, strict=True):
        tokens = np.array(text['tokens'], np.int32)
        assert len(tokens) == length
        error = np.abs(np.asarray(run(params, tokens)) - text['logprobs'])
        assert error.max() <= 3e-4
        assert error.mean() <= 2e-5


def test_an_export_reads_back_bit_for_bit(model, tmp_path):
    config, params, _ = model
    export_hf(tmp_path / 'export', params, config, dtype='float32')
    found, loaded = load_hf(tmp_path / 'export')
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
