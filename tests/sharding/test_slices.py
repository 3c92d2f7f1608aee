from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.sharding.placement import first_tokens, from_slices, slice_places, to_slices


def test_each_device_holds_a_cheap_and_a_dear_half():
    row = jnp.arange(12)[None]
    assert to_slices(row, 2).reshape(2, 2, 3).tolist() == [[[0, 1, 2], [9, 10, 11]], [[3, 4, 5], [6, 7, 8]]]


@pytest.mark.parametrize('context', [1, 2, 3, 4])
def test_slice_order_and_back(context):
    row = np.random.default_rng(0).normal(size=(3, 48, 2))
    sliced = to_slices(jnp.asarray(row), context)
    np.testing.assert_array_equal(from_slices(sliced, context), row.astype(np.float32))
    index = np.arange(48)[None].repeat(3, 0)
    found = np.take_along_axis(np.asarray(sliced), np.asarray(slice_places(index, 48, context))[..., None], axis=1)
    np.testing.assert_array_equal(found, row.astype(np.float32))


@pytest.mark.parametrize('context', [1, 2, 4])
def test_causal_pairs_are_shared_evenly(context):
    """Token t reads t + 1 tokens: T (T + 1) / 2 pairs in all, and the halves of a device begin where it is said."""
    tokens = 64
    devices = np.asarray(to_slices(jnp.arange(tokens)[None], context)).reshape(context, 2, -1)
    assert {int((device + 1).sum()) for device in devices} == {tokens * (tokens + 1) // 2 // context}
    for device, halves in enumerate(devices):
        assert first_tokens(device, tokens, context) == tuple(halves[:, 0])
