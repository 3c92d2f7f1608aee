"""The rows of a dispatch as arrays of a declared batch, filled on the host.

generate.py reads them. Shapes: B rows of the batch, M blocks of the longest sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.columns import Column
from areal_jax.models.delta_rule import DeltaState, copy_states, empty_states
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.backend import DecodeRow, SamplingSupport
from areal_jax.rollout.decode.attention.loops import Cache, CacheAttention, LayerCache
from areal_jax.rollout.decode.sampling import Adjustments, empty_adjustments
from areal_jax.rollout.state_pool import StateSizes
from areal_jax.rollout.window_blocks import WindowSizes
from areal_jax.types import SamplingParams

COPIES = 8  # blocks that one call of `copy_blocks` copies


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """The sizes of a cache in blocks of `block_tokens` positions."""

    context_tokens: int
    block_tokens: int
    blocks: int  # available to sequences
    windows: WindowSizes | None = None  # the pool of the layers with a window; None = they have `blocks` too
    states: StateSizes | None = None  # of the layers with delta nets; None = there are none

    def allocated(self, window: int | None) -> int:
        """The blocks of a layer with this window, those that no sequence has included."""
        return self.blocks + 1 if window is None or self.windows is None else self.windows.blocks + 2

    @property
    def table_blocks(self) -> int:
        return -(-self.context_tokens // self.block_tokens)

    @property
    def padding_block(self) -> int:
        """The block after the sequences' blocks: writes of padding go here."""
        return self.blocks


class EngineState(NamedTuple):
    """The state that an engine's programs take and return: KV cache and columns."""

    layers: Cache
    # ModelConfig.columns by name, [blocks + 1, block_tokens, *shape], of the token whose keys and values are at the
    # same position; {} = not recorded
    columns: dict[str, jax.Array]


def empty_columns(columns: Iterable[Column], *axes: int) -> dict[str, jax.Array]:
    """Returns arrays [*axes, *shape] with each column's fill value; the model has set the column's shape."""
    return {column.name: jnp.full((*axes, *column.blank(0).shape[1:]), column.fill, column.dtype) for column in columns}


def read_columns(columns: Mapping[str, jax.Array], table: jax.Array) -> dict[str, jax.Array]:
    """Returns the columns [M, block_tokens, *shape] of the blocks of a table, int32 [M]."""
    return {name: kept[table] for name, kept in columns.items()}


def empty_cache(attention: CacheAttention, config: ModelConfig, sizes: CacheSizes, dtype: jnp.dtype) -> Cache:
    """Returns a cache of zeros, the padding block and the padding's state included."""

    def empty(layer: int) -> LayerCache:
        if config.mixer(layer) == 'delta':
            assert config.delta is not None
            assert sizes.states is not None
            return empty_states(sizes.states.places + 1, config.delta, dtype)
        blocks = sizes.allocated(config.window(layer))
        return attention.empty(blocks, config.n_kv_heads, sizes.block_tokens, config.head_dim, dtype)

    return tuple(map(empty, range(config.n_layers)))


Copies = tuple[jax.Array, jax.Array]  # sources and targets, int32 [C] each


def copy_blocks(
    attention: CacheAttention,
    config: ModelConfig,
    state: EngineState,
    sources: jax.Array,
    targets: jax.Array,
    parts: Copies | None,
    states: Copies | None,
) -> EngineState:
    """Returns the state with block sources[i] copied to block targets[i], both int32 [C].

    `parts` are sources and targets of the layers with a window, if they have a pool of their own, `states` of the
    layers with delta nets.
    """

    def copy(index: int, layer: LayerCache) -> LayerCache:
        if isinstance(layer, DeltaState):
            assert states is not None
            return copy_states(layer, *states)
        own = (sources, targets) if parts is None or config.window(index) is None else parts
        return attention.copy(layer, *own)

    layers = tuple(copy(index, layer) for index, layer in enumerate(state.layers))
    return EngineState(layers, {name: kept.at[targets].set(kept[sources]) for name, kept in state.columns.items()})


def write_columns(
    state: EngineState, found: Mapping[str, jax.Array], blocks: jax.Array, offsets: jax.Array
) -> dict[str, jax.Array]:
    """Writes a pass's columns `found`, [T, *shape], at `blocks` and `offsets` of its T tokens, int32 [T]."""
    write = lambda kept, new: kept.at[blocks, offsets].set(new.astype(kept.dtype))
    return {name: write(kept, found[name]) for name, kept in state.columns.items()}


Array = Any  # numpy on the host, jax.Array on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows by descending position; rows of padding come last."""

    token: Array  # int32 [B], the next input; its keys and values are not in the cache yet
    position: Array  # int32 [B], of that token
    limit: Array  # int32 [B], tokens at which the sequence ends; 0 = a row of padding
    seed: Array  # uint32 [B, 4]: the seed's high and low word, draw, sample
    temperature: Array  # float32 [B]
    top_k: Array  # int32 [B]
    top_p: Array  # float32 [B]
    min_p: Array  # float32 [B]
    stop_tokens: Array  # int32 [B, most_stop_tokens], -1 where unused
    table: Array  # int32 [B, M], blocks of the sequence, then the padding block
    adjustments: Adjustments | None  # None = programs without
    window_table: Array | None = None  # as `table`, of the layers with a window, if they have a pool of their own
    state: Array | None = None  # int32 [B], the place of the row's state, if there are delta nets


def most_stop_tokens(adjusted: bool) -> int:
    """The maximum of a request. Chat models end an answer with one to three; clients of a server add more."""
    return 16 if adjusted else 4


def is_plain(params: SamplingParams) -> bool:
    """Whether programs that are neither filtered nor adjusted can decode with these parameters."""
    return not params.changes_softmax and len(params.stop_tokens) <= most_stop_tokens(adjusted=False)


def empty_batch(rows: int, sizes: CacheSizes, adjusted: bool = False, penalized: bool = False) -> Batch:
    """Returns a batch of padding; `penalized`: its rows may be given penalties."""
    adjustments = empty_adjustments(rows, sizes.context_tokens, penalized=penalized) if adjusted else None
    return Batch(
        token=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        limit=np.zeros(rows, np.int32),
        seed=np.zeros((rows, 4), np.uint32),
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        stop_tokens=np.full((rows, most_stop_tokens(adjusted)), -1, np.int32),
        table=np.full((rows, sizes.table_blocks), sizes.padding_block, np.int32),
        adjustments=adjustments,
        window_table=_empty_window_table(rows, sizes),
        state=None if sizes.states is None else np.full(rows, sizes.states.padding, np.int32),
    )


def _empty_window_table(rows: int, sizes: CacheSizes) -> np.ndarray | None:
    if sizes.windows is None:
        return None
    return np.full((rows, sizes.table_blocks), sizes.windows.padding, np.int32)


def fill_batch(rows: Sequence[DecodeRow], size: int, sizes: CacheSizes, adjusted: bool) -> tuple[Batch, np.ndarray]:
    """Returns (batch of `size` rows, the batch row of every given row, int [rows])."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i].position)
    penalized = adjusted and any(row.request.sampling.penalizes for row in rows)
    batch, places = empty_batch(size, sizes, adjusted, penalized), np.empty(len(rows), np.intp)
    for place, i in enumerate(order):
        places[i] = place
        row, request, params = rows[i], rows[i].request, rows[i].request.sampling
        batch.token[place], batch.position[place], batch.limit[place] = row.token, row.position, row.limit
        batch.temperature[place], batch.top_k[place] = params.temperature, params.top_k
        batch.top_p[place], batch.min_p[place] = params.top_p, params.min_p
        batch.stop_tokens[place, : len(params.stop_tokens)] = params.stop_tokens
        words = request.seed >> 32, request.seed, request.draw, request.noise_sample
        batch.seed[place] = [word & 0xFFFFFFFF for word in words]
        blocks = row.blocks[: sizes.table_blocks]
        batch.table[place, : len(blocks)] = blocks
        if batch.window_table is not None:
            batch.window_table[place, : len(blocks)] = row.parts[: len(blocks)]
        if batch.state is not None:
            batch.state[place] = row.state
        if batch.adjustments is not None:
            batch.adjustments.fill(place, row)
    return batch, places


def check_row(row: DecodeRow, steps: int, sizes: CacheSizes, support: SamplingSupport) -> None:
    """Raises ValueError for a row that the programs can not decode for `steps` tokens."""
    params, length = row.request.sampling, row.position + 1
    where = f'request {row.request.request_id}: '
    if row.position < 0 or not length < row.limit <= sizes.context_tokens:
        raise ValueError(
            f'{where}limit={row.limit} must exceed its {length} tokens and fit context_tokens={sizes.context_tokens}'
        )
    needed = min(row.position + steps, row.limit - 1)
    if len(row.blocks) * sizes.block_tokens < needed:
        raise ValueError(
            f'{where}{len(row.blocks)} blocks of {sizes.block_tokens} positions do not hold the {needed} that '
            f'{steps} steps from position {row.position} need; give it more'
        )
    if not all(0 <= block < sizes.blocks for block in row.blocks):
        raise ValueError(f'{where}blocks={[*row.blocks]} must lie between 0 and cache_blocks - 1 = {sizes.blocks - 1}')
    if sizes.states is not None and not 0 <= row.state < sizes.states.places:
        raise ValueError(f'{where}state={row.state} must be a place of a state, 0 to {sizes.states.places - 1}')
    if sizes.windows is not None:
        _check_parts(row, needed, sizes.windows, sizes.block_tokens)
    if params.penalizes and len(row.tokens) != length:
        raise ValueError(f'{where}{len(row.tokens)} tokens, but its penalties need all {length}; give them')
    support.check_programs(row.request)


def _check_parts(row: DecodeRow, needed: int, windows: WindowSizes, block_tokens: int) -> None:
    """Raises ValueError if the layers with a window lack a block that the row sees or writes."""
    first = max(0, row.position + 1 - windows.tokens) // block_tokens
    parts = np.asarray(row.parts[first : -(-needed // block_tokens)])
    if len(row.parts) != len(row.blocks) or not np.all((parts >= 0) & (parts < windows.blocks)):
        raise ValueError(
            f'request {row.request.request_id}: parts={[*row.parts]} must name a block of the layers with a window, 0 '
            f'to {windows.blocks - 1}, for each of {len(row.blocks)} blocks from number {first} on'
        )


MOST_BATCHES = 10  # programs of `generate`


def derive_batches(slots: int, most: int = MOST_BATCHES, least: int = 1) -> tuple[int, ...]:
    """Returns ascending batches up to `slots`: powers of two from `least` on, from 16 on also the value half way
    between two of them.

    Without a batch, its rows run in the next larger one. So while there are more than `most`, the batch whose
    neighbours are closest in ratio is removed, of several the smallest.
    """
    powers = (2**i for i in itertools.count())
    sizes = itertools.chain.from_iterable((n, 3 * n // 2) if n >= 16 else (n,) for n in powers)
    batches = [*(size for size in itertools.takewhile(lambda size: size < slots, sizes) if size >= least), slots]
    while len(batches) > most:
        inner = range(1, len(batches) - 1)
        del batches[min(inner, key=lambda i: batches[i + 1] / batches[i - 1]) if inner else 0]
    return tuple(batches)


def share_batches(slots: int, most: int, least: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns batches for plain rows and for any rows, `most` >= 2 in all; most are for plain rows, the usual ones."""
    others = max(1, most // 4)
    return derive_batches(slots, min(MOST_BATCHES, most - others), least), derive_batches(slots, others, least)


def smallest_that_holds(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest of ascending sizes that holds `needed` rows; raises ValueError if none does."""
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f'{needed} rows do not fit batch_buckets={tuple(sizes)}; decode fewer at once')
