from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.app.build import build_learner, build_model
from areal_jax.config import TrackedConfig, default_config
from areal_jax.models.decoder import Decoder
from areal_jax.models.hf_config import HfError
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.export import export_hf
from tests.tasks import hf_directory


def test_a_hugging_face_directory_becomes_a_sharded_learner(tmp_path):
    path = tmp_path / 'model'
    shape = ModelConfig(
        vocab_size=512, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2,
        head_dim=8, d_ff=24, rope_theta=1e4, family='qwen3', qk_norm=True,
    )  # fmt: skip
    params = Decoder(shape).init(3)
    export_hf(path, params, shape)
    hf_directory.write(path)  # the tokenizer's files beside
    config = default_config()
    config.model.source, config.model.path = 'hf', str(path)
    config.mesh.fsdp, config.mesh.tensor, config.mesh.strategy = 4, 2, 'fsdp_tensor'
    config.learner.rows_per_microbatch, config.learner.layers = 4, 'stacked'
    tracked = TrackedConfig(config)
    model = build_model(tracked)
    query = model.params['layers']['0']['attention']['query']['weight']
    assert query.addressable_shards[0].data.shape == (4, 16)  # [16, 32] over fsdp=4 and tensor=2
    published = build_learner(tracked, model).publish(0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(published), jax.device_get(params))


def test_a_directory_without_a_model_is_named(tmp_path):
    config = default_config()
    config.model.source, config.model.path = 'hf', str(tmp_path)
    with pytest.raises(HfError, match=str(tmp_path)):
        build_model(TrackedConfig(config))
