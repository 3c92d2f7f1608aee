"""A Llama-type decoder in float64 numpy, written for the tests and sharing no code with the package."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LAYER = ('attn_norm', 'attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_norm', 'ffn_gate', 'ffn_up', 'ffn_down')


def forward(
    weight: Callable[[str], np.ndarray],
    tokens: np.ndarray,
    *,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    theta: float,
    eps: float,
    interleaved: bool,
) -> np.ndarray:
    """Logits [T, V] of one causal sequence.

    `weight` gives matrices [out, in] by GGUF's short names: 'token_embd', 'blk.3.attn_q', 'output_norm', 'output'.
    Rotary pairs are (2j, 2j + 1) when `interleaved`, as in a GGUF file, else (j, j + D/2).
    """
    embedding = weight('token_embd').astype(np.float64)
    x = embedding[tokens]
    for layer in range(n_layers):
        w = {name: weight(f'blk.{layer}.{name}').astype(np.float64) for name in LAYER}
        y = norm(x, w['attn_norm'], eps)
        queries = np.split(y @ w['attn_q'].T, n_heads, axis=1)
        keys = np.split(y @ w['attn_k'].T, n_kv_heads, axis=1)
        values = np.split(y @ w['attn_v'].T, n_kv_heads, axis=1)
        answers = []
        for head in range(n_heads):
            group = head // (n_heads // n_kv_heads)
            q, k = (turn(z, theta, interleaved) for z in (queries[head], keys[group]))
            answers.append(causal(q, k, values[group]))
        x = x + np.concatenate(answers, axis=1) @ w['attn_output'].T
        y = norm(x, w['ffn_norm'], eps)
        gate = y @ w['ffn_gate'].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w['ffn_up'].T)) @ w['ffn_down'].T
    return norm(x, weight('output_norm').astype(np.float64), eps) @ weight('output').astype(np.float64).T


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(np.dot(row, row) / len(row) + eps) * scale for row in x])


def turn(x: np.ndarray, theta: float, interleaved: bool) -> np.ndarray:
    """Pairs as complex numbers, times e^(i t theta^(-2j/D))."""
    dim = x.shape[1]
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, None))
    )
    out = np.empty_like(x)
    for t, row in enumerate(x):
        angles = t * theta ** (-2 * np.arange(dim // 2) / dim)
        turned = (row[first] + 1j * row[second]) * np.exp(1j * angles)
        out[t, first], out[t, second] = turned.real, turned.imag
    return out


def causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    rows = []
    for t in range(len(q)):
        scores = k[: t + 1] @ q[t] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        rows.append(weights @ v[: t + 1] / weights.sum())
    return np.stack(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
