import concurrent.futures
import gc
import time

import jax
import numpy as np

from areal_jax.rollout.decode.jax_backend import share_prepared
from areal_jax.types import PublishedWeights
from tests.rollout.decode.examples import backend, build, weights


def test_a_version_is_received_and_prepared_once_while_somebody_holds_it():
    received, prepared = [], []

    def receive(published):
        received.append(published.version)
        time.sleep(0.05)  # the second lane comes while the first is at it
        return weights(published.version)

    def prepare(params):
        prepared.append(params)
        return backend().prepare(params)

    fetch = share_prepared(receive, prepare)
    published = [PublishedWeights(version, str(version), None) for version in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as lanes:
        first, second = lanes.map(fetch, [published[0]] * 2)
    assert first is second
    newer = fetch(published[1])
    assert fetch(published[0]) is first  # pinned for an evaluation, say
    assert received == [0, 1]
    assert len(prepared) == 2
    for leaf, expected in zip(jax.tree.leaves(newer), jax.tree.leaves(backend().prepare(weights(1))), strict=True):
        np.testing.assert_array_equal(leaf, expected)

    del first, second
    gc.collect()
    fetch(published[0])
    assert received == [0, 1, 0]  # nothing is kept that nobody uses


def test_other_weights_of_the_same_version_are_not_mistaken_for_it():
    # a run that was resumed from an older checkpoint publishes a version again
    fetch = share_prepared(lambda published: weights(published.handle), backend().prepare)
    first = fetch(PublishedWeights(3, 'a', 0))
    second = fetch(PublishedWeights(3, 'b', 1))
    assert not np.array_equal(*(np.asarray(one.params['embedding']) for one in (first, second)))


def test_prepared_weights_are_prepared():
    # the engine of an evaluation beside training prepares what its device has
    prepared = backend().prepare(weights())
    assert backend().prepare(prepared) is prepared
    assert build(slots=2, batch_buckets=(2,)).prepare(prepared) is prepared


def test_prepared_weights_share_what_keeps_its_form():
    given = weights()
    prepared = backend().prepare(given).params
    assert prepared['final_norm'].unsafe_buffer_pointer() == given['final_norm'].unsafe_buffer_pointer()
