"""A Llama-type decoder in float64 numpy, written for the tests and sharing no code with the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    frequencies: np.ndarray | None = None,
    windows: Sequence[int | None] | None = None,
) -> np.ndarray:
    """Logits [T, V] of one causal sequence.

    `weight` gives matrices [out, in] by GGUF's short names: 'token_embd', 'blk.3.attn_q', 'output_norm', 'output', and
    with the options 'blk.3.attn_q_bias', 'blk.3.attn_output_bias', 'blk.3.attn_q_norm'. Rotary pairs are (2j, 2j + 1)
    when `interleaved`, as in a GGUF file, else (j, j + D/2); `frequencies` [D/2] replaces those that follow from
    `theta`. `windows` is the number of positions that each layer sees.
    """
    embedding = weight('token_embd').astype(np.float64)
    x = embedding[tokens]
    biased = ('attn_q', 'attn_k', 'attn_v') * qkv_bias + ('attn_output',) * output_bias
    extra = (*(f'{name}_bias' for name in biased), *('attn_q_norm', 'attn_k_norm') * qk_norm)
    for layer in range(n_layers):
        w = {name: weight(f'blk.{layer}.{name}').astype(np.float64) for name in (*LAYER, *extra)}
        y = norm(x, w['attn_norm'], eps)
        queries, keys, values = (
            np.split(y @ w[name].T + w.get(f'{name}_bias', 0.0), heads, axis=1)
            for name, heads in (('attn_q', n_heads), ('attn_k', n_kv_heads), ('attn_v', n_kv_heads))
        )
        if qk_norm:
            queries = [norm(head, w['attn_q_norm'], eps) for head in queries]
            keys = [norm(head, w['attn_k_norm'], eps) for head in keys]
        answers = []
        for head in range(n_heads):
            group = head // (n_heads // n_kv_heads)
            q, k = (turn(z, theta, interleaved, frequencies) for z in (queries[head], keys[group]))
            answers.append(causal(q, k, values[group], windows[layer] if windows else None))
        x = x + np.concatenate(answers, axis=1) @ w['attn_output'].T + w.get('attn_output_bias', 0.0)
        y = norm(x, w['ffn_norm'], eps)
        gate = y @ w['ffn_gate'].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w['ffn_up'].T)) @ w['ffn_down'].T
    return norm(x, weight('output_norm').astype(np.float64), eps) @ weight('output').astype(np.float64).T


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(np.dot(row, row) / len(row) + eps) * scale for row in x])


def turn(x: np.ndarray, theta: float, interleaved: bool, frequencies: np.ndarray | None = None) -> np.ndarray:
    """Pairs as complex numbers, times e^(i t theta^(-2j/D))."""
    dim = x.shape[1]
    if frequencies is None:
        frequencies = theta ** (-2 * np.arange(dim // 2) / dim)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, None))
    )
    out = np.empty_like(x)
    for t, row in enumerate(x):
        turned = (row[first] + 1j * row[second]) * np.exp(1j * t * frequencies)
        out[t, first], out[t, second] = turned.real, turned.imag
    return out


def llama3_frequencies(
    dim: int, theta: float, *, factor: float, low: float, high: float, original_context: int
) -> np.ndarray:
    """The rule of Llama 3.1 in its own terms: a case for each wavelength."""
    stretched = []
    for frequency in theta ** (-2 * np.arange(dim // 2) / dim):
        wavelength = 2 * np.pi / frequency
        smooth = (original_context / wavelength - low) / (high - low)
        if wavelength < original_context / high:
            stretched.append(frequency)
        elif wavelength > original_context / low:
            stretched.append(frequency / factor)
        else:
            stretched.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(stretched)


def causal(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    rows = []
    for t in range(len(q)):
        seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        scores = k[seen] @ q[t] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        rows.append(weights @ v[seen] / weights.sum())
    return np.stack(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
