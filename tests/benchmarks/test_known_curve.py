"""The reference of the known curve: what it samples, what it trains on, and how seeds are summed up."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import known_curve
from benchmarks.known_curve import LENGTH, ReferenceDecoder


def test_at_the_weights_that_sampled_every_ratio_is_1():
    decoder = ReferenceDecoder()

    @jax.jit
    def one_update():
        weights = decoder.init(jax.random.key(0), jnp.zeros((1, 2 * LENGTH), jnp.int32))
        batch = known_curve.sample(decoder, weights, jax.random.key(1))
        return batch, decoder.apply(weights, batch.tokens), known_curve.weighted_loss(weights, decoder, batch)

    batch, logits, loss = one_update()
    scored = jax.nn.log_softmax(logits[:, LENGTH - 1 : -1])
    scored = np.take_along_axis(scored, batch.tokens[:, LENGTH:, None], axis=2)[..., 0]
    np.testing.assert_allclose(scored, batch.logprobs, atol=1e-5)
    assert abs(loss) < 1e-6  # every ratio is 1, and the advantages of a prompt add up to 0
    right = np.asarray(batch.tokens[:, LENGTH:] == batch.tokens[:, LENGTH - 1 :: -1][:, :LENGTH])
    np.testing.assert_allclose(batch.rewards, right.mean(1))
    assert 0.4 < batch.rewards.mean() < 0.6


def test_a_scale_reaches_embedding_and_positions_alone():
    one, three = (
        ReferenceDecoder(scale).init(jax.random.key(0), jnp.zeros((1, 2 * LENGTH), jnp.int32))['params']
        for scale in (1.0, 3.0)
    )
    for name in one:
        factor = 3.0 if name.startswith('Embed') else 1.0
        jax.tree.map(lambda a, b, by=factor: np.testing.assert_allclose(b, by * a, rtol=1e-6), one[name], three[name])


def test_seeds_are_ordered_by_their_last_updates():
    curves = [{'lag': lag, 'seed': 0, 'right': [0.5, last]} for lag, last in ((0, 1.0), (30, 0.5), (0, 0.7), (0, 0.9))]
    assert known_curve.summarise(curves) == [
        {'lag': 0, 'seeds': 3, 'last': [0.7, 0.9, 1.0], 'median': 0.9},
        {'lag': 30, 'seeds': 1, 'last': [0.5], 'median': 0.5},
    ]
