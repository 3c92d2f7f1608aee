"""The compiled programs of an engine in this process: prefill, generate and copy of one decoder on its devices.

rollout/stream.py calls them on the engine's lane; app/ builds one backend for the devices of each engine.
Weights and cache are arguments of every program, so new weights of the same shapes need no compilation. Shapes come
from short declared lists, prefill buckets and batch buckets; `warm_up` compiles all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from areal_jax.columns import ColumnArrays
from areal_jax.config.declarations import DTYPES, choices
from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import DeltaInputs
from areal_jax.models.experts import Routing
from areal_jax.models.families import ModelConfig
from areal_jax.models.logprobs import Ranking
from areal_jax.models.native_layers import LEAST_COLUMNS
from areal_jax.models.weights import Lora, Params, leaf_dtype
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillBucket, PrefillPiece, SamplingSupport, Span
from areal_jax.rollout.decode import decode_rows as rows
from areal_jax.rollout.decode import generate as parallel
from areal_jax.rollout.decode import prefill
from areal_jax.rollout.decode.decode_rows import CacheSizes, EngineState
from areal_jax.rollout.decode.generate import Generate, Outputs
from areal_jax.rollout.decode.prefill import PackedPieces
from areal_jax.rollout.decode.sampling import MOST_BIASED_TOKENS
from areal_jax.rollout.scoring import ScoringRequest
from areal_jax.rollout.state_pool import StateSizes, size_states
from areal_jax.rollout.window_blocks import WindowSizes, size_windows
from areal_jax.sharding.rules import path_name
from areal_jax.types import MOST_ALTERNATIVES, PublishedWeights, TokenScores, Tree

HostCopies = tuple[np.ndarray, np.ndarray]  # sources and targets, int32 [COPIES] each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedWeights:
    """The result of a backend's `prepare`; valid for every backend of the same decoder on the same devices."""

    params: Params


def require_quantizable(weights: str, dtype: str, lora: Lora | None, config: ModelConfig) -> None:
    """Raises ConfigError for an unknown form of weights, and if these weights cannot be in 8 bits."""
    if weights not in choices('rollout.weights'):
        raise ConfigError(f'weights={weights!r} is unknown; use one of {", ".join(choices("rollout.weights"))}')
    if weights == 'int8' and dtype != 'float32':
        raise ConfigError(f"weights='int8' with dtype={dtype!r}: float32 is what is quantized; use dtype='float32'")
    if weights == 'int8' and lora:
        raise ConfigError(f"weights='int8' with adapters of rank {lora.rank}: these stay in float32; use 'published'")
    if weights == 'int8' and config.experts:
        raise ConfigError(
            f"weights='int8' with {config.experts.count} experts: these are not quantized; use 'published'"
        )


def find_transposed(decoder: Decoder, dtype: str) -> frozenset[str] | None:
    """Returns the paths of the published leaves that the decoder takes transposed; it takes all others unchanged.

    None if it takes a leaf in another form (panels or 8 bits): then every version is prepared as a whole. Found by
    preparing abstract matrices with unequal sides: the shape of each result shows how its leaf is changed.
    """
    rows, columns = 16, 24  # which panels of kernels divide
    of_matrix = lambda shape: (*shape[:-2], rows, columns) if len(shape) > 1 else shape
    own = lambda path: leaf_dtype(path_name(path), dtype)
    probe = lambda path, leaf: jax.ShapeDtypeStruct(of_matrix(leaf.shape), own(path))
    published = jax.tree_util.tree_map_with_path(probe, decoder.abstract())
    prepared = jax.eval_shape(decoder.prepare, published)
    leaves, outcome = jax.tree_util.tree_leaves_with_path(published), jax.tree.leaves(prepared)
    if len(leaves) != len(outcome):  # a matrix in 8 bits is two arrays
        return None
    found = []
    for (path, before), after in zip(leaves, outcome, strict=True):
        if after.dtype != before.dtype or sorted(after.shape) != sorted(before.shape):
            return None
        if after.shape != before.shape:
            found.append(path_name(path))
    return frozenset(found)


def share_prepared(
    receive: Callable[[PublishedWeights], Params], prepare: Callable[[Params], PreparedWeights]
) -> Callable[[PublishedWeights], PreparedWeights]:
    """Wraps `receive` to return prepared weights: a version is received and prepared once while any engine holds it."""
    held: weakref.WeakValueDictionary[tuple[int, str], PreparedWeights] = weakref.WeakValueDictionary()
    lock = threading.Lock()  # engines fetch on separate lanes

    def fetch(published: PublishedWeights) -> PreparedWeights:
        key = published.version, published.manifest_hash
        with lock:
            weights = held.get(key)
            if weights is None:
                held[key] = weights = prepare(receive(published))
        return weights

    return fetch


MOST_PROGRAMS = 16
_OTHER_PROGRAMS = 2  # in addition to the buckets': initial state, copy; plus a column read if columns are recorded


@dataclasses.dataclass(frozen=True)
class Generation:
    """The programs of `generate` for one kind of row, one per batch."""

    form: Generate
    batches: tuple[int, ...]
    program: jax.stages.Wrapped

    def no_rows(self, size: int) -> rows.Batch:
        return rows.empty_batch(size, self.form.sizes, self.form.adjusted)

    def lower(self, weights: PreparedWeights, state: Tree, size: int) -> jax.stages.Lowered:
        return self.program.lower(weights, state, self.no_rows(size), np.int32(1))


class JaxDecodeBackend:
    """rollout.backend.DecodeBackend for a decoder on one device, or with its heads or experts over several.

    Every call that takes a state donates it: use only the state returned last.

    Args:
      slots: most sequences decoded at once.
      context_tokens: most tokens of a sequence.
      block_tokens: positions of a block.
      cache_blocks: blocks for sequences; None = enough for `slots` sequences of maximum length.
      window_blocks: of the pool of the layers with a window; 0 = they have the blocks of the others; None = as many as
        it takes, or 0 if these are not fewer than `cache_blocks`.
      state_snapshots: states of delta nets that are kept for prompts that continue an earlier sequence, see
        state_pool.size_states; None = half as many as `slots`, at least 1.
      prefill_buckets: ascending tokens of a packed prefill; longer sequences are prefilled in pieces of the last size.
      decode_steps: most tokens of a row in one `generate`.
      filtered: whether requests may use top_k, top_p or min_p.
      adjusted: whether requests may use penalties, biases and minimum lengths. Such requests come from many clients, so
        dispatches in which no request changes the softmax have separate programs without these computations.
      dtype: of the weights that will be given, one of DTYPES; keys, values and activations have it too. Logits and
        log-probs are float32.
      batch_buckets: ascending batch sizes to compile `generate` for, the last `slots`; None = derived from `slots`.
      devices: of weights, cache and programs; None = the first of this process.
      expert: number of device groups over which the experts are sharded; the devices of a group (1: all devices)
        shard the heads.
      attention: over the cache, one of choose.IMPLEMENTATIONS; 'auto' = the best of the platform.
      small_batches: also batches that cost a kernel as much as a larger one. Log-probs of batches differ by rounding.
      weights: rollout.weights; 'int8' quantizes the weights given to `prepare`, and activations, see models.quantized.
      records_routes: rollout.record_routes; needs a model whose passes return columns, as models with experts do.

    Raises ConfigError for sizes that do not fit together, an unknown dtype or a stacked decoder, and AttentionError
    if the attention lacks a feature that the decoder needs, or fails its check.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        context_tokens: int,
        block_tokens: int,
        cache_blocks: int | None = None,
        window_blocks: int | None = None,
        state_snapshots: int | None = None,
        prefill_buckets: tuple[int, ...],
        decode_steps: int,
        filtered: bool,
        dtype: str,
        batch_buckets: tuple[int, ...] | None = None,
        devices: Sequence[jax.Device] | None = None,
        expert: int = 1,
        attention: str = 'auto',
        adjusted: bool = False,
        weights: str = 'published',
        small_batches: bool = True,
        records_routes: bool = False,
        mla: str = 'absorbed',
    ):
        require_quantizable(weights, dtype, decoder.lora, decoder.config)
        if dtype not in DTYPES:
            raise ConfigError(f'dtype={dtype!r} is unknown; use one of {", ".join(DTYPES)}')
        if decoder.layers != 'list':
            raise ConfigError(f"decoding needs a decoder with layers='list', not {decoder.layers!r}")
        for name, value in (('slots', slots), ('decode_steps', decode_steps), ('block_tokens', block_tokens)):
            if value < 1:
                raise ConfigError(f'{name}={value} must be at least 1')
        if records_routes and not decoder.config.columns:
            raise ConfigError('rollout.record_routes=True needs a model with experts; set it to False')
        devices = tuple(devices or jax.local_devices()[:1])
        self.records_context = records_routes
        self.slots, self.context_tokens, self.block_tokens = slots, context_tokens, block_tokens
        self.cache_blocks = slots * -(-context_tokens // block_tokens) if cache_blocks is None else cache_blocks
        self.devices = tuple(map(str, devices))
        longest = max(filter(None, decoder.config.windows), default=None)
        self.windows = size_windows(
            longest, slots=slots, cache_blocks=self.cache_blocks, block_tokens=block_tokens, steps=decode_steps,
            piece_tokens=max(prefill_buckets, default=0),
        )  # fmt: skip
        if window_blocks is not None and longest is not None:
            self.windows = WindowSizes(longest, window_blocks) if window_blocks else None
        self.states = size_states(slots, state_snapshots) if decoder.config.delta else None
        self._sizes = rows.CacheSizes(context_tokens, block_tokens, self.cache_blocks, self.windows, self.states)
        self._steps, self.dtype = decode_steps, jnp.dtype(dtype)
        self.sampling = SamplingSupport(
            vocab_size=decoder.config.vocab_size, cuts=filtered, adjusts=adjusted,
            stop_tokens=rows.most_stop_tokens(adjusted), biased_tokens=MOST_BIASED_TOKENS,
        )  # fmt: skip
        self.placement, self.passed_over = parallel.place(
            decoder, self._sizes, self.dtype, attention, devices, weights, expert, mla
        )
        self._decoder, self._attention = self.placement.decoder, self.placement.attention
        self.attention = self._attention.name
        self._buckets = tuple(prefill_buckets)
        self.declared_prefills = prefill.declared_buckets(
            self._buckets, block_tokens, context_tokens, self.placement.platform
        )
        # in_shardings for all arguments: host arrays and committed or uncommitted device arrays share one program, and
        # weights committed to another device are an error instead of a silent copy.
        where = self.placement
        on, state, prepared = where.rows, where.state, where.prepared
        self.initial_program = jax.jit(self._initial, out_shardings=state)
        self._prefill_program = jax.jit(
            self._prefill, in_shardings=(prepared, state, on), out_shardings=state, donate_argnums=1
        )
        self.copy_program = jax.jit(self._copy, in_shardings=(state, *(on,) * 4), out_shardings=state, donate_argnums=0)
        self.read_program = jax.jit(rows.read_columns, in_shardings=(on, on), out_shardings=on)
        self.generations = self._declare_generations(batch_buckets, filtered, adjusted, small_batches)

    def _declare_generations(
        self, batches: tuple[int, ...] | None, filtered: bool, adjusted: bool, small_batches: bool
    ) -> tuple[Generation, ...]:
        """Declares the generate programs: the last generation takes every row, the first of two only plain rows."""
        most = MOST_PROGRAMS - _OTHER_PROGRAMS - len(self.declared_prefills) - self.records_context
        native = self._decoder.tokens == 'native_columns' and self.dtype == jnp.float32
        least = LEAST_COLUMNS if native and not small_batches else 1
        if not adjusted:
            kinds: list[tuple[bool, bool]] = [(filtered, adjusted)]
            shares = [rows.derive_batches(self.slots, min(rows.MOST_BATCHES, most), least)]
        else:
            kinds = [(False, False), (filtered, adjusted)]
            shares = [*rows.share_batches(self.slots, most, least)]
        if batches is not None:
            shares = [tuple(batches)] * len(kinds)
        self._check(shares)
        generate = functools.partial(
            Generate,
            self._decoder,
            self._attention,
            self.placement.over_heads,
            self.placement.over_states,
            self.placement.mix,
            self.placement.sum_blocks,
            self._sizes,
        )
        forms = [generate(self._steps, *kind) for kind in kinds]
        return tuple(Generation(*one, self._compile(one[0])) for one in zip(forms, shares, strict=True))

    def _compile(self, form: Generate) -> jax.stages.Wrapped:
        def generate(
            weights: PreparedWeights, state: EngineState, batch: rows.Batch, steps: jax.Array
        ) -> tuple[EngineState, Outputs]:
            return form(weights.params, state, batch, steps)

        where = self.placement
        return jax.jit(
            generate, in_shardings=(where.prepared, where.state, where.rows, where.rows),
            out_shardings=(where.state, where.rows), donate_argnums=1,
        )  # fmt: skip

    def _check(self, shares: Sequence[tuple[int, ...]]) -> None:
        for name, sizes in (('prefill_buckets', self._buckets), *(('batch_buckets', share) for share in shares)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f'{name}={sizes} must be ascending positive numbers')
        if any(share[-1] != self.slots for share in shares):
            raise ConfigError(f'batch_buckets={shares[0]} must end with slots={self.slots}')
        if self.cache_blocks < self._sizes.table_blocks:
            raise ConfigError(
                f'cache_blocks={self.cache_blocks} of {self.block_tokens} tokens do not hold one sequence of '
                f'context_tokens={self.context_tokens}; give at least {self._sizes.table_blocks}'
            )
        programs = sum(map(len, shares)) + len(self.declared_prefills) + _OTHER_PROGRAMS + self.records_context
        if programs > MOST_PROGRAMS:
            raise ConfigError(
                f'prefill_buckets={self._buckets} and batch_buckets={shares[0]} need {programs} programs, more '
                f'than {MOST_PROGRAMS}; declare fewer'
            )

    def warm_up(self, weights: PreparedWeights, announce: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compiles every declared program by running it without sequences; returns the number of programs.

        `announce` is called before each program with the number done and the total.
        """
        decoding = [(generation, size) for generation in self.generations for size in generation.batches]
        if self.placement.platform != 'cpu':
            compile_side_by_side(self.lower_all(weights))
        total = _OTHER_PROGRAMS + len(self.declared_prefills) + len(decoding)
        announce(0, total)
        state = self.initial_state()
        announce(1, total)
        state = self.copy_program(state, *self.no_copies())
        for done, bucket in enumerate(self.declared_prefills, start=_OTHER_PROGRAMS):
            announce(done, total)
            state = self._prefill_program(weights, state, self._pack([], bucket))
        for done, (generation, size) in enumerate(decoding, start=_OTHER_PROGRAMS + len(self.declared_prefills)):
            announce(done, total)
            state, _ = generation.program(weights, state, generation.no_rows(size), np.int32(1))
        if state.columns:
            self.read_program(state.columns, np.zeros(self._sizes.table_blocks, np.int32))
        jax.block_until_ready(state)
        return total + self.records_context

    def lower_all(self, weights: PreparedWeights) -> Iterator[jax.stages.Lowered]:
        """Lowers every prefill and every generation."""
        yield from (self.lower_prefill(weights, bucket) for bucket in self.declared_prefills)
        for generation in self.generations:
            yield from (generation.lower(weights, self.abstract_state(), size) for size in generation.batches)

    # The programs as text and numbers, for measurements and tests.

    def lower_prefill(self, weights: PreparedWeights, bucket: PrefillBucket) -> jax.stages.Lowered:
        """Lowers the prefill of one of `declared_prefills`."""
        return self._prefill_program.lower(weights, self.abstract_state(), self._pack([], bucket))

    def lower_generate(self, weights: PreparedWeights, batch: int, *, plain: bool = True) -> jax.stages.Lowered:
        """Lowers `generate` for `batch` rows; `plain`: for rows that the plain programs can decode."""
        return self.generations[0 if plain else -1].lower(weights, self.abstract_state(), batch)

    # The loop's calls; rollout.backend.DecodeBackend has the docstrings.

    @property
    def state_bytes(self) -> int:
        """The size of one state, its padding block included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_state()))

    def prepare(self, weights: Params | PreparedWeights) -> PreparedWeights:
        """Converts weights to the form for decoding; returns prepared weights unchanged.

        Raises ValueError for weights of another dtype than the backend's.
        """
        if isinstance(weights, PreparedWeights):
            return weights
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
            if leaf.dtype != (own := leaf_dtype(path_name(path), self.dtype.name)):
                fix = f'the backend was built with dtype={own!r}; cast the weights or build it with theirs'
                if own != self.dtype.name:
                    fix = f'this leaf is {own} in every copy of the weights: do not cast it'
                raise ValueError(f'weights have {leaf.dtype} at {path_name(path)}, but {fix}')
        # outside jit, so that unchanged leaves are not copied; committed, so that all weights use the same operations
        prepared = self._decoder.prepare(jax.device_put(weights, self.placement.published))
        return PreparedWeights(jax.block_until_ready(prepared))

    def find_transposed(self) -> frozenset[str] | None:
        """Finds transposed leaves, see `find_transposed` above; None if several devices would need any.

        Over several devices no leaf is transposed before it is sharded.
        """
        found = find_transposed(self._decoder, self.dtype.name)
        return None if found and len(self.devices) > 1 else found

    def initial_state(self) -> EngineState:
        # ready, so that the time of the first prefill does not include allocating the cache's pages
        return jax.block_until_ready(self.initial_program())

    def prefill_bucket(self, spans: Sequence[Span]) -> PrefillBucket | None:
        return prefill.bucket_for(spans, self._buckets, self.block_tokens, self.context_tokens, self.placement.platform)

    @property
    def largest_piece(self) -> int:
        return self._buckets[-1]

    def prefill(self, weights: PreparedWeights, state: EngineState, pieces: Sequence[PrefillPiece]) -> EngineState:
        """Prefills; raises ValueError if no bucket holds the pieces, and then leaves the state untouched."""
        bucket = self.prefill_bucket([piece.span for piece in pieces])
        if bucket is None:
            raise ValueError(
                f'{len(pieces)} pieces of {sum(len(piece.tokens) for piece in pieces)} tokens do not fit '
                f'prefill_buckets={self._buckets}; split them'
            )
        packed = self._pack(pieces, bucket)
        # ready, so that the lane's interval ends when the work does
        return jax.block_until_ready(self._prefill_program(weights, state, packed))

    def batch_bucket(self, decoded: Sequence[DecodeRow]) -> int:
        """Returns the smallest batch that holds the rows; raises ValueError for more rows than slots."""
        return rows.smallest_that_holds(self._generation(decoded).batches, len(decoded))

    def generate(
        self, weights: PreparedWeights, state: EngineState, decoded: Sequence[DecodeRow], steps: int
    ) -> tuple[EngineState, DecodeOutput]:
        """Decodes; raises ValueError for rows that do not fit this backend, and then leaves the state untouched."""
        if not 0 < steps <= self._steps:
            raise ValueError(f'steps={steps} must lie between 1 and decode_steps={self._steps}')
        for row in decoded:
            rows.check_row(row, steps, self._sizes, self.sampling)
        generation, size = self._generation(decoded), self.batch_bucket(decoded)
        batch, places = rows.fill_batch(decoded, size, self._sizes, generation.form.adjusted)
        state, outputs = generation.program(weights, state, batch, np.int32(steps))
        out = jax.device_get(outputs)
        given = lambda values: values[:steps, places]
        columns = {name: given(values) for name, values in out.columns.items()}
        read = int(out.positions_read)
        return state, DecodeOutput(given(out.tokens), given(out.logprobs), given(out.valid), columns, read)

    def read_context(self, state: EngineState, blocks: Sequence[int], tokens: int) -> ColumnArrays:
        table = np.full(self._sizes.table_blocks, self._sizes.padding_block, np.int32)
        table[: len(blocks)] = blocks[: self._sizes.table_blocks]
        found, columns = jax.device_get(self.read_program(state.columns, table)), {}
        for column in self._decoder.config.columns:
            read = np.concatenate(found[column.name])[: tokens - 1]
            columns[column.name] = np.concatenate([column.blank(1), read])  # no pass predicts the first token
        return columns

    def copy(
        self,
        state: EngineState,
        copies: Sequence[tuple[int, int]],
        parts: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> EngineState:
        for each in itertools.zip_longest(_cut(copies), _cut(parts), _cut(states), fillvalue=()):
            first, last, of_parts, of_states = self.no_copies()
            for some, of_pool in zip(each, ((first, last), of_parts, of_states), strict=True):
                for index, copy in enumerate(some if of_pool else ()):
                    assert of_pool is not None
                    of_pool[0][index], of_pool[1][index] = copy
            state = self.copy_program(state, first, last, of_parts, of_states)
        return state

    def no_copies(self) -> tuple[np.ndarray, np.ndarray, HostCopies | None, HostCopies | None]:
        """Returns the arguments of `copy_program` after the state, for copies of padding to itself."""
        of_parts = _copies_of(self.windows.padding) if self.windows else None
        return (
            *_copies_of(self._sizes.padding_block),
            of_parts,
            _copies_of(self.states.padding) if self.states else None,
        )

    def _generation(self, decoded: Sequence[DecodeRow]) -> Generation:
        if len(self.generations) > 1 and all(rows.is_plain(row.request.sampling) for row in decoded):
            return self.generations[0]
        return self.generations[-1]

    def _pack(self, pieces: Sequence[PrefillPiece], bucket: PrefillBucket) -> PackedPieces[np.ndarray]:
        sizes = self._sizes
        return prefill.pack_pieces(pieces, bucket, self.block_tokens, sizes.padding_block, sizes.windows, sizes.states)

    # The programs.

    def abstract_state(self) -> Tree:
        """Describes shape, dtype and sharding of every array of a state."""
        return jax.tree.map(_describe_over, self.placement.state, jax.eval_shape(self._initial))

    def _initial(self) -> EngineState:
        recorded = self._decoder.config.columns if self.records_context else ()
        columns = rows.empty_columns(recorded, self._sizes.blocks + 1, self.block_tokens)
        return EngineState(self.placement.empty_cache(self._sizes, self.dtype), columns)

    def _prefill(self, weights: PreparedWeights, state: EngineState, packed: PackedPieces[np.ndarray]) -> EngineState:
        at = self.placement
        fixed = self._decoder, self._attention, at.row_attention
        return prefill.prefill_pieces(*fixed, weights.params, state, packed, at.over_heads, at.mix, at.over_states)

    def _copy(
        self,
        state: EngineState,
        sources: jax.Array,
        targets: jax.Array,
        parts: rows.Copies | None,
        states: rows.Copies | None,
    ) -> EngineState:
        return rows.copy_blocks(self._attention, self._decoder.config, state, sources, targets, parts, states)


def _copies_of(padding: int) -> HostCopies:
    return np.full(rows.COPIES, padding, np.int32), np.full(rows.COPIES, padding, np.int32)


def _cut(copies: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Cuts copies into the calls of a program that reads all sources before it writes: none reads a target of its."""
    part: list[tuple[int, int]] = []
    for copy in copies:
        if len(part) == rows.COPIES or any(target in copy for _, target in part):
            yield part
            part = []
        part.append(copy)
    if part:
        yield part


def compile_side_by_side(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compiles programs in one thread per core; jax keeps the results for later calls.

    XLA compiles a program for a GPU on a single core.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(jax.stages.Lowered.compile, programs))


def _describe_over(sharding: Sharding, part: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)


@functools.lru_cache(maxsize=8)
def share_backend(config: ModelConfig, lora: Lora | None, **sizes: Any) -> JaxDecodeBackend:
    """Returns a backend that all runs of a process share; `sizes` are JaxDecodeBackend's arguments.

    A backend holds programs and no state, so a second run of the same shapes traces and compiles nothing.
    """
    return JaxDecodeBackend(Decoder(config, lora=lora), **sizes)


# The compiled passes that score sequences: packed as for a prefill, through the decoder, to log-probs.
#
# Sequences are concatenated in one row, as in prefill.py, and each reads only its own tokens: its numbers do not
# depend on the others, bit for bit if attention runs in C++, else up to rounding. Their keys and values are in a
# scratch cache inside the program, one layer at a time. Only tokens that predict a scored token reach the head, whose
# logits exist for a part of the vocabulary at a time. A program is declared for each row of SIZES that the context
# allows, and for one alternative or MOST_ALTERNATIVES; it is compiled when it is first needed, because a server of a
# run scores nothing.


SIZES = (256, 1024)  # tokens of rows, in addition to the context; shared rows have at most the last size
_BLOCK_TOKENS = 16  # of the scratch cache: a sequence begins at a block
_KINDS = (1, MOST_ALTERNATIVES)


class Program(NamedTuple):
    """The shape of a declared scoring program."""

    tokens: int  # of the row, padding included
    alternatives: int


class ScoredPlaces(NamedTuple):
    """The indices in a row of tokens that predict scored tokens, int32 [C]; from `wanted` on padding."""

    sources: np.ndarray
    targets: np.ndarray
    temperatures: np.ndarray  # float32 [C]
    wanted: np.ndarray  # int32 []


class JaxScoring:
    """scoring.ScoringBackend on the devices of a decode backend, with the weights that it prepared."""

    def __init__(self, backend: JaxDecodeBackend):
        self._placement, self._dtype = backend.placement, backend.dtype
        context = backend.context_tokens
        self._sizes = tuple(sorted({*(size for size in SIZES if size < context), context}))
        self._shared = min(SIZES[-1], context)  # tokens of sequences that share a row
        self._compiled: dict[Program, jax.stages.Compiled] = {}

    @property
    def programs(self) -> int:
        return len(self._compiled)

    @property
    def declared(self) -> tuple[Program, ...]:
        return tuple(Program(size, kind) for kind in _KINDS for size in self._sizes)

    def program_for(self, lengths: Sequence[int], alternatives: int) -> Program | None:
        if len(lengths) > 1 and sum(lengths) > self._shared:
            return None
        spans = [Span(0, length - 1) for length in lengths]  # the last token predicts nothing
        kind = next(kind for kind in _KINDS if alternatives <= kind)
        for size in self._sizes:
            if prefill.holds(spans, PrefillBucket(size, 0), _BLOCK_TOKENS):
                return Program(size, kind)
        return None

    def is_compiled(self, program: Hashable) -> bool:
        return program in self._compiled

    def compile(self, program: Hashable, weights: PreparedWeights) -> None:
        assert isinstance(program, Program)
        where = self._placement
        run = jax.jit(
            functools.partial(self._run, program),
            in_shardings=(where.prepared, where.rows, where.rows),
            out_shardings=where.rows,
        )
        self._compiled[program] = run.lower(weights, *self._pack(program, [])).compile()

    def score(
        self, program: Hashable, weights: PreparedWeights, requests: Sequence[ScoringRequest]
    ) -> list[TokenScores]:
        assert isinstance(program, Program)
        if program not in self._compiled:
            self.compile(program, weights)
        ranking = jax.device_get(self._compiled[program](weights, *self._pack(program, requests)))
        found, end = [], 0
        for request in requests:
            start, end = end, end + len(request.tokens) - request.first
            own = slice(start, end)
            ids, largest = (side[own, : request.alternatives] for side in (ranking.ids, ranking.largest))
            found.append(TokenScores(ranking.logprobs[own], ids, largest))
        return found

    def _scratch(self, program: Program) -> CacheSizes:
        """The scratch cache; a sequence takes whole blocks, so each may leave its last block partly empty."""
        blocks = -(-program.tokens // _BLOCK_TOKENS) + prefill.MAX_PIECES
        states = StateSizes(1) if self._placement.config.delta else None  # each sequence begins, and leaves, its own
        return CacheSizes(program.tokens, _BLOCK_TOKENS, blocks, states=states)

    def _pack(
        self, program: Program, requests: Sequence[ScoringRequest]
    ) -> tuple[PackedPieces[np.ndarray], ScoredPlaces]:
        pieces, block = [], 0
        sources, targets = (np.zeros(program.tokens, np.int32) for _ in range(2))
        temperatures = np.ones(program.tokens, np.float32)
        token = place = 0
        for request in requests:
            length = len(request.tokens) - 1
            blocks = -(-length // _BLOCK_TOKENS)
            pieces.append(PrefillPiece(request.tokens[:-1], 0, range(block, block + blocks)))
            scored = slice(place, place + len(request.tokens) - request.first)
            sources[scored] = np.arange(token + request.first - 1, token + length)
            targets[scored] = request.tokens[request.first :]
            temperatures[scored] = request.temperatures
            token, place, block = token + length, scored.stop, block + blocks
        bucket = PrefillBucket(program.tokens, 0)
        scratch = self._scratch(program)
        packed = prefill.pack_pieces(pieces, bucket, _BLOCK_TOKENS, scratch.padding_block, states=scratch.states)
        return packed, ScoredPlaces(sources, targets, temperatures, np.array(place, np.int32))

    def _run(
        self, program: Program, weights: PreparedWeights, packed: PackedPieces[jax.Array], scored: ScoredPlaces
    ) -> Ranking:
        where, params = self._placement, weights.params
        decoder, given = where.decoder, jax.tree.map(jnp.asarray, packed)
        attend_layer = where.over_heads(prefill.attend_pieces(where.attention, where.row_attention, given))
        # each layer overwrites the scratch of the last layer of its kind
        scratch: dict[str, Tree] = {
            decoder.config.mixer(index): entry
            for index, entry in enumerate(where.empty_cache(self._scratch(program), self._dtype))
        }

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None, **sinks: jax.Array
        ) -> tuple[jax.Array, Tree]:
            out, scratch['attention'] = attend_layer(q, k, v, scratch['attention'], window, **sinks)
            return out, entry

        def recur(inputs: DeltaInputs, entry: Tree) -> tuple[jax.Array, Tree]:
            assert given.chunks is not None
            run = where.over_states(prefill.recur_pieces(given.chunks))
            out, scratch['delta'] = run(inputs, scratch['delta'])
            return out, entry

        hidden, _ = decoder.hidden(
            params, given.tokens, given.positions, attend, wanted=given.wanted, routing=Routing(where.mix),
            recur=recur if decoder.config.delta else None,
        )  # fmt: skip
        sources, targets, temperatures, wanted = map(jnp.asarray, scored)
        predicting = jnp.take(hidden, sources, axis=decoder.token_axis, mode='clip')
        return decoder.rank(params, predicting, targets, temperatures, program.alternatives, wanted)


# Compiles the programs of a backend before its devices hold weights, while other backends use those devices.


def compile_ahead(backend: JaxDecodeBackend, weights: PreparedWeights) -> None:
    """Compiles the programs that `warm_up` would run, and runs nothing; callable from any thread.

    `weights` may be on other devices of the same number, or only be descriptions: only their shapes are read.
    """

    def describe(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding, mesh = leaf.sharding, backend.placement.mesh
        if mesh is None or not isinstance(sharding, NamedSharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec))

    described, state = jax.tree.map(describe, weights), backend.abstract_state()
    backend.initial_program.lower().compile()
    backend.copy_program.lower(state, *backend.no_copies()).compile()
    for lowered in backend.lower_all(described):
        lowered.compile()
    if state.columns:
        table = np.zeros(-(-backend.context_tokens // backend.block_tokens), np.int32)
        backend.read_program.lower(state.columns, table).compile()
