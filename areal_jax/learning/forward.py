"""The forward pass: packed rows on a mesh become log-probs of their loss tokens.

Dense layers see one flat stream of tokens. On a mesh the stream is ordered by device, so that flattening moves no data:
[R, T], with R sharded over data, fsdp and expert, S shards together, and T over context, is viewed as
[S, context, R / S, T / context] and flattened from there. If `context` > 1, the tokens of a row
are in slice order (sharding/placement.py); only attention and the choice of the predicting tokens depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    DIVERGENCES,
    FORWARD_KL,
    REVERSE_KL,
    STATISTICS,
    Objective,
)
from areal_jax.models.attention.backends import packed_rows_attention
from areal_jax.models.decoder import Attend, Decoder
from areal_jax.models.delta_rule import DeltaInputs, Recur, run_rows, specs_of
from areal_jax.models.expert_products import Mixer
from areal_jax.models.experts import Routing, make_mix
from areal_jax.models.layer_parts import CHUNK
from areal_jax.models.logprobs import TokenFunction, over_mesh, sharded_token_logprobs, token_logprobs
from areal_jax.models.vocabulary_divergence import Caps, clamped_entropy, count_kept, token_divergences
from areal_jax.sharding.placement import first_tokens, from_slices, slice_places, to_slices
from areal_jax.sharding.rules import ROW_AXES, TOKEN_AXES, data_shards, nearest_device
from areal_jax.types import Tree

Rows = Mapping[str, jax.Array]  # fields of a micro-batch [R, ...], see passes.training_rows
_AttendRows = Callable[..., jax.Array]  # (q, k, v, sinks, segments, parents, positions, first=0) -> out


class SeenRoutes(NamedTuple):
    """The choices of the routers in a pass, whether or not they were followed."""

    differs: jax.Array  # int32 [R, N], number of layers in which a loss token's set of experts is not the recorded one
    loads: jax.Array  # float32 [L, E], tokens that reached an expert
    scores: jax.Array  # float32 [L, E], the sum of the scores of all tokens


def forward(
    decoder: Decoder,
    params: Tree,
    rows: Rows,
    temperature: jax.Array | float,
    *,
    attention: str = 'auto',
    mesh: Mesh | None = None,
    compute: TokenFunction = token_logprobs,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of the loss tokens of packed rows, or the results of another `compute`.

    Only the hidden states at `sources` reach the head.

    Args:
      rows: see `predicting_states`, and 'targets' int [R, N].
      mesh: see `predicting_states`.

    Returns:
      (logprobs, entropy), float32 [R, N], both at `temperature`.
    """
    states, _ = predicting_states(decoder, params, rows, attention=attention, mesh=mesh)
    return score_targets(decoder, params, states, rows['targets'], temperature, mesh=mesh, compute=compute)


def predicting_states(
    decoder: Decoder,
    params: Tree,
    rows: Rows,
    *,
    attention: str = 'auto',
    mesh: Mesh | None = None,
    follows: jax.Array | bool | None = None,
    chunk: int = CHUNK,
    expert_parallel: str = 'auto',
) -> tuple[jax.Array, SeenRoutes | None]:
    """Hidden states [R, N, d] from which the loss tokens of packed rows are predicted, and the routes to experts.

    Args:
      rows: 'tokens', 'positions', 'segment_ids', 'parent_ids' int [R, T]; 'sources' int [R, N]; 'routed_experts' int
        [R, T, L, k] where they are recorded.
      follows: bool [], whether recorded routes are taken (see Routing); None = they are not read.
      mesh: the devices that hold the rows; None = one device. R must be a multiple of data * fsdp * expert, and
        with context > 1 T one of 2 * context and N one of context.
      chunk: tokens that the rule of delta nets computes at once.
      expert_parallel: how tokens reach experts of other devices, see learner.expert_parallel.
    """
    tokens = Stream(mesh, *rows['tokens'].shape)
    inputs, positions, sources = rows['tokens'], rows['positions'], rows['sources']
    used = rows['segment_ids'] > 0
    if (context := 1 if mesh is None else mesh.shape['context']) > 1:
        sources = slice_places(sources, inputs.shape[1], context)
        inputs, positions, used = (to_slices(places, context) for places in (inputs, positions, used))
    recorded = None
    if follows is not None:
        recorded = rows[ROUTED_EXPERTS.name] if context == 1 else to_slices(rows[ROUTED_EXPERTS.name], context)
        recorded = jnp.moveaxis(tokens.flatten(recorded), 0, 1)  # [L, R * T, k]
    routing = Routing(tokens.mix(expert_parallel), tokens.flatten(used), recorded, follows is not None and follows)
    flat_hidden, _, routed = decoder.hidden_and_routes(  # [R * T, d]
        params,
        tokens.flatten(inputs),
        tokens.flatten(positions),
        _attend(rows, tokens, attention),
        constrain=tokens.constrain,
        routing=routing,
        recur=_recur(rows, tokens, chunk) if decoder.config.delta else None,
    )
    states = jnp.take_along_axis(tokens.unflatten(flat_hidden), sources[..., None], axis=1)
    if routed is None:
        return states, None
    differs = jnp.sum(routed.differs, axis=0, dtype=jnp.int32)
    of_loss_tokens = jnp.take_along_axis(tokens.unflatten(differs), sources, axis=1)
    return states, SeenRoutes(of_loss_tokens, routed.loads, routed.scores)


def score_targets(
    decoder: Decoder,
    params: Tree,
    states: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    *,
    mesh: Mesh | None = None,
    stored: Sequence[PartitionSpec] = (),
    compute: TokenFunction = token_logprobs,
) -> tuple[jax.Array, jax.Array]:
    """Applies `compute` to states [R, N, d] and targets int [R, N]; by default (log-probs, entropy), [R, N] each.

    `stored` has the sharding of the head's shards, see logprobs.over_mesh.
    """
    stream = Stream(mesh, *targets.shape)
    # logprobs and entropy are [R * N] until they are unflattened
    arguments = stream.flatten(states), decoder.head(params), stream.flatten(targets), temperature
    cap = decoder.config.logit_cap
    if stream.mesh is not None:
        logprobs, entropy = sharded_token_logprobs(
            *arguments, mesh=stream.mesh, token_axes=TOKEN_AXES, vocab_axis='tensor', stored=stored, cap=cap,
            compute=compute,
        )  # fmt: skip
    else:
        logprobs, entropy = compute(*arguments, cap=cap)
    return stream.unflatten(logprobs), stream.unflatten(entropy)


class Stream:
    """The order of the tokens of rows [R, T] in the flat stream [R * T], and the sharding of both."""

    def __init__(self, mesh: Mesh | None, rows: int, tokens: int):
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None  # None = one device, no sharding to state
        self._device = jax.local_devices()[0] if mesh is None else nearest_device(mesh)  # like all of the mesh
        self._rows, self._tokens = rows, tokens
        self._parts = (1, 1) if self.mesh is None else (data_shards(self.mesh), self.mesh.shape['context'])
        for size, parts, what in ((rows, self._parts[0], 'rows'), (tokens, self._parts[1], 'tokens of a row')):
            if size % parts:
                raise ValueError(f'{size} {what} do not divide over {parts} devices of the mesh')

    def flatten(self, x: jax.Array) -> jax.Array:
        """[R, T, ...] -> [R * T, ...]."""
        shards, slices = self._parts
        if slices > 1:
            x = x.reshape(shards, self._rows // shards, slices, self._tokens // slices, *x.shape[2:]).swapaxes(1, 2)
            return self.constrain(x.reshape(self._rows * self._tokens, *x.shape[4:]))
        return self.constrain(x.reshape(self._rows * self._tokens, *x.shape[2:]))

    def unflatten(self, x: jax.Array) -> jax.Array:
        """[R * T, ...] -> [R, T, ...]."""
        shards, slices = self._parts
        if slices > 1:
            x = x.reshape(shards, slices, self._rows // shards, self._tokens // slices, *x.shape[1:]).swapaxes(1, 2)
            return self._at(x.reshape(self._rows, self._tokens, *x.shape[4:]), ROW_AXES, 'context')
        return self._at(x.reshape(self._rows, self._tokens, *x.shape[1:]), ROW_AXES)

    def constrain(self, x: jax.Array) -> jax.Array:
        """The stream [R * T, ...], sharded by token: no device holds a part of a token's features."""
        return self._at(x, TOKEN_AXES)

    def mix(self, form: str) -> Mixer:
        """The product of experts for tokens of the flat stream; `form` as in make_mix."""
        return make_mix(self._device, self.mesh, TOKEN_AXES, form)

    def _at(self, x: jax.Array, *spec: str | tuple[str, ...]) -> jax.Array:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


def require_heads(n_heads: int, n_kv_heads: int, tensor: int) -> None:
    """Raises ConfigError for heads that cannot be sharded over the axis `tensor` of a mesh."""
    if n_heads % tensor or (n_kv_heads % tensor and tensor % n_kv_heads):
        raise ConfigError(
            f'tensor={tensor} of cluster.learner does not divide the {n_heads} query heads and {n_kv_heads} key heads '
            'of the model; use a common divisor'
        )


def _attend(rows: Rows, stream: Stream, impl: str) -> Attend:
    """`attend` of Decoder.hidden. On a mesh, each device computes the queries of its rows, tokens and heads."""
    places = tuple(rows[name] for name in ('segment_ids', 'parent_ids', 'positions'))  # [R, T] each

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None, *, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        def attend_rows(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            sinks: jax.Array | None,
            *places: jax.Array,
            first: int | jax.Array = 0,
        ) -> jax.Array:
            segments, parents, positions = places
            return packed_rows_attention(
                q,
                k,
                v,
                segments,
                parents,
                scale=q.shape[-1] ** -0.5,
                impl=impl,
                positions=positions,
                window=window,
                first=first,
                sinks=sinks,
            )

        mesh = stream.mesh
        run = attend_rows if mesh is None else _over_mesh(attend_rows, mesh, q.shape[1], k.shape[1])
        q, k, v = (stream.unflatten(x) for x in (q, k, v))
        out = run(q, k, v, sinks, *places)  # q, out [R, T, H, D]; k, v [R, T, K, D]
        return stream.flatten(out), entry

    return attend


def _recur(rows: Rows, stream: Stream, chunk: int) -> Recur:
    """`recur` of Decoder.hidden. On a mesh, each device computes the rule of its rows and heads."""
    places = rows['segment_ids'], rows['parent_ids']

    def recur(inputs: DeltaInputs, entry: Tree) -> tuple[jax.Array, Tree]:
        run, mesh = functools.partial(run_rows, chunk=chunk), stream.mesh
        if mesh is not None:
            heads, rows_only = PartitionSpec(ROW_AXES, None, 'tensor'), PartitionSpec(ROW_AXES)
            in_specs = specs_of(heads, PartitionSpec('tensor')), rows_only, rows_only
            run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)
        out = run(inputs.map_tokens(stream.unflatten), *places)
        return stream.flatten(out), entry

    return recur


def _over_mesh(attend_rows: _AttendRows, mesh: Mesh, n_heads: int, n_kv_heads: int) -> _AttendRows:
    """Attention with heads sharded over `tensor` and queries over `context`; each device gathers all keys of its heads.

    If `tensor` does not divide the key heads, they are replicated, and each device takes the one that its queries read.
    """
    context, tensor = mesh.shape['context'], mesh.shape['tensor']
    require_heads(n_heads, n_kv_heads, tensor)
    cut_keys = n_kv_heads % tensor == 0

    def local(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, *places: jax.Array) -> jax.Array:
        if not cut_keys:
            head = jax.lax.axis_index('tensor') * n_kv_heads // tensor
            k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k, v))
        if context == 1:
            return attend_rows(q, k, v, sinks, *places)
        k, v = (from_slices(jax.lax.all_gather(x, 'context', axis=1, tiled=True), context) for x in (k, v))
        firsts = first_tokens(jax.lax.axis_index('context'), k.shape[1], context)
        halves = zip(jnp.split(q, 2, axis=1), firsts, strict=True)
        return jnp.concatenate([attend_rows(half, k, v, sinks, *places, first=first) for half, first in halves], axis=1)

    heads = PartitionSpec(ROW_AXES, 'context', 'tensor')
    keys = heads if cut_keys else PartitionSpec(ROW_AXES, 'context')
    in_specs = (heads, keys, keys, PartitionSpec('tensor')) + (PartitionSpec(ROW_AXES),) * 3
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)


# Statistics of whole distributions over the vocabulary at loss tokens, for objectives; see LossTokens.statistic.


_Arrays = tuple[jax.Array, ...]


class TeacherForm(NamedTuple):
    """The parts of a teacher that a step's program needs before it gets the weights."""

    decoder: Decoder
    attention: str  # resolved implementation


def vocabulary_statistics(
    objective: Objective,
    states: jax.Array,
    head: jax.Array,
    temperature: jax.Array,
    mesh: Mesh,
    teacher: Callable[[], tuple[jax.Array, jax.Array]],
    caps: Caps = (None, None),
    stored: Sequence[PartitionSpec] = (),
) -> dict[str, jax.Array]:
    """The statistics that the objective reads, float32 [R, N] each; no other is computed.

    Args:
      states: hidden states [R, N, d] of the policy where it predicts.
      head: [V, d].
      teacher: returns the teacher's states and head, see `read_teacher`.
      caps: ModelConfig.logit_cap of the policy and of the teacher.
      stored: the sharding of the policy's head, see logprobs.over_mesh.
    """
    found: dict[str, jax.Array] = {}
    if not STATISTICS & objective.reads:
        return found
    rates = jnp.broadcast_to(temperature, states.shape[:2])
    if CLAMPED_ENTROPY in objective.reads:
        kept = count_kept(len(head), objective.entropy_clamp)
        (found[CLAMPED_ENTROPY],) = _map(
            functools.partial(_entropies, kept=kept, cap=caps[0]), (states, rates), (head,), mesh, stored
        )
    if DIVERGENCES & objective.reads:
        teacher_states, teacher_head = teacher()
        tokens, heads = (states, teacher_states, rates), (head, teacher_head)
        compute = functools.partial(_divergences, caps=caps)
        found[REVERSE_KL], found[FORWARD_KL] = _map(compute, tokens, heads, mesh, stored)
    return found


def read_teacher(form: TeacherForm | None, weights: Tree, rows: Rows, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Runs the teacher: (hidden states [R, N, d'] where loss tokens are predicted, head [V, d']), constant."""
    assert form is not None, 'place_teacher refuses an objective whose teacher is not there'
    weights = jax.lax.stop_gradient(weights)
    states, _ = predicting_states(form.decoder, weights, rows, attention=form.attention, mesh=mesh)
    return states, form.decoder.head(weights)


def _map(
    compute: Callable[..., _Arrays], tokens: _Arrays, heads: _Arrays, mesh: Mesh, stored: Sequence[PartitionSpec]
) -> _Arrays:
    """Applies `compute` to tokens [R, N, ...] on the devices of the mesh; its results [R * N] become [R, N]."""
    stream = Stream(mesh, *tokens[0].shape[:2])
    flat = tuple(stream.flatten(x) for x in tokens)
    if stream.mesh is None:
        results = compute(flat, heads)
    else:
        local = functools.partial(compute, axis_name='tensor')
        results = over_mesh(
            local, flat, heads, mesh=stream.mesh, token_axes=TOKEN_AXES, vocab_axis='tensor', stored=stored
        )
    return tuple(stream.unflatten(x) for x in results)


def _entropies(
    tokens: _Arrays, heads: _Arrays, *, kept: int, cap: float | None, axis_name: str | None = None
) -> _Arrays:
    states, rates = tokens
    return (clamped_entropy(states, heads[0], rates, kept, cap=cap, axis_name=axis_name),)


def _divergences(tokens: _Arrays, heads: _Arrays, *, caps: Caps, axis_name: str | None = None) -> _Arrays:
    states, teacher_states, rates = tokens
    return tuple(token_divergences(states, heads[0], teacher_states, heads[1], rates, caps=caps, axis_name=axis_name))
