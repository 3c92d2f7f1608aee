"""The digest of weights: equal on host and device, and different for different weights."""

import hashlib
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.native import compiled_library as library
from areal_jax.publication import manifest
from areal_jax.publication.manifest import (
    decode_manifest,
    device_manifest,
    digest_leaf,
    encode_manifest,
    finite_host_manifest,
    finite_manifest,
    host_manifest,
    manifest_hash,
    require_equal,
    sum_content,
    weights_sha256,
)
from areal_jax.publication.shard_plan import Shard
from areal_jax.publication.versions import PublicationError


@pytest.fixture(params=['kernels', 'numpy and jax'])
def kernels(request, monkeypatch):
    """With the library of kernels, and without it."""
    if request.param != 'kernels':
        monkeypatch.setattr(manifest, 'sum_words', lambda *args, **kwargs: None)
    elif not library.is_available():
        pytest.skip('this machine has no C++ compiler')


def test_two_words_by_hand(kernels):
    # words of int32 [-1, 2]: 4294967295 and 2, sum 4294967297 = 1 mod 2^32.
    # mixed, with G = 0x9E3779B9 = 2654435769: words[0] + 0 G = 4294967295, words[1] + 1 G = 2654435771;
    # each through MurmurHash3's finalizer in Python's unbounded integers
    expected = (_murmur(4294967295) + _murmur(2654435771)) % 2**32
    leaf = host_manifest({'a': np.array([-1, 2], np.int32)})['a']
    assert leaf.content == (1, expected)
    assert (leaf.shape, leaf.dtype) == ((2,), 'int32')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'int32', 'uint32', 'int8', 'bool'])
@pytest.mark.parametrize('shape', [(), (7,), (3, 4), (2, 3, 5), (0, 3)])
def test_host_and_device_agree(shape, dtype):
    # random bytes: every bit pattern, NaN and subnormals too
    values = np.random.default_rng(0).integers(-128, 127, shape).astype(dtype)
    params = {'a': values, 'b': {'c': values}}
    _require_one_digest(params)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'int32', 'bool'])
@pytest.mark.parametrize('wrong', [(), (np.nan,), (np.inf, -np.inf, np.nan)])
def test_host_and_device_agree_on_what_is_not_finite(dtype, wrong, kernels):
    values = np.ones((3, 5), dtype)
    if dtype not in ('int32', 'bool'):
        values.reshape(-1)[1 : 1 + len(wrong)] = wrong
    said = []
    for find, params in ((finite_manifest, {'a': jax.device_put(values)}), (finite_host_manifest, {'a': values})):
        try:
            said.append(find(params, 7))
        except PublicationError as error:
            said.append(str(error))
    assert said[0] == said[1]
    assert isinstance(said[0], str) == (bool(wrong) and dtype not in ('int32', 'bool'))


def test_host_and_device_agree_beyond_one_block_and_on_any_bits():
    words = np.random.default_rng(0).integers(0, 2**32, 3 * 2**20 + 5, dtype=np.uint32)
    _require_one_digest({'a': words.view(np.float32)})  # NaNs with payload and subnormals among them


def _require_one_digest(params):
    """By the kernels where there are some, by numpy, and by a program of jax."""
    found = [host_manifest(params), device_manifest(jax.device_put(params))]
    with mock.patch.object(manifest, 'sum_words', return_value=None):
        found += [host_manifest(params), device_manifest(jax.device_put(params))]
    assert found == found[:1] * 4


def test_a_sharded_leaf_has_the_digest_of_the_whole():
    # 8 devices, each with one row: positions count in the whole leaf, not in the shard
    mesh = jax.make_mesh((8,), ('x',))
    value = np.arange(24, dtype=np.float32).reshape(8, 3)
    sharded = jax.device_put(value, jax.NamedSharding(mesh, jax.P('x')))
    assert device_manifest({'a': sharded}) == host_manifest({'a': value})


@pytest.mark.parametrize('spec', [('x', 'y'), ('y', 'x'), (('x', 'y'),), (None, 'y'), ()])
def test_shards_are_digested_where_they_are(spec):
    # every device sums its own shards; a program over several devices could meet one of the learner on another thread
    mesh = jax.make_mesh((2, 4), ('x', 'y'))
    value = np.random.default_rng(0).integers(0, 2**32, (8, 24), dtype=np.uint32).view(np.float32)
    sharded = jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))
    devices = set()
    program = manifest.shard_sums
    record = lambda shard, *place: (devices.add(len(shard.devices())), program(shard, *place))[1]
    with mock.patch.object(manifest, 'shard_sums', record):
        assert device_manifest({'a': sharded, 'b': sharded}) == host_manifest({'a': value, 'b': value})
    assert devices == {1}


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize('box', [None, ((1, 3), (0, 5), (0, 4)), ((0, 3), (2, 4), (1, 3)), ((0, 3), (0, 5), (1, 4))])
def test_values_are_copied_to_their_places_as_they_are_digested(box, dtype, kernels):
    leaf = np.random.default_rng(0).integers(-128, 127, (3, 5, 4)).astype(dtype)
    shard = Shard('a', box or tuple((0, size) for size in leaf.shape), leaf.shape)
    values, expected = np.ascontiguousarray(leaf[shard.slices]), np.zeros_like(leaf)
    expected[shard.slices] = values
    whole = np.zeros(leaf.size, f'u{leaf.itemsize}')
    digest = digest_leaf(values, shard.name if box else '', whole)
    assert digest == digest_leaf(values, shard.name if box else '')
    assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize('start', [0, 1, 3, 4])
def test_words_at_any_address_have_the_sums_of_their_leaf(start, kernels):
    words = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32)
    memory = bytearray(start) + words.tobytes()
    assert sum_content(np.frombuffer(memory, np.uint32, offset=start)) == digest_leaf(words).content


def test_a_transposed_view_is_digested_in_its_own_order():
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert host_manifest({'a': value.T}) == host_manifest({'a': np.ascontiguousarray(value.T)})
    assert host_manifest({'a': value.T}) == device_manifest({'a': jnp.asarray(value).T})


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 99), st.integers(0, 31))
def test_any_flipped_bit_changes_both_sums(place, bit):
    words = np.arange(1, 101, dtype=np.uint32)
    flipped = words.copy()
    flipped[place] ^= np.uint32(1) << np.uint32(bit)
    before, after = (host_manifest({'a': w.view(np.float32)})['a'].content for w in (words, flipped))
    assert before[0] != after[0]
    assert before[1] != after[1]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 99), st.integers(0, 99))
def test_swapped_elements_keep_the_first_sum_and_change_the_second(one, other):
    # x and -x differ in the top bit alone: weights w_i (i or any multiple) would not see them swapped
    values = np.where(np.arange(100) % 2, 1.0, -1.0).astype(np.float32)
    swapped = values.copy()
    swapped[[one, other]] = values[[other, one]]
    before, after = (host_manifest({'a': v})['a'].content for v in (values, swapped))
    assert before[0] == after[0]
    assert (before[1] == after[1]) == (values[one] == values[other])


def test_the_hash_knows_names_shapes_dtypes_and_contents_but_not_the_order_of_keys():
    zeros = np.zeros(6, np.float32)
    hashes = [
        manifest_hash(host_manifest(params))
        for params in (
            {'a': zeros},
            {'b': zeros},
            {'a': zeros.reshape(2, 3)},
            {'a': zeros.view(np.int32)},
            {'a': zeros + 1},
            {'a': zeros, 'b': zeros},
        )
    ]
    assert len(set(hashes)) == len(hashes)
    ones = zeros + 1
    assert manifest_hash(host_manifest({'a': zeros, 'b': ones})) == manifest_hash(
        host_manifest({'b': ones, 'a': zeros})
    )
    assert manifest_hash(host_manifest({'a': zeros, 'b': ones})) != manifest_hash(
        host_manifest({'a': ones, 'b': zeros})
    )


def test_a_manifest_survives_json():
    manifest = host_manifest({'a': {'b': np.ones((2, 3), ml_dtypes.bfloat16)}})
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_first_leaf_that_differs_is_named():
    sent = host_manifest({'a': np.ones(2, np.float32), 'b': np.ones(2, np.float32)})
    require_equal(sent, dict(sent), 7)
    with pytest.raises(PublicationError, match=r"version 7: leaf 'b' .*received nothing"):
        require_equal(sent, {'a': sent['a']}, 7)
    with pytest.raises(PublicationError, match=r"leaf 'a' .*sent nothing"):
        require_equal({'b': sent['b']}, sent, 7)


def test_wide_elements_are_refused_by_name():
    with pytest.raises(PublicationError, match="leaf 'a/b' has dtype float64"):
        host_manifest({'a': {'b': np.zeros(2)}})


def test_weights_sha256_is_that_of_the_bytes_in_path_order():
    a, b = np.arange(3, dtype=np.float32), np.arange(4, dtype=np.float32).reshape(2, 2)
    expected = hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
    assert weights_sha256({'y': b, 'x': {'z': a}}) == expected
    assert weights_sha256({'x': {'z': jnp.asarray(a)}, 'y': jnp.asarray(b)}) == expected
    assert weights_sha256({'y': b.T, 'x': {'z': a}}) != expected


def _murmur(word):
    word ^= word >> 16
    word = word * 0x85EBCA6B % 2**32
    word ^= word >> 13
    word = word * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)
