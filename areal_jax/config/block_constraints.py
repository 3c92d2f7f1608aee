"""Rules that join the fields of training in blocks with others; see constraints.py."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.cluster import parse_learner


def find_block_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What updates that train one block of the leaves do not take; the fix is always to train all leaves."""
    if c.optimizer.blocks == 1:
        return
    hosts = parse_learner(c.cluster.learner).hosts
    for path, value, fix, fits, why in (
        ('lora.rank', c.lora.rank, 0, not c.lora.rank, 'adapters are the leaves that are trained then, in all layers'),
        (
            *('learner.layers', c.learner.layers, 'list', c.learner.layers == 'list'),
            'a stacked leaf has the weights of all layers, and a block those of some',
        ),
        (
            *('learner.dtype', c.learner.dtype, 'float32', c.learner.dtype == 'float32'),
            'the leaves of other blocks are kept once, in float32',
        ),
        (
            *('loss.kl_coefficient', c.loss.kl_coefficient, 0.0, not c.loss.kl_coefficient),
            'the reference model would need the frozen leaves as they were at the start',
        ),
        (
            *('diagnostics.ratio_sample', c.diagnostics.ratio_sample, 0.0, not c.diagnostics.ratio_sample),
            'its ring keeps the trained leaves alone of an earlier version',
        ),
        (
            *('cluster.learner', c.cluster.learner, 'data=1', hosts is None),
            'processes of a learner write whole versions, each its share',
        ),
    ):
        if not fits:
            yield f'optimizer.blocks={c.optimizer.blocks} with {path}={value!r}: {why}; use {path}={fix!r}, or blocks=1'
