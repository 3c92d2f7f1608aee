"""The state of every slot besides its cache (next token, position, limits, sampling), as vectors over the slots.

Used by backend.py inside its programs, and on the host to fill slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.rollout.backend import SlotInit
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.cache import Cache

MAX_STOP_TOKENS = 4  # of a request: chat models end an answer with one to three
Vector = Any  # numpy on the host, jax.Array on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """One entry per slot, B of them."""

    token: Vector  # int32 [B], the next input of decode; its keys and values are not in the cache yet
    position: Vector  # int32 [B], its index in the trajectory
    limit: Vector  # int32 [B], tokens at which the trajectory ends
    live: Vector  # bool [B]; dead slots are computed too, and write to their own part of the cache only
    key: Vector  # uint32 [B, 2], of the request
    temperature: Vector  # float32 [B]
    top_k: Vector  # int32 [B]
    top_p: Vector  # float32 [B]
    stop_tokens: Vector  # int32 [B, MAX_STOP_TOKENS], -1 where unused


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that decoding changes. Each call donates it, so only the newest state may be used."""

    cache: Cache
    slots: Slots


def empty_slots(n: int) -> Slots:
    """All dead, on the host."""
    return Slots(
        token=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        limit=np.zeros(n, np.int32),
        live=np.zeros(n, bool),
        key=np.zeros((n, 2), np.uint32),
        temperature=np.ones(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        stop_tokens=np.full((n, MAX_STOP_TOKENS), -1, np.int32),
    )


def slot_values(inits: Sequence[SlotInit], n: int) -> tuple[np.ndarray, Slots, np.ndarray]:
    """(slots int32 [n], values, seeds uint32 [n, 4]) of up to n inits, padded with slot n, which does not exist.

    A row of seeds is (seed's high word, low word, draw, sample), from which `occupy` computes the request's key.
    """
    at, values, seeds = np.full(n, n, np.int32), empty_slots(n), np.zeros((n, 4), np.uint32)
    for i, init in enumerate(inits):
        request, params = init.request, init.request.sampling
        at[i] = init.slot
        values.token[i], values.position[i], values.limit[i] = init.tokens[-1], len(init.tokens) - 1, init.limit
        values.live[i] = True
        values.temperature[i], values.top_k[i], values.top_p[i] = params.temperature, params.top_k, params.top_p
        values.stop_tokens[i, : len(params.stop_tokens)] = params.stop_tokens
        seeds[i] = [word & 0xFFFFFFFF for word in (request.seed >> 32, request.seed, request.draw, request.sample)]
    return at, values, seeds


def occupy(slots: Slots, at: jax.Array, values: Slots, seeds: jax.Array) -> Slots:
    """The slots with the rows of `slot_values` in place."""
    values = dataclasses.replace(values, key=sampling.request_keys(seeds[:, :2], seeds[:, 2], seeds[:, 3]))
    return jax.tree.map(lambda old, new: old.at[at].set(new, mode='drop'), slots, values)


def advance(slots: Slots, tokens: jax.Array) -> Slots:
    """The slots after each has generated its entry of `tokens`, int32 [B].

    Positions of dead slots grow too, but nothing reads them.
    """
    stopped = jnp.any(slots.stop_tokens == tokens[:, None], axis=-1)
    length = slots.position + 2  # tokens of the trajectory with the new one: its input was at `position`
    return dataclasses.replace(
        slots,
        token=tokens,
        position=slots.position + 1,
        live=slots.live & ~stopped & (length < slots.limit),
    )
