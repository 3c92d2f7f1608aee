"""A learner that trains a small decoder in blocks, for the tests of this folder and of others."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from areal_jax.config.training import OptimizerSection
from areal_jax.learning.blockwise import BlockLearner, BlockOrder
from areal_jax.learning.learner import SpmdLearner
from areal_jax.sharding.rules import make_mesh, path_name
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import learner_settings, make_learner, make_optimizer, random_groups, tiny_decoder

DECODER = tiny_decoder(n_layers=3)
PARAMS = DECODER.init(seed=2, scale=2.0)
GROUPS = random_groups(5, 5)  # policy versions 0..2
FIRST_GROUPS = [  # the same, all of policy version 0: for the first updates of a run
    TrajectoryGroup(
        g.draw,
        tuple(
            dataclasses.replace(
                t, segments=tuple(dataclasses.replace(s, policy_version=min(s.policy_version, 0)) for s in t.segments)
            )
            for t in g.trajectories
        ),
    )
    for g in GROUPS
]
_SHAPE = {'row_tokens': 40, 'row_loss_tokens': 24}
_BLOCKS = ('blocks', 'block_order', 'block_updates', 'block_state', 'seed')


def make_blocks(**changes: object) -> BlockOrder:
    seed = changes.pop('seed', 0)
    return BlockOrder(OptimizerSection(**({'blocks': 3} | changes)), seed)


def make_block_learner(
    *, mesh=None, decoder=DECODER, params=PARAMS, optimizer='adamw', clip_norm=1.0, ahead=False, **changes
):
    blocks = make_blocks(**{name: changes.pop(name) for name in _BLOCKS if name in changes})
    return BlockLearner(
        decoder, params, mesh or make_mesh(),
        blocks=blocks, optimizer=make_optimizer(optimizer, clip_norm=clip_norm), learning_rate=0.05,
        settings=learner_settings(**(_SHAPE | changes)), compile_ahead=ahead,
    )  # fmt: skip


def make_whole_learner(*, optimizer='adamw', clip_norm=1.0, **changes):
    optimizer = make_optimizer(optimizer, clip_norm=clip_norm)
    return make_learner(decoder=DECODER, params=PARAMS, optimizer=optimizer, learning_rate=0.05, **changes)


def leaves_of(tree) -> dict[str, np.ndarray]:
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def weights_of(learner: SpmdLearner) -> dict[str, np.ndarray]:
    return {path: leaf.copy() for path, leaf in leaves_of(learner.save()['params']).items()}


def assert_bit_equal(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)
