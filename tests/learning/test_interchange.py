"""Memory that is used again, and never while somebody can read it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.weights import HostCopies

WEIGHTS = {'a': jnp.arange(6.0).reshape(2, 3), 'b': [jnp.ones(6), jnp.zeros((4, 4))]}


def places(tree):
    return {leaf.__array_interface__['data'][0] for leaf in jax.tree.leaves(tree)}


def test_a_copy_is_equal_and_apart():
    copy = HostCopies().copy(WEIGHTS)
    for found, given in zip(jax.tree.leaves(copy), jax.tree.leaves(WEIGHTS), strict=True):
        np.testing.assert_array_equal(found, given)
        assert (found.dtype, found.shape) == (np.float32, given.shape)
        assert found.__array_interface__['data'][0] != given.unsafe_buffer_pointer()


def test_copies_that_live_at_once_are_apart_and_the_memory_of_dead_ones_is_used_again():
    copies = HostCopies()
    first, second = copies.copy(WEIGHTS), copies.copy(WEIGHTS)
    before = places(first)
    assert before.isdisjoint(places(second))
    del first
    assert places(copies.copy(WEIGHTS)) == before


@pytest.mark.parametrize(
    'part',
    [
        lambda leaf: leaf[1:],
        lambda leaf: leaf.reshape(-1)[::2][1:],
        lambda leaf: memoryview(leaf[0]),
        lambda leaf: np.asarray(leaf).T,
        jnp.asarray,
        lambda leaf: np.frombuffer(leaf, np.uint8),
    ],
    ids=['rows', 'slice of slice', 'memoryview', 'transposed', 'jax', 'bytes'],
)
def test_the_memory_of_a_part_that_lives_is_not_used_again(part):
    """jax may copy the part, or read it where it is."""
    gc.freeze()  # what other tests hold is not searched
    copies = HostCopies()
    copy = copies.copy({'a': WEIGHTS['a']})
    before, kept = places(copy), part(copy['a'])
    seen = np.array(kept)
    del copy
    gc.collect()
    again = copies.copy({'a': WEIGHTS['a'] + 100})
    np.testing.assert_array_equal(np.array(kept), seen)
    del kept, again
    gc.collect()
    alive = [copies.copy({'a': WEIGHTS['a']}) for _ in range(2)]
    assert before <= set().union(*map(places, alive))


def test_what_was_copied_can_still_be_donated():
    """While a view of it lives, the next update would copy it first."""
    give = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros(1000)
    place = array.unsafe_buffer_pointer()
    copies = HostCopies()
    copied = copies.copy(array)
    assert give(array).unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(copied, 0)
