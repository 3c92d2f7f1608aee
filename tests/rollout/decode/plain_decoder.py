"""A decoder that keeps nothing between two tokens: each is chosen after a pass over the whole sequence, in float64.

It shares no code with areal_jax/rollout/decode/ and none with the models; the random numbers are jax's, because their
stream is part of the definition. Shapes: T tokens, d model width, H heads, K kv heads, D head size, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 256  # vocabulary entries of a block of the two-level choice


def next_logits(config, weights, tokens, versions):
    """float64 [V] behind `tokens`; token t goes through `weights[versions[t]]`, its keys and values included."""
    by_version = {version: np.array(versions) == version for version in set(versions)}

    def each(x, *path):
        """x [T, in] times the matrix at `path`, every token with its version's."""
        out = None
        for version, own in by_version.items():
            y = x[own] @ _at(weights[version], path)
            out = np.zeros((len(x), y.shape[1])) if out is None else out
            out[own] = y
        return out

    def norm(x, *path):
        scale = np.stack([_at(weights[version], path) for version in versions])
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_eps) * scale

    x = np.stack([_at(weights[version], ('embedding',))[t] for t, version in zip(tokens, versions, strict=True)])
    for index in range(config.n_layers):
        layer = ('layers', str(index))
        h = norm(x, *layer, 'attention_norm')
        heads = (each(h, *layer, 'attention', name, 'weight') for name in ('query', 'key', 'value'))
        q, k, v = (y.reshape(len(x), -1, config.head_dim) for y in heads)
        out = _attention(_rotate(q, config.rope_theta), _rotate(k, config.rope_theta), v)
        x = x + each(out, *layer, 'attention', 'output', 'weight')
        h = norm(x, *layer, 'mlp_norm')
        gate, up = (each(h, *layer, 'mlp', name, 'weight') for name in ('gate', 'up'))
        x = x + each(gate / (1 + np.exp(-gate)) * up, *layer, 'mlp', 'down', 'weight')
    head = 'embedding' if config.tie_embeddings else 'head'
    return _at(weights[versions[-1]], (head,)) @ norm(x, 'final_norm')[-1]


def _at(tree, path):
    return np.asarray(functools.reduce(lambda node, key: node[key], path, tree), np.float64)


def _rotate(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


def _attention(q, k, v):
    out = np.zeros(q.shape)
    for t in range(len(q)):
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            out[t, head] = softmax(k[: t + 1, group] @ q[t, head] / np.sqrt(q.shape[-1])) @ v[: t + 1, group]
    return out.reshape(len(q), -1)


def softmax(z):
    weights = np.exp(z - z.max())
    return weights / weights.sum()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The next token of a request, and by how much it won."""

    token: int
    margin: float  # the smallest difference by which any comparison on the way was decided
    logprobs: np.ndarray  # float64 [V], of the whole softmax at the temperature
    cut_logprobs: np.ndarray  # the same of the part that top-k and top-p leave, -inf elsewhere


def choose(logits, request, index):
    """The token at `index` of the trajectory of a request, as sampling.draw_tokens and cut_support define it."""
    params = request.sampling
    greedy = params.temperature == 0
    z = logits / (params.temperature or 1.0)
    kept, margin = (z, np.inf) if greedy else _cut(z, params.top_k, params.top_p)
    blocks = [kept[start : start + BLOCK] for start in range(0, len(z), BLOCK)]
    gumbel = _noise(request.seed, request.draw, request.sample, index, len(blocks) + min(BLOCK, len(z)))
    if greedy:
        gumbel = 0 * gumbel
    mass = np.array([block.max() if greedy else _logsumexp(block) for block in blocks]) + gumbel[: len(blocks)]
    block = int(np.argmax(mass))
    within = blocks[block] + gumbel[len(blocks) :][: len(blocks[block])]
    margin = min(margin, _lead(mass), _lead(within))
    return Choice(block * BLOCK + int(np.argmax(within)), margin, z - _logsumexp(z), kept - _logsumexp(kept))


def _cut(z, top_k, top_p):
    """z with -inf outside the support, and the distance to another support."""
    order, margin = np.sort(z)[::-1], np.inf
    if top_k:
        margin = order[top_k - 1] - order[top_k] if top_k < len(z) else np.inf
        z = np.where(z >= order[min(top_k, len(z)) - 1], z, -np.inf)
        order = np.sort(z)[::-1]
    if top_p < 1:
        mass = np.cumsum(softmax(order))
        count = int(np.argmax(mass >= top_p))  # of tokens before the last that is kept
        margin = min(margin, np.abs(mass - top_p).min())
        z = np.where(z >= order[count], z, -np.inf)
    return z, margin


def _lead(scores):
    """By how much the best is ahead of the second."""
    first, *others = np.sort(scores)[::-1]
    return first - others[0] if others else np.inf


def _logsumexp(z):
    return z.max() + np.log(np.exp(z - z.max()).sum()) if np.isfinite(z).any() else -np.inf


@functools.lru_cache(maxsize=4096)
def _noise(seed, draw, sample, index, n):
    return np.asarray(_gumbel(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), draw, sample, index, n), np.float64)


@functools.partial(jax.jit, static_argnums=4)
def _gumbel(seed, draw, sample, index, n):
    key = jax.random.wrap_key_data(seed, impl='threefry2x32')
    for number in (draw, sample, index):
        key = jax.random.fold_in(key, number)
    return jax.random.gumbel(key, (n,), jnp.float32)
