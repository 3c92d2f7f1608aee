"""The compiled programs of an engine in this process: prefill, insert and decode of one decoder on one device.

rollout/stream.py calls them on the engine's lane; app/ builds one backend for each device on which engines
decode. Weights are arguments of every program, so new weights of the same shapes need no compilation. Shapes come from
short declared lists: prefill buckets (for one row, and for a row per slot) and decode widths; `warm_up` compiles all of
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from areal_jax.config.declarations import DTYPES
from areal_jax.config.ranges import ConfigError
from areal_jax.models.decoder import Decoder, Params
from areal_jax.rollout.backend import DecodeOutput, SlotInit
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.attention import cache_attention, causal_attention
from areal_jax.rollout.decode.cache import Cache, LayerCache, Prefix, empty_cache, insert_row, write_token
from areal_jax.rollout.decode.slots import (
    MAX_STOP_TOKENS,
    DecodeState,
    Slots,
    advance,
    empty_slots,
    occupy,
    slot_values,
)

_PREFILL_TOKENS = 16384  # of rows that are computed at once: bounds attention scores and activations
# tokens, log-probs, valid, log-probs of the cut softmax (None unless filtered): [decode_steps, slots] each
_Outputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


class JaxDecodeBackend:
    """rollout.backend.DecodeBackend for a decoder on one device.

    Every call donates the state that it is given: use only the state returned last.

    Args:
      slots: sequences decoded at once, B.
      context_tokens: cache positions of a slot, S: the most tokens of a sequence.
      prefill_buckets: ascending lengths that prefixes are padded to; the last holds context_tokens - 1.
      decode_steps: most tokens per slot of one `generate`.
      decode_widths: ascending numbers of cache positions that a `generate` may attend to, the last context_tokens;
        None = that one alone.
      filtered: whether requests may use top_k or top_p.
      dtype: of the weights that will be given, one of DTYPES; keys, values and activations have it too. Logits and
        log-probs are float32.
      device: of weights, cache and programs; None = the first of this process.

    Raises ValueError for sizes that do not fit together, an unknown dtype or a stacked decoder, and, from every call
    that is given weights, for weights of another dtype.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        context_tokens: int,
        prefill_buckets: tuple[int, ...],
        decode_steps: int,
        filtered: bool,
        dtype: str,
        decode_widths: tuple[int, ...] | None = None,
        device: jax.Device | None = None,
    ):
        if dtype not in DTYPES:
            raise ConfigError(f'dtype={dtype!r} is unknown; use one of {", ".join(DTYPES)}')
        if decoder.layers != 'list':
            raise ConfigError(f"decoding needs a decoder with layers='list', not {decoder.layers!r}")
        self.slots, self.context_tokens = slots, context_tokens
        self._decoder, self._steps, self._filtered = decoder, decode_steps, filtered
        self._dtype = jnp.dtype(dtype)
        device = device or jax.local_devices()[0]
        self.devices: tuple[str, ...] = (str(device),)
        self._buckets = tuple(prefill_buckets)
        self._widths = (context_tokens,) if decode_widths is None else tuple(decode_widths)
        self._check()
        # in_shardings for all arguments: host arrays and committed or uncommitted device arrays share one program, and
        # weights committed to another device are an error instead of a silent copy.
        self._on = on = jax.sharding.SingleDeviceSharding(device)
        self._initial_program = jax.jit(self._initial, out_shardings=on)
        self._prefill_program = jax.jit(self._prefill_rows, in_shardings=on, out_shardings=on)
        self._insert_program = jax.jit(_insert, in_shardings=on, out_shardings=on, donate_argnums=0)
        self._release_program = jax.jit(_release, in_shardings=on, out_shardings=on, donate_argnums=0)
        self._generate_program = jax.jit(
            self._generate_steps, in_shardings=on, out_shardings=on, static_argnums=3, donate_argnums=1
        )

    def _check(self) -> None:
        for name, value in (('slots', self.slots), ('decode_steps', self._steps)):
            if value < 1:
                raise ConfigError(f'{name}={value} must be at least 1')
        for name, sizes in (('prefill_buckets', self._buckets), ('decode_widths', self._widths)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f'{name}={sizes} must be ascending positive lengths')
        if self._buckets[-1] < self.context_tokens - 1:
            raise ConfigError(
                f'prefill_buckets={self._buckets} end below context_tokens - 1 = {self.context_tokens - 1}, the '
                'longest prefix of an interrupted answer; add a bucket'
            )
        if self._widths[-1] != self.context_tokens:
            raise ConfigError(f'decode_widths={self._widths} must end with context_tokens={self.context_tokens}')

    # Buckets.

    def width_for(self, longest: int) -> int:
        """The smallest declared decode width that holds `longest` positions.

        Raises ValueError when there is none.
        """
        return _bucket(self._widths, longest, 'decode_widths')

    def prefill_bucket(self, longest: int) -> int:
        """The smallest declared prefill bucket that holds `longest` tokens.

        Raises ValueError when there is none.
        """
        return _bucket(self._buckets, longest, 'prefill_buckets')

    def warm_up(self, weights: Params, announce: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compiles every declared program by running it without requests; returns the number of programs.

        `announce` is called before each program with the number done and the total.
        """
        shapes = [(rows, bucket) for rows in sorted({1, self.slots}) for bucket in self._buckets]
        total = 2 + 2 * len(shapes) + len(self._widths)
        announce(0, total)
        state = self.initial_state()
        for done, (rows, bucket) in enumerate(shapes):
            announce(1 + 2 * done, total)
            layers = self._prefill_program(weights, np.zeros((rows, bucket), np.int32))
            announce(2 + 2 * done, total)
            state = self._insert(Prefix(layers, 0, 0), state, [])
        state = self.release(state, [])
        for done, width in enumerate(self._widths):
            announce(2 + 2 * len(shapes) + done, total)
            state, _ = self.generate(weights, state, self._steps, width)
        return total

    # The loop's calls.

    def initial_state(self) -> DecodeState:
        """No live slots."""
        return self._initial_program()

    def prefill(self, weights: Params, sequences: Sequence[np.ndarray]) -> list[Prefix]:
        """The prefixes of int32 [L] sequences, L >= 0, at most `slots` of them.

        Up to slots / 2 sequences run one at a time, each in its own bucket. More run as one batch with a row per slot
        in the bucket of the longest: the batch costs the same however many of its rows are used.

        Raises ValueError when there are too many or one is longer than every bucket.
        """
        if len(sequences) > self.slots:
            raise ValueError(f'{len(sequences)} sequences to prefill, but slots={self.slots}; split them')
        if len(sequences) <= max(1, self.slots // 2):
            return [self._prefill_batch(weights, [sequence], 1)[0] for sequence in sequences]
        return self._prefill_batch(weights, sequences, self.slots)

    def _prefill_batch(self, weights: Params, sequences: Sequence[np.ndarray], rows: int) -> list[Prefix]:
        lengths = [len(sequence) for sequence in sequences]
        if not any(lengths):
            return [Prefix(self._no_rows(), 0, 0) for _ in sequences]
        tokens = np.zeros((rows, self.prefill_bucket(max(lengths))), np.int32)
        for row, sequence in zip(tokens, sequences, strict=False):
            row[: len(sequence)] = sequence
        layers = self._prefill_program(weights, tokens)
        return [Prefix(layers, row, length) for row, length in enumerate(lengths)]

    def insert(self, prefix: Prefix, state: DecodeState, inits: Sequence[SlotInit]) -> DecodeState:
        """The state with the prefix, the KV of `tokens[:-1]`, in the slots of all `inits`, live.

        Raises ValueError when an init does not fit the prefix or the sizes of this backend; the state is untouched.
        """
        for init in inits:
            self._check_init(init, prefix)
        return jax.block_until_ready(self._insert(prefix, state, inits))  # so that the lane's interval has its real end

    def generate(self, weights: Params, state: DecodeState, steps: int, width: int) -> tuple[DecodeState, DecodeOutput]:
        """Up to `steps` tokens for every live slot; `width` must hold the position of each token that is read.

        Raises ValueError when `steps` or `width` was not declared.
        """
        if not 0 < steps <= self._steps or width not in self._widths:
            raise ValueError(
                f'steps={steps}, width={width}: compiled are up to decode_steps={self._steps} and '
                f'decode_widths={self._widths}'
            )
        state, outputs = self._generate_program(weights, state, np.int32(steps), width)
        tokens, logprobs, valid, cut_logprobs = jax.device_get(outputs)
        cut = None if cut_logprobs is None else cut_logprobs[:steps]
        return state, DecodeOutput(tokens[:steps], logprobs[:steps], valid[:steps], cut)

    def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """The state with these slots dead."""
        dead = np.zeros(self.slots, bool)
        dead[list(slots)] = True
        return self._release_program(state, dead)

    # Host side of insert.

    def _check_init(self, init: SlotInit, prefix: Prefix) -> None:
        params, length = init.request.sampling, len(init.tokens)
        where = f'request {init.request.request_id} in slot {init.slot}: '
        if not 0 <= init.slot < self.slots:
            raise ValueError(f'{where}there are slots={self.slots}')
        if prefix.length != length - 1:
            raise ValueError(f'{where}{length} tokens need a prefix of {length - 1}, not of {prefix.length}')
        if not length < init.limit <= self.context_tokens:
            raise ValueError(
                f'{where}limit={init.limit} must exceed its {length} tokens and fit '
                f'context_tokens={self.context_tokens}'
            )
        if len(params.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f'{where}{len(params.stop_tokens)} stop tokens, but a slot holds {MAX_STOP_TOKENS}; use fewer'
            )
        if (params.top_k > 0 or params.top_p < 1.0) and not self._filtered:
            raise ValueError(
                f'{where}top_k={params.top_k}, top_p={params.top_p}, but the programs were built without; '
                'build the backend with filtered=True'
            )

    def _insert(self, prefix: Prefix, state: DecodeState, inits: Sequence[SlotInit]) -> DecodeState:
        values = slot_values(inits, self.slots)
        return self._insert_program(state, prefix.rows, np.int32(prefix.row), np.int32(len(inits)), *values)

    def _no_rows(self) -> Cache:
        """The rows of an empty prefix, with the shapes of the smallest prefill."""
        c = self._decoder.config
        zeros = jax.device_put(np.zeros((1, c.n_kv_heads, self._buckets[0], c.head_dim), self._dtype), self._on)
        return ((zeros, zeros),) * c.n_layers

    # The programs.

    def _check_dtype(self, weights: Params) -> None:
        """Raises ValueError for weights of another dtype, which would compile the program again.

        Called while a program is traced, so it costs nothing when the program runs.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
            if leaf.dtype != self._dtype:
                raise ValueError(
                    f'weights have {leaf.dtype} at {jax.tree_util.keystr(path, simple=True, separator="/")}, but the '
                    f'backend was built with dtype={self._dtype.name!r}; cast the weights or build it with theirs'
                )

    @property
    def state_bytes(self) -> int:
        """Of one state, its KV cache included."""
        leaves = jax.tree.leaves(jax.eval_shape(self._initial))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _initial(self) -> DecodeState:
        c = self._decoder.config
        cache = empty_cache(c.n_layers, self.slots, c.n_kv_heads, self.context_tokens, c.head_dim, self._dtype)
        return DecodeState(cache, jax.tree.map(jnp.asarray, empty_slots(self.slots)))

    def _prefill_rows(self, weights: Params, tokens: jax.Array) -> Cache:
        """Per layer k, v [R, K, L, D] of tokens [R, L]."""
        self._check_dtype(weights)
        rows, length = tokens.shape
        at_once = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * length <= _PREFILL_TOKENS))
        if at_once == rows:
            return self._prefill_part(weights, tokens)
        parts = lax.map(lambda part: self._prefill_part(weights, part), tokens.reshape(-1, at_once, length))
        return jax.tree.map(lambda leaf: leaf.reshape(rows, *leaf.shape[2:]), parts)

    def _prefill_part(self, weights: Params, tokens: jax.Array) -> Cache:
        rows, length = tokens.shape

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, _: None, window: int | None
        ) -> tuple[jax.Array, LayerCache]:
            q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            return causal_attention(q, k, v, window).reshape(rows * length, *q.shape[2:]), (k, v)

        positions = jnp.tile(jnp.arange(length), rows)
        return self._decoder.hidden(weights, tokens.reshape(-1), positions, attend)[1]

    def _generate_steps(
        self, weights: Params, state: DecodeState, steps: jax.Array, width: int
    ) -> tuple[DecodeState, _Outputs]:
        self._check_dtype(weights)
        shape = (self._steps, self.slots)
        empty = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool)
        outputs: _Outputs = *empty, jnp.zeros(shape, jnp.float32) if self._filtered else None

        def more(carry: tuple[jax.Array, DecodeState, _Outputs]) -> jax.Array:
            return (carry[0] < steps) & jnp.any(carry[1].slots.live)

        def step(carry: tuple[jax.Array, DecodeState, _Outputs]) -> tuple[jax.Array, DecodeState, _Outputs]:
            i, before, outputs = carry
            live = before.slots.live
            after, tokens, logprobs, cut_logprobs = self._step(weights, before, width)
            values = tokens, logprobs, live, cut_logprobs
            outputs = jax.tree.map(lambda rows, row: rows.at[i].set(row), outputs, values)
            return i + 1, after, outputs

        _, state, outputs = lax.while_loop(more, step, (jnp.int32(0), state, outputs))
        return state, outputs

    def _step(
        self, weights: Params, state: DecodeState, width: int
    ) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array | None]:
        """One token per slot: (state, tokens [B], log-probs [B], log-probs of the cut softmax [B] or None)."""
        slots = state.slots

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache, window: int | None
        ) -> tuple[jax.Array, LayerCache]:
            layer = write_token(layer, k, v, slots.position)
            return cache_attention(q, layer[0][:, :, :width], layer[1][:, :, :width], slots.position, window), layer

        hidden, cache = self._decoder.hidden(weights, slots.token, slots.position, attend, state.cache)
        logits = self._decoder.logits(weights, hidden)
        cut_logits = _cut_where_asked(logits, slots) if self._filtered else None
        tokens, logprobs, cut_logprobs = sampling.sample_tokens(
            logits, slots.key, slots.position + 1, slots.temperature, cut_logits
        )
        return DecodeState(cache, advance(slots, tokens)), tokens, logprobs, cut_logprobs


def _cut_where_asked(logits: jax.Array, slots: Slots) -> jax.Array:
    asked = slots.live & ((slots.top_k > 0) | (slots.top_p < 1.0))
    cut = lambda x: sampling.cut_support(x, slots.temperature, slots.top_k, slots.top_p)
    return lax.cond(jnp.any(asked), cut, lambda x: x, logits)


def _insert(
    state: DecodeState,
    rows: Cache,
    row: jax.Array,
    n: jax.Array,
    at: jax.Array,
    values: Slots,
    seeds: jax.Array,
) -> DecodeState:
    return DecodeState(insert_row(state.cache, rows, row, at, n), occupy(state.slots, at, values, seeds))


def _release(state: DecodeState, dead: jax.Array) -> DecodeState:
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, live=state.slots.live & ~dead))


def _bucket(sizes: tuple[int, ...], needed: int, name: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f'{needed} tokens do not fit {name}={sizes}; add one that holds them')
