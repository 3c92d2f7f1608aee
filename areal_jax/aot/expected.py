"""What is known of a program before it is compiled: arguments and results by the dry run, arithmetic by the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from areal_jax.app.parts.sizes import cache_bytes, state_sizes, version_bytes
from areal_jax.config import TrackedConfig
from areal_jax.models.families import ModelConfig
from areal_jax.sharding.rules import EngineDevices
from areal_jax.simulation.prices import ModelShape, shape_of
from areal_jax.types import Tree

# The trees of `state_sizes` that the learner's programs take, in their order, and those that they make; rows and
# numbers follow the trees. Gradients of one micro-batch are like the working copy.
_UNREAD = 'unread'  # XLA leaves out what a program does not read
_PASS = ('working copy', 'frozen')
_TAKEN: Mapping[str, tuple[str, ...]] = {
    'export': ('trained', 'frozen'), 'cast': ('trained',), 'gradients': _PASS, 'loads': _PASS, 'logprobs': _PASS,
    'single_tokens': _PASS, 'latent_forms': _PASS,
    'accumulate': ('gradients', *_PASS), 'zeros': (_UNREAD,),
    'collisions': _PASS, 'values': _PASS, 'scan': ('trained', 'optimizer', 'frozen'),
    'add': ('gradients', 'working copy'), 'add_first': ('working copy', 'working copy'),
    'apply': ('trained', 'optimizer', 'gradients'), 'apply_only': ('trained', 'optimizer', 'working copy'),
    'apply_and_cast': ('trained', 'optimizer', 'gradients'),
    'apply_only_and_cast': ('trained', 'optimizer', 'working copy'),
}  # fmt: skip
_MADE: Mapping[str, tuple[str, ...]] = {
    'export': ('publication',), 'cast': ('working copy',), 'gradients': ('working copy',), 'add': ('gradients',),
    'accumulate': ('gradients',), 'zeros': ('gradients',),
    'add_first': ('gradients',), 'scan': ('trained', 'optimizer'), 'apply': ('trained', 'optimizer'),
    'apply_only': ('trained', 'optimizer'),
    **dict.fromkeys(('apply_and_cast', 'apply_only_and_cast'), ('trained', 'optimizer', 'working copy')),
}  # fmt: skip
# backward is two passes
_PASSES = {
    **dict.fromkeys(('gradients', 'accumulate', 'scan'), 3),
    **dict.fromkeys(('logprobs', 'single_tokens', 'loads', 'collisions', 'values'), 1),
    'latent_forms': 2,
}


@dataclasses.dataclass(frozen=True)
class Expected:
    """Bytes and flops of a program on one device; None = nothing is said of them."""

    arguments: int | None = None
    outputs: int | None = None  # also those that take the place of arguments
    flops: float | None = None  # of the model's products, without those of attention; of decoding, one step


UNKNOWN = Expected()


def expect_learner(
    config: TrackedConfig, shape: ModelConfig, mesh: Mesh
) -> Callable[[str, tuple[Tree, ...]], Expected]:
    """Returns a function that tells of a program of the learner, by name and described arguments."""
    sizes = {**state_sizes(config, shape, mesh), _UNREAD: 0}
    counted = shape_of('', shape)
    by_token = 8 if shape.experts else 4  # log-probs, and in how many layers its route differs: of all rows, everywhere
    share = config.learner.row_loss_tokens / config.learner.row_tokens  # of the tokens that the head sees

    def expect(name: str, args: tuple[Tree, ...]) -> Expected:
        if (taken := _TAKEN.get(name)) is None:
            return UNKNOWN
        given = jax.tree.leaves(args[len(taken) :])
        tokens = next((arg['tokens'].size for arg in args if isinstance(arg, dict) and 'tokens' in arg), 0)
        flops = 2 * _PASSES[name] * _active(counted, share) * tokens / mesh.size if name in _PASSES else None
        made = _MADE.get(name)
        scored = by_token * next((arg['targets'].size for arg in args if isinstance(arg, dict) and 'targets' in arg), 0)
        return Expected(
            sum(sizes[tree] for tree in taken) + sum(map(bytes_on_device, given)),
            None if made is None else sum(sizes[tree] for tree in made) + scored,
            flops,
        )

    return expect


def _active(counted: ModelShape, share: float) -> float:
    """The parameters with which a token is multiplied, if this share of the tokens reaches the head."""
    return counted.active_parameters - (1 - share) * counted.head_parameters


def expect_prefill(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices) -> Expected:
    """Tells of a prefill, which writes to the cache and predicts nothing."""
    cache = cache_bytes(config, shape, devices)
    return Expected(version_bytes(config, shape, devices, prefills=True) + cache, cache)


def expect_decoding(config: TrackedConfig, shape: ModelConfig, devices: EngineDevices, batch: int) -> Expected:
    """Tells of a batch of decoding."""
    cache, flops = cache_bytes(config, shape, devices), 2 * shape_of('', shape).active_parameters * batch
    return Expected(version_bytes(config, shape, devices) + cache, cache, flops / len(devices))


def bytes_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of a described array that one device holds."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
