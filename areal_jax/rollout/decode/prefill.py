"""Prefill: keys and values of pieces of sequences, packed into one row.

The host packs pieces into a declared bucket (`pack_pieces`); `prefill_pieces` is traced once for each bucket. Matrix
products run over the C tokens of the bucket, which are concatenated. With attention in C++ every token reads the cache
in place, as in decoding. Otherwise the learner's attention runs over a row of places for the tokens, in which every
piece starts at a tile of the kernel, so that its result does not depend on the other pieces. The row begins with the
prior: the earlier positions of the pieces' sequences, read from the cache:

    keys     [ prior of piece 0 | prior of piece 1 | ... ][ piece 0, gap | piece 1, gap | ... | padding ]
    queries                                               [ piece 0, gap | piece 1, gap | ... | padding ]

Memory is proportional to the length of this row, because scores exist for one tile at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.generation import MOST_PREFILL_BUCKETS
from areal_jax.models.attention.backends import MAX_TILE_TOKENS, packed_attention, tile_tokens
from areal_jax.models.attention.check import choose_checked
from areal_jax.models.attention.cudnn import MAX_SEGMENTS
from areal_jax.models.decoder import Attend, Decoder, Params
from areal_jax.models.delta_rule import PieceChunks, Recur, run_pieces
from areal_jax.models.expert_products import Mixer, mix_blocks
from areal_jax.models.experts import Routing
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import CHUNK
from areal_jax.rollout.backend import PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.decode.attention.choose import NativeAttention
from areal_jax.rollout.decode.attention.loops import CacheAttention, LayerCache
from areal_jax.rollout.decode.decode_rows import EngineState, write_columns
from areal_jax.rollout.state_pool import StateSizes
from areal_jax.rollout.window_blocks import WindowSizes

MAX_BUCKETS = MOST_PREFILL_BUCKETS + 1  # with and without a prior; leaves room for the programs of decoding
MAX_PIECES = MAX_SEGMENTS - 1  # of a row; the padding is a segment too
_PLACES_PER_TOKEN = 1.5  # pieces of 32 tokens or more always fit when their tokens do
_SMALLER_PRIOR = 4  # factor between two sizes of the prior

_Array = TypeVar('_Array', np.ndarray, jax.Array)


class PackedParts(NamedTuple, Generic[_Array]):
    """The fields of PackedPieces with blocks, of the layers with a window if they have a pool of their own."""

    blocks: _Array
    prior_blocks: _Array
    tables: _Array


class PackedPieces(NamedTuple, Generic[_Array]):
    """The int32 arguments of a prefill, without weights and cache. C tokens, A places, R prior positions of the row."""

    tokens: _Array  # [C]
    positions: _Array  # [C], in the sequence
    blocks: _Array  # [C], where keys and values of a token are written
    offsets: _Array  # [C], inside the block
    places: _Array  # [C], of the token in the row
    sources: _Array  # [A], index of the token at a place
    prior_blocks: _Array  # [prior / block_tokens], the blocks that are read
    tables: _Array  # [prior / block_tokens + C], the blocks of the pieces' sequences, concatenated
    starts: _Array  # [C], where the blocks of a token's sequence begin in `tables`
    segments: _Array  # [R + A]: the ids of the row; < 0 = padding
    row_positions: _Array  # [R + A], in the sequence
    wanted: _Array  # [], tokens of the pieces; the others are padding
    parts: PackedParts[_Array] | None = None
    chunks: PieceChunks | None = None  # of the layers with delta nets, if there are any


# The attention of rows.

RowAttention = Mapping[tuple[bool, bool], str]  # by (the layer has a window, the row has a prior): one of BACKENDS

_KINDS = tuple((windowed, has_prior) for windowed in (False, True) for has_prior in (False, True))
BLOCKED_ROWS: RowAttention = dict.fromkeys(_KINDS, 'blocked')  # on any platform


def choose_row_attention(config: ModelConfig, dtype: str, device: jax.Device) -> tuple[RowAttention, tuple[str, ...]]:
    """Returns (the attention of a model's packed rows on the device, why faster ones were rejected).

    Chosen as 'auto' in training, but never 'dense', whose sums depend on a token's place in the row. Call it outside a
    trace, because the check runs kernels.
    """
    if device.platform == 'cpu':
        return BLOCKED_ROWS, ()
    windows = {window is not None for window in config.windows}
    chosen, rejected = dict[tuple[bool, bool], str](), dict[str, None]()
    for windowed, has_prior in _KINDS:
        if windowed not in windows:
            continue
        name, reasons = choose_checked(
            'auto',
            tokens=MAX_TILE_TOKENS,
            dtype=dtype,
            head_dim=config.head_dim,
            window=1 if windowed else None,
            slices=has_prior,
            sinks=config.sinks,
            device=device,
        )
        chosen[windowed, has_prior] = name
        rejected |= dict.fromkeys(reasons)
    return chosen, tuple(rejected)


# Shapes.


def declared_buckets(
    sizes: Sequence[int], block_tokens: int, context_tokens: int, platform: str
) -> tuple[PrefillBucket, ...]:
    """Returns the buckets for rows of `sizes` tokens on a platform, ascending, at most MAX_BUCKETS.

    The last size has a bucket with a prior for any position of a sequence, and every size has one without a prior, or
    with the whole prior if that costs next to nothing. While there is room, the other sizes get buckets with the whole
    prior too, and then with smaller priors.

    Raises ValueError if the sizes are not ascending or too many.
    """
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f'prefill_buckets={tuple(sizes)} must be ascending positive numbers of tokens')
    if len(sizes) >= MAX_BUCKETS:
        raise ValueError(f'prefill_buckets={tuple(sizes)} are too many; declare at most {MAX_BUCKETS - 1}')

    def with_prior(tokens: int, divisor: int) -> PrefillBucket:
        # at least the size: the pieces that fill the row may have as many positions before them
        return PrefillBucket(tokens, _prior_positions(max(tokens, (context_tokens - 1) // divisor), block_tokens))

    whole = {tokens: with_prior(tokens, 1) for tokens in reversed(sizes)}
    least = [whole[n] if _is_cheap(whole[n], platform) else PrefillBucket(n, 0) for n in sizes]
    smaller = [with_prior(n, divisor) for divisor in (_SMALLER_PRIOR, _SMALLER_PRIOR**2) for n in whole]
    worth = [
        bucket
        for bucket in smaller
        if not _is_cheap(bucket, platform) and 2 * bucket.prior <= whole[bucket.tokens].prior
    ]
    wanted = dict.fromkeys([whole[sizes[-1]], *least, *whole.values(), *worth])  # by importance, each once
    return tuple(sorted(list(wanted)[:MAX_BUCKETS]))


def _is_cheap(bucket: PrefillBucket, platform: str) -> bool:
    """Whether the prior costs so little that a program without it is not worth its compilation.

    Only the kernels of accelerators are faster for rows without prior.
    """
    return bucket.prior <= 2 * bucket.tokens and platform == 'cpu'


def bucket_for(
    spans: Sequence[Span], sizes: Sequence[int], block_tokens: int, context_tokens: int, platform: str
) -> PrefillBucket | None:
    """Returns the smallest declared bucket that holds all spans, by tokens, then by prior; None if no bucket does."""
    if len(spans) > MAX_PIECES:
        return None
    for bucket in _declared(tuple(sizes), block_tokens, context_tokens, platform):
        if _overflow(spans, bucket, block_tokens) is None:
            return bucket
    return None


def holds(spans: Sequence[Span], bucket: PrefillBucket, block_tokens: int) -> bool:
    return _overflow(spans, bucket, block_tokens) is None


def _overflow(spans: Sequence[Span], bucket: PrefillBucket, block_tokens: int) -> int | None:
    """Returns the index of the first span that the bucket has no room for; None if all fit."""
    places, _, tile = _row(bucket, block_tokens)
    tokens = taken = prior = 0
    for index, span in enumerate(spans):
        length = span.stop - span.start
        tokens, taken, prior = (
            tokens + length,
            taken + _round_up(length, tile),
            prior + _prior_positions(span.start, block_tokens),
        )
        if tokens > bucket.tokens or taken > places or prior > bucket.prior or index == MAX_PIECES:
            return index
    return None


_declared = functools.lru_cache(declared_buckets)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _run(block_tokens: int) -> tuple[int, int]:
    """Returns (blocks, places): blocks that are read as one run, and the run's places in the row, in whole tiles."""
    blocks = max(1, MAX_TILE_TOKENS // block_tokens)
    return blocks, _round_up(blocks * block_tokens, MAX_TILE_TOKENS)


def _prior_positions(start: int, block_tokens: int) -> int:
    """The number of positions in the whole runs of blocks that hold `start` positions."""
    return _round_up(start, _run(block_tokens)[0] * block_tokens)


def _row(bucket: PrefillBucket, block_tokens: int) -> tuple[int, int, int]:
    """Returns (places of tokens, places of the prior, side of the kernel's tile) of a bucket's row."""
    blocks, width = _run(block_tokens)
    prior = bucket.prior // (blocks * block_tokens) * width
    places = _round_up(int(bucket.tokens * _PLACES_PER_TOKEN), MAX_TILE_TOKENS)
    return places, prior, tile_tokens(prior + places)


# The host's part.


def pack_pieces(
    pieces: Sequence[PrefillPiece],
    bucket: PrefillBucket,
    block_tokens: int,
    padding_block: int,
    windows: WindowSizes | None = None,
    states: StateSizes | None = None,
) -> PackedPieces[np.ndarray]:
    """Packs the pieces in this order into the arrays of a prefill; padding tokens write to `padding_block`.

    `windows` is the pool of the layers with a window; None = they have the blocks of the other layers. `states` is the
    pool of the layers with delta nets; None = there are none.

    Raises ValueError, naming the piece, if it is malformed, has no room in the bucket or shares a written position.
    """
    for index, piece in enumerate(pieces):
        _require_sound(index, piece, block_tokens)
    full = _overflow([piece.span for piece in pieces], bucket, block_tokens)
    if full is not None:
        raise ValueError(f'piece {full}: {pieces[full].span} has no room in {bucket} beside the pieces before it')
    packed = _padding(bucket, block_tokens, padding_block, windows)
    _, first, tile = _row(bucket, block_tokens)
    run_blocks, run_places = _run(block_tokens)
    token = place = run = block = 0
    for index, piece in enumerate(pieces):
        length, segment = len(piece.tokens), 2 * index + 1
        own = slice(token, token + length)
        positions = np.arange(piece.start, piece.start + _round_up(length, tile), dtype=np.int32)
        table = np.asarray(piece.blocks, np.int32)
        packed.tokens[own], packed.positions[own] = piece.tokens, positions[:length]
        packed.starts[own], needed = block, -(-piece.span.stop // block_tokens)
        packed.offsets[own] = positions[:length] % block_tokens
        packed.places[own] = np.arange(place, place + length)
        packed.sources[place : place + length] = np.arange(token, token + length)
        # the gap after a piece belongs to its segment: it is later than the tokens, and adds no segment to the tile
        packed.segments[first + place : first + place + len(positions)] = segment
        packed.row_positions[first + place : first + place + len(positions)] = positions
        runs = _prior_positions(piece.start, block_tokens) // (run_blocks * block_tokens)
        written, before = positions[:length] // block_tokens, -(-piece.start // block_tokens)
        read = slice(run * run_blocks, run * run_blocks + before)
        for to, blocks in ((packed, table), (packed.parts, np.asarray(piece.parts, np.int32))):
            if to is not None:
                to.tables[block : block + needed], to.blocks[own] = blocks[:needed], blocks[written]
                to.prior_blocks[read] = blocks[:before]
        prior = slice(run * run_places, (run + runs) * run_places)
        packed.segments[prior], packed.row_positions[prior] = _prior_ids(piece.start, runs, block_tokens, segment)
        token, place, run, block = token + length, place + len(positions), run + runs, block + needed
    packed.wanted[...] = token
    _require_written_once(packed, pieces, block_tokens)
    return packed if states is None else packed._replace(chunks=_cut_chunks(pieces, bucket, states))


def _cut_chunks(pieces: Sequence[PrefillPiece], bucket: PrefillBucket, states: StateSizes) -> PieceChunks:
    """Cuts each piece into chunks of the rule of delta nets, from its first token on."""
    most = bucket.tokens // CHUNK + MAX_PIECES + 1
    first, count = np.zeros(most, np.int32), np.zeros(most, np.int32)
    place, begins = np.full(most, states.padding, np.int32), np.zeros(most, bool)
    token = number = 0
    for index, piece in enumerate(pieces):
        if not 0 <= piece.state < states.places:
            raise ValueError(f'piece {index}: state={piece.state} must be a place of a state, 0 to {states.places - 1}')
        starts = np.arange(0, len(piece.tokens), CHUNK)
        own = slice(number, number + len(starts))
        first[own], count[own] = token + starts, np.minimum(len(piece.tokens) - starts, CHUNK)
        place[own], begins[number] = piece.state, piece.start == 0
        token, number = token + len(piece.tokens), own.stop
    return PieceChunks(first, count, place, begins, np.array(number, np.int32))  # type: ignore[arg-type]


def _prior_ids(start: int, runs: int, block_tokens: int, segment: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns segments and positions of a piece's prior; places that hold no position before `start` get another id."""
    blocks, width = _run(block_tokens)
    inside = np.arange(width)
    positions = (np.arange(runs)[:, None] * (blocks * block_tokens) + inside).ravel()
    seen = (positions < start) & np.tile(inside < blocks * block_tokens, runs)
    return np.where(seen, segment, segment + 1).astype(np.int32), positions.astype(np.int32)


def _padding(
    bucket: PrefillBucket, block_tokens: int, padding_block: int, windows: WindowSizes | None
) -> PackedPieces[np.ndarray]:
    """Returns a row of padding: every tile is a separate segment, so that attention does next to nothing for it."""
    places, prior, tile = _row(bucket, block_tokens)
    tokens = lambda: np.zeros(bucket.tokens, np.int32)
    of_pool = lambda block: PackedParts(
        np.full(bucket.tokens, block, np.int32),
        np.full(bucket.prior // block_tokens, block, np.int32),
        np.full(bucket.prior // block_tokens + bucket.tokens, block, np.int32),
    )
    return PackedPieces(
        tokens=tokens(),
        positions=tokens(),
        offsets=(np.arange(bucket.tokens) % block_tokens).astype(np.int32),
        places=tokens(),
        sources=np.zeros(places, np.int32),
        starts=tokens(),
        segments=(-1 - np.arange(prior + places) // tile).astype(np.int32),
        row_positions=np.zeros(prior + places, np.int32),
        wanted=np.array(0, np.int32),
        parts=None if windows is None else of_pool(windows.padding),
        **of_pool(padding_block)._asdict(),
    )


def _require_sound(index: int, piece: PrefillPiece, block_tokens: int) -> None:
    start, stop = piece.span
    if stop == start or start < 0:
        raise ValueError(f'piece {index}: {len(piece.tokens)} tokens from position {start}; give 1 or more from 0 on')
    if len(piece.blocks) * block_tokens < stop:
        raise ValueError(
            f'piece {index}: {len(piece.blocks)} blocks of {block_tokens} tokens do not hold its {stop} positions; '
            'give it more'
        )


def _require_written_once(packed: PackedPieces[np.ndarray], pieces: Sequence[PrefillPiece], block_tokens: int) -> None:
    lengths = [len(piece.tokens) for piece in pieces]
    written = packed.blocks[: sum(lengths)].astype(np.int64) * block_tokens + packed.offsets[: sum(lengths)]
    found, firsts = np.unique(written, return_index=True)
    if len(found) < len(written):
        again = np.setdiff1d(np.arange(len(written)), firsts)[0]
        piece = int(np.searchsorted(np.cumsum(lengths), again, side='right'))
        raise ValueError(
            f'piece {piece}: position {packed.positions[again]} is written to place {packed.offsets[again]} of block '
            f'{packed.blocks[again]}, and so is another; pieces must not share blocks that they write'
        )


# The traced part.


def prefill_pieces(
    decoder: Decoder,
    attention: CacheAttention,
    row_attention: RowAttention,
    weights: Params,
    state: EngineState,
    packed: PackedPieces[np.ndarray],
    over_heads: Callable[[Attend], Attend] = lambda attend: attend,
    mix: Mixer = mix_blocks,
    over_states: Callable[[Recur], Recur] = lambda recur: recur,
) -> EngineState:
    """Returns the state with the keys and values of all pieces. Its other content, NaN included, has no influence.

    `over_heads` turns attention over the heads of one device into attention over all heads, `over_states` the rule of
    delta nets likewise; `mix` is the product of experts.
    """
    given = jax.tree.map(jnp.asarray, packed)
    attend = over_heads(attend_pieces(attention, row_attention, given))
    recur = None if given.chunks is None else over_states(recur_pieces(given.chunks))
    _, layers, routed = decoder.hidden_and_routes(
        weights, given.tokens, given.positions, attend, state.layers, wanted=given.wanted, routing=Routing(mix),
        recur=recur,
    )  # fmt: skip
    found = {} if routed is None else routed.columns
    return EngineState(layers, write_columns(state, found, given.blocks, given.offsets))


def recur_pieces(chunks: PieceChunks) -> Recur:
    """Returns the `recur` of Decoder.hidden for packed pieces."""
    return lambda inputs, states: run_pieces(inputs, states, chunks)


def attend_pieces(attention: CacheAttention, row_attention: RowAttention, packed: PackedPieces[jax.Array]) -> Attend:
    """Returns the `attend` of Decoder.hidden for packed pieces, over a cache in the layout of the attention."""
    if isinstance(attention, NativeAttention):
        return _attend_in_place(attention, packed)
    return _attend_in_row(attention, row_attention, packed)


def _of_layer(packed: PackedPieces[jax.Array], window: int | None) -> PackedPieces[jax.Array] | PackedParts[jax.Array]:
    """Returns what has the blocks of a layer with this window."""
    return packed if window is None or packed.parts is None else packed.parts


def _attend_in_place(attention: NativeAttention, packed: PackedPieces[jax.Array]) -> Attend:
    """Lets each token attend directly to its sequence's cache blocks, without gathering rows or computing padding."""
    tokens = len(packed.tokens)
    lengths = jnp.where(jnp.arange(tokens) < packed.wanted, packed.positions + 1, 0)

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: LayerCache,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        at = _of_layer(packed, window)
        layer = attention.write(layer, k, v, at.blocks, packed.offsets)
        return attention.attend_pieces(q, layer, at.tables, packed.starts, lengths, window, sinks), layer

    return attend


def _attend_in_row(attention: CacheAttention, row_attention: RowAttention, packed: PackedPieces[jax.Array]) -> Attend:
    """Attends over the row of the module's docstring, with the learner's attention."""
    segments, sources = packed.segments, packed.sources
    prior = len(segments) - len(sources)

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: LayerCache,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        # written first: a read before the write would make XLA copy the cache
        at = _of_layer(packed, window)
        layer = attention.write(layer, k, v, at.blocks, packed.offsets)
        q, k, v = (x.at[sources].get(mode='promise_in_bounds') for x in (q, k, v))
        if prior:
            read = (_as_runs(x, len(at.prior_blocks)) for x in attention.read(layer, at.prior_blocks))
            k, v = (jnp.concatenate(both) for both in zip(read, (k, v), strict=True))
        impl = row_attention[window is not None, prior > 0]
        ids = segments if impl in _OWN else jnp.maximum(segments, 0)
        out = packed_attention(
            q, k, v, ids, ids, scale=q.shape[-1] ** -0.5, impl=impl, positions=packed.row_positions, window=window,
            first=prior, sinks=sinks,
        )  # fmt: skip
        return out.at[packed.places].get(mode='promise_in_bounds'), layer

    return attend


_OWN = ('blocked', 'pallas')  # accept any segment ids


def _as_runs(x: jax.Array, blocks: int) -> jax.Array:
    """Pads every run of the positions read, [blocks * T, K, D], to its places in the row: [R, K, D]."""
    block_tokens = len(x) // blocks
    run_blocks, places = _run(block_tokens)
    runs = x.reshape(-1, run_blocks * block_tokens, *x.shape[1:])
    return jnp.pad(runs, ((0, 0), (0, places - runs.shape[1]), (0, 0), (0, 0))).reshape(-1, *x.shape[1:])
