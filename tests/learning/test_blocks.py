from __future__ import annotations

import itertools

import pytest

from areal_jax.config.declarations import choices
from areal_jax.config.fields import ConfigError
from areal_jax.config.training import OptimizerSection
from areal_jax.learning.blockwise import ORDERS, BlockOrder, cut_blocks, cyclic, shuffled


def make_settings(**changes):
    seed = changes.pop('seed', 0)
    return BlockOrder(OptimizerSection(**({'blocks': 3, 'block_updates': 2} | changes)), seed)


def make_sizes(layers, outside=(('embedding', 10), ('final_norm', 1))):
    """`layers` has the bytes of each layer, of which two leaves share."""
    inside = {f'layers/{i}/{name}': size // 2 for i, size in enumerate(layers) for name in ('mlp_norm', 'up/weight')}
    return dict(outside) | inside


def layers_of(paths):
    return sorted({int(path.split('/')[1]) for path in paths if path.startswith('layers/')})


def test_every_leaf_is_in_one_block_and_layers_are_consecutive():
    sizes = make_sizes([4] * 7)
    blocks = cut_blocks(sizes, 4)
    assert sorted(itertools.chain(*blocks)) == sorted(sizes)
    assert blocks[0] == {'embedding', 'final_norm'}
    # 7 layers in 3 parts: shares of 28 / 3 = 9.3 bytes, the nearest ends are 8 and 20 bytes (16 is 2.7 off, 20 is 1.3)
    assert [layers_of(paths) for paths in blocks[1:]] == [[0, 1], [2, 3, 4], [5, 6]]


def test_blocks_have_about_equal_bytes():
    # 8 + 2 * 6 = 20 bytes in two parts: 8 + 2 = 10 on the left
    assert [layers_of(paths) for paths in cut_blocks(make_sizes([8, 2, 2, 2, 2, 2, 2]), 3)[1:]] == [
        [0, 1],
        [2, 3, 4, 5, 6],
    ]
    # one layer outweighs all others: no block is empty all the same
    assert [layers_of(paths) for paths in cut_blocks(make_sizes([2, 2, 100]), 4)[1:]] == [[0], [1], [2]]
    assert [layers_of(paths) for paths in cut_blocks(make_sizes([100, 2, 2]), 4)[1:]] == [[0], [1], [2]]


def test_more_blocks_than_layers_are_refused():
    with pytest.raises(
        ConfigError, match=r'blocks=4 needs 3 layers .* the model has 2; use optimizer.blocks=3 or less'
    ):
        cut_blocks(make_sizes([4, 4]), 4)


def test_an_update_trains_the_block_of_its_turn():
    # 3 blocks of 2 updates: a round is 6 updates
    settings = make_settings()
    assert [settings.block_of(version) for version in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert [version for version in range(1, 8) if settings.ends_turn(version)] == [2, 4, 6]


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('blocks', [2, 3, 5])
def test_a_round_trains_every_block_once_and_no_block_twice_in_a_row(order, blocks):
    settings = make_settings(blocks=blocks, block_order=order, block_updates=1, seed=7)
    trained = [settings.block_of(version) for version in range(40 * blocks)]
    assert all(sorted(trained[i : i + blocks]) == list(range(blocks)) for i in range(0, len(trained), blocks))
    assert all(a != b for a, b in itertools.pairwise(trained))


def test_the_shuffled_order_is_a_function_of_seed_and_round():
    rounds = [tuple(shuffled(4, 3, number)) for number in range(12)]
    assert rounds == [tuple(shuffled(4, 3, number)) for number in range(12)]
    assert len(set(rounds)) > 6
    assert rounds != [tuple(shuffled(4, 4, number)) for number in range(12)]
    assert cyclic(4, 3, 5) == [0, 1, 2, 3]


def test_the_declared_orders_are_those_that_exist():
    assert set(choices('optimizer.block_order')) == set(ORDERS)


def test_a_value_that_a_field_may_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.block_order='random' is not known"):
        make_settings(block_order='random')
