"""Rules that join the fields of training in blocks with others; see constraints.py."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.cluster import parse_learner
from areal_jax.config.declarations import FIELDS
from areal_jax.config.objectives import find_objective, is_policy, resolve


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
            *('loss.objective', c.loss.objective, 'decoupled_ppo', not _is_compared(c.loss.objective)),
            'a model beside the trained one is compared with all of its leaves',
        ),
        (
            *('loss.kl_coefficient', find_kl(c), 0.0, not find_kl(c)),
            'the reference model would need the frozen leaves as they were at the start',
        ),
        (
            *('diagnostics.ratio_sample', c.diagnostics.ratio_sample, 0.0, not c.diagnostics.ratio_sample),
            'its ring keeps the trained leaves alone of an earlier version',
        ),
        (
            *('optimizer.brake', c.optimizer.brake, 'none', c.optimizer.brake != 'projection'),
            'consecutive gradients are of different leaves',
        ),
        (
            *('diagnostics.brakes', c.diagnostics.brakes, False, not c.diagnostics.brakes),
            'consecutive gradients are of different leaves',
        ),
        (
            *('cluster.learner', c.cluster.learner, 'data=1', hosts is None),
            'processes of a learner write whole versions, each its share',
        ),
    ):
        if not fits:
            yield f'optimizer.blocks={c.optimizer.blocks} with {path}={value!r}: {why}; use {path}={fix!r}, or blocks=1'


def _is_compared(objective: str) -> bool:
    """Whether every update reads a model beside the trained one."""
    kind = find_objective(objective)
    return kind.reference or kind.teacher


def find_kl(c: config_dict.ConfigDict) -> float:
    """loss.kl_coefficient, or that of the method."""
    return resolve(c.loss)['kl_coefficient'] if is_policy(c.loss.objective) else 0.0


def find_client_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What independent clients that average their blocks need."""
    ours = c.distributed
    if ours.clients == 1:
        return
    setting = f'distributed.clients={ours.clients}'
    if ours.client >= ours.clients:
        yield f'distributed.client={ours.client} must be below {setting}: the clients are numbered from 0'
    if not ours.average_directory:
        yield f'{setting} needs distributed.average_directory: a directory that all clients see'
    if c.optimizer.blocks == 1:
        yield f'{setting} with optimizer.blocks=1: clients average blocks; use optimizer.blocks=2 or more'
    if not find_objective(c.loss.objective).generates:
        objective = f'loss.objective={c.loss.objective!r}'
        yield f'{setting} with {objective}: its demonstrations are not divided; use distributed.clients=1'
    if parse_learner(c.cluster.learner).hosts is not None:
        yield (
            f'{setting} with cluster.learner={c.cluster.learner!r}: each client is one process; use '
            f'cluster.learner={FIELDS["cluster.learner"].default!r}'
        )
    if c.run.clock == 'real' and ours.average_deadline_s >= c.run.stall_timeout_s:
        yield (
            f'distributed.average_deadline_s={ours.average_deadline_s} must be below run.stall_timeout_s='
            f'{c.run.stall_timeout_s}: a client that waits for others completes nothing'
        )
    if c.run.steps % c.optimizer.block_updates:
        yield (
            f'run.steps={c.run.steps} must be a multiple of optimizer.block_updates={c.optimizer.block_updates} with '
            f'{setting}: a block is averaged when all its updates are made'
        )
