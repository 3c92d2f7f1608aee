"""Arrow 7, the step: mean gradients become new weights. The learning rate is data, so no value of it recompiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

NAMES = ('adamw', 'sgd')


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Clipping by the global norm, the direction of `transform`, linear warm-up; non-finite gradients are skipped.

    The state is {'transform': optax state, 'step': int32 scalar, steps applied}.
    """

    transform: optax.GradientTransformation  # gradients to a descent direction; the learning rate comes after it
    clip_norm: float  # 0 = off
    warmup_steps: int  # steps over which the learning rate grows linearly to its value

    def init(self, params: Any) -> dict[str, Any]:
        return {'transform': self.transform.init(params), 'step': jnp.zeros((), jnp.int32)}

    def shardings(self, params: Any, param_shardings: Any, replicated: Any) -> dict[str, Any]:
        """Of the state: moments lie as their parameters do, everything else on every device."""
        transform = optax.tree_map_params(
            self.transform,
            lambda _, sharding: sharding,
            jax.eval_shape(self.transform.init, params),
            param_shardings,
            transform_non_params=lambda _: replicated,
        )
        return {'transform': transform, 'step': replicated}

    def apply(
        self, params: Any, state: dict[str, Any], gradients: Any, learning_rate: jax.Array
    ) -> tuple[Any, dict[str, Any], dict[str, jax.Array]]:
        """One step. A non-finite gradient norm leaves weights and state bit-equal and counts in `skip_count`.

        Returns (params, state, metrics): metrics hold the norm before clipping and the learning rate after warm-up.
        """
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        rate = learning_rate * jnp.minimum((state['step'] + 1) / max(self.warmup_steps, 1), 1.0)

        def step(params: Any, state: dict[str, Any], gradients: Any) -> tuple[Any, dict[str, Any]]:
            if self.clip_norm > 0:
                scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
                gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
            directions, transform = self.transform.update(gradients, state['transform'], params)
            stepped = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), params, directions)
            return stepped, {'transform': transform, 'step': state['step'] + 1}

        def skip(params: Any, state: dict[str, Any], gradients: Any) -> tuple[Any, dict[str, Any]]:
            return params, state

        # a branch and not a select of every leaf, which would keep old and new of all of them alive at once
        new_params, new_state = jax.lax.cond(finite, step, skip, params, state, gradients)
        metrics = {
            'grad_norm': jnp.where(finite, norm, 0.0),
            'learning_rate': rate,
            'skip_count': 1.0 - finite.astype(jnp.float32),
        }
        return new_params, new_state, metrics


def make_optimizer(
    name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
    warmup_steps: int = 0,
) -> Optimizer:
    """'adamw' (decoupled weight decay, arXiv 1711.05101) or 'sgd' (b1, b2 and eps unused).

    Raises ValueError for an unknown name or a negative setting.
    """
    settings = {'clip_norm': clip_norm, 'warmup_steps': warmup_steps, 'weight_decay': weight_decay}
    for field, value in settings.items():
        if value < 0:
            raise ValueError(f'optimizer.{field}={value} must not be negative; 0 turns it off')
    if name == 'adamw':
        direction = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    elif name == 'sgd':
        direction = optax.identity()
    else:
        raise ValueError(f'optimizer.name={name!r} is unknown; use one of {", ".join(NAMES)}')
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    return Optimizer(optax.chain(direction, *decay), clip_norm, warmup_steps)
