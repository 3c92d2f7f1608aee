"""Every family against transformers on tiny checkpoints: equal logits, alone and packed, and equal greedy text."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import run_rows
from areal_jax.publication.export import export_hf
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams
from tests.models import parity
from tests.rollout.decode.examples import Decoding

LENGTH = 48  # tokens of a row: both texts and one of padding
TOLERANCE = 1e-5  # of the range of the logits
# the two forms run the same layers; one checkpoint has every option that the loop over them can see
DECODED = [
    pytest.param(
        name,
        marks=[]
        if name
        in (
            'qwen3_moe_mixed',
            'gpt_oss',
            'qwen3_5',
            'glm4_moe',
            'deepseek_v3',
        )
        else [pytest.mark.slow],
    )
    for name in parity.ALL
]
STACKED = [
    pytest.param(
        name,
        'stacked',
        marks=[] if name in ('qwen3_5', 'glm4_moe') else [pytest.mark.slow],
    )
    for name in parity.ALL
]


@functools.cache
def recorded():
    with np.load(parity.RECORDED) as file:
        return dict(file)


@functools.cache
def model(name, layers):
    with tempfile.TemporaryDirectory() as folder:
        parity.write(directory := parity.pathlib.Path(folder), name)
        config, params = load_hf(directory, layers=layers)
    return Decoder(config, layers=layers), params


@functools.cache
def row_logits(name, layers):
    """(tokens, positions, segment ids) int32 [LENGTH] -> logits [LENGTH, V], compiled once."""
    decoder, params = model(name, layers)

    @jax.jit
    def run(tokens, positions, segments):
        def attend(q, k, v, entry, window, **sinks):
            scale = q.shape[-1] ** -0.5
            out = packed_attention(
                q, k, v, segments, segments, scale=scale, positions=positions, window=window, **sinks
            )
            return out, entry

        def recur(inputs, entry):
            row = inputs.map_tokens(lambda x: x[None])
            return run_rows(row, segments[None], segments[None])[0], entry

        return decoder.logits(params, decoder.hidden(params, tokens, positions, attend, recur=recur)[0])

    return run


def logits_of(name, layers, texts):
    """Logits of texts in one row, a segment each."""
    row = np.zeros((3, LENGTH), np.int32)
    ends = np.cumsum([len(text) for text in texts])
    for number, (text, end) in enumerate(zip(texts, ends, strict=True)):
        row[:, end - len(text) : end] = text, np.arange(len(text)), np.full(len(text), number + 1)
    return np.split(np.asarray(row_logits(name, layers)(*row))[: ends[-1]], ends[:-1])


def assert_close(actual, expected, name=''):
    assert actual.shape == expected.shape
    if name in parity.HYBRIDS:  # the norm of a head divides by numbers that may be small; in float64 all digits agree
        assert np.abs(actual - expected).mean() <= 2e-5
        assert np.abs(actual - expected).max() <= 2e-3
        return
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


@pytest.mark.parametrize(('name', 'layers'), [*((name, 'list') for name in parity.ALL), *STACKED])
def test_logits_are_those_of_transformers(name, layers):
    texts = parity.texts(name)
    expected = [recorded()[f'{name}/{number}/logits'] for number in range(len(texts))]
    for text, one in zip(texts, expected, strict=True):
        assert_close(logits_of(name, layers, [text])[0], one, name)
    for actual, one in zip(logits_of(name, layers, texts), expected, strict=True):
        assert_close(actual, one, name)


def greedy(name, texts):
    """What the decode engine continues every text with."""
    decoder, params = model(name, 'list')
    backend = JaxDecodeBackend(
        decoder, slots=2, context_tokens=LENGTH, block_tokens=16, prefill_buckets=(LENGTH,),
        decode_steps=parity.NEW_TOKENS, batch_buckets=(2,), filtered=False, dtype='float32',
    )  # fmt: skip
    sampling = SamplingParams(parity.NEW_TOKENS, temperature=0.0, top_k=0, top_p=1.0, stop_tokens=())
    decoding = Decoding(backend, params)
    decoding.start({number: GenerationRequest(0, number, 0, text, sampling) for number, text in enumerate(texts)})
    return decoding.decode(parity.NEW_TOKENS).tokens.T  # [texts, NEW_TOKENS]


@pytest.mark.parametrize(
    'names',
    [
        ('gemma3_capped', 'gpt_oss', 'qwen3_next', 'deepseek_v3_yarn'),
        pytest.param((*parity.EXACT, *parity.HYBRIDS), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_in_float64_logits_are_those_of_transformers_to_the_last_digits(names):
    # bars of float32 would hide a wrong norm or scale in models as small as these
    command = [sys.executable, '-m', 'tests.models.exact_side', *names]
    found = subprocess.run(
        command, env=os.environ | {'JAX_ENABLE_X64': '1'}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    errors = json.loads(found.stdout)
    assert errors.keys() == set(names)
    assert {name for name, routes in errors.items() if 'foreign' in routes} == {*parity.SIGMOID} & set(names)
    assert max(error for routes in errors.values() for error in routes.values()) <= 1e-11, errors


# two programs to compile for each: the quick tests take what decoding could get wrong
@pytest.mark.parametrize('name', DECODED)
def test_greedy_continuations_are_those_of_transformers(name):
    expected = [recorded()[f'{name}/{number}/greedy'] for number in range(2)]
    np.testing.assert_array_equal(greedy(name, parity.texts(name)), expected)


def test_the_checkpoints_exercise_the_options():
    configs = {}
    for name in parity.CONFIGS:
        configs[name] = model(name, 'list')[0].config
    llama3 = configs['llama3']
    assert llama3.rope_scaling.original_context_tokens < min(parity.LENGTHS)
    frequencies = llama3.rope_theta ** (-np.arange(0, llama3.head_dim, 2) / llama3.head_dim)
    turns = llama3.rope_scaling.original_context_tokens * frequencies / (2 * np.pi)
    assert {*np.digitize(turns, [1, 2.5])} == {0, 1, 2}  # some stretched, some in part, some left alone
    windows = {name: [config.window(layer) for layer in range(2)] for name, config in configs.items()}
    assert windows['qwen2_window'] == [None, 7]
    assert windows['qwen3_window'] == [None, 5]
    assert windows['mistral'] == [7, 7]
    assert windows['qwen2'] == windows['mistral_full'] == [None] * 2
    kinds = {name: configs[name].kinds for name in ('olmo3', 'smollm3', 'gemma3', 'gemma3_capped', 'gpt_oss')}
    assert [kind.window for kind in kinds['olmo3']] == [7, 7, 7, None]
    assert [kind.rotates for kind in kinds['smollm3']] == [kind.window is None for kind in kinds['smollm3']]
    assert [kind.window for kind in kinds['gemma3']] == [7] * 5 + [None, 7]
    assert [kind.window for kind in kinds['gemma3_capped']] == [7, 7, None, 7]
    assert [kind.window for kind in kinds['gpt_oss']] == [7, None, 7, None]
    assert {kind.rope.theta for kind in kinds['gemma3'] if kind.window} == {1e4}
    experts = {name: config.experts for name, config in configs.items() if config.experts}
    assert {name: config.dense_layers for name, config in experts.items() if config.dense_layers} == {
        'qwen3_moe_mixed': (0,),
        'glm4_moe': (0,),
        'deepseek_v3': (0,),
        'deepseek_v3_plain': (0,),
        'glm4_moe_lite': (0,),
    }
    assert {config.normalised for config in experts.values()} == {True, False}
    assert {config.tie_embeddings for config in configs.values()} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize('name', parity.ALL)
def test_an_export_is_what_transformers_runs(tmp_path, name):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from tests.models import record_parity

    decoder, params = model(name, 'list')
    export_hf(tmp_path / 'export', params, decoder.config, file_bytes=20_000, dtype='float32')
    config, found = load_hf(tmp_path / 'export')
    assert config == decoder.config
    jax.tree.map(np.testing.assert_array_equal, found, params)
    scores, following = record_parity.run(tmp_path / 'export', parity.texts(name))
    for number, (one, tokens) in enumerate(zip(scores, following, strict=True)):
        assert_close(logits_of(name, 'list', [parity.texts(name)[number]])[0], one, name)
        np.testing.assert_array_equal(one, recorded()[f'{name}/{number}/logits'])
        np.testing.assert_array_equal(tokens, recorded()[f'{name}/{number}/greedy'])
    # in bfloat16 both libraries read the same values back
    export_hf(tmp_path / 'half', params, decoder.config, dtype='bfloat16')
    loaded = record_parity.load(tmp_path / 'half').model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(loaded, np.asarray(params['embedding'].astype(jnp.bfloat16).astype(jnp.float32)))
