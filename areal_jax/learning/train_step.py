"""Arrow 7, on the devices: the pass over packed rows and the compiled programs of an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from areal_jax.learning.losses import decoupled_ppo_loss, entropy_bonus, masked_sum
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.packing import denominator_weights
from areal_jax.learning.proximal import proximal_logprobs
from areal_jax.models.attention import packed_attention
from areal_jax.models.logprobs import token_logprobs
from areal_jax.sharding.mesh import AXES
from areal_jax.sharding.rules import replicated, row_sharding
from areal_jax.types import PackedBatch

Rows = Mapping[str, Any]  # fields of a micro-batch [R, ...], see `training_rows`
Scalars = Mapping[str, Any]  # what differs from call to call, see `training_scalars`
_ROW_FIELDS = (
    *('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets'),
    *('loss_mask', 'behavior_logprobs', 'advantages', 'policy_versions'),
)


class PackedDecoder(Protocol):
    """What the learner needs of a model (models/decoder.py)."""

    def hidden(self, params: Any, tokens: Any, positions: Any, attend: Callable[..., Any]) -> tuple[Any, Any]: ...

    def head(self, params: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an update minimises; every value is compiled into its programs."""

    clip_epsilon: float
    clip_epsilon_high: float | None
    behavior_weight_cap: float | None
    entropy_coefficient: float
    proximal: str  # see proximal.KINDS
    vocab_chunk: int | None  # columns of the head computed at once; None = as many as suit
    attention: str  # implementation of packed_attention


def training_rows(
    batch: PackedBatch, aggregation: str, recomputed_logprobs: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], float]:
    """A batch as the programs read it, leaves [M, R, ...], and the denominator of its minibatch."""
    weights, denominator = denominator_weights(batch, aggregation)
    rows = {name: getattr(batch, name) for name in _ROW_FIELDS}
    recomputed = np.zeros_like(batch.behavior_logprobs) if recomputed_logprobs is None else recomputed_logprobs
    return rows | {'token_weights': weights, 'recomputed_logprobs': recomputed}, denominator


def training_scalars(
    *, denominator: float, version: int, temperature: float, weights_are_proximal: bool
) -> dict[str, Any]:
    """Typed, so that no value recompiles a program."""
    return {
        'denominator': np.float32(denominator),
        'version': np.int32(version),
        'temperature': np.float32(temperature),
        'weights_are_proximal': np.bool_(weights_are_proximal),
    }


def forward(
    decoder: PackedDecoder,
    params: Any,
    rows: Rows,
    temperature: jax.Array | float,
    *,
    vocab_chunk: int | None = None,
    attention: str = 'auto',
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of the loss tokens of packed rows.

    Rows are flattened for the dense layers and separate in attention; only the hidden states at `sources` reach the
    head.

    Args:
      rows: 'tokens', 'positions', 'segment_ids', 'parent_ids' int [R, T]; 'sources', 'targets' int [R, N].
      mesh: where rows lie; None = one device.

    Returns:
      (logprobs, entropy), float32 [R, N], both at `temperature`.
    """
    n_rows, n_tokens = rows['tokens'].shape
    attend = _row_attention(rows['segment_ids'], rows['parent_ids'], attention, mesh)
    hidden, _ = decoder.hidden(params, rows['tokens'].reshape(-1), rows['positions'].reshape(-1), attend)
    by_row = hidden.reshape(n_rows, n_tokens, -1)
    predicting = jnp.take_along_axis(by_row, rows['sources'][..., None], axis=1)
    head = decoder.head(params)
    if mesh is not None and mesh.size > 1:  # gathered once, not in every chunk
        head = jax.lax.with_sharding_constraint(head, replicated(mesh))
    flat = predicting.reshape(-1, hidden.shape[-1])
    logprobs, entropy = token_logprobs(flat, head, rows['targets'].reshape(-1), temperature, chunk=vocab_chunk)
    return logprobs.reshape(rows['targets'].shape), entropy.reshape(rows['targets'].shape)


def _row_attention(segment_ids: jax.Array, parent_ids: jax.Array, impl: str, mesh: Mesh | None) -> Callable[..., Any]:
    """`attend` of Decoder.hidden for flattened rows; with a mesh each device attends within the rows it holds."""
    n_rows, n_tokens = segment_ids.shape

    def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, parents: jax.Array) -> jax.Array:
        return packed_attention(q, k, v, segments, parents, scale=q.shape[-1] ** -0.5, impl=impl)

    def attend_rows(*arrays: jax.Array) -> jax.Array:
        if arrays[0].shape[0] == 1:  # vmap would turn the loops over visible blocks into loops over all
            return attend_row(*(a[0] for a in arrays))[None]
        return jax.vmap(attend_row)(*arrays)

    over_devices = attend_rows
    if mesh is not None and mesh.size > 1:
        rows = PartitionSpec(AXES)
        over_devices = jax.shard_map(attend_rows, mesh=mesh, in_specs=(rows,) * 5, out_specs=rows, check_vma=False)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_cache: Any, window: Any) -> tuple[jax.Array, Any]:
        q_rows, k_rows, v_rows = (x.reshape(n_rows, n_tokens, *x.shape[1:]) for x in (q, k, v))
        out = over_devices(q_rows, k_rows, v_rows, segment_ids, parent_ids)
        return out.reshape(q.shape), layer_cache

    return attend


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted programs of one learner. Loss and gradient are sums over micro-batches of parts of one minibatch.

    Every method returns a jitted function; weights, optimizer state and gradients that it replaces are donated.
    """

    decoder: PackedDecoder
    objective: Objective
    optimizer: Optimizer
    mesh: Mesh
    params: Any  # shardings
    state: Any  # shardings of the optimizer state

    def copy(self) -> Any:
        """params -> the same values in buffers of their own."""
        return jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.params)

    def initial_state(self) -> Any:
        """params -> optimizer state."""
        return jax.jit(self.optimizer.init, out_shardings=self.state)

    def zeros(self) -> Any:
        """params -> gradients of nothing."""
        return jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=self.params)

    def logprobs(self) -> Any:
        """(params, rows, scalars) -> log-probs [R, N]."""
        return jax.jit(lambda *args: self._forward(*args)[0], out_shardings=replicated(self.mesh))

    def accumulate(self) -> Any:
        """(gradients, params, rows, scalars) -> (gradients with the micro-batch added, metrics, log-probs [R, N])."""

        def run(gradients: Any, params: Any, rows: Rows, scalars: Scalars) -> Any:
            added, metrics, logprobs = self._gradients(params, rows, scalars)
            return jax.tree.map(jnp.add, gradients, added), metrics, logprobs

        everywhere = replicated(self.mesh)
        return jax.jit(run, donate_argnums=0, out_shardings=(self.params, everywhere, everywhere))

    def apply(self) -> Any:
        """(params, state, gradients, learning rate) -> (params, state, gradients of nothing, step metrics)."""

        def run(params: Any, state: Any, gradients: Any, learning_rate: jax.Array) -> Any:
            params, state, metrics = self.optimizer.apply(params, state, gradients, learning_rate)
            return params, state, jax.tree.map(jnp.zeros_like, gradients), metrics

        shardings = (self.params, self.state, self.params, replicated(self.mesh))
        return jax.jit(run, donate_argnums=(0, 1, 2), out_shardings=shardings)

    def scan(self) -> Any:
        """(params, state, rows [M, R, ...], scalars, learning rate) -> (params, state, step metrics, metrics [M],
        log-probs [M, R, N]): a whole minibatch."""

        def run(params: Any, state: Any, rows: Rows, scalars: Scalars, learning_rate: jax.Array) -> Any:
            def body(gradients: Any, microbatch: Rows) -> Any:
                added, metrics, logprobs = self._gradients(params, microbatch, scalars)
                return jax.tree.map(jnp.add, gradients, added), (metrics, logprobs)

            gradients, (metrics, logprobs) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), rows)
            params_after, state, step_metrics = self.optimizer.apply(params, state, gradients, learning_rate)
            return params_after, state, step_metrics, metrics, logprobs

        everywhere = replicated(self.mesh)
        shardings = (self.params, self.state, everywhere, everywhere, everywhere)
        return jax.jit(run, donate_argnums=(0, 1), out_shardings=shardings)

    def rows_sharding(self, microbatches: bool) -> jax.sharding.NamedSharding:
        return row_sharding(self.mesh, leading_axes=int(microbatches))

    def _forward(self, params: Any, rows: Rows, scalars: Scalars) -> tuple[jax.Array, jax.Array]:
        return forward(
            self.decoder,
            params,
            rows,
            scalars['temperature'],
            vocab_chunk=self.objective.vocab_chunk,
            attention=self.objective.attention,
            mesh=self.mesh,
        )

    def _gradients(self, params: Any, rows: Rows, scalars: Scalars) -> tuple[Any, dict[str, jax.Array], jax.Array]:
        (_, (metrics, logprobs)), gradients = jax.value_and_grad(self._loss, has_aux=True)(params, rows, scalars)
        return gradients, metrics, logprobs

    def _loss(self, params: Any, rows: Rows, scalars: Scalars) -> tuple[jax.Array, Any]:
        """This micro-batch's part of the loss of its minibatch."""
        objective = self.objective
        policy_logprobs, entropy = self._forward(params, rows, scalars)
        proximal = proximal_logprobs(
            objective.proximal,
            policy_logprobs,
            rows['behavior_logprobs'],
            rows['policy_versions'],
            scalars['version'],
            rows['recomputed_logprobs'],
            scalars['weights_are_proximal'],
        )
        normalizer = (rows['loss_mask'], scalars['denominator'], rows['token_weights'])
        loss, metrics = decoupled_ppo_loss(
            policy_logprobs,
            proximal,
            rows['behavior_logprobs'],
            rows['advantages'],
            *normalizer,
            clip_epsilon=objective.clip_epsilon,
            clip_epsilon_high=objective.clip_epsilon_high,
            behavior_weight_cap=objective.behavior_weight_cap,
        )
        if objective.entropy_coefficient:
            loss = loss - objective.entropy_coefficient * entropy_bonus(entropy, *normalizer)
        metrics |= {'loss_sum': loss, 'entropy_sum': masked_sum(entropy, rows['loss_mask'])}
        return loss, (jax.lax.stop_gradient(metrics), policy_logprobs)
