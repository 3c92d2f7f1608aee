"""The families of 2026 in the learner: packed rows, meshes and adapters change nothing of what a model computes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Lora, attach_adapters, is_router_state, merge_adapters
from areal_jax.sharding.rules import path_name
from tests.learning.test_meshes import GROUPS, make_learner, update_once
from tests.models.family_examples import CONFIGS, EACH, HYBRIDS, LATENT, NAMES, draw

PROMPT, ANSWERS = 12, (9, 7)  # tokens; windows have 5
TOKENS = np.random.default_rng(0).integers(0, 300, PROMPT + sum(ANSWERS)).astype(np.int32)
ROW = 40  # places


def shared_row(tokens=TOKENS):
    """A prompt with two answers and padding, in one row; every answer's tokens are predicted.

    With a row of padding, so that one program computes these rows and those of `rows_apart`.
    """
    row = {name: np.zeros((2, ROW), np.int32) for name in ('tokens', 'positions', 'segment_ids', 'parent_ids')}
    row['tokens'][0, : len(tokens)] = tokens
    sources, start = [], 0
    for number, length in enumerate((PROMPT, *ANSWERS), start=1):
        own = slice(start, start + length)
        first = 0 if number == 1 else PROMPT
        row['positions'][0, own] = np.arange(first, first + length)
        row['segment_ids'][0, own], row['parent_ids'][0, own] = number, 1
        if number > 1:
            sources += [PROMPT - 1, *range(start, start + length - 1)]
        start += length
    return {**row, 'sources': with_padding(sources), 'targets': with_padding(tokens[PROMPT:])}


def with_padding(values):
    """A row of values, and one of zeros."""
    values = np.asarray(values)
    return np.stack([values, np.zeros_like(values)]).astype(np.float32 if values.dtype.kind == 'f' else np.int32)


def rows_apart():
    """Each answer behind its own copy of the prompt, a row each, with predictions of padding."""
    rows = []
    for answer in np.split(TOKENS[PROMPT:], [ANSWERS[0]]):
        tokens, length = np.concatenate([TOKENS[:PROMPT], answer]), PROMPT + len(answer)
        row = {name: np.zeros(ROW, np.int32) for name in ('tokens', 'positions', 'segment_ids', 'parent_ids')}
        row['tokens'][:length], row['positions'][:length] = tokens, np.arange(length)
        row['segment_ids'][:length] = row['parent_ids'][:length] = 1
        more = sum(ANSWERS) - len(answer)
        row['sources'] = np.pad(np.arange(PROMPT - 1, length - 1), (0, more)).astype(np.int32)
        row['targets'] = np.pad(answer, (0, more)).astype(np.int32)
        rows.append(row)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def by_answer(values):
    """Values of the predictions of `shared_row` as `rows_apart` has them."""
    return np.stack([np.pad(own, (0, len(values) - len(own))) for own in np.split(values, [ANSWERS[0]])])


def of_answers(rows):
    """The inverse of `by_answer`."""
    return np.concatenate([rows[0, : ANSWERS[0]], rows[1, : ANSWERS[1]]])


@functools.cache
def compiled(config, attention, lora=None):
    decoder = Decoder(config, lora=lora)

    def loss(params, rows, weights):
        logprobs, entropy = forward(decoder, params, rows, 0.8, attention=attention)
        return jnp.sum(weights * (logprobs + 0.1 * entropy)), logprobs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize('attention', [pytest.param('dense', marks=pytest.mark.slow), 'blocked'])
@pytest.mark.parametrize('name', EACH)
def test_answers_that_share_their_prompt_are_as_apart(name, attention):
    config, rng = CONFIGS[name], np.random.default_rng(1)
    params, weights = draw(config), rng.normal(size=sum(ANSWERS)).astype(np.float32)
    run = compiled(config, attention)
    (_, packed), gradient = run(params, shared_row(), with_padding(weights))
    (_, apart), expected = run(params, rows_apart(), by_answer(weights))
    np.testing.assert_allclose(packed[0], of_answers(apart), atol=3e-5)
    # delta nets divide by the length of a head's output, which may be small; see the test in float64
    allowed = 5e-5 if config.delta else 1e-5
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        other = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        if is_router_state(path_name(path)):
            assert not np.any(other)
            continue
        error = np.linalg.norm(leaf - other) / np.linalg.norm(other)
        assert error <= allowed, (jax.tree_util.keystr(path), error)
        assert np.linalg.norm(other) > 0


@pytest.mark.parametrize(
    'names', [('qwen3_5', 'deepseek_v3'), pytest.param((*HYBRIDS, *LATENT), marks=pytest.mark.slow)], ids=len
)
def test_in_float64_answers_that_share_their_prompt_are_as_apart_to_the_last_digits(names):
    command = [sys.executable, '-m', 'tests.models.exact_side', '--packed', *names]
    found = subprocess.run(
        command, env=os.environ | {'JAX_ENABLE_X64': '1'}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    errors = json.loads(found.stdout)
    assert errors.keys() == set(names)
    for name, (of_logprobs, of_gradient) in errors.items():
        assert of_logprobs <= 1e-12, (name, of_logprobs)
        assert of_gradient <= 1e-10, (name, of_gradient)


@pytest.mark.parametrize('name', EACH)
def test_a_token_of_a_neighbour_changes_no_bit(name):
    config = CONFIGS[name]
    params, run = draw(config), compiled(config, 'blocked')
    ones = with_padding(np.ones(sum(ANSWERS), np.float32))
    before = np.asarray(run(params, shared_row(), ones)[0][1])[0]
    changed = TOKENS.copy()
    changed[PROMPT + 1] = (changed[PROMPT + 1] + 1) % 300  # of the first answer
    after = np.asarray(run(params, shared_row(changed), ones)[0][1])[0]
    np.testing.assert_array_equal(after[ANSWERS[0] :], before[ANSWERS[0] :])
    assert np.abs(after[1 : ANSWERS[0]] - before[1 : ANSWERS[0]]).min() > 0
    assert after[0] == before[0]


_MESHES = {'fsdp': 2, 'context': 2, 'tensor': 2, 'strategy': 'fsdp_tensor'}, {'expert': 2, 'tensor': 2, 'data': 2}


_HYBRID_MESH = {'data': 2, 'fsdp': 2, 'tensor': 2, 'strategy': 'fsdp_tensor'}


@pytest.mark.parametrize(
    ('name', 'mesh', 'layers'),
    [
        pytest.param(
            'gpt_oss', {**_MESHES[1], 'strategy': 'tensor'}, 'list', id='gpt_oss, experts', marks=pytest.mark.slow
        ),
        *(
            pytest.param(name, _MESHES[0], 'stacked', id=name, marks=pytest.mark.slow)
            for name in NAMES
            if name not in HYBRIDS
        ),
        pytest.param(
            'qwen3_5_moe',
            {**_MESHES[1], 'strategy': 'tensor'},
            'stacked',
            id='qwen3_5_moe, experts',
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(name, _HYBRID_MESH, 'stacked', id=name, marks=[] if name == 'qwen3_5' else [pytest.mark.slow])
            for name in HYBRIDS
        ),
    ],
)
def test_a_mesh_of_eight_changes_nothing(name, mesh, layers):
    config = CONFIGS[name]
    params = draw(config)
    make = functools.partial(make_learner, config=config, params=params)
    (expected, weights), (metrics, found) = (
        update_once(make(**changes), GROUPS) for changes in ({}, {**mesh, 'layers': layers})
    )
    for metric in ('loss/value', 'update/grad_norm', 'mismatch/mean_abs'):
        rtol = 5e-5 if config.delta else 1e-5
        np.testing.assert_allclose(metrics[metric], expected[metric], rtol=rtol, err_msg=metric)
    for path, after in jax.tree_util.tree_leaves_with_path(weights):
        before, other = (functools.reduce(lambda tree, key: tree[key.key], path, t) for t in (params, found))
        step = np.linalg.norm(np.asarray(after) - np.asarray(before))
        allowed = 6e-5 if config.delta else 2e-5
        assert np.linalg.norm(np.asarray(after) - np.asarray(other)) <= allowed * step + 1e-8, path
        assert (step == 0) == is_router_state(path_name(path)), path


_DEVICES = {
    'fsdp=8': {'fsdp': 8},
    'tensor=2 x data=4': {'tensor': 2, 'data': 4, 'strategy': 'tensor'},
    'expert=2 x fsdp=4': {'expert': 2, 'fsdp': 4},
    'fsdp=2 x expert=2 x tensor=2': {'fsdp': 2, 'expert': 2, 'tensor': 2, 'strategy': 'fsdp_tensor'},
}


@functools.cache
def learner_logprobs(name, layers, mesh=None):
    config = CONFIGS[name]
    learner = make_learner(config=config, params=draw(config), layers=layers, **_DEVICES.get(mesh, {}))
    learner.publish(0)  # tells it the version of its weights
    return np.concatenate([learner.score(0, TOKENS[:PROMPT], order(TOKENS[PROMPT:])) for order in (np.array, np.flip)])


@pytest.mark.parametrize(
    ('name', 'mesh', 'layers'),
    [
        pytest.param(
            name,
            mesh,
            layers,
            id=f'{name} {mesh} {layers}',
            marks=[] if (name, mesh, layers) == ('deepseek_v3', 'fsdp=8', 'list') else [pytest.mark.slow],
        )
        for name in ('glm4_moe', *LATENT)
        for layers in ('list', 'stacked')
        for mesh in _DEVICES
    ],
)
def test_log_probs_over_a_mesh_of_eight_are_as_on_one_device(name, mesh, layers):
    expected, found = learner_logprobs(name, 'list'), learner_logprobs(name, layers, mesh)
    assert np.linalg.norm(found - expected) <= 3e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize('name', EACH)
def test_adapters_compute_what_the_merged_weights_do(name):
    config = CONFIGS[name]
    of_latents = ('latent', 'query_latent') if config.query_latent else ('latent',)
    lora = Lora(2, 4.0, ('query', 'output', *(of_latents if config.latent else ('value',))))
    params = draw(config)
    rng = np.random.default_rng(5)
    abstract = Decoder(config, lora=lora).abstract()
    noise = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), abstract)
    adapted = attach_adapters(params, noise)
    ones = with_padding(np.ones(sum(ANSWERS), np.float32))
    (_, found), gradient = compiled(config, 'dense', lora)(adapted, shared_row(), ones)
    run = compiled(config, 'blocked')  # as above; no attention may make a difference
    (_, merged), _ = run(merge_adapters(adapted, lora), shared_row(), ones)
    (_, plain), _ = run(params, shared_row(), ones)
    np.testing.assert_allclose(found[0], merged[0], atol=3e-4 if config.delta else 3e-5)
    assert np.abs(np.asarray(found[0]) - np.asarray(plain[0])).max() > 0.01
    for layer in gradient['layers'].values():
        assert np.linalg.norm(layer.get('attention', layer.get('delta'))['query']['lora_a']) > 0
