"""Corrections of sigmoid routers are a part of every version: digest, delta, file."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.formats.hf_directory import load_hf
from areal_jax.learning import weights as trees
from areal_jax.models.weights import leaf_at
from areal_jax.publication.files_channel import DeviceChannel, FilesChannel
from tests.models.family_examples import CONFIGS, LATENT, draw
from tests.publication.bits16 import Carrier, over
from tests.publication.tiny import assert_bit_equal

LEAF = 'layers/2/mlp/correction'
of_each_family = pytest.mark.parametrize('name', ['glm4_moe', *LATENT])


def versions(name):
    """Two that differ in one number of a correction, by its last bit."""
    first = jax.tree.map(np.asarray, trees.cast(draw(CONFIGS[name]), 'bfloat16'))
    second = jax.tree.map(np.copy, first)
    leaf_at(second, LEAF).view(np.uint32)[3] ^= 1
    return first, second


@of_each_family
def test_a_version_that_differs_in_the_last_bit_of_a_correction_alone_has_another_digest_and_a_delta(name):
    first, second = versions(name)
    channel = over(Carrier())
    published = [channel.transfer(number, params) for number, params in enumerate((first, second))]
    assert published[0].manifest_hash != published[1].manifest_hash
    assert published[1].manifest_hash == DeviceChannel(verify=False).transfer(1, second).manifest_hash
    assert published[1].size.record == 'delta'
    assert published[1].size.changed == 1 / sum(leaf.size for leaf in jax.tree.leaves(first))
    assert_bit_equal(channel.receive(published[1]), second)


@of_each_family
def test_files_hold_corrections_in_float32(tmp_path, name):
    _, second = versions(name)
    published = FilesChannel(tmp_path, CONFIGS[name], verify=True).transfer(1, second)
    config, params = load_hf(published.handle)
    assert config == CONFIGS[name]
    assert leaf_at(params, LEAF).dtype == np.float32
    np.testing.assert_array_equal(leaf_at(params, LEAF), leaf_at(second, LEAF))
