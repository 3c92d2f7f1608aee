"""Shapes of random models, by the fields of the config."""

import numpy as np

from areal_jax.app.model.text_model import random_shape
from areal_jax.config import default_config
from areal_jax.models.decoder import Decoder

VOCABULARY = 11


def params_of(**fields):
    config = default_config()
    config.model.update(
        {'d_model': 8, 'n_layers': 1, 'n_heads': 2, 'n_kv_heads': 1, 'head_dim': 4, 'd_ff': 16, **fields}
    )
    return config, Decoder(random_shape(config, VOCABULARY)).init(seed=0)


def test_a_plain_decoder_has_positions_and_a_head_of_its_own_and_neither_gate_nor_final_norm():
    config, params = params_of(family='plain')
    _, llama = params_of()
    assert set(params) == {'embedding', 'positions', 'layers', 'head'}
    assert set(params['layers']['0']['mlp']) == {'up', 'down'}
    assert params['positions'].shape == (config.rollout.context_tokens, 8)
    assert params['head'].shape == params['embedding'].shape == (VOCABULARY, 8)
    assert not np.array_equal(params['head'], params['embedding'])
    np.testing.assert_array_equal(params['embedding'], llama['embedding'])
    _, symbols = params_of(family='plain', outputs='symbols')
    assert symbols['embedding'].shape == (VOCABULARY, 8)
    assert symbols['head'].shape == (2, 8)  # a and b
    # what writes to the residual stream is drawn as any other matrix, elsewhere divided by sqrt(2 n_layers)
    for path in (('attention', 'output'), ('mlp', 'down')):
        own, scaled = (tree['layers']['0'][path[0]][path[1]]['weight'] for tree in (params, llama))
        np.testing.assert_allclose(own, scaled * np.sqrt(2), rtol=1e-6)
