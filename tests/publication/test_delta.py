"""Deltas of leaves: bit for bit there and back, by the kernel and by numpy, and damage that is found."""

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.native import compiled_library
from areal_jax.publication.delta import (
    ChangeFinder,
    apply_changes,
    decode_changes,
    encode_changes,
)
from areal_jax.publication.manifest import host_manifest
from areal_jax.publication.versions import PublicationError, add_sums
from tests.native import needs_kernels

SIDES = [pytest.param(None, id='kernel'), pytest.param(False, id='numpy')]
PAYLOADS = np.array([0x7FC1, 0xFFC2, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x7FFF], np.uint16)  # NaN, inf, -0.0, ...


def bits(size, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 16, size, dtype=np.uint16)


def changed(base, share, seed=1):
    """A copy in which about this share of the elements has other bits; the first and the last among them."""
    rng = np.random.default_rng(seed)
    current, places = base.copy(), np.flatnonzero(rng.random(base.size) < share)
    if share and base.size:
        places = np.union1d(places, [0, base.size - 1])
    current[places] += rng.integers(1, 1 << 16, places.size, dtype=np.uint16)
    return current


def content(words, dtype='bfloat16'):
    return host_manifest({'leaf': words.view(jnp.dtype(dtype))})['leaf'].content


def make_part(base, current, native=None):
    found = ChangeFinder(base.size, native=native).find(base.copy(), current, 'bfloat16')
    return encode_changes(found.changes, base.size)


@pytest.mark.parametrize('native', SIDES)
@pytest.mark.parametrize('share', [0, 0.001, 0.03, 0.59, 0.7, 1])
@pytest.mark.parametrize('size', [0, 1, 255, 256, 257, 70_000])
def test_a_leaf_goes_there_and_back_with_its_digest(size, share, native):
    base = bits(size)
    current = changed(base, share)
    moved = base.copy()
    found = ChangeFinder(size, native=native).find(moved, current, 'bfloat16')
    np.testing.assert_array_equal(moved, current)
    part = encode_changes(found.changes, size)
    assert add_sums(content(base), found.sums) == content(current)
    assert (part == b'') == np.array_equal(base, current)
    words, changes = base.copy(), decode_changes(part, size)
    sums = apply_changes(words, changes, native=native)
    np.testing.assert_array_equal(words, current)
    assert add_sums(content(base), sums) == content(current)
    back = apply_changes(words, changes, back=True, native=native)
    np.testing.assert_array_equal(words, base)
    assert add_sums(content(current), back) == content(base)


@needs_kernels
@pytest.mark.parametrize('share', [0.004, 0.2, 1])
def test_kernel_and_numpy_find_the_same(share):
    assert compiled_library.is_available()
    base = bits(70_000)
    current = changed(base, share)
    kernel, numpy = (
        ChangeFinder(base.size, native=native).find(base.copy(), current, 'bfloat16') for native in (None, False)
    )
    for one, other in zip(vars(kernel.changes).values(), vars(numpy.changes).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (kernel.sums, kernel.unfinite) == (numpy.sums, numpy.unfinite)


@pytest.mark.parametrize('native', SIDES)
def test_bits_of_no_number_are_bits(native):
    base = np.tile(PAYLOADS, 64)
    current = np.roll(base, 3)
    words = base.copy()
    apply_changes(words, decode_changes(make_part(base, current, native), base.size), native=native)
    np.testing.assert_array_equal(words, current)


@pytest.mark.parametrize('native', SIDES)
@pytest.mark.parametrize(('dtype', 'unfinite'), [('bfloat16', 3), ('float16', 4), ('int16', 0)])
def test_new_values_that_are_no_numbers_are_counted(dtype, unfinite, native):
    """0x7F80 and 0x7FC0 are infinity and NaN of both floats, 0x7C00 of float16 alone, 0xFF80 of both again."""
    base = np.zeros(300, np.uint16)
    base[0] = 0x7F80  # stays
    current = base.copy()
    current[[10, 20, 290, 299]] = 0x7F80, 0x7FC0, 0x7C00, 0xFF80
    assert ChangeFinder(300, native=native).find(base, current, dtype).unfinite == unfinite


def test_a_part_by_hand():
    """Elements 2 and 260 of 300 change by +1 and -1: gaps 2 and 257 (escaped), codes 2 and 1."""
    base = np.full(300, 7, np.uint16)
    current = base.copy()
    current[2], current[260] = 8, 6
    changes = decode_changes(make_part(base, current), 300)
    assert (changes.gaps.tolist(), changes.large.tolist()) == ([2, 255], [257])
    assert (changes.low.tolist(), changes.high.tolist()) == ([2, 1], [0, 0])
    assert (changes.positions.tolist(), changes.differences.tolist()) == ([2, 260], [1, 0xFFFF])


@pytest.mark.parametrize('native', SIDES)
def test_positions_are_mapped_to_a_transpose(native):
    base = bits(35 * 600).reshape(35, 600)
    current = changed(base.reshape(-1), 0.05).reshape(35, 600)
    turned = np.ascontiguousarray(base.T)
    changes = decode_changes(make_part(base.reshape(-1), current.reshape(-1)), base.size)
    sums = apply_changes(turned.reshape(-1), changes, rows=35, native=native)
    np.testing.assert_array_equal(turned.T, current)
    assert add_sums(content(base.reshape(-1)), sums) == content(
        current.reshape(-1)
    )  # of the leaf, not of its transpose


def test_small_changes_take_few_bytes():
    """3% of the elements move by one step: 1.5 bytes a change and less is 0.045 bytes an element, of 2."""
    base = bits(200_000)
    places = np.flatnonzero(np.random.default_rng(2).random(base.size) < 0.03)
    current = base.copy()
    current[places] += np.where(places % 2, 1, 65535).astype(np.uint16)
    assert len(make_part(base, current)) < 0.045 * base.size


def test_a_finder_is_used_again_for_smaller_leaves():
    finder = ChangeFinder(1000)
    for size in (1000, 10, 500):
        base = bits(size, seed=size)
        current = changed(base, 0.5)
        found = finder.find(base.copy(), current, 'bfloat16')
        words = base.copy()
        apply_changes(words, decode_changes(encode_changes(found.changes, size), size))
        np.testing.assert_array_equal(words, current)


@pytest.mark.parametrize('share', [0.03, 0.8])
def test_every_cut_of_a_part_is_found(share):
    base = bits(3000)
    part = make_part(base, changed(base, share))
    for length in range(1, len(part)):
        with pytest.raises(PublicationError, match='3000 elements'):
            decode_changes(part[:length], 3000)


@pytest.mark.parametrize('native', SIDES)
def test_a_flipped_bit_is_refused_or_changes_the_digest(native):
    base = bits(3000)
    current = changed(base, 0.03)
    part = make_part(base, current)
    expected, silent = content(current), 0
    for place in range(len(part)):
        damaged = bytearray(part)
        damaged[place] ^= 1 << place % 8
        words = base.copy()
        try:
            sums = apply_changes(words, decode_changes(damaged, 3000), native=native)
        except PublicationError:
            continue
        same = np.array_equal(words, current)
        silent += not same and add_sums(content(base), sums) == expected
    assert silent == 0


def test_a_part_of_another_leaf_is_refused():
    base = bits(3000)
    part = make_part(base, changed(base, 0.03))
    with pytest.raises(PublicationError, match='positions outside of its leaf of 1000 elements'):
        decode_changes(part, 1000)
    with pytest.raises(PublicationError, match='the delta of a leaf of 3000 elements is damaged'):
        decode_changes(b'\0' * 20, 3000)


def test_a_stream_that_inflates_without_end_makes_no_memory():
    """1000 elements are asked for; the stream holds 64 MiB of zeros."""
    import struct
    import zlib

    bomb = zlib.compress(bytes(64 << 20), 9)
    part = struct.pack('<7I', 0b10, 1000, 0, len(bomb), 0, 1000, 1000) + bomb + bytes(2000)
    with pytest.raises(PublicationError, match='a stream that is not of 1000 bytes'):
        decode_changes(part, 1000)
