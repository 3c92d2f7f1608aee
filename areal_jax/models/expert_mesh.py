"""Which product of experts a pass uses, and the same over the devices of a mesh.

Each device computes its own tokens; `tensor` cuts the width of every expert, and the parts of an output are summed.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from areal_jax.models.expert_check import choose_checked_mixer
from areal_jax.models.expert_products import Mixer


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
        cut = 'tensor' if mesh.shape['tensor'] > 1 and gate.shape[2] % mesh.shape['tensor'] == 0 else None

        def own(*inputs: jax.Array) -> jax.Array:
            y = local(*inputs)
            return y if cut is None else jax.lax.psum(y, cut)

        wide, high = PartitionSpec(None, None, cut), PartitionSpec(None, cut)
        # check_vma=False: kernels do not say how their results vary over devices
        run = jax.shard_map(
            own, mesh=mesh, in_specs=(tokens, tokens, tokens, wide, wide, high), out_specs=tokens, check_vma=False
        )
        return run(x, experts, weights, gate, up, down)

    return over_mesh


@functools.cache
def _choose(platform: str, dtype: str) -> Mixer:
    with jax.ensure_compile_time_eval():  # the check runs programs, and a program is being traced here
        mix, fault = choose_checked_mixer(platform, dtype, 1)
    if fault:
        print(f'warning: {fault}', file=sys.stderr)
    return mix
