"""Arrow 7, on the devices: the compiled programs of an update."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.learning import trees
from areal_jax.learning.denominators import denominator_weights
from areal_jax.learning.forward import Rows, forward
from areal_jax.learning.interchange import export_weights
from areal_jax.learning.likelihood import negative_log_likelihood
from areal_jax.learning.losses import decoupled_ppo_loss, entropy_bonus, kl_penalty, masked_sum
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.proximal import proximal_logprobs
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import replicated
from areal_jax.types import PackedBatch

Scalars = dict[str, Any]  # what differs from call to call, see `training_scalars`
_ROW_FIELDS = (
    *('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets'),
    *('loss_mask', 'behavior_logprobs', 'advantages', 'policy_versions'),
)


@dataclasses.dataclass(frozen=True)
class KnownLogprobs:
    """Log-probs of a batch taken before its step, float32 [M, R, N]; None = not needed."""

    proximal: np.ndarray | None = None
    reference: np.ndarray | None = None


def training_rows(
    batch: PackedBatch, aggregation: str, known: KnownLogprobs | None = None
) -> tuple[dict[str, np.ndarray], float]:
    """A batch as the programs read it, leaves [M, R, ...], and the denominator of its minibatch."""
    weights, denominator = denominator_weights(batch, aggregation)
    rows = {name: getattr(batch, name) for name in _ROW_FIELDS}
    known = known or KnownLogprobs()
    zeros = np.zeros_like(batch.behavior_logprobs)
    rows['recomputed_logprobs'] = zeros if known.proximal is None else known.proximal
    rows['reference_logprobs'] = zeros if known.reference is None else known.reference
    return rows | {'token_weights': weights}, denominator


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


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions of one learner that are compiled. Loss and gradient are sums over micro-batches of parts of one
    minibatch.

    `params` are the trained weights, float32; `frozen` the others, in `settings.dtype`; `working` is `params` in
    that dtype, and `params` itself where that is float32. Every method returns a jitted function, which replaces and
    donates the weights, optimizer state and gradients that it gives new values for.
    """

    decoder: Decoder
    settings: LearnerSettings
    optimizer: Optimizer
    mesh: Mesh
    attention: str  # resolved implementation
    params: Any  # shardings of the trained weights
    frozen: Any  # of the frozen ones
    state: Any  # of the optimizer state
    exported: Any  # of the interchange form

    def copy(self) -> Any:
        """params -> the same values in buffers of their own."""
        return jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.params)

    def initial_state(self) -> Any:
        """params -> optimizer state."""
        return jax.jit(self.optimizer.init, out_shardings=self.state)

    def zeros(self) -> Any:
        """params -> gradients of nothing."""
        return jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=self.params)

    def cast(self) -> Any:
        """params -> working."""
        return jax.jit(lambda params: trees.cast(params, self.settings.dtype), out_shardings=self.params)

    def export(self) -> Any:
        """(params, frozen) -> the interchange form, in buffers of its own."""
        run = lambda *sides: jax.tree.map(jnp.copy, export_weights(self.decoder, self.settings.publish_dtype, *sides))
        return jax.jit(run, out_shardings=self.exported)

    def logprobs(self) -> Any:
        """(working, frozen, rows, scalars) -> log-probs [R, N]."""
        return jax.jit(lambda *args: self._forward(*args)[0], out_shardings=replicated(self.mesh))

    def accumulate(self) -> Any:
        """(gradients, working, frozen, rows, scalars) -> (gradients with the micro-batch added, metrics, log-probs
        [R, N])."""

        def run(gradients: Any, working: Any, frozen: Any, rows: Rows, scalars: Scalars) -> Any:
            added, metrics, logprobs = self._gradients(working, frozen, rows, scalars)
            return self._add(gradients, added), metrics, logprobs

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
        """(params, state, frozen, rows [M, R, ...], scalars, learning rate) -> (params, state, step metrics, metrics
        [M], log-probs [M, R, N]): a whole minibatch."""

        def run(params: Any, state: Any, frozen: Any, rows: Rows, scalars: Scalars, learning_rate: jax.Array) -> Any:
            working = trees.cast(params, self.settings.dtype)  # once, outside the loop

            def body(gradients: Any, microbatch: Rows) -> Any:
                added, metrics, logprobs = self._gradients(working, frozen, microbatch, scalars)
                return self._add(gradients, added), (metrics, logprobs)

            gradients, (metrics, logprobs) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), rows)
            params_after, state, step_metrics = self.optimizer.apply(params, state, gradients, learning_rate)
            return params_after, state, step_metrics, metrics, logprobs

        everywhere = replicated(self.mesh)
        shardings = (self.params, self.state, everywhere, everywhere, everywhere)
        return jax.jit(run, donate_argnums=(0, 1), out_shardings=shardings)

    def _add(self, gradients: Any, added: Any) -> Any:
        """float32 sums; the scale that kept small gradients of a narrow dtype above 0 is taken out."""
        unscale = 1.0 / self.settings.loss_scale
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32) * unscale, gradients, added)

    def _forward(self, working: Any, frozen: Any, rows: Rows, scalars: Scalars) -> tuple[jax.Array, jax.Array]:
        return forward(
            self.decoder,
            trees.join(working, frozen),
            rows,
            scalars['temperature'],
            vocab_chunk=self.settings.vocab_chunk,
            attention=self.attention,
            mesh=self.mesh,
        )

    def _gradients(
        self, working: Any, frozen: Any, rows: Rows, scalars: Scalars
    ) -> tuple[Any, dict[str, jax.Array], jax.Array]:
        def scaled(working: Any) -> tuple[jax.Array, Any]:
            loss, rest = self._loss(working, frozen, rows, scalars)
            return loss * self.settings.loss_scale, rest

        (_, (metrics, logprobs)), gradients = jax.value_and_grad(scaled, has_aux=True)(working)
        return gradients, metrics, logprobs

    def _loss(self, working: Any, frozen: Any, rows: Rows, scalars: Scalars) -> tuple[jax.Array, Any]:
        """This micro-batch's part of the loss of its minibatch."""
        policy_logprobs, entropy = self._forward(working, frozen, rows, scalars)
        normalizer = (rows['loss_mask'], scalars['denominator'], rows['token_weights'])
        if self.settings.objective == 'sft':
            loss, metrics = negative_log_likelihood(policy_logprobs, *normalizer)
        else:
            loss, metrics = self._surrogate(policy_logprobs, rows, scalars, normalizer)
        if self.settings.entropy_coefficient:
            loss = loss - self.settings.entropy_coefficient * entropy_bonus(entropy, *normalizer)
        if self.settings.kl_coefficient:
            penalty, kl_metrics = kl_penalty(
                policy_logprobs, rows['reference_logprobs'], *normalizer, estimator=self.settings.kl_estimator
            )
            loss, metrics = loss + self.settings.kl_coefficient * penalty, metrics | kl_metrics
        metrics |= {'loss_sum': loss, 'entropy_sum': masked_sum(entropy, rows['loss_mask'])}
        return loss, (jax.lax.stop_gradient(metrics), policy_logprobs)

    def _surrogate(
        self, policy_logprobs: jax.Array, rows: Rows, scalars: Scalars, normalizer: tuple[Any, Any, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        settings = self.settings
        proximal = proximal_logprobs(
            settings.proximal,
            policy_logprobs,
            rows['behavior_logprobs'],
            rows['policy_versions'],
            scalars['version'],
            rows['recomputed_logprobs'],
            scalars['weights_are_proximal'],
        )
        return decoupled_ppo_loss(
            policy_logprobs,
            proximal,
            rows['behavior_logprobs'],
            rows['advantages'],
            *normalizer,
            clip_epsilon=settings.clip_epsilon,
            clip_epsilon_high=settings.clip_epsilon_high,
            behavior_weight_cap=settings.behavior_weight_cap,
        )
