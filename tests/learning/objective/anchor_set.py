"""Three tokens of one answer, on which every combination has a value that can be worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.learning.objective.tokens import loss_of

PROXIMAL = np.full(3, -1.0, np.float32)
RATIO = np.array([0.5, 1.0, 1.5])  # theta / prox
POLICY = np.float32(PROXIMAL + np.log(RATIO))  # -1.693147 -1 -0.594535
BEHAVIOR = np.array([-0.5, -1.5, -0.8], np.float32)  # prox / behavior = 0.606531 1.648721 0.818731
ADVANTAGES = np.array([1.0, -1.0, 2.0], np.float32)


def per_token(policy=POLICY, proximal=PROXIMAL, behavior=BEHAVIOR, advantages=ADVANTAGES, *, prepared=None, **choices):
    """[N]: the loss of each token of one answer."""
    arrays = [jnp.asarray(x, jnp.float32)[None] for x in (policy, proximal, behavior, advantages)]
    mask, prepared = jnp.ones(arrays[0].shape, bool), {k: jnp.asarray(v)[None] for k, v in (prepared or {}).items()}
    only = jnp.eye(arrays[0].shape[1])[:, None]
    losses = [loss_of(*arrays, mask, np.float32(1), weights, prepared, **choices)[0] for weights in only]
    return np.array(losses)


def gradient(policy=POLICY, proximal=PROXIMAL, behavior=BEHAVIOR, advantages=ADVANTAGES, *, prepared=None, **choices):
    """[N] of one answer, or [R, N] of R: the gradient of the sum over their tokens by log theta."""
    arrays = [jnp.atleast_2d(jnp.asarray(x, jnp.float32)) for x in (policy, proximal, behavior, advantages)]
    prepared = {name: jnp.atleast_2d(value) for name, value in (prepared or {}).items()}
    mask, ones = jnp.ones(arrays[0].shape, bool), jnp.ones(arrays[0].shape)
    total = lambda p: loss_of(p, *arrays[1:], mask, np.float32(1), ones, prepared, **choices)[0]
    return np.reshape(jax.grad(total)(arrays[0]), np.shape(policy))
