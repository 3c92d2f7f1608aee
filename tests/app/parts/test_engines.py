"""Engines that read records: the weights are those that whole versions give, in the form that the backend takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.parts.engines import bind_fetch, place_of
from areal_jax.config import TrackedConfig
from areal_jax.models.decoder import Decoder
from areal_jax.publication.files_channel import FilesChannel
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, find_transposed
from tests.app.small import small_config
from tests.publication.bits16 import make_versions, open_channel
from tests.publication.tiny import CONFIG, assert_bit_equal

MATRICES = ('attention/query', 'attention/key', 'attention/value', 'attention/output', 'mlp/gate', 'mlp/up', 'mlp/down')


TWO_HEADS = dataclasses.replace(CONFIG, n_kv_heads=2, vocab_size=12)  # over two devices


def build_backend(devices, dtype='bfloat16', config=CONFIG):
    return JaxDecodeBackend(
        Decoder(config), slots=2, context_tokens=16, block_tokens=8, prefill_buckets=(8,), decode_steps=2,
        filtered=False, dtype=dtype, devices=devices, attention='gather',
    )  # fmt: skip


@pytest.mark.parametrize('count', [1, 2])
def test_what_engines_fetch_is_what_they_prepare_of_whole_versions(tmp_path, count):
    devices = tuple(jax.devices()[2 : 2 + count])
    backend = build_backend(devices, config=TWO_HEADS)
    engines = TrackedConfig(small_config(cluster__engines=f'1 x tensor={count}'))
    place, versions = place_of(engines, Decoder(TWO_HEADS), devices), make_versions(4, config=TWO_HEADS)
    channel = open_channel(tmp_path / 'deltas', config=TWO_HEADS)
    whole = FilesChannel(tmp_path / 'whole', TWO_HEADS, verify=True)
    fetch, fetch_whole, before = bind_fetch(channel, place, backend), bind_fetch(whole, place, backend), None
    for version, params in enumerate(versions):
        found = fetch(channel.transfer(version, params))
        expected = fetch_whole(whole.transfer(version, params))
        assert_bit_equal(found.params, expected.params)
        assert backend.prepare(found) is found
        assert {leaf.sharding for leaf in jax.tree.leaves(found.params)} == {
            leaf.sharding for leaf in jax.tree.leaves(expected.params)
        }
        before = found  # in use while the next one is fetched
    assert before is not None


def test_engines_on_the_same_devices_share_a_version(tmp_path):
    devices = jax.devices()[:1]
    channel = open_channel(tmp_path)
    fetch = bind_fetch(channel, devices[0], build_backend(devices))
    published = channel.transfer(0, make_versions(1)[0])
    one = fetch(published)
    assert fetch(published) is one


@pytest.mark.parametrize('form', ['columns', 'native_columns', 'rows'])
def test_the_matrices_of_layers_are_what_is_transposed(form):
    found = find_transposed(Decoder(CONFIG, tokens=form), 'bfloat16')
    layers = range(CONFIG.n_layers)
    expected = {f'layers/{layer}/{name}/weight' for layer in layers for name in MATRICES}
    assert found == (set() if form == 'rows' else expected)


@pytest.mark.parametrize(('form', 'dtype'), [('native_columns', 'float32'), ('int8_rows', 'float32')])
def test_panels_and_quantized_matrices_are_prepared_as_a_whole(form, dtype):
    assert find_transposed(Decoder(CONFIG, tokens=form), dtype) is None


def test_where_nothing_can_be_mapped_versions_are_prepared(tmp_path, monkeypatch):
    devices = jax.devices()[:1]
    backend, channel = build_backend(devices), open_channel(tmp_path)
    monkeypatch.setattr(backend, 'find_transposed', lambda: None)
    params = make_versions(1)[0]
    found = bind_fetch(channel, devices[0], backend)(channel.transfer(0, params))
    assert_bit_equal(found.params, backend.prepare(jax.tree.map(jnp.asarray, params)).params)
    assert np.asarray(found.params['final_norm']).dtype == jnp.bfloat16
