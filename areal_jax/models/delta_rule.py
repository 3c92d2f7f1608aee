"""The gated delta rule (arXiv 2412.06464): a state per sequence in place of keys and values, in three forms.

A head has a state S [Dk, Dv], 0 before the first token. A token with query q, key k, value v, decay e^g and step beta

    S <- e^g S;  u = beta (v - S' k);  S <- S + k u';  o = S' q

Queries, keys and values come from a causal convolution of a few tokens by channel, then SiLU; queries and keys are
scaled to length 1. Decoding runs the rule token by token (`run_steps`). Training and prefill run all tokens of a chunk
at once: with G the sum of g over a token's path (its sequence so far, within the chunk) and D_ij = e^(G_i - G_j) for j
on the path of i, else 0,

    A = beta_i (k_i . k_j) D_ij for j < i;  u = (I + A)^-1 beta (v - e^G S' k);  o = e^G S' q + ((q k') D) u
    state behind token t = e^G_t S + sum_j D_tj k_j u_j'

The triangular system is solved by substitution, because products of powers of A lose all digits where keys are alike.
`run_rows` runs packed rows with shared prompts, and carries two states from chunk to chunk: that of the segment that
continues, and that behind the latest prompt, with which each of its answers begins. `run_pieces` runs pieces of
sequences whose states are in a pool. All numbers of the rule are float32. Shapes: T tokens, C tokens of a chunk, Hk key
heads, H value heads, Dk and Dv sizes of a head, n taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from areal_jax.models.layer_parts import CHUNK, DeltaNet
from areal_jax.types import Tree

_EPS = 1e-6  # of the lengths of queries and keys


class DeltaInputs(NamedTuple):
    """The projections of a layer's tokens; tokens may have several leading axes."""

    query: jax.Array  # [T, Hk, Dk], before the convolution
    key: jax.Array  # [T, Hk, Dk]
    value: jax.Array  # [T, H, Dv]
    decay: jax.Array  # float32 [T, H], g <= 0
    beta: jax.Array  # float32 [T, H]
    taps: Projected  # [heads, D, n]

    def map_tokens(self, change: Callable[[jax.Array], jax.Array]) -> DeltaInputs:
        """Returns the inputs with each array of tokens changed."""
        query, key, value, decay, beta = map(change, (self.query, self.key, self.value, self.decay, self.beta))
        return DeltaInputs(query, key, value, decay, beta, self.taps)


class Projected(NamedTuple):
    """Queries, keys and values, or what belongs to each."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def specs_of(tokens: PartitionSpec, taps: PartitionSpec) -> DeltaInputs:
    """Returns the sharding of inputs, as shard_map takes it."""
    return DeltaInputs(*(tokens,) * 5, Projected(*(taps,) * 3))  # type: ignore[arg-type]


class DeltaState(NamedTuple):
    """The states of a pool of P places, for one layer."""

    rule: jax.Array  # float32 [P, H, Dk, Dv]
    query: jax.Array  # [P, n - 1, Hk, Dk], the last inputs of the convolution
    key: jax.Array
    value: jax.Array

    @property
    def inputs(self) -> Projected:
        return Projected(self.query, self.key, self.value)


# (projections, the layer's states) -> (out float32 [T, H, Dv], the layer's states)
Recur = Callable[[DeltaInputs, Tree], tuple[jax.Array, Tree]]


def empty_states(places: int, delta: DeltaNet, dtype: jnp.dtype) -> DeltaState:
    """Returns states of zeros; the inputs of the convolution have `dtype`."""
    keys = places, delta.taps - 1, delta.key_heads, delta.key_dim
    values = places, delta.taps - 1, delta.value_heads, delta.value_dim
    rule = jnp.zeros((places, delta.value_heads, delta.key_dim, delta.value_dim), jnp.float32)
    return DeltaState(rule, jnp.zeros(keys, dtype), jnp.zeros(keys, dtype), jnp.zeros(values, dtype))


def copy_states(states: DeltaState, sources: jax.Array, targets: jax.Array) -> DeltaState:
    """Returns the states with place sources[i] copied to targets[i], both int32 [C]."""
    return DeltaState(*(leaf.at[targets].set(leaf[sources]) for leaf in states))


# The convolution.


def _convolve(tokens: tuple[jax.Array, ...], taps: jax.Array) -> jax.Array:
    """SiLU of the sum of taps times a token and the tokens before it, the latest first; float32."""
    terms = (taps[..., -1 - back].astype(jnp.float32) * x.astype(jnp.float32) for back, x in enumerate(tokens))
    return jax.nn.silu(sum(terms, start=jnp.float32(0)))


def _normalise(mixed: Projected) -> Projected:
    """Queries and keys of length 1 for each value head, queries divided by sqrt(Dk)."""
    query, key, value = mixed
    repeats, size = value.shape[-2] // key.shape[-2], key.shape[-1]
    unit = lambda x: x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)
    of_values = lambda x: x if repeats == 1 else jnp.repeat(x, repeats, axis=-2)
    return Projected(of_values(unit(query) * size**-0.5), of_values(unit(key)), value)


# One token of each row.


def run_steps(
    inputs: DeltaInputs, states: DeltaState, places: jax.Array, begins: jax.Array
) -> tuple[jax.Array, DeltaState]:
    """Computes one token per row: returns (out float32 [B, H, Dv], the states behind it at `places`).

    Args:
      places: int32 [B], distinct but for a place that no sequence has.
      begins: bool [B], the token is the first of its sequence, whose state is 0 whatever its place holds.
    """
    fresh = lambda x: jnp.where(begins.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)
    before = [fresh(leaf[places]) for leaf in states]
    new = (inputs.query, inputs.key, inputs.value)
    seen = [jnp.concatenate([old, x[:, None]], axis=1) for old, x in zip(before[1:], new, strict=True)]  # [B, n, h, D]
    mixed = (
        _convolve(tuple(x[:, -1 - back] for back in range(x.shape[1])), taps)
        for x, taps in zip(seen, inputs.taps, strict=True)
    )
    query, key, value = _normalise(Projected(*mixed))
    out, rule = _step(before[0], query, key, value, inputs.decay, inputs.beta)
    after = (rule, *(x[:, 1:] for x in seen))
    return out, DeltaState(*(leaf.at[places].set(x) for leaf, x in zip(states, after, strict=True)))


def _step(
    state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule for a token of each row: (out [B, H, Dv], state [B, H, Dk, Dv])."""
    state = jnp.exp(decay)[..., None, None] * state
    update = beta[..., None] * (value - jnp.sum(state * key[..., None], axis=-2))
    state = state + key[..., None] * update[..., None, :]
    return jnp.sum(state * query[..., None], axis=-2), state


# A chunk of tokens.


class _Chunk(NamedTuple):
    """What the rule reads of the tokens of a chunk."""

    query: jax.Array  # [C, H, Dk]
    key: jax.Array
    value: jax.Array  # [C, H, Dv]
    decay: jax.Array  # [C, H]
    beta: jax.Array


class _Solved(NamedTuple):
    out: jax.Array  # [C, H, Dv]
    updates: jax.Array  # [C, H, Dv], u
    total: jax.Array  # [C, H], G
    ratios: jax.Array  # [H, C, C], D


def _solve(chunk: _Chunk, path: jax.Array, entering: Callable[[jax.Array], jax.Array]) -> _Solved:
    """Computes a chunk, given path[i, j], whether token j is i or before it in its sequence.

    `entering` maps x [C, H, Dk] to S' x [C, H, Dv], with the state with which each token's path enters the chunk.
    """
    total = jnp.einsum('ij,jh->ih', path.astype(jnp.float32), chunk.decay)
    by_head = total.T
    between = jnp.where(path, by_head[:, :, None] - by_head[:, None, :], -jnp.inf)  # masked before exp: no 0 * inf
    ratios = jnp.exp(between)
    grown = jnp.exp(total)[..., None]
    keys = jnp.einsum('ihd,jhd->hij', chunk.key, chunk.key)
    below = jnp.tril(jnp.ones(path.shape, bool), -1)
    lower = jnp.where(below, chunk.beta.T[:, :, None] * keys * ratios, 0)
    wanted = chunk.beta[..., None] * (chunk.value - grown * entering(chunk.key))
    updates = solve_unit_lower(lower, wanted.swapaxes(0, 1))
    scores = jnp.einsum('ihd,jhd->hij', chunk.query, chunk.key) * ratios
    out = grown * entering(chunk.query) + jnp.einsum('hij,hjd->ihd', scores, updates)
    return _Solved(out, updates, total, ratios)


@jax.custom_vjp
def solve_unit_lower(lower: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns u [..., C, D] with (I + lower) u = wanted; `lower` [..., C, C] is 0 on and above the diagonal.

    lax.linalg.triangular_solve is not used: on CPUs two of them at once wait for each other's threads for ever
    (jaxlib 0.10.2, batched strsm).
    """
    return _invert(lower) @ wanted


def _solve_forward(lower: jax.Array, wanted: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _invert(lower)
    solution = inverse @ wanted
    return solution, (inverse, solution)


def _solve_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solution = saved
    of_wanted = inverse.swapaxes(-1, -2) @ gradient
    return jnp.tril(-of_wanted @ solution.swapaxes(-1, -2), -1), of_wanted


solve_unit_lower.defvjp(_solve_forward, _solve_backward)
_ELIMINATED = 16  # rows and columns of the blocks whose inverse is found column by column


def _invert(lower: jax.Array) -> jax.Array:
    """The inverse of I + lower: of blocks on the diagonal by elimination, of larger ones from their two halves."""
    size = lower.shape[-1]
    if size > _ELIMINATED and size % 2 == 0:
        half = size // 2
        first, last = _invert(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
        below = -last @ lower[..., half:, :half] @ first
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([upper, jnp.concatenate([below, last], axis=-1)], axis=-2)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for column in range(size - 1):
        inverse = inverse - lower[..., column, None] * inverse[..., column, None, :]
    return inverse


def _state_behind(token: jax.Array, chunk: _Chunk, solved: _Solved, first: jax.Array) -> jax.Array:
    """The state [H, Dk, Dv] behind a token of the chunk, whose path enters the chunk with the state `first`."""
    shares = lax.dynamic_index_in_dim(solved.ratios, token, axis=1, keepdims=False)  # [H, C]
    grown = jnp.exp(lax.dynamic_index_in_dim(solved.total, token, axis=0, keepdims=False))
    added = jnp.einsum('jhk,hjv->hkv', chunk.key * shares.T[..., None], solved.updates)
    return grown[:, None, None] * first + added


# Packed rows with shared prompts.


class _Places(NamedTuple):
    """The segments of the tokens of a chunk."""

    segments: jax.Array  # int32 [C], 0 = padding
    parents: jax.Array  # int32 [C], the prompt that an answer follows; of other segments their own id
    continues: jax.Array  # bool [], the first token's segment began in an earlier chunk
    prompt_end: jax.Array  # int32 [], the last token here that ends a prompt; -1 = none does


def run_rows(inputs: DeltaInputs, segments: jax.Array, parents: jax.Array, chunk: int = CHUNK) -> jax.Array:
    """Computes packed rows: out float32 [R, T, H, Dv]; a token's numbers depend on its sequence alone.

    Answers follow their prompt before the next prompt begins. Backward passes compute a chunk again.

    Args:
      inputs: of tokens [R, T].
      segments, parents: int32 [R, T], see PackedBatch.
    """
    run = lambda inputs, segments, parents: _run_row(inputs, segments, parents, chunk)
    if len(segments) == 1:  # a batched branch would compute both sides
        return run(inputs.map_tokens(lambda x: x[0]), segments[0], parents[0])[None]
    axes = specs_of(0, None)  # type: ignore[arg-type]
    return jax.vmap(run, in_axes=(axes, 0, 0))(inputs, segments, parents)


def _run_row(inputs: DeltaInputs, segments: jax.Array, parents: jax.Array, size: int) -> jax.Array:
    tokens = len(segments)
    with jax.default_matmul_precision('float32'):
        mixed = _normalise(_mix_along(inputs, paths_before(segments, parents)))
        padding = -tokens % size
        pad = lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
        cut = lambda x: pad(x).reshape(-1, size, *x.shape[1:])
        chunks = _Chunk(*map(cut, (*mixed, inputs.decay, inputs.beta)))
        zeros = jnp.zeros((*inputs.value.shape[1:2], inputs.key.shape[-1], inputs.value.shape[-1]), jnp.float32)
        body = jax.checkpoint(_run_chunk, prevent_cse=False)
        _, out = lax.scan(body, (zeros, zeros), (chunks, _place(pad(segments), pad(parents), size)))
    return out.reshape(-1, *out.shape[2:])[:tokens]


def paths_before(segments: jax.Array, parents: jax.Array) -> jax.Array:
    """The token before each token in its sequence, int32 [T]; -1 = none. `segments` and `parents` are a row's, [T]."""
    index = jnp.arange(len(segments), dtype=jnp.int32)
    inside = jnp.concatenate([jnp.zeros(1, bool), segments[1:] == segments[:-1]])
    ends = jnp.where(_ends_prompt(segments, parents), index, -1)
    latest = jnp.concatenate([jnp.full(1, -1, jnp.int32), lax.cummax(ends)[:-1]])
    follows = (latest >= 0) & (parents != segments) & (jnp.take(segments, latest) == parents)
    return jnp.where(segments > 0, jnp.where(inside, index - 1, jnp.where(follows, latest, -1)), -1)


def _ends_prompt(segments: jax.Array, parents: jax.Array) -> jax.Array:
    """Whether each token, [T], is the last of a segment that others may follow."""
    following = jnp.concatenate([segments[1:], jnp.zeros(1, segments.dtype)])
    return (segments > 0) & (segments == parents) & (following != segments)


def _mix_along(inputs: DeltaInputs, before: jax.Array) -> Projected:
    """The convolution along paths: `before` int32 [T] names the token before each token, -1 for none."""
    ends = lambda x, fill: jnp.concatenate([x, jnp.full((1, *x.shape[1:]), fill, x.dtype)])  # what -1 names
    steps, behind = [jnp.arange(len(before), dtype=jnp.int32)], ends(before, -1)
    for _ in range(inputs.taps.query.shape[-1] - 1):
        steps.append(behind[steps[-1]])
    mix = lambda x, taps: _convolve(tuple(ends(x, 0)[step] for step in steps), taps)
    return Projected(*map(mix, inputs[:3], inputs.taps))


def _place(segments: jax.Array, parents: jax.Array, size: int) -> _Places:
    """The places of a row's tokens, by chunk."""
    before = jnp.concatenate([jnp.zeros(1, segments.dtype), segments[:-1]])
    cut = lambda x: x.reshape(-1, size)
    ends = jnp.where(cut(_ends_prompt(segments, parents)), jnp.arange(size, dtype=jnp.int32), -1)
    continues = cut((segments == before) & (segments > 0))[:, 0]
    return _Places(cut(segments), cut(parents), continues, ends.max(axis=1))


_Carry = tuple[jax.Array, jax.Array]  # the states of the running segment and behind the latest prompt


def _run_chunk(carry: _Carry, row: tuple[_Chunk, _Places]) -> tuple[_Carry, jax.Array]:
    (running, prompt), (chunk, places) = carry, row
    segments, parents = places.segments, places.parents
    index = jnp.arange(len(segments))
    same = segments[:, None] == segments
    of_parent = parents[:, None] == segments
    path = (same | of_parent) & (index[:, None] >= index) & (segments[:, None] > 0)
    goes_on = places.continues & ((segments == segments[0]) | (parents == segments[0]))
    forks = ~goes_on & (parents != segments) & ~jnp.any(of_parent & path, axis=1)

    def entering(x: jax.Array) -> jax.Array:
        seen = lambda state: jnp.einsum('ihk,hkv->ihv', x, state)
        own = jnp.where(goes_on[:, None, None], seen(running), 0)
        other = lax.cond(jnp.any(forks), lambda: seen(prompt), lambda: jnp.zeros_like(own))
        return jnp.where(forks[:, None, None], other, own)

    solved = _solve(chunk, path, entering)

    def behind(token: jax.Array) -> jax.Array:
        first = jnp.where(goes_on[token], running, jnp.where(forks[token], prompt, 0))
        return _state_behind(token, chunk, solved, first)

    kept = lax.cond(places.prompt_end >= 0, lambda: behind(places.prompt_end), lambda: prompt)
    return (behind(jnp.int32(len(segments) - 1)), kept), solved.out


# Pieces of sequences, whose states are in a pool.


class PieceChunks(NamedTuple):
    """The chunks of pieces that are packed one after the other, N at most; made on the host."""

    first: jax.Array  # int32 [N], its first token in the row
    tokens: jax.Array  # int32 [N], how many it has
    place: jax.Array  # int32 [N], of the sequence's state
    begins: jax.Array  # bool [N], the sequence begins here
    chunks: jax.Array  # int32 [], the others are not read


def run_pieces(
    inputs: DeltaInputs, states: DeltaState, pieces: PieceChunks, chunk: int = CHUNK
) -> tuple[jax.Array, DeltaState]:
    """Computes packed pieces, chunk by chunk: returns (out float32 [T, H, Dv], states behind the pieces' last tokens).

    A token of no piece gets any number.
    """
    tokens, history = len(inputs.query), states.query.shape[1]
    pad = lambda x: jnp.pad(x, ((0, chunk), *((0, 0),) * (x.ndim - 1)))
    padded = [pad(x) for x in inputs[:5]]
    out = jnp.zeros((tokens + chunk, *inputs.value.shape[1:]), jnp.float32)
    index = jnp.arange(chunk)
    causal = index[:, None] >= index

    def run(number: jax.Array, carry: tuple[jax.Array, DeltaState]) -> tuple[jax.Array, DeltaState]:
        out, states = carry
        first, count, place = pieces.first[number], pieces.tokens[number], pieces.place[number]
        own = [lax.dynamic_slice_in_dim(x, first, chunk) for x in padded]
        fresh = lambda leaf: jnp.where(pieces.begins[number], 0, lax.dynamic_index_in_dim(leaf, place, keepdims=False))
        rule, *before = map(fresh, states)
        seen = [jnp.concatenate([old, x]) for old, x in zip(before, own[:3], strict=True)]
        mix = lambda x, taps: _convolve(
            tuple(x[history - back : history - back + chunk] for back in range(history + 1)), taps
        )
        mixed = _normalise(Projected(*map(mix, seen, inputs.taps)))
        parts = _Chunk(*mixed, own[3], own[4])
        solved = _solve(parts, causal & (index < count)[:, None], lambda x: jnp.einsum('ihk,hkv->ihv', x, rule))
        after = (
            _state_behind(count - 1, parts, solved, rule),
            *(lax.dynamic_slice_in_dim(x, count, history) for x in seen),
        )
        put = lambda leaf, x: lax.dynamic_update_index_in_dim(leaf, x.astype(leaf.dtype), place, axis=0)
        states = DeltaState(*map(put, states, after))
        return lax.dynamic_update_slice_in_dim(out, solved.out, first, axis=0), states

    with jax.default_matmul_precision('float32'):
        out, states = lax.fori_loop(0, pieces.chunks, run, (out, states))
    return out[:tokens], states
