"""Load balance: rows are placed such that the devices that share a micro-batch finish at about the same time.

All rows have one shape, but they differ in how many of their places are used and in how many pairs of tokens attention
computes. numpy only.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from areal_jax.models.shape import ModelConfig

EMPTY = -1  # in a placement: a place without a row
_Number = TypeVar('_Number', float, np.ndarray)


@dataclasses.dataclass(frozen=True)
class CostCoefficients:
    """The cost of a token and of a visible pair of tokens, in any common unit. By default pairs cost nothing."""

    per_token: float = 1.0
    per_pair: float = 0.0


def cost_coefficients(
    *, n_layers: int, n_parameters_per_layer: int, n_heads: int, head_dim: int, n_head_parameters: int = 0
) -> CostCoefficients:
    """Floating-point operations of the forward and the backward pass.

      per token = 6 P,   P the parameters that multiply it: 2 forward, 2 for each of the two gradients
      per pair  = 12 H D layers: scores and weighted sum are 2 H D each, and the gradient costs twice as much

    P counts the head in full: of a long answer nearly every token is a loss token. Kaplan et al., arXiv 2001.08361,
    section 2.1, with pairs counted instead of context lengths.

    Args:
      n_parameters_per_layer: in matrices that a token meets, on average.
      n_heads: query heads; the number of key heads does not change the cost.
      n_head_parameters: of the matrix to the vocabulary.
    """
    return CostCoefficients(
        per_token=6.0 * (n_layers * n_parameters_per_layer + n_head_parameters),
        per_pair=12.0 * n_layers * n_heads * head_dim,
    )


def _mlp_parameters(c: ModelConfig) -> int:
    """Of the MLPs of all layers, or of the router and the experts that a token reaches."""
    dense = 3 * c.d_model * c.d_ff
    if c.experts is None:
        return c.n_layers * dense
    reached = c.d_model * (c.experts.count + 3 * c.experts.per_token * c.experts.d_expert)
    return len(c.experts.dense_layers) * dense + c.n_expert_layers * reached


def decoder_cost(c: ModelConfig) -> CostCoefficients:
    """`cost_coefficients` of a decoder."""
    attention = 2 * c.d_model * (c.n_heads + c.n_kv_heads) * c.head_dim
    return cost_coefficients(
        n_layers=c.n_layers,
        n_parameters_per_layer=attention + _mlp_parameters(c) // c.n_layers,
        n_heads=c.n_heads,
        head_dim=c.head_dim,
        n_head_parameters=c.vocab_size * c.d_model,
    )


def visible_pairs(tokens: int, tokens_before: int = 0) -> int:
    """Pairs (q, k) with k visible from q: of `tokens` in causal order, each also seeing all of `tokens_before`."""
    return tokens * tokens_before + tokens * (tokens + 1) // 2


def row_cost(tokens: _Number, pairs: _Number, coefficients: CostCoefficients) -> _Number:
    """a * tokens + b * pairs, in the coefficients' unit; numbers or arrays of rows."""
    return coefficients.per_token * tokens + coefficients.per_pair * pairs


def place_rows(
    costs: np.ndarray, shares: np.ndarray, rows_per_microbatch: int, data_shards: int = 1, *, in_order: bool = False
) -> np.ndarray:
    """Assigns rows to places of as few micro-batches as hold them; each shard has an equal slice of every micro-batch.

    The least filled rows form the last micro-batch, which may be incomplete, so that it may fit a smaller bucket. The
    other rows are sorted by cost, so that rows of one micro-batch cost about the same. Within a micro-batch, each row,
    most expensive first, goes to the shard with the lowest cost so far (longest processing time first, with equal
    counts of rows).

    Args:
      costs: float [rows].
      shares: float [rows], the share of a row's places that are used.
      rows_per_microbatch: R, a multiple of `data_shards`.
      in_order: no balancing: row i is put at place i.

    Returns:
      int [M, R], the index of a row or EMPTY.

    Raises:
      ValueError: rows that the shards cannot share evenly.
    """
    if data_shards < 1 or rows_per_microbatch % data_shards:
        raise ValueError(
            f'learner.rows_per_microbatch={rows_per_microbatch} must be a multiple of the {data_shards} data shards '
            '(data * fsdp * expert of cluster.learner)'
        )
    n_microbatches = -(-len(costs) // rows_per_microbatch)
    if in_order:
        empty = n_microbatches * rows_per_microbatch - len(costs)
        return np.append(np.arange(len(costs)), np.full(empty, EMPTY)).reshape(n_microbatches, rows_per_microbatch)
    n_before_last = max(n_microbatches - 1, 0) * rows_per_microbatch
    fullest_first = np.argsort(-shares, kind='stable')
    before_last, last = np.sort(fullest_first[:n_before_last]), np.sort(fullest_first[n_before_last:])
    order = np.concatenate([chosen[np.argsort(-costs[chosen], kind='stable')] for chosen in (before_last, last)])
    microbatches = [order[m * rows_per_microbatch :][:rows_per_microbatch] for m in range(n_microbatches)]
    placed = [_share_out(rows, costs, rows_per_microbatch // data_shards, data_shards) for rows in microbatches]
    return np.array(placed, np.int64).reshape(n_microbatches, rows_per_microbatch)


def shard_costs(costs: np.ndarray, placement: np.ndarray, data_shards: int) -> np.ndarray:
    """float [M, data_shards]: the cost of each shard in each micro-batch of a placement [M, R]."""
    by_place = np.where(placement == EMPTY, 0.0, np.append(costs, 0.0)[placement])
    microbatches, rows = placement.shape
    return by_place.reshape(microbatches, data_shards, rows // data_shards).sum(-1)


def _share_out(rows: Iterable[int], costs: np.ndarray, rows_per_shard: int, data_shards: int) -> list[int]:
    """Gives each row, most expensive first, to the cheapest shard that has a place left; returns places by shard."""
    shards: list[list[int]] = [[] for _ in range(data_shards)]
    loads = [(0.0, s) for s in range(data_shards)]
    for row in rows:
        load, s = heapq.heappop(loads)
        shards[s].append(int(row))
        if len(shards[s]) < rows_per_shard:
            heapq.heappush(loads, (load + float(costs[row]), s))
    return [place for shard in shards for place in shard + [EMPTY] * (rows_per_shard - len(shard))]
