"""Experts over the devices of an axis of the mesh, in two forms.

'gather': every device gets the tokens of all devices, computes its own experts on them (choices of other experts add
nothing), and each device gets the sum for its own tokens back.

'all_to_all': a token is sent once to each device that has any of its experts, and the device sends back one row, the
sum over these experts; so never more rows travel than by the gather. The shapes are static and no token is dropped: a
device has room for all tokens of all devices. Only the slices in use travel, by `lax.ragged_all_to_all`; XLA for CPUs
has none, so there everything travels.

n devices of the axis, t tokens on each, k choices of each token, E experts, E / n of them on a device, d model width.
A token reaches at most m = min(k, n) devices.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from areal_jax.models.attention.backends import is_attached
from areal_jax.models.expert_products import Mixer, collect, mix_blocks, sort_rows, spread

GATHER, ALL_TO_ALL = 'gather', 'all_to_all'

_INDEX_BYTES = 4 + 4  # of a choice: its expert and its weight, which both forms gather
# Rows of an all-to-all are put in order before and after it, twice written and read. A device's memory is 4 to 8 times
# as fast as its links in one direction (simulation/prices.py), so this takes what a quarter to a third of the rows do.
_MOST_SHARE = 0.75


class Layer(NamedTuple):
    """A layer of experts, for the tokens of one device."""

    tokens: int
    per_token: int
    experts: int
    row_bytes: int  # of a token

    def count_bytes(self, devices: int, hops: float = 1.0) -> dict[str, float]:
        """Bytes that the links of one device carry, there and back, by form.

        A gathered row passes a link to each of the other devices. A sent row passes `hops` links, and there are as
        many as there are other devices with an expert that the token chose, if all choices are equally likely.
        """
        others, own = devices - 1, self.experts // devices
        index = others * self.tokens * self.per_token * _INDEX_BYTES
        rows = 2 * others * self.tokens * self.row_bytes
        none = math.comb(self.experts - own, self.per_token) / math.comb(self.experts, self.per_token)
        return {GATHER: rows + index, ALL_TO_ALL: (1 - none) * hops * rows + index}


def count_hops(mesh: Mesh, axis: str) -> float:
    """The mean number of links between two devices of an axis of at least 2: 1 for devices that a switch connects.

    Links that close a ring of chips are not counted, since small slices have none.
    """
    if mesh.devices.flat[0].platform != 'tpu':
        return 1.0
    at = np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, -1)
    groups = np.moveaxis(at, mesh.axis_names.index(axis), -2).reshape(-1, mesh.shape[axis], at.shape[-1])
    links = np.maximum(np.abs(groups[:, :, None] - groups[:, None]).sum(-1), 1)  # two devices of a chip are two
    others = ~np.eye(mesh.shape[axis], dtype=bool)
    return float(links[:, others].mean())


def choose_form(asked: str, layer: Layer, mesh: Mesh, axis: str) -> str:
    """GATHER or ALL_TO_ALL: as `asked`, or for 'auto' the one that moves less; on CPUs always the gather.

    No program runs: `find_fault` says whether the all-to-all is right on devices that are there.
    """
    if asked != 'auto':
        return asked
    if mesh.devices.flat[0].platform == 'cpu':
        return GATHER
    moved = layer.count_bytes(mesh.shape[axis], count_hops(mesh, axis))
    return ALL_TO_ALL if moved[ALL_TO_ALL] <= _MOST_SHARE * moved[GATHER] else GATHER


@functools.cache
def form_over(mesh: Mesh, axis: str, form: str) -> Mixer:
    """The form for an axis that cuts the tokens; the gather in place of an all-to-all that fails its check."""
    if form == ALL_TO_ALL:
        with jax.ensure_compile_time_eval():  # the check runs a program, and another one is being traced
            fault = find_fault(mesh, axis)
        if not fault:
            return functools.partial(mix_by_all_to_all, ragged=mesh.devices.flat[0].platform != 'cpu')
        print(f"warning: the all-to-all of experts' tokens {fault}; they are gathered", file=sys.stderr)
    return mix_by_gather


# The two forms, inside shard_map.


def mix_by_gather(
    local: Mixer,
    axis: str,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *leaves: jax.Array,
    cuts_tokens: bool = True,
) -> jax.Array:
    """`local` with the experts of one device of `axis`, then the sum over all devices' experts.

    Args:
      cuts_tokens: whether `axis` cuts the tokens; otherwise each device has all tokens.
    """
    if cuts_tokens:
        gather = functools.partial(lax.all_gather, axis_name=axis, tiled=True)
        x, experts, weights = gather(x), gather(experts), gather(weights)
    y = local(x, *_take_own(experts, weights, axis, len(leaves[0])), *leaves)
    return lax.psum_scatter(y, axis, tiled=True) if cuts_tokens else lax.psum(y, axis)


def _take_own(experts: jax.Array, weights: jax.Array, axis: str, own: int) -> tuple[jax.Array, jax.Array]:
    """The choices [..., k] that are of the `own` experts of this device, in order, and their weights.

    Returns at most `own` of a token, since that many can be; the number `own` = none.
    """
    number = experts - lax.axis_index(axis) * own
    number = jnp.where((number >= 0) & (number < own), number, own)
    if own >= experts.shape[-1]:
        return number, weights
    first = jnp.argsort(number == own, axis=-1, stable=True)[..., :own]
    return jnp.take_along_axis(number, first, axis=-1), jnp.take_along_axis(weights, first, axis=-1)


def mix_by_all_to_all(
    local: Mixer,
    axis: str,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *leaves: jax.Array,
    ragged: bool = True,
) -> jax.Array:
    """`local` with the experts of one device of `axis`, for the tokens that chose them; the axis cuts the tokens.

    Args:
      ragged: whether the platform has `lax.ragged_all_to_all`.
    """
    own, n, t = len(leaves[0]), lax.axis_size(axis), len(x)
    sizes, rows, _ = sort_rows(_find_devices(experts, own, n), n)
    everyone = functools.partial(lax.all_gather, axis_name=axis)
    number, own_weights = _take_own(everyone(experts), everyone(weights), axis, own)  # [n, t, at most k]
    comes = jnp.any(number < own, axis=-1)
    order = jnp.argsort(~comes, axis=1, stable=True)[:, :, None]  # of each device: the tokens that come, then others
    take = lambda each: jnp.take_along_axis(each, order, axis=1).reshape(n * t, -1)
    starts, me = jnp.cumsum(sizes, dtype=jnp.int32) - sizes, lax.axis_index(axis)
    here = _Side(starts, sizes, lax.all_to_all(starts, axis, 0, 0, tiled=True))
    there = _Side(
        jnp.arange(n, dtype=jnp.int32) * t, comes.sum(axis=1, dtype=jnp.int32), jnp.full(n, me * t, jnp.int32)
    )
    path = _Path(axis, ragged, most=t, size=len(rows.choice), becomes=n * t)
    parts = local(move_slices(path, spread(x, rows), here, there), take(number), take(own_weights), *leaves)
    return collect(move_slices(path.back(), parts, there, here), rows)


def _find_devices(experts: jax.Array, own: int, n: int) -> jax.Array:
    """The devices that have the experts of a token, int32 [t, m], each once and in order; n = none."""
    device = jnp.sort(jnp.where((experts >= 0) & (experts < own * n), experts // own, n), axis=1)
    again = device[:, 1:] == device[:, :-1]
    once = jnp.concatenate([device[:, :1], jnp.where(again, n, device[:, 1:])], axis=1)
    return jnp.sort(once, axis=1)[:, : min(experts.shape[1], n)]


class _Side(NamedTuple):
    """The slices of a device's buffer, one for each device that it sends to or receives from; int32 [n] each."""

    starts: jax.Array
    sizes: jax.Array
    theirs: jax.Array  # in the like buffer of each device: the start of its slice for this one


class _Path(NamedTuple):
    """How slices travel between two buffers."""

    axis: str
    ragged: bool
    most: int  # rows of a slice
    size: int  # rows of the buffer that they come from
    becomes: int  # and of the one that they go to

    def back(self) -> _Path:
        return self._replace(size=self.becomes, becomes=self.size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def move_slices(path: _Path, rows: jax.Array, here: _Side, there: _Side) -> jax.Array:
    """The slices `here` of every device's rows, at their places `there`; 0 where no slice is."""
    empty = jnp.zeros((path.becomes, rows.shape[1]), rows.dtype)
    if path.ragged:
        moved: jax.Array = lax.ragged_all_to_all(
            rows, empty, here.starts, here.sizes, there.theirs, there.sizes, axis_name=path.axis
        )
        return moved
    offset = jnp.arange(path.most, dtype=jnp.int32)
    place = lambda side, none: jnp.where(offset < side.sizes[:, None], side.starts[:, None] + offset, none)
    parts = jnp.take(rows, place(here, path.size), axis=0, mode='fill', fill_value=0)
    parts = lax.all_to_all(parts, path.axis, 0, 0, tiled=True)
    return empty.at[place(there, path.becomes)].set(parts, mode='drop')


move_slices.defvjp(
    lambda path, rows, here, there: (move_slices(path, rows, here, there), (here, there)),
    lambda path, sides, d_rows: (move_slices(path.back(), d_rows, *reversed(sides)), None, None),
)


# The check of the all-to-all, at start-up on the devices of the run.

_TOKENS, _CHOICES, _EXPERTS_EACH, _WIDTH, _EXPERT_WIDTH = 24, 4, 3, 128, 16  # tokens and experts of each device
_ALLOWED = 2e-2  # of the largest value: a row at a wrong place gives 1


def find_fault(mesh: Mesh, axis: str) -> str:
    """What is wrong with the all-to-all on the devices of a mesh of all processes; '' = nothing, or nobody to ask."""
    device = mesh.devices.flat[0]
    if device.platform == 'cpu' or not any(map(is_attached, mesh.devices.flat)):
        return ''
    try:
        off = float(compare_forms(mesh, axis, ragged=True))
    except Exception as error:  # collectives of accelerators fail in many ways
        return f'does not run here: {error or type(error).__name__}'
    wrong = f'fails its check: it is off by {off:.2g} of the largest value, allowed are {_ALLOWED:g}'
    return '' if off <= _ALLOWED else wrong  # NaN fails too


def compare_forms(mesh: Mesh, axis: str, *, ragged: bool) -> jax.Array:
    """The largest difference of the two forms' outputs and gradients of x, over the largest value; on every device."""

    def run() -> jax.Array:
        n, me = lax.axis_size(axis), lax.axis_index(mesh.axis_names)
        count = n * _EXPERTS_EACH
        keys = iter(jax.random.split(jax.random.fold_in(jax.random.key(0), me), 6))
        normal = lambda *shape: jax.random.normal(next(keys), shape)
        scores = normal(_TOKENS, count) - jnp.arange(count) / 2  # uneven: the first device has the most
        experts = lax.top_k(scores, min(_CHOICES, count))[1].astype(jnp.int32)
        experts = jnp.where(jax.random.bernoulli(next(keys), 0.2, experts.shape), count, experts)
        into, out_of = (_EXPERTS_EACH, _WIDTH, _EXPERT_WIDTH), (_EXPERTS_EACH, _EXPERT_WIDTH, _WIDTH)
        leaves = [normal(*shape) / np.sqrt(shape[1]) for shape in (into, into, out_of)]
        x, weights = normal(_TOKENS, _WIDTH), jnp.ones(experts.shape)
        forms: tuple[Mixer, ...] = (mix_by_gather, functools.partial(mix_by_all_to_all, ragged=ragged))
        of_x = [lambda x, form=form: form(mix_blocks, axis, x, experts, weights, *leaves) for form in forms]
        wanted, found = (jnp.stack([y, *pull(jnp.sin(y))]) for y, pull in (jax.vjp(one, x) for one in of_x))
        most = lambda values: lax.pmax(jnp.abs(values).max(), mesh.axis_names)
        difference: jax.Array = most(found - wanted) / most(wanted)
        return difference

    over = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False))
    off: jax.Array = over()
    return off
