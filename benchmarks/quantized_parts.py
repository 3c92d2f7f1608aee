"""Policies in which a part is in 8 bits, for quantized.py: forms of the decoder that round and then use float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.model.model import Model
from areal_jax.models import decoder as decoders
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.quantized import Rows, quantize

Answers = Sequence[tuple[np.ndarray, np.ndarray]]  # (tokens of prompt and answer, log-probs of the answer)


@dataclasses.dataclass(frozen=True)
class RoundedRows(Rows):
    """Which numbers are rounded to 8 bits; `group` activations of a token share a scale, 0 = all."""

    activations: bool = True
    head: bool = True
    embedding: bool = True
    group: int = 0

    def stored(self, matrix: jax.Array) -> jax.Array:
        return rounded(matrix, -2)

    def multiply(self, x: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        x = self._round_tokens(x) if self.activations else x
        return tuple(x @ matrix for matrix in matrices)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return (rounded(table, -1) if self.embedding else table)[tokens]

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return super().logits(self._round_tokens(x), rounded(head, -1)) if self.head else super().logits(x, head)

    def _round_tokens(self, x: jax.Array) -> jax.Array:
        if not self.group:
            return rounded(x, -1)
        return rounded(x.reshape(*x.shape[:-1], -1, self.group), -1).reshape(x.shape)


def rounded(x: jax.Array, axis: int) -> jax.Array:
    values, scales = quantize(x, axis)
    return values.astype(jnp.float32) * scales


POLICIES: Mapping[str, RoundedRows] = {
    'all in 8 bits': RoundedRows(),
    'float32 head': RoundedRows(head=False),
    'float32 head and embedding': RoundedRows(head=False, embedding=False),
    'float32 activations': RoundedRows(head=False, embedding=False, activations=False),
    'activations with a scale for 64': RoundedRows(group=64),
}


def mismatches(model: Model, answers: Answers, most_tokens: int) -> dict[str, np.ndarray]:
    """Log-prob minus the published weights' log-prob for every token: of the engine, and of each policy."""
    exact = _score(model, answers, most_tokens, Rows())
    found = {'engine': np.concatenate([logprobs for _, logprobs in answers]) - exact}
    return found | {name: _score(model, answers, most_tokens, form) - exact for name, form in POLICIES.items()}


def _score(model: Model, answers: Answers, most_tokens: int, form: Rows) -> np.ndarray:
    """float64: log-probs of the answers' tokens."""
    with mock.patch.dict(decoders._TOKENS, {'part': form}):
        decoder = Decoder(model.decoder.config, tokens='part')
    run, params, found = _program(decoder), jax.jit(decoder.prepare)(model.params), []
    for tokens, logprobs in answers:
        row = np.zeros(most_tokens, np.int32)
        row[: len(tokens)] = tokens
        behind = np.asarray(run(params, row), np.float64)
        places = np.arange(len(tokens) - len(logprobs), len(tokens))
        found.append(behind[places - 1, tokens[places]])
    return np.concatenate(found)


def _program(decoder: Decoder) -> Callable[[object, np.ndarray], jax.Array]:
    def run(params: dict, tokens: jax.Array) -> jax.Array:
        one = jnp.ones(len(tokens), jnp.int32)
        attend = lambda q, k, v, entry, window: (
            packed_attention(q, k, v, one, one, scale=q.shape[-1] ** -0.5, impl='dense'),
            entry,
        )
        hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend)
        return jax.nn.log_softmax(decoder.logits(params, hidden))

    return jax.jit(run)
