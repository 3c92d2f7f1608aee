"""A decoder of a few hundred weights, every leaf filled with numbers of its own."""

import jax
import numpy as np

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig

CONFIG = ModelConfig(
    vocab_size=11, d_model=6, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=10, rope_theta=10000.0
)
ABSTRACT = Decoder(CONFIG).abstract()


def host_params(seed=0, config=CONFIG):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), Decoder(config).abstract())


def assert_bit_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
