"""Log-probs of the answers of whole groups: what learning/forward.py computes, for rows that all have one form.

A row is a group, its prompt once and then its answers, so that what a token sees and which token predicts it are known
when the program is compiled: nothing is gathered, and no answer is compared with another. Shapes: E groups, P tokens of
a prompt, G answers of A tokens, C = A - 1 of which are read; H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.decoder import Attend
from areal_jax.models.logprobs import TokenFunction, token_logprobs
from areal_jax.studies.arms.setting import Setting
from areal_jax.types import Tree

_MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


def answer_logprobs(
    setting: Setting,
    params: Tree,
    prompts: jax.Array,
    answers: jax.Array,
    temperature: jax.Array,
    compute: TokenFunction = token_logprobs,
) -> tuple[jax.Array, jax.Array]:
    """(log-probs, entropies), float32 [E, G * A], of answers int32 [E, G, A] to prompts int32 [E, P]; or `compute`."""
    (groups, length), (_, size, tokens) = prompts.shape, answers.shape
    read = tokens - 1
    inputs = jnp.concatenate([prompts, answers[..., :-1].reshape(groups, -1)], axis=1)  # [E, P + G * C]
    places = np.concatenate([np.arange(length), np.tile(length + np.arange(read), size)])
    hidden, _ = setting.decoder.hidden(
        params, inputs.reshape(-1), jnp.tile(jnp.asarray(places), groups), _attend(groups, length, size)
    )
    hidden = hidden.reshape(groups, len(places), -1)
    width = hidden.shape[-1]
    last = jnp.broadcast_to(hidden[:, None, length - 1 : length], (groups, size, 1, width))
    own = hidden[:, length:].reshape(groups, size, read, width)
    predicting = jnp.concatenate([last, own], axis=2)  # [E, G, A, d]
    flat = predicting.reshape(-1, width)
    logprobs, entropy = compute(flat, setting.decoder.head(params), answers.reshape(-1), temperature)
    return logprobs.reshape(groups, -1), entropy.reshape(groups, -1)


def _attend(groups: int, length: int, size: int) -> Attend:
    """Attention of prompts to themselves, and of answers to their prompt and themselves."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        scale = q.shape[-1] ** -0.5
        q = q.reshape(groups, -1, *heads, q.shape[-1])
        k, v = (x.reshape(groups, -1, *x.shape[1:]) for x in (k, v))
        (prompt_k, own_k), (prompt_v, own_v) = ((x[:, :length], _by_answer(x[:, length:], size)) for x in (k, v))
        prompt_q, own_q = q[:, :length], _by_answer(q[:, length:], size)
        scores = jnp.einsum('etkhd,eskd->ekhts', prompt_q, prompt_k) * scale
        seen = np.tri(length, dtype=bool)
        out = jnp.einsum('ekhts,eskd->etkhd', _softmax(scores, seen), prompt_v)
        read = own_q.shape[2]
        scores = jnp.concatenate(
            [
                jnp.einsum('egckhd,eskd->ekgchs', own_q, prompt_k),
                jnp.einsum('egckhd,egxkd->ekgchx', own_q, own_k),
            ],
            axis=-1,
        )
        seen = np.concatenate([np.ones((read, length), bool), np.tri(read, dtype=bool)], axis=1)
        weights = _softmax(scores * scale, seen[:, None])
        own = jnp.einsum('ekgchs,eskd->egckhd', weights[..., :length], prompt_v)
        own += jnp.einsum('ekgchx,egxkd->egckhd', weights[..., length:], own_v)
        whole = jnp.concatenate([out, own.reshape(groups, -1, *out.shape[2:])], axis=1)
        return whole.reshape(-1, heads[0] * heads[1], whole.shape[-1]), entry

    return attend


def _by_answer(x: jax.Array, size: int) -> jax.Array:
    """[E, G * C, ...] -> [E, G, C, ...]."""
    return x.reshape(len(x), size, -1, *x.shape[2:])


def _softmax(scores: jax.Array, seen: np.ndarray) -> jax.Array:
    return jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)
