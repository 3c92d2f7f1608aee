"""Leaves that are float32 in every copy of the weights: in the learner, the engines, servers and plans."""

from __future__ import annotations

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.aot.programs import describe_weights
from areal_jax.app.roles.serve import VersionLoader
from areal_jax.formats.hf_directory import load_hf
from areal_jax.learning import weights as trees
from areal_jax.learning.programs import describe_cast
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import FAMILIES
from areal_jax.models.weights import is_float32, leaf_dtype
from areal_jax.publication.manifest import by_path
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, find_transposed
from areal_jax.rollout.http.service import UpdateError, WeightsDirectory
from areal_jax.types import PublishedWeights
from tests.models import parity
from tests.publication.bits16 import open_channel

KEPT = ('log_rate', 'rate_bias')


@functools.cache
def model():
    with tempfile.TemporaryDirectory() as folder:
        parity.write(directory := pathlib.Path(folder), 'qwen3_5')
        config, params = load_hf(directory)
    return Decoder(config), params


@functools.cache
def backend(dtype='bfloat16'):
    return JaxDecodeBackend(
        model()[0], slots=2, context_tokens=32, block_tokens=16, prefill_buckets=(32,), decode_steps=2,
        batch_buckets=(2,), filtered=False, dtype=dtype,
    )  # fmt: skip


def dtypes(tree):
    """(of the leaves that stay float32, of all others)."""
    leaves = by_path(tree)
    of = lambda stays: {str(leaf.dtype) for path, leaf in leaves.items() if is_float32(path) is stays}
    return of(True), of(False)


def test_which_leaves_they_are():
    paths = {path for family in FAMILIES.values() for path in (row.path for row in family.weights) if is_float32(path)}
    assert paths == {*(f'layers/*/delta/{name}' for name in KEPT), 'layers/*/mlp/correction'}
    assert [leaf_dtype(path, 'bfloat16') for path in ('layers/log_rate', 'layers/0/norm')] == ['float32', 'bfloat16']


def test_the_learner_s_copies():
    decoder, params = model()
    cast = trees.cast(params, 'bfloat16')
    assert dtypes(cast) == ({'float32'}, {'bfloat16'})
    assert cast['layers']['0']['delta']['log_rate'] is params['layers']['0']['delta']['log_rate']  # no copy
    assert dtypes(trees.cast(params, 'float32')) == ({'float32'}, {'float32'})
    assert dtypes(describe_cast(params, 'bfloat16')) == ({'float32'}, {'bfloat16'})
    exported = jax.eval_shape(functools.partial(trees.export_weights, decoder, 'bfloat16'), params, {})
    assert dtypes(exported) == ({'float32'}, {'bfloat16'})


def test_an_engine_takes_them_in_float32_alone():
    _, params = model()
    cast = trees.cast(params, 'bfloat16')
    assert dtypes(backend().prepare(cast).params)[0] == {'float32'}
    everything = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    said = r'weights have bfloat16 at layers/0/delta/log_rate, but this leaf is float32 in every copy of the weights'
    with pytest.raises(ValueError, match=said):
        backend().prepare(everything)
    with pytest.raises(ValueError, match="weights have float32 at embedding, but the backend was built with dtype='bf"):
        backend().prepare(params)


def test_leaves_that_an_engine_takes_transposed_are_found_beside_them():
    decoder, _ = model()
    assert find_transposed(decoder, 'bfloat16') == find_transposed(decoder, 'float32')


def test_a_plan_of_compilations_describes_them_so():
    assert dtypes(describe_weights(backend()).params) == ({'float32'}, {'bfloat16'})


def test_a_server_takes_versions_with_them(tmp_path):
    decoder, params = model()
    cast = jax.tree.map(np.asarray, trees.cast(params, 'bfloat16'))
    channel = open_channel(tmp_path, config=decoder.config)
    channel.transfer(0, cast)
    cast['final_norm'] = cast['final_norm'].copy()
    cast['final_norm'].view(np.uint16)[0] ^= 1
    published = channel.transfer(1, cast)
    assert published.size.record == 'delta'
    given = PublishedWeights(1, '', WeightsDirectory(published.handle))
    weights = VersionLoader(backend(), decoder, jax.devices()[0])(given)
    assert given.handle.digest == published.manifest_hash
    assert dtypes(weights.params) == ({'float32'}, {'bfloat16'})
    with pytest.raises(UpdateError, match='is in bfloat16, and this server decodes in float32'):
        VersionLoader(backend('float32'), decoder, jax.devices()[0])(given)
