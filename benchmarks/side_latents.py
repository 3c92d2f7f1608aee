"""A pass of a small model with latent attention; run as a program, in float64, for latents.py.

    JAX_ENABLE_X64=1 python -m benchmarks.side_latents CASE OUT

CASE: pickled (config, weights, tokens); OUT gets pickled (log-probs, routes).
"""

from __future__ import annotations

import functools
import pathlib
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == '__main__':
    jnp.float32 = jnp.float64  # type: ignore[misc]  # in which the decoder computes

from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import Routing
from areal_jax.models.families import ModelConfig


def log_probs(
    config: ModelConfig, params: Any, tokens: np.ndarray, routes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probs [T, V] behind each token and the routes to experts [L, T, k]; given `routes` are followed."""
    found, chosen = _program(config, routes is not None)(params, tokens, routes)
    return np.asarray(found), np.asarray(chosen)


@functools.cache
def _program(config: ModelConfig, follows: bool) -> Any:
    decoder = Decoder(config)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Any, window: Any) -> tuple[jax.Array, Any]:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum('thd,shd->hts', q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        place = jnp.arange(len(q))
        weights = jax.nn.softmax(jnp.where(place[:, None] >= place, scores, -jnp.inf), axis=-1).astype(v.dtype)
        out = jnp.einsum('hts,shd->thd', weights, v, preferred_element_type=jnp.float32)
        return out.astype(q.dtype), entry

    def run(params: Any, tokens: jax.Array, routes: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        hidden, _, routed = decoder.hidden_and_routes(
            params, tokens, jnp.arange(len(tokens), dtype=jnp.int32), attend,
            routing=Routing(recorded=routes, follows=follows),
        )  # fmt: skip
        assert routed is not None
        return jax.nn.log_softmax(decoder.logits(params, hidden), axis=-1), routed.live

    return jax.jit(run)


def main(case: str, out: str) -> None:
    config, params, tokens = pickle.loads(pathlib.Path(case).read_bytes())
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    pathlib.Path(out).write_bytes(pickle.dumps(log_probs(config, params, tokens)))


if __name__ == '__main__':
    main(*sys.argv[1:])
