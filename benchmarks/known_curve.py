"""What the set-up of a published curve of token reversal gives over several seeds, with flax's own layers.

    python -m benchmarks.known_curve --out=benchmarks/results/known_curve.json

The study has a control whose outcome is known: unclipped importance-weighted policy gradient solves token reversal at
a lag of 0 and stays at chance at a lag of 30 (docs/study.md). The curve that is known is one seed. This trains the same
decoder by other code than ours, seed after seed, so that a seed which does not follow the curve says something about
the curve and not about our learner. third_party/README.md says where the set-up is from.

A prompt has 10 of 2 symbols, the answer is their reverse; 10 prompts x 10 answers an update; the reward is the share of
right symbols less the mean of the prompt's answers; mean over tokens; Adam at 3e-4 as optax has it. The decoder has 3
pre-norm layers of width 64 (LayerNorm, 4 heads, ReLU MLP of 128), learned positions, no biases, no final norm, a head
of its own, and flax's default initial values. At a lag of D an answer is sampled by the weights of D updates before.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.report import write_report

SYMBOLS, LENGTH, PROMPTS, ANSWERS, UPDATES, WINDOW = 2, 10, 10, 10, 300, 50
WIDTH, MLP_WIDTH, LAYERS, HEADS, RATE = 64, 128, 3, 4, 3e-4
Weights = Any  # of flax: nested dicts of arrays


class Layer(nn.Module):
    """Attention and MLP, each after a LayerNorm, each added to what came in."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False)
        normed = nn.LayerNorm(use_bias=False)(x)
        x = x + attention(normed, normed, normed, mask=mask)
        hidden = nn.relu(nn.Dense(MLP_WIDTH, use_bias=False)(nn.LayerNorm(use_bias=False)(x)))
        return x + nn.Dense(WIDTH, use_bias=False)(hidden)


class ReferenceDecoder(nn.Module):
    """Logits [B, T, 2] of tokens [B, T].

    Args:
      embedding_scale: multiplies the standard deviation of embedding and positions, which is 1 / sqrt(width) otherwise.
    """

    embedding_scale: float = 1.0

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(self.embedding_scale / WIDTH**0.5)
        x = nn.Embed(SYMBOLS, WIDTH, embedding_init=init)(tokens)
        x = x + nn.Embed(2 * LENGTH, WIDTH, embedding_init=init)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = Layer()(x, mask)
        return nn.Dense(SYMBOLS, use_bias=False)(x)


class Batch(NamedTuple):
    """Answers of one update. B = PROMPTS * ANSWERS, T = 2 * LENGTH."""

    tokens: jax.Array  # [B, T]: prompt and answer
    logprobs: jax.Array  # [B, LENGTH]: of the answer's tokens, under the weights that sampled them
    rewards: jax.Array  # [B]


def sample(decoder: ReferenceDecoder, weights: Weights, key: jax.Array) -> Batch:
    """A batch of new prompts, answered at temperature 1."""
    of_prompts, of_answers = jax.random.split(key)
    prompts = jnp.repeat(jax.random.randint(of_prompts, (PROMPTS, LENGTH), 0, SYMBOLS), ANSWERS, axis=0)

    def answer(tokens: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = decoder.apply(weights, tokens)[:, LENGTH - 1 + place]  # what comes later is masked
        new = jax.random.categorical(jax.random.fold_in(of_answers, place), logits)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), new[:, None], axis=1)[:, 0]
        return tokens.at[:, LENGTH + place].set(new), logprobs

    tokens, logprobs = jax.lax.scan(answer, jnp.pad(prompts, ((0, 0), (0, LENGTH))), jnp.arange(LENGTH))
    rewards = (tokens[:, LENGTH:] == prompts[:, ::-1]).mean(1)
    return Batch(tokens, logprobs.T, rewards)


def weighted_loss(weights: Weights, decoder: ReferenceDecoder, batch: Batch) -> jax.Array:
    """Unclipped importance-weighted policy gradient with the mean of a prompt's answers as baseline."""
    logits = decoder.apply(weights, batch.tokens[:, :-1])[:, -LENGTH:]
    answers = batch.tokens[:, LENGTH:, None]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), answers, axis=2)[..., 0]
    groups = batch.rewards.reshape(PROMPTS, ANSWERS)
    advantages = (groups - groups.mean(1, keepdims=True)).reshape(-1, 1)
    return -(jnp.exp(logprobs - batch.logprobs) * advantages).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(decoder: ReferenceDecoder, lag: int, key: jax.Array) -> jax.Array:
    """Mean rewards [UPDATES] of the batches, each sampled by the weights of `lag` updates before it."""
    optimizer = optax.adam(RATE)
    of_weights, of_batches = jax.random.split(key)
    first = decoder.init(of_weights, jnp.zeros((1, 2 * LENGTH), jnp.int32))
    ring = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], lag + 1, axis=0), first)

    def update(state: tuple[Weights, optax.OptState, Weights], index: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments, ring = state
        slot = index % (lag + 1)  # of the oldest version, which this update replaces
        batch = sample(decoder, jax.tree.map(lambda leaf: leaf[slot], ring), jax.random.fold_in(of_batches, index))
        gradient = jax.grad(weighted_loss)(weights, decoder, batch)
        change, moments = optimizer.update(gradient, moments)
        weights = optax.apply_updates(weights, change)
        ring = jax.tree.map(lambda versions, leaf: versions.at[slot].set(leaf), ring, weights)
        return (weights, moments, ring), batch.rewards.mean()

    return jax.lax.scan(update, (first, optimizer.init(first), ring), jnp.arange(UPDATES))[1]


def summarise(curves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each lag: share of right symbols over the last WINDOW updates, seeds in ascending order of it."""
    rows = []
    for lag in sorted({curve['lag'] for curve in curves}):
        last = sorted(curve['right'][-1] for curve in curves if curve['lag'] == lag)
        rows.append({'lag': lag, 'seeds': len(last), 'last': last, 'median': round(statistics.median(last), 4)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', '--json', type=pathlib.Path, help='where the report is written as JSON')
    parser.add_argument('--seed', type=int, default=0, help='the first seed')
    parser.add_argument('--seeds', type=int, default=8, help='how many, at each lag; one takes half a minute of a core')
    parser.add_argument('--lags', type=int, nargs='+', default=[0, 30])
    parser.add_argument('--embedding_scale', type=float, default=1.0, help='see ReferenceDecoder')
    parser.add_argument('--minutes', type=float, default=60.0, help='no seed is begun after that')
    options = parser.parse_args(arguments)
    decoder, started = ReferenceDecoder(options.embedding_scale), time.monotonic()
    curves: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        if time.monotonic() - started > 60 * options.minutes:
            break
        for lag in options.lags:
            rewards = train(decoder, lag, jax.random.key(seed))
            right = [round(float(part.mean()), 4) for part in rewards.reshape(-1, WINDOW)]
            print(f'lag {lag}, seed {seed}: {right}', file=sys.stderr, flush=True)
            curves.append({'lag': lag, 'seed': seed, 'right': right})
    command = f'python -m benchmarks.known_curve {" ".join(sys.argv[1:] if arguments is None else arguments)}'
    report = {'embedding_scale': options.embedding_scale, 'window': WINDOW, 'rows': summarise(curves)}
    write_report({**report, 'curves': curves, 'command': command.strip()}, options.out)
    return 0 if curves else 2


if __name__ == '__main__':
    sys.exit(main())
