"""Shapes of random models, by the fields of the config."""

import numpy as np

from areal_jax.app.text_model import random_shape
from areal_jax.config import default_config
from areal_jax.models.decoder import Decoder

VOCABULARY = 11


def params_of(**fields):
    config = default_config()
    config.model.update(
        {'d_model': 8, 'n_layers': 1, 'n_heads': 2, 'n_kv_heads': 1, 'head_dim': 4, 'd_ff': 16, **fields}
    )
    return config, Decoder(random_shape(config, VOCABULARY)).init(seed=0)


def test_a_head_of_its_own_has_the_shape_of_the_embedding_and_other_numbers():
    _, tied = params_of()
    _, own = params_of(tie_embeddings=False)
    assert set(own) - set(tied) == {'head'}
    assert own['head'].shape == own['embedding'].shape == (VOCABULARY, 8)
    assert not np.array_equal(own['head'], own['embedding'])
    np.testing.assert_array_equal(own['embedding'], tied['embedding'])


def test_learned_positions_have_a_row_for_every_place_of_the_longest_sequence():
    config, params = params_of(positions='learned')
    assert params['positions'].shape == (config.rollout.context_tokens, 8)
    assert 'positions' not in params_of()[1]
