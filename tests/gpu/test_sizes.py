"""What a run is refused by: the memory that jax has on the device, and sizes that the device bears out."""

import jax
import pytest

from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts import sizes
from areal_jax.app.parts.engines import build_backend
from areal_jax.config import TrackedConfig
from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from tests.app.small import small_config

pytestmark = pytest.mark.gpu


def test_the_limit_is_what_jax_may_use_of_the_device(device, on_gpu):
    limit = sizes.device_memory(device)
    assert (limit is not None) == on_gpu
    needed = {'model__d_model': 65536, 'model__n_layers': 200}
    where = f'of {device.device_kind}' if on_gpu else 'of this machine'
    with pytest.raises(ConfigError, match=where):
        sizes.require_room(small_config(**needed))
    if on_gpu:
        assert 2**30 < limit <= device.memory_stats()['bytes_limit']


def test_the_cache_takes_as_many_bytes_as_were_counted(device, on_gpu):
    # heads of 128: the kernels of a GPU store narrower ones with padding
    slots = {
        'rollout__slots': 512,
        'rollout__context_tokens': 1024,
        'rollout__block_tokens': 64,
        'model__head_dim': 128,
    }
    config = TrackedConfig(small_config(**slots))
    counted = sizes.measure(config, read_shape(config), build.build_allocation(config)).engines['KV cache']
    backend = build_backend(config, Decoder(read_shape(config)), (device,))
    before = (device.memory_stats() or {}).get('bytes_in_use', 0)
    state = jax.block_until_ready(backend.initial_state())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == counted
    if on_gpu:
        assert device.memory_stats()['bytes_in_use'] - before == pytest.approx(counted, rel=0.05)
