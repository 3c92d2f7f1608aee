"""Which product of experts a pass uses, and the same over the devices of a mesh.

Each device computes its own tokens; `tensor` cuts the width of every expert, and the parts of an output are summed.
`expert` cuts the experts of a layer: the devices of this axis gather each other's tokens, each computes what its own
experts make of all of them (choices of other experts are none), and each gets the sum for its own tokens back. So no
buffer has a capacity and no token is dropped.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from areal_jax.config.ranges import ConfigError
from areal_jax.models.expert_products import Mixer
from areal_jax.models.experts import choose_checked_mixer
from areal_jax.models.shape import ModelConfig


def require_experts(config: ModelConfig, expert: int, field: str) -> None:
    """Raises ConfigError for a model without experts, or with a number that cannot be shared out evenly.

    Args:
      expert: devices that share the experts of a layer, as `field` of the config says.
    """
    if expert > 1 and config.experts is None:
        raise ConfigError(
            f'expert={expert} of {field} shares out the experts of a layer, and this model has none; remove expert'
        )
    if config.experts and config.experts.count % expert:
        raise ConfigError(
            f'expert={expert} of {field} does not divide the {config.experts.count} experts of the model; use a divisor'
        )


def make_mix(platform: str, mesh: Mesh | None = None, token_axes: tuple[str, ...] = ()) -> Mixer:
    """The product for devices of a platform.

    Args:
      mesh: the devices that hold the tokens; None or one device: no exchange.
      token_axes: of the mesh, over which the tokens are cut; () = every device has all.
    """

    def local(
        x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        return _choose(platform, jnp.dtype(x.dtype).name)(x, experts, weights, gate, up, down)

    if mesh is None or mesh.size == 1:
        return local
    tokens = PartitionSpec(token_axes)

    def over_mesh(
        x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        cut = _divides(mesh, 'tensor', gate.shape[2])
        share = _divides(mesh, 'expert', gate.shape[0])  # None: each device has all experts, as a teacher's may be

        def own(*inputs: jax.Array) -> jax.Array:
            mix = local if share is None else _over_experts(local, share, cuts_tokens=share in token_axes)
            y = mix(*inputs)
            return y if cut is None else jax.lax.psum(y, cut)

        wide, high = PartitionSpec(share, None, cut), PartitionSpec(share, cut)
        # check_vma=False: kernels do not say how their results vary over devices
        run = jax.shard_map(
            own, mesh=mesh, in_specs=(tokens, tokens, tokens, wide, wide, high), out_specs=tokens, check_vma=False
        )
        return run(x, experts, weights, gate, up, down)

    return over_mesh


def _divides(mesh: Mesh, axis: str, size: int) -> str | None:
    """The axis, where it cuts something of this size evenly."""
    return axis if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None


def _over_experts(local: Mixer, axis: str, *, cuts_tokens: bool) -> Mixer:
    """`local` for the experts of one device of `axis`, inside shard_map; the sum is over the experts of all.

    Args:
      cuts_tokens: whether `axis` cuts the tokens; otherwise each device has them all.
    """

    def mix(
        x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        if cuts_tokens:
            gather = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
            x, experts, weights = gather(x), gather(experts), gather(weights)
        own = len(gate)
        number = experts - jax.lax.axis_index(axis) * own
        y = local(x, jnp.where((number >= 0) & (number < own), number, own), weights, gate, up, down)
        return jax.lax.psum_scatter(y, axis, tiled=True) if cuts_tokens else jax.lax.psum(y, axis)

    return mix


@functools.cache
def _choose(platform: str, dtype: str) -> Mixer:
    with jax.ensure_compile_time_eval():  # the check runs programs, and a program is being traced here
        mix, fault = choose_checked_mixer(platform, dtype, 1)
    if fault:
        print(f'warning: {fault}', file=sys.stderr)
    return mix
